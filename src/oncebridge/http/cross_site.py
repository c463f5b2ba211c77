"""
Detect requests that a web page of another site made a browser send.

A browser sends the requests of any page, also to this machine, and a page can make its own host
name resolve to this address (DNS rebinding). Such requests are detected by `Host`,
`Sec-Fetch-Site` or `Origin`. Clients other than browsers send neither of the last two.
"""

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Final, Literal
from urllib.parse import urlsplit

from oncebridge.errors import ConfigError
from oncebridge.http.addresses import names_loopback

if TYPE_CHECKING:
    from oncebridge.http.server import Request

_HOST: Final = re.compile(r"([0-9A-Za-z_.-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")


def host_errors(hosts: Sequence[str], where: str) -> Iterator[ConfigError]:
    """Yield an error for each of *hosts* that is not a host name."""
    for at, host in enumerate(hosts):
        if not _HOST.fullmatch(host):
            message = f"{host!r}: must be a host name, such as oncebridge.example.com"
            yield ConfigError(f"{where}[{at}]", message)


def requested_host(request: "Request") -> str:
    """Return the `Host` of *request* in lower case; empty if it has none."""
    return (request.header(b"host") or b"").decode("latin-1").lower()


class OwnNames:
    """The host names of a listener: those of this machine, and *hosts*."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = {_known(host.lower()) for host in hosts}
        self.include = lru_cache(256)(self._include)
        """True if a `Host`, in lower case, is one of these names."""

    def _include(self, host: str) -> bool:
        name = without_port(host)
        is_here = names_loopback(name) or name.endswith(".localhost")
        return is_here or bool({host, name} & self._hosts)

    def page(self, request: "Request") -> Literal["own", "other"] | None:
        """Return whether our own page or another site's sent *request*; None if no page did."""
        sites = request.values(b"sec-fetch-site")
        if sites:
            return "own" if sites in ([b"same-origin"], [b"none"]) else "other"
        origins = request.values(b"origin")
        if not origins:  # browsers send it with every POST
            return None
        try:
            origin = urlsplit(origins[0].decode("ascii").lower())
        except ValueError:
            return "other"
        if len(origins) != 1 or origin.scheme not in ("http", "https"):
            return "other"
        is_known = {origin.netloc, without_port(origin.netloc)} & self._hosts
        return "own" if is_known or origin.netloc == requested_host(request) else "other"


def without_port(host: str) -> str:
    """Return the name or address in a `Host`."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].removesuffix(".")


def _known(host: str) -> str:
    """Return a configured name as it is compared: with its port, if it has one."""
    return host if ":" in host.rpartition("]")[2] else without_port(host)
