"""
Where Redis is, as a URL says it.

    redis://[USER:PASSWORD@]HOST[:PORT][/DB]                              one server
    redis+unix://[USER:PASSWORD@]/PATH[?db=DB]                            one, on this host
    redis+sentinel://[USER:PASSWORD@]HOST[:PORT][,HOST…]/SERVICE[/DB]     the primary of SERVICE
    redis+cluster://[USER:PASSWORD@]HOST[:PORT][,HOST…]                   a cluster

`rediss` instead of `redis` encrypts. User and password are percent-encoded.
"""

import re
from typing import Final, Literal, Self
from urllib.parse import parse_qsl, unquote

from msgspec import Struct

from oncebridge.base.secrets import Secret
from oncebridge.errors import ConfigError

Kind = Literal["one", "unix", "sentinel", "cluster"]

_KINDS: Final[dict[str, Kind]] = {
    "redis": "one",
    "redis+unix": "unix",
    "redis+sentinel": "sentinel",
    "redis+cluster": "cluster",
}
_PORTS: Final[dict[Kind, int]] = {"one": 6379, "sentinel": 26379, "cluster": 6379}
_HOST = re.compile(r"(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<name>[^\[\]:,@/]+))(?::(?P<port>\d{1,5}))?")


class RedisAddress(Struct, frozen=True):
    """A URL, taken apart."""

    kind: Kind
    is_tls: bool
    user: str
    password: Secret | None
    hosts: tuple[tuple[str, int], ...] = ()
    path: str = ""
    service: str = ""
    db: int = 0

    @classmethod
    def parse(cls, url: str) -> Self:
        """Take *url* apart; a `ConfigError` says what is wrong, and quotes nothing secret."""
        scheme, separator, rest = url.partition("://")
        plain = re.sub("^rediss", "redis", scheme.lower())
        if not separator or plain not in _KINDS or scheme.lower() == "rediss+unix":
            raise ConfigError("", "a Redis address starts with redis://, rediss:// or redis+…://")
        kind = _KINDS[plain]
        # A password may hold any character, written as it is: so it goes up to the last @.
        login, _, rest = ("", "", rest) if rest.startswith("/") else rest.rpartition("@")
        rest, _, query = rest.partition("?")
        authority, _, path = rest.partition("/")
        user, _, password = login.partition(":")
        if login and not password:
            raise ConfigError("", "the address has a user and no password; write USER:PASSWORD@")
        service, db = "", _queried_db(query)
        if kind == "unix":
            if authority or not path:
                raise ConfigError("", "a socket is redis+unix:///PATH, with three slashes")
            path = "/" + unquote(path)
        elif kind == "sentinel":
            service, _, path = path.partition("/")
            if not service:
                raise ConfigError(
                    "", "the address lacks the name of the service: redis+sentinel://HOST/SERVICE"
                )
        if kind != "unix":
            db = _db(path, "the path of the address") if path else db
            path = ""
        if kind == "cluster" and db:
            raise ConfigError("", "a cluster has no databases; leave out the number at the end")
        return cls(
            kind,
            scheme.lower() != plain,
            unquote(user),
            Secret(unquote(password)) if password else None,
            () if kind == "unix" else _hosts(authority, kind),
            path,
            unquote(service),
            db,
        )


def _hosts(authority: str, kind: Kind) -> tuple[tuple[str, int], ...]:
    texts = authority.split(",")
    if kind == "one" and len(texts) > 1:
        raise ConfigError("", "redis:// has one host; several are redis+sentinel or redis+cluster")
    hosts = []
    for text in texts:
        found = _HOST.fullmatch(text)
        if found is None or not 0 < (port := int(found["port"] or _PORTS[kind])) < 65536:
            # Not quoted: a password without its @ ends up here.
            raise ConfigError(
                "",
                "a host or port of the address cannot be read; "
                "write HOST or HOST:PORT, an IPv6 address in brackets",
            )
        hosts.append((found["six"] or found["name"], port))
    return tuple(hosts)


def _queried_db(query: str) -> int:
    db = 0
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name != "db":
            raise ConfigError(
                "", f"the address has a parameter {name!r}; only db is read, options stand beside"
            )
        db = _db(value, "db")
    return db


def _db(text: str, where: str) -> int:
    if not re.fullmatch(r"\d{1,5}", text, re.ASCII):
        raise ConfigError("", f"{where} must be the number of a database, such as 0")
    return int(text)
