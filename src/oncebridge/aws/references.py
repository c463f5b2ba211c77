"""
Look up settings that are stored at AWS: `ssm:NAME` and `secretsmanager:NAME[#field]`.

They are looked up when the configuration is read, and not again. botocore is imported only
then, and finds credentials, Region and endpoint in its usual way.

Raise `ConfigError`, with the setting and the reference, if the configuration has to be fixed,
and `NotNow` if a retry may succeed. Neither ever contains a value, and neither does the log of
botocore during the lookup.
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
"""Few, because a Lambda function has ten seconds to start."""

_UNKNOWN = frozenset({"ParameterNotFound", "ParameterVersionNotFound", "ResourceNotFoundException"})
_DENIED = frozenset({"AccessDenied", "AccessDeniedException"})
_KEY_ERRORS = frozenset({"DecryptionFailure", "InvalidKeyId", "KMSAccessDeniedException"})
_BUSY = frozenset({"ThrottlingException", "TooManyRequestsException", "RequestLimitExceeded"})

Memory = MutableMapping[tuple[str, ...], Any]
"""A cache of clients, values and failures."""


class NotNow(OncebridgeError):
    """A reference could not be looked up for a temporary reason: start again later."""


class _ReferenceKind(Struct, frozen=True):
    """One service that stores settings."""

    service: str
    what: str
    action: str
    """The IAM action that has to be allowed."""
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

    Calls with the same *memory* look up each parameter or secret once; *where* is the
    setting, for errors.
    """
    scheme, _, rest = text.partition(":")
    name, _, field = rest.partition("#") if scheme == "secretsmanager" else (rest, "", "")
    kind = _KINDS[scheme]
    if not name or text.endswith("#"):
        form = "ssm:NAME" if scheme == "ssm" else "secretsmanager:NAME or secretsmanager:NAME#field"
        raise ConfigError(where, f"{text!r} is incomplete; write {form}")
    value = _look_up_once(kind, name, memory)
    if isinstance(value, _LookupFailure):
        raise value.as_error(text, where)
    return _member(value, field, text, where) if field else value


def _member(value: str, field: str, text: str, where: str) -> str:
    """Return one field of a secret; errors do not contain other names or values."""
    try:
        table = msgspec.json.decode(value)
    except (msgspec.DecodeError, ValueError, RecursionError):
        table = None
    if not isinstance(table, dict):
        raise ConfigError(
            where, f"{text!r}: the secret is not a JSON object; remove the # and the field"
        )
    if field not in table:
        raise ConfigError(where, f"{text!r}: the secret has no field {field!r}")
    found = table[field]
    if isinstance(found, int) and not isinstance(found, bool):  # a port, as RDS writes it
        return str(found)
    if not isinstance(found, str) or not found:
        raise ConfigError(where, f"{text!r}: the field must be a text that is not empty")
    return found


# --- looking up -------------------------------------------------------------------------


class _LookupFailure(Struct, frozen=True):
    """Why there is no value; reported for each setting that refers to it."""

    why: str
    is_transient: bool = False

    def as_error(self, text: str, where: str) -> OncebridgeError:
        message = f"{text!r} cannot be read: {self.why}"
        if self.is_transient:
            return NotNow(f"{where}: {message}" if where else message)
        return ConfigError(where, message)


def _look_up_once(kind: _ReferenceKind, name: str, memory: Memory) -> "str | _LookupFailure":
    at = (kind.service, name)
    if at not in memory:
        with _without_parser_log():
            memory[at] = _look_up_at_aws(kind, name, memory)
    found: str | _LookupFailure = memory[at]
    return found


def _look_up_at_aws(kind: _ReferenceKind, name: str, memory: Memory) -> "str | _LookupFailure":
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
        ValueError,  # an endpoint that is not a URL
    ) as error:
        return _LookupFailure(
            f"the AWS configuration cannot be used ({type(error).__name__}: {error})"
        )
    except botocore.BotoCoreError as error:
        # Its text may quote the output of a metadata service or a credential process.
        return _LookupFailure(
            f"{kind.service} cannot be reached ({type(error).__name__})", is_transient=True
        )
    if not isinstance(value, str):
        return _LookupFailure("its value is binary; store it as text")
    # A value that was stored from a file often ends with a line break.
    return value.strip("\r\n") or _LookupFailure("it is empty")


def _client(service: str, region: str | None, memory: Memory) -> Any:
    """Return the client for a service and Region, cached in *memory*."""
    import botocore.session  # type: ignore[import-untyped] # noqa: PLC0415
    from botocore.config import Config  # type: ignore[import-untyped] # noqa: PLC0415

    at = ("client", service, region or "")
    if at not in memory:
        if ("session",) not in memory:
            memory["session",] = botocore.session.Session()
        session = memory["session",]
        # botocore reads only the older variable; Lambda, ECS and the other SDKs set AWS_REGION.
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
    """Return the Region of an ARN, where the parameter or secret has to be looked up."""
    parts = name.split(":")
    return parts[3] or None if parts[0] == "arn" and len(parts) > 5 else None


def _refused(response: Any, kind: _ReferenceKind, name: str, client: Any) -> _LookupFailure:
    """Return the reason for an error of AWS, without its message."""
    error = response.get("Error", {})
    code, message = str(error.get("Code", "")), str(error.get("Message", ""))
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    region = client.meta.region_name
    if code in _UNKNOWN:
        which = "version of it" if "Version" in code or "staging" in message else kind.what
        return _LookupFailure(f"there is no such {which} in {region}")
    if code in _KEY_ERRORS or (code in _DENIED and "kms" in message.lower()):
        return _LookupFailure(f"its key cannot be used ({code}); allow kms:Decrypt on its KMS key")
    if code in _DENIED:
        return _LookupFailure(f"access is denied; allow {kind.action} on {_arn(name, client)}")
    if code in _BUSY or status >= 500 or status == 429:
        return _LookupFailure(
            f"{kind.service} cannot answer now ({code or status})", is_transient=True
        )
    return _LookupFailure(f"{kind.service} in {region} returned {code or status}")


def _arn(name: str, client: Any) -> str:
    """Return the ARN for an IAM policy."""
    if name.startswith("arn:"):
        return name
    service = client.meta.service_model.service_name
    start = f"arn:{client.meta.partition}:{service}:{client.meta.region_name}:ACCOUNT"
    if service == "ssm":
        plain = name.partition(":")[0]  # without a version
        return f"{start}:parameter/{plain.removeprefix('/')}"
    return f"{start}:secret:{name}-??????"


@contextmanager
def _without_parser_log() -> Iterator[None]:
    """Keep responses of AWS out of the log: at the level DEBUG botocore logs them completely."""
    log = logging.getLogger("botocore.parsers")

    def nothing(_: logging.LogRecord) -> bool:
        return False

    log.addFilter(nothing)
    try:
        yield
    finally:
        log.removeFilter(nothing)
