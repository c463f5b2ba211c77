"""
Settings that are kept at AWS: `ssm:NAME` and `secretsmanager:NAME[#field]`.

They are looked up when the configuration is read, and not again. botocore is imported only
then, and finds credentials, Region and endpoint as everywhere else on AWS.

What a human must put right is a `ConfigError` with the setting, the reference and what is
missing; what may be better in a moment is `NotNow`. Neither ever holds a value, and nor does
what botocore writes to the log meanwhile.
"""

import logging
import os
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any, Final

import msgspec
from msgspec import Struct

from oncebridge.errors import ConfigError, OncebridgeError

_CONNECT_S: Final = 2
_READ_S: Final = 5
_ATTEMPTS: Final = 2
"""A function has ten seconds to start."""

_UNKNOWN = frozenset({"ParameterNotFound", "ParameterVersionNotFound", "ResourceNotFoundException"})
_DENIED = frozenset({"AccessDenied", "AccessDeniedException"})
_KEY = frozenset({"DecryptionFailure", "InvalidKeyId", "KMSAccessDeniedException"})
_BUSY = frozenset({"ThrottlingException", "TooManyRequestsException", "RequestLimitExceeded"})

Memory = MutableMapping[tuple[str, ...], Any]
"""What was asked for so far: clients, values, and why there is none."""


class NotNow(OncebridgeError):
    """A reference could not be looked up, for a reason that may pass: start again."""


class _ReferenceKind(Struct, frozen=True):
    """One service that keeps settings."""

    service: str
    what: str
    action: str
    """What has to be allowed."""
    read: Callable[[Any, str], Any]


def _parameter(client: Any, name: str) -> Any:
    return client.get_parameter(Name=name, WithDecryption=True)["Parameter"].get("Value")


def _secret(client: Any, name: str) -> Any:
    return client.get_secret_value(SecretId=name).get("SecretString")


_KINDS: Final = {
    "ssm": _ReferenceKind("ssm", "parameter", "ssm:GetParameter", _parameter),
    "secretsmanager": _ReferenceKind(
        "secretsmanager", "secret", "secretsmanager:GetSecretValue", _secret
    ),
}


def look_up(text: str, where: str, memory: Memory) -> str:
    """
    Return the value that *text* refers to.

    Calls with the same *memory* ask for each parameter or secret once; *where* names the
    setting.
    """
    scheme, _, rest = text.partition(":")
    name, _, field = rest.partition("#") if scheme == "secretsmanager" else (rest, "", "")
    kind = _KINDS[scheme]
    if not name or text.endswith("#"):
        form = "ssm:NAME" if scheme == "ssm" else "secretsmanager:NAME or secretsmanager:NAME#field"
        raise ConfigError(where, f"{text!r} is incomplete; write {form}")
    value = _remembered(kind, name, memory)
    if isinstance(value, _LookupFailure):
        raise value.told(text, where)
    return _member(value, field, text, where) if field else value


def _member(value: str, field: str, text: str, where: str) -> str:
    """Take one field out of a secret; names and values of the others are not told."""
    try:
        table = msgspec.json.decode(value)
    except (msgspec.DecodeError, ValueError, RecursionError):
        table = None
    if not isinstance(table, dict):
        raise ConfigError(where, f"{text!r}: the secret is no JSON object, so it has no fields")
    if field not in table:
        raise ConfigError(where, f"{text!r}: the secret has no field {field!r}")
    found = table[field]
    if isinstance(found, int) and not isinstance(found, bool):  # a port, as RDS writes it
        return str(found)
    if not isinstance(found, str) or not found:
        raise ConfigError(where, f"{text!r}: the field must be a text that is not empty")
    return found


# --- asking -----------------------------------------------------------------------------


class _LookupFailure(Struct, frozen=True):
    """Why there is no value; told for each setting that wanted it."""

    why: str
    passes: bool = False

    def told(self, text: str, where: str) -> OncebridgeError:
        message = f"{text!r} cannot be read: {self.why}"
        if self.passes:
            return NotNow(f"{where}: {message}" if where else message)
        return ConfigError(where, message)


def _remembered(kind: _ReferenceKind, name: str, memory: Memory) -> "str | _LookupFailure":
    at = (kind.service, name)
    if at not in memory:
        with _quiet():
            memory[at] = _ask(kind, name, memory)
    found: str | _LookupFailure = memory[at]
    return found


