"""
The address of a client, and the number of wrong credentials it sent.

A client can send any `X-Forwarded-For`, so only the part that configured proxies added is used.
Without configured proxies, the address of the connection is used, also on loopback.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import TYPE_CHECKING, Final

from oncebridge.base.clock import Clock
from oncebridge.errors import ConfigError
from oncebridge.http.cross_site import without_port

if TYPE_CHECKING:
    from oncebridge.http.server import Request

_MOST_HOPS: Final = 32
_WITHIN_MS: Final = 60_000
_MOST_WRONG: Final = 10
_MOST_WRONG_IN_ALL: Final = 1000
_MOST_ADDRESSES: Final = 1024


class TooManyAttempts(Exception):
    """Too many wrong credentials arrived within a minute."""


def proxy_errors(proxies: Sequence[str], where: str) -> Iterator[ConfigError]:
    """Yield an error for each of *proxies* that is not an address or network."""
    for at, text in enumerate(proxies):
        try:
            network = ip_network(text, strict=False)
        except ValueError:
            message = f"{text!r}: must be an address or a network, such as 10.0.0.0/8"
            yield ConfigError(f"{where}[{at}]", message)
            continue
        if network.prefixlen == 0:
            message = f"{text!r}: includes every address; list only those of your proxies"
            yield ConfigError(f"{where}[{at}]", message)


class TrustedProxies:
    """The proxies whose `X-Forwarded-…` headers are trusted."""

    def __init__(self, proxies: Sequence[str]) -> None:
        self._networks = [ip_network(one, strict=False) for one in proxies]

    def include(self, peer: str) -> bool:
        """Return True if *peer* is the address of a trusted proxy."""
        address = _address(peer)
        return address is not None and any(address in network for network in self._networks)

    def client(self, request: "Request") -> str:
        """
        Return the right-most address that is not a trusted proxy's.

        Each proxy appends the address of its client. Everything before the last address
        that is not trusted was sent by that client.
        """
        client = request.peer
        said = b",".join(request.values(b"x-forwarded-for")).decode("latin-1")
        for hop in reversed(said.rsplit(",", _MOST_HOPS)[-_MOST_HOPS:]):
            if not self.include(client):
                break
            text = hop.strip()
            has_port = text.startswith("[") or text.count(":") == 1
            address = _address(without_port(text) if has_port else text)
            if address is None:
                break
            client = str(address)
        return client


class FailedAttempts:
    """
    Counts wrong credentials within a minute, by address and in total.

    The right credential is never refused, so no client can lock out others, not even behind
    the same proxy. The length of a credential prevents guessing; this keeps the log short and
    slows down misconfigured clients.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._in_all = (0, 0)
        self._by_address: OrderedDict[str, tuple[int, int]] = OrderedDict()

    def note(self, address: str) -> None:
        """Count a wrong credential from *address*; raise `TooManyAttempts` above the limit."""
        counted_as, now_ms = _counted_as(address), self._clock()
        count, _ = own = _counted(self._by_address.pop(counted_as, (0, 0)), now_ms)
        self._by_address[counted_as] = own
        if len(self._by_address) > _MOST_ADDRESSES:
            self._by_address.popitem(last=False)
        if count > _MOST_WRONG:
            raise TooManyAttempts
        self._in_all = _counted(self._in_all, now_ms)
        if self._in_all[0] > _MOST_WRONG_IN_ALL:
            raise TooManyAttempts


def _counted(before: tuple[int, int], now_ms: int) -> tuple[int, int]:
    """Return the count plus one and the start of its minute; after a minute, start again."""
    count, since_ms = before
    return (count + 1, since_ms) if 0 <= now_ms - since_ms < _WITHIN_MS else (1, now_ms)


def _counted_as(address: str) -> str:
    """Return the group that *address* is counted in: a /64 in IPv6, all loopback as one."""
    ip = _address(address)
    if ip is None:
        return ""
    if ip.is_loopback:
        return "loopback"
    return str(ip) if ip.version == 4 else ip.exploded[:19]


def _address(text: str) -> IPv4Address | IPv6Address | None:
    """Return *text* as an address, without its interface; IPv4 mapped to IPv6 as IPv4."""
    try:
        ip = ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return getattr(ip, "ipv4_mapped", None) or ip
