"""
Addresses of Redis.

    redis://[USER:PASSWORD@]HOST[:PORT][/DB]                              one server
    redis+unix://[USER:PASSWORD@]/PATH[?db=DB]                            one, on this host
    redis+sentinel://[USER:PASSWORD@]HOST[:PORT][,HOST…]/SERVICE[/DB]     the primary of SERVICE
    redis+cluster://[USER:PASSWORD@]HOST[:PORT][,HOST…]                   a cluster

`rediss` instead of `redis` uses TLS. User and password are percent-encoded.
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
    """The parts of a Redis URL."""

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
        """Return the parts of *url*; raise `ConfigError`, which quotes no secret, if it is wrong."""
        scheme, separator, rest = url.partition("://")
        plain = re.sub("^rediss", "redis", scheme.lower())
        if not separator or plain not in _KINDS or scheme.lower() == "rediss+unix":
            raise ConfigError("", "a Redis address starts with redis://, rediss:// or redis+…://")
        kind = _KINDS[plain]
        # A password may contain any character unencoded, so it ends at the last @.
        login, _, rest = ("", "", rest) if rest.startswith("/") else rest.rpartition("@")
        rest, _, query = rest.partition("?")
        authority, _, path = rest.partition("/")
        user, _, password = login.partition(":")
        if login and not password:
            raise ConfigError("", "the address has a user but no password; write USER:PASSWORD@")
        service, db = "", _queried_db(query)
        if kind == "unix":
            if authority or not path:
                raise ConfigError("", "write a socket as redis+unix:///PATH, with three slashes")
            path = "/" + unquote(path)
        elif kind == "sentinel":
            service, _, path = path.partition("/")
            if not service:
                raise ConfigError(
                    "", "the address has no service name; write redis+sentinel://HOST/SERVICE"
                )
        if kind != "unix":
            db = _db(path, "the path of the address") if path else db
            path = ""
        if kind == "cluster" and db:
            raise ConfigError("", "a cluster has no databases; remove the number at the end")
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
        raise ConfigError(
            "", "redis:// takes one host; for several use redis+sentinel:// or redis+cluster://"
        )
    hosts = []
    for text in texts:
        found = _HOST.fullmatch(text)
        if found is None or not 0 < (port := int(found["port"] or _PORTS[kind])) < 65536:
            # Not quoted: it may be a password without its @.
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
                "", f"the address has a parameter {name!r}; only db is allowed, set options instead"
            )
        db = _db(value, "db")
    return db


def _db(text: str, where: str) -> int:
    if not re.fullmatch(r"\d{1,5}", text, re.ASCII):
        raise ConfigError("", f"{where} must be the number of a database, such as 0")
    return int(text)
