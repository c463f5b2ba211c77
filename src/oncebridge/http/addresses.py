"""
Which addresses a connection may go to, and addresses to listen at.

The name of a target comes from the configuration, but its addresses come from DNS and may
point inwards: at this host, at a private network, at the cloud's metadata service, which
returns credentials. So only addresses of the public internet are used unless the
configuration allows others.

A name is looked up once per connection, and the connection is made to the addresses that
were checked. A second lookup could return other addresses. Behind a proxy the proxy looks
names up, so only a target that is written as an address can be checked here.
"""

import asyncio
import re
import socket
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import cast
from urllib.parse import urlsplit

from msgspec import Struct

from oncebridge.errors import ConfigError, OncebridgeError

SocketAddress = tuple[str, int] | tuple[str, int, int, int]

# From the registries of IANA. `ipaddress.is_global` is not used: its results changed between
# patch versions of Python.
_SPECIAL_4 = tuple(
    IPv4Network(network)
    for network in (
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",
        "127.0.0.0/8",
        "168.63.129.16/32",  # in a public range, but it is the host of a machine in Azure
        "169.254.0.0/16",
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.88.99.0/24",
        "192.168.0.0/16",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/4",
        "240.0.0.0/4",
    )
)
_UNICAST_6 = IPv6Network("2000::/3")
_SPECIAL_6 = (IPv6Network("2001::/23"), IPv6Network("2001:db8::/32"), IPv6Network("3fff::/20"))
_NAT64 = IPv6Network("64:ff9b::/96")
_LOOPBACK_4 = IPv4Network("127.0.0.0/8")
_LOOPBACK_6 = IPv6Address("::1")
_LOCAL_4 = (IPv4Network("0.0.0.0/8"), _LOOPBACK_4, IPv4Network("169.254.0.0/16"))
_LINK_LOCAL_6 = (IPv6Network("fe80::/10"), IPv6Network("fd00:ec2::/32"))  # the second is AWS's own
_LISTEN_HOST = re.compile(r"[0-9A-Za-z._-]+|[0-9A-Fa-f:.]+(%[0-9A-Za-z._-]+)?")


class AddressRefused(OncebridgeError):
    """The name was found, but none of its addresses is allowed."""


class Endpoint(Struct, frozen=True):
    """One address to connect to, in the form that a socket takes."""

    family: int
    address: SocketAddress


async def resolve_allowed(host: str, port: int, *, allow_private: bool) -> list[Endpoint]:
    """
    Look up *host*, and return the addresses that may be connected to, in order.

    Raise `AddressRefused` if none of them is allowed, and `OSError` if the name is not
    found. `localhost`, `127.0.0.1` and `[::1]` are always allowed; any other name of this
    host, and every address that is not public, needs *allow_private*.
    """
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP
        )
    except UnicodeError:  # an empty part, or one that is too long
        raise socket.gaierror(socket.EAI_NONAME, "not a host name") from None
    endpoints = [
        Endpoint(family, cast("SocketAddress", address)) for family, _, _, _, address in found
    ]
    if allow_private:
        return endpoints
    is_meant = is_loopback if names_loopback(host) else is_public
    allowed = [endpoint for endpoint in endpoints if is_meant(endpoint.address[0])]
    if not allowed:
        raise AddressRefused(
            "the target has no public address; set allow_private = true to allow a private one"
        )
    return allowed


def names_loopback(host: str) -> bool:
    """Return True if *host* is plainly written as this host: no short form, no other name."""
    try:
        return host.lower() == "localhost" or is_loopback(host)
    except ValueError:
        return False


def is_loopback(address: str) -> bool:
    """Return True if a numeric address is a loopback address."""
    ip = _read(address)
    return ip == _LOOPBACK_6 if isinstance(ip, IPv6Address) else ip in _LOOPBACK_4


def is_local(address: str) -> bool:
    """Return True if a numeric address is loopback, or link-local (as a cloud's metadata service)."""
    ip = _read(address)
    if isinstance(ip, IPv6Address):
        if ip.ipv4_mapped is None:
            return ip <= _LOOPBACK_6 or any(ip in network for network in _LINK_LOCAL_6)
        ip = ip.ipv4_mapped
    return any(ip in network for network in _LOCAL_4)


def numeric_address(host: str) -> str | None:
    """Return the address that *host* is, in any notation; None if it is a name."""
    try:
        found = socket.getaddrinfo(host, None, flags=socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        return None
    return str(found[0][4][0])


def is_public(address: str) -> bool:
    """Return True if a numeric address belongs to the public internet."""
    ip = _read(address)
    if isinstance(ip, IPv6Address):
        inner = IPv4Address(int(ip) & 0xFFFF_FFFF) if ip in _NAT64 else ip.sixtofour
        if inner is None:
            # Mapped and compatible forms of version 4 are outside of the unicast range.
            return ip in _UNICAST_6 and not any(ip in network for network in _SPECIAL_6)
        ip = inner
    return not any(ip in network for network in _SPECIAL_4)


def _read(address: str) -> IPv4Address | IPv6Address:
    return ip_address(address.partition("%")[0])  # after a % comes an interface


class ListenAddress(Struct, frozen=True):
    """
    A host and a port to listen at, written as `HOST:PORT` or as an `http://` URL.

    Only a host plainly written as this machine (`localhost`, `127.…`, `[::1]`) counts as
    local: the address of another name may change.
    """

    host: str
    port: int

    @classmethod
    def read(cls, text: str, where: str) -> "ListenAddress":
        """Read an address, or raise `ConfigError`; *where* names the setting."""
        try:
            parts = urlsplit(text if "://" in text else f"//{text}")
            host, port = parts.hostname, parts.port
        except ValueError:
            host, port, parts = None, None, urlsplit("")
        is_plain = not (parts.query or parts.fragment or "@" in parts.netloc)
        is_ours = parts.scheme in ("", "http") and parts.path in ("", "/")
        is_name = host is not None and _LISTEN_HOST.fullmatch(host)
        if not host or not is_name or port is None or not is_plain or not is_ours:
            raise ConfigError(where, "must be HOST:PORT, such as 127.0.0.1:8081")
        return cls(host, port)

    @property
    def is_loopback(self) -> bool:
        """True if it can be reached from this machine only."""
        return names_loopback(self.host)

    @property
    def url_host(self) -> str:
        """The host as a URL writes it."""
        return f"[{self.host}]" if ":" in self.host else self.host
