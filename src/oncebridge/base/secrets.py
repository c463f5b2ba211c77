"""
Secrets, and addresses that may contain one: they must never be printed.

Neither has to be in the configuration: it can refer to an environment variable, a file, an SSM
parameter or a secret of Secrets Manager. This module resolves these references.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from hashlib import blake2b
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, ClassVar, Final

from oncebridge.errors import ConfigError

REFERENCES: Final = "env:NAME, file:PATH, ssm:NAME or secretsmanager:NAME"
"""The forms of a reference to a secret."""
ADDRESS_REFERENCE: Final = "^(env|ssm|secretsmanager):."
"""The same for an address, as a pattern."""
SHORTEST: Final = 16
"""The minimum length of a secret that clients have to send."""
_AT_AWS: Final = ("ssm:", "secretsmanager:")
_asked: ContextVar[dict[tuple[str, ...], Any]] = ContextVar("asked")

_HIDDEN = "***"
_MOST = 64 * 1024
# A password may hold any character, written as it is: so all up to the last @ is hidden.
_USER_INFO = re.compile(r"(?is)^(?:[a-z][a-z0-9+.-]*:(?:https?:)?//)?(.*)@")
_HEADER_VALUE = re.compile(r"[^\x00-\x20\x7f]([^\x00-\x1f\x7f]*[^\x00-\x20\x7f])?")
_LOCAL = re.compile(r"(?i)^(file|sqlite|python|memory):(?!//[^/])")
_WEB = re.compile(r"(?is)^((?:[a-z0-9.-]+\+)?https?://)([^/?#]*)(.*)")
_HASHED = re.compile(r"/\*\*\*[0-9a-f]{8}")
_QUERY_SECRET = re.compile(
    r"(?is)[?&;#][^=&;#]*(?:pass|pwd|secret|token|key|sig|auth|cred|code|jwt|session)[^=&;#]*=([^&]+)"
)


class Secret:
    """A text that is never shown: its `repr` and `str` are `***`."""

    __slots__ = ("_text",)
    is_secret: ClassVar = True

    def __init__(self, text: str) -> None:
        self._text = text

    @classmethod
    def read_option(cls, value: Any, where: str, problems: object) -> "Secret":  # noqa: ARG003
        if isinstance(value, Secret):
            return value
        if not isinstance(value, str) or not value:
            raise ConfigError(where, f"must be a text: {REFERENCES}, or the secret itself")
        return cls(resolve(str(value), where))

    @classmethod
    def option_schema(cls) -> dict[str, Any]:
        return {"type": "string", "minLength": 1}

    @classmethod
    def option_form(cls) -> str:
        return f"secret: {REFERENCES}"

    def reveal(self) -> str:
        """Return the text itself, for sending or comparing it."""
        return self._text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)

    def __repr__(self) -> str:
        return _HIDDEN


def find_weakness(text: str, *, in_header: bool) -> str | None:
    """
    Return why the secret *text* is not safe for authenticating clients; None if it is.

    *in_header* is True if clients send it unchanged in a header.
    """
    if len(text.strip()) < SHORTEST:
        return f"must have at least {SHORTEST} characters; make one with: openssl rand -hex 24"
    if in_header and not _HEADER_VALUE.fullmatch(text):
        return "must be one line without spaces at its start or end"
    return None


class Address(str):
    """An address as it was configured; its `repr` is masked, see `mask_address`."""

    __slots__ = ()

    @property
    def shown(self) -> str:
        """The address as it may be printed."""
        return mask_address(self)

    def __repr__(self) -> str:
        return repr(self.shown)


def resolve(text: str, where: str) -> str:
    """
    Return what a reference refers to; any other text is returned unchanged.

    The result is not resolved again, even if it looks like a reference.
    """
    kind, _, name = text.partition(":")
    if kind == "env":
        return _variable(name, text, where)
    if kind == "file":
        return _content(name, text, where)
    return resolve_at_aws(text, where) if is_at_aws(text) else text


def resolve_address(text: str, where: str) -> str:
    """Return the address that a reference refers to; `file:PATH` is an address itself."""
    return text if text.startswith("file:") else resolve(text, where)


def is_at_aws(text: str) -> bool:
    """Return True if *text* refers to a parameter of SSM or a secret of Secrets Manager."""
    return text.startswith(_AT_AWS)


def resolve_at_aws(text: str, where: str) -> str:
    """Return the parameter or secret that *text* refers to."""
    scheme = text.partition(":")[0]
    for point in entry_points(group="oncebridge.secrets", name=scheme):
        read: str = point.load()(text, where, _asked.get({}))
        return read
    raise ConfigError(where, f"{scheme!r} is not registered; reinstall oncebridge")


@contextmanager
def cache_aws_lookups() -> Iterator[None]:
    """Look each reference up at AWS only once inside, so that all settings get the same value."""
    token = _asked.set({})
    try:
        yield
    finally:
        _asked.reset(token)


def _variable(name: str, text: str, where: str) -> str:
    found = os.environ.get(name)
    if not found:
        raise ConfigError(where, f"{text!r}: the environment variable {name} is not set")
    return found


def _content(path: str, text: str, where: str) -> str:
    try:
        with Path(path).open("rb") as file:
            read = file.read(_MOST + 1)
        found = read.decode("utf-8-sig").strip("\r\n")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a path with a NUL
        raise ConfigError(where, f"{text!r} cannot be read: {type(error).__name__}") from None
    if not found:
        raise ConfigError(where, f"{text!r} is empty")
    if len(read) > _MOST:
        raise ConfigError(where, f"{text!r} is larger than {_MOST} bytes, too large for a secret")
    return found


def mask_address(url: str) -> str:
    """
    Return an address in the form that may be printed, logged and counted.

    For http and https, whose path is often the secret (a webhook), that is the scheme, the host and
    a short hash of the path and the query, so that two targets can be distinguished. All other
    addresses (a file, a queue, a database) lose user, password and query parameters that are named
    like a secret.
    """
    if web := _WEB.match(url):
        return _masked_web(*web.groups())
    shown, at = "", 0
    for start, end in _credentials(url):
        if start >= at:
            shown += url[at:start] + _HIDDEN
        at = max(at, end)
    return shown + url[at:]


def has_credentials(url: str) -> bool:
    """Return True if *url* has a user, a password or a query parameter named like a secret."""
    return bool(_credentials(url))


def _credentials(url: str) -> list[tuple[int, int]]:
    found = [*_QUERY_SECRET.finditer(url)]
    if not _LOCAL.match(url):
        found += _USER_INFO.finditer(url)
    return sorted(one.span(1) for one in found)


def _masked_web(scheme: str, authority: str, rest: str) -> str:
    if "@" in rest:  # of a path, or of a password with a slash in it: then the host is not known
        return f"{scheme}{_HIDDEN}"
    user, at, host = authority.rpartition("@")
    # The user and the password are not hashed: a short password could be guessed from the hash.
    shown = f"{scheme}{_HIDDEN if user else ''}{at}{host}"
    if rest.strip("/") and not _HASHED.fullmatch(rest):
        digest = blake2b(rest.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()
        return f"{shown}/{_HIDDEN}{digest}"
    return shown + rest