def _ask(kind: _ReferenceKind, name: str, memory: Memory) -> "str | _LookupFailure":
    try:
        from botocore import exceptions as botocore  # type: ignore[import-untyped] # noqa: PLC0415
    except ImportError:
        return _LookupFailure("it needs a package that is not installed; pip install botocore")
    client = None
    try:
        client = _client(kind.service, _region_of(name), memory)
        value = kind.read(client, name)
    except botocore.ClientError as error:
        return _refused(error.response, kind, name, client)
    except botocore.NoCredentialsError:
        return _LookupFailure(
            "no AWS credentials were found; set AWS_PROFILE or AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, or give this host, container or function a role"
        )
    except botocore.NoRegionError:
        return _LookupFailure("no AWS Region is set; set AWS_REGION, or write the whole ARN")
    except botocore.ParamValidationError:
        return _LookupFailure(f"that is not the name of a {kind.what}")
    except (
        botocore.ConfigNotFound,
        botocore.ConfigParseError,
        botocore.InvalidConfigError,
        botocore.InvalidRegionError,
        botocore.PartialCredentialsError,
        botocore.ProfileNotFound,
        botocore.UnknownServiceError,
        ValueError,  # an endpoint that is no URL
    ) as error:
        return _LookupFailure(
            f"the AWS configuration cannot be used ({type(error).__name__}: {error})"
        )
    except botocore.BotoCoreError as error:
        # Its text may quote what a metadata service or a credential process said.
        return _LookupFailure(
            f"{kind.service} cannot be reached ({type(error).__name__})", passes=True
        )
    if not isinstance(value, str):
        return _LookupFailure("it holds bytes, and must hold a text")
    # Who stores a file, stores the end of its line too.
    return value.strip("\r\n") or _LookupFailure("it is empty")


def _client(service: str, region: str | None, memory: Memory) -> Any:
    """Make the client for a service and Region, or give the one that is there."""
    import botocore.session  # type: ignore[import-untyped] # noqa: PLC0415
    from botocore.config import Config  # type: ignore[import-untyped] # noqa: PLC0415

    at = ("client", service, region or "")
    if at not in memory:
        if ("session",) not in memory:
            memory["session",] = botocore.session.Session()
        session = memory["session",]
        # botocore knows the older name only; what runs on AWS, and the other SDKs, set this one
        region = region or session.get_config_variable("region") or os.environ.get("AWS_REGION")
        patience = Config(
            connect_timeout=_CONNECT_S,
            read_timeout=_READ_S,
            retries={"mode": "standard", "total_max_attempts": _ATTEMPTS},
        )
        session.set_default_client_config(patience)  # roles are fetched by calls, too
        memory[at] = session.create_client(service, region_name=region)
    return memory[at]


def _region_of(name: str) -> str | None:
    """Take the Region from an ARN: a parameter or secret is known in its own only."""
    parts = name.split(":")
    return parts[3] or None if parts[0] == "arn" and len(parts) > 5 else None


def _refused(response: Any, kind: _ReferenceKind, name: str, client: Any) -> _LookupFailure:
    """Say what AWS's no comes from; its own words are read, and not repeated."""
    error = response.get("Error", {})
    code, message = str(error.get("Code", "")), str(error.get("Message", ""))
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    region = client.meta.region_name
    if code in _UNKNOWN:
        which = "version of it" if "Version" in code or "staging" in message else kind.what
        return _LookupFailure(f"there is no such {which} in {region}")
    if code in _KEY or (code in _DENIED and "kms" in message.lower()):
        return _LookupFailure(
            f"its key cannot be used ({code}); allow kms:Decrypt on the key it has"
        )
    if code in _DENIED:
        return _LookupFailure(f"access is denied; allow {kind.action} on {_arn(name, client)}")
    if code in _BUSY or status >= 500 or status == 429:
        return _LookupFailure(f"{kind.service} cannot answer now ({code or status})", passes=True)
    return _LookupFailure(f"{kind.service} in {region} says {code or status}")


def _arn(name: str, client: Any) -> str:
    """Write what a policy has to name."""
    if name.startswith("arn:"):
        return name
    service = client.meta.service_model.service_name
    start = f"arn:{client.meta.partition}:{service}:{client.meta.region_name}:ACCOUNT"
    if service == "ssm":
        plain = name.partition(":")[0]  # without a version
        return f"{start}:parameter/{plain.removeprefix('/')}"
    return f"{start}:secret:{name}-??????"


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep what AWS answers out of the log: at the level DEBUG botocore writes it whole."""
    log = logging.getLogger("botocore.parsers")

    def nothing(_: logging.LogRecord) -> bool:
        return False

    log.addFilter(nothing)
    try:
        yield
    finally:
        log.removeFilter(nothing)
