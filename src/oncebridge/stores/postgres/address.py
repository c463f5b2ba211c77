"""
Addresses in the form of libpq: `postgresql://user:password@host:port,host:port/database?sslmode=…`.

They are parsed here, so that errors are reported before anything connects, and so that two
addresses can be compared. Parameters for TLS and passwords are left to the driver.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlsplit

from msgspec import Struct

from oncebridge.base.options import did_you_mean
from oncebridge.base.secrets import Address as Shown
from oncebridge.errors import ConfigError

_PORT = 5432
# The driver would send any other name to the server, as a setting of the session.
_FOR_DRIVER = (
    *("sslmode", "sslrootcert", "sslcert", "sslkey", "sslcrl", "sslpassword", "sslnegotiation"),
    *("ssl_min_protocol_version", "ssl_max_protocol_version", "passfile", "password", "user"),
    *("options", "application_name", "krbsrvname", "gsslib"),
)
_FILES = ("sslrootcert", "sslcert", "sslkey", "sslcrl", "passfile")
_FOR_US = ("host", "port", "dbname", "target_session_attrs")
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.%]+)\]|([^\[\]:]*))(?::([0-9]*))?")
_SESSIONS = ("any", "read-write", "read-only", "primary", "standby", "prefer-standby")

Host = tuple[str, int]
"""A host name, an IP address or the directory of a Unix socket; and the port."""


class PostgresAddress(Struct, frozen=True):
    """Where a database is, and how to get in."""

    shown: Shown
    """As it was written; prints without the password."""
    hosts: tuple[Host, ...]
    """To be tried in this order; empty: the driver looks for a server on this machine."""
    database: str
    dsn: str
    """For the driver: everything but the hosts."""
    session: str
    """The `target_session_attrs` that a host must have."""

    def is_same_database(self, other: "PostgresAddress") -> bool:
        """Return True if hosts and database are written the same; aliases of a host are not."""
        return (frozenset(self.hosts), self.database) == (frozenset(other.hosts), other.database)


def read_address(url: str, names: Sequence[str] = ()) -> tuple[PostgresAddress, Mapping[str, str]]:
    """Return the address in *url*, and the values of its parameters among *names*."""
    shown = Shown(url)
    parts = _split(shown)
    query = _query(parts, shown, names)
    user_info, _, written = parts.netloc.rpartition("@")
    hosts = _hosts(written, query, shown)
    user = unquote(user_info.partition(":")[0]) or query.get("user", "")
    database = unquote(parts.path[1:]) or query.get("dbname", "") or user
    session = query.get("target_session_attrs", "any" if len(hosts) < 2 else "read-write")
    if session not in _SESSIONS:
        raise _error(shown, f"target_session_attrs: {did_you_mean(session, _SESSIONS)}")
    for_driver = "&".join(
        f"{name}={quote(value, safe='/')}" for name, value in query.items() if name in _FOR_DRIVER
    )
    before = f"{user_info}@" if user_info else ""
    address = PostgresAddress(
        shown,
        hosts,
        database,
        f"postgresql://{before}/{quote(database, safe='')}{'?' if for_driver else ''}{for_driver}",
        session,
    )
    return address, {name: value for name, value in query.items() if name in names}


def _split(shown: Shown) -> SplitResult:
    try:
        parts = urlsplit(shown)
    except ValueError:  # its text would quote the password
        raise _error(shown, "its host or port cannot be read") from None
    if parts.scheme not in ("postgresql", "postgres") or not shown[len(parts.scheme) :].startswith(
        "://"
    ):
        raise _error(shown, "write it as postgresql://USER:PASSWORD@HOST:PORT/DATABASE")
    if parts.fragment:
        raise _error(shown, "write a # in the password as %23")
    if parts.netloc.count("@") > 1:
        raise _error(shown, "write an @ in the password as %40")
    if "/" in parts.path[1:]:
        raise _error(shown, "write a / in the password or the database as %2F")
    return parts


def _query(parts: SplitResult, shown: Shown, names: Sequence[str]) -> dict[str, str]:
    try:
        query = dict(parse_qsl(parts.query, strict_parsing=bool(parts.query)))
    except ValueError:
        raise _error(
            shown,
            "the text after ? must be NAME=VALUE&NAME=VALUE; write a ? in the password as %3F",
        ) from None
    allowed = (*_FOR_DRIVER, *_FOR_US, *names)
    for name, value in query.items():
        if name not in allowed:
            raise _error(shown, f"there is no parameter {name!r}; {did_you_mean(name, allowed)}")
        if name in _FILES and not Path(value).is_file():
            raise _error(shown, f"{name}: there is no such file")
    return query


def _hosts(written: str, query: Mapping[str, str], shown: Shown) -> tuple[Host, ...]:
    if written:
        found = [_host(unquote(one), shown) for one in written.split(",")]
        return tuple((host, port or _PORT) for host, port in found)
    hosts = [host for host in query.get("host", "").split(",") if host]
    ports = [_port(port, shown) for port in query.get("port", "").split(",") if port] or [_PORT]
    if len(ports) == 1:
        ports *= len(hosts)
    if len(ports) != len(hosts):
        raise _error(shown, f"has {len(ports)} ports for {len(hosts)} hosts")
    return tuple(zip(hosts, ports, strict=True))


def _host(written: str, shown: Shown) -> Host:
    if written.startswith("/"):
        directory, colon, port = written.rpartition(":")
        return (directory, _port(port, shown)) if colon else (written, 0)
    found = _HOST.fullmatch(written)
    if not found or not (found[1] or found[2]):
        raise _error(shown, "write a host as NAME:PORT or [ADDRESS]:PORT")
    return found[1] or found[2], _port(found[3], shown) if found[3] else 0


def _port(written: str, shown: Shown) -> int:
    if not re.fullmatch(r"[0-9]{1,5}", written) or not 0 < int(written) < 65536:
        raise _error(shown, "a port must be a number from 1 to 65535")
    return int(written)


def _error(shown: Shown, text: str) -> ConfigError:
    return ConfigError("", f"{shown!r}: {text}")
