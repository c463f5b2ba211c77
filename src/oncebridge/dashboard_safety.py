"""
Whether the settings of the dashboard are safe together.

It shows what passes through, and lets people act on it. So it is for this machine alone, unless
people have to say who they are.
"""

import re
from collections.abc import Iterator
from ipaddress import ip_network
from typing import TYPE_CHECKING, Final

from oncebridge.errors import ConfigError
from oncebridge.http.listening import Listening

if TYPE_CHECKING:
    from oncebridge.config import Config

SHORTEST_TOKEN: Final = 16
_TOKEN: Final = re.compile(r"[^\x00-\x20\x7f]([^\x00-\x1f\x7f]*[^\x00-\x20\x7f])?")
_HEADER: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_NEVER_A_NAME: Final = {"host", "cookie", "authorization", "origin", "connection", "content-length"}
_HOST: Final = re.compile(r"([0-9A-Za-z_.-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")


def mistakes(config: "Config") -> Iterator[ConfigError]:
    """Find what is wrong with the settings of the dashboard, each by itself and together."""
    address = None
    if config.dashboard:
        try:
            address = Listening.read(config.dashboard, "dashboard")
        except ConfigError as error:
            yield error
    if address is not None and address.port > 65535:
        yield ConfigError("dashboard", "a port is a number from 0 to 65535")
    token = config.dashboard_token.reveal() if config.dashboard_token is not None else None
    if token is not None and len(token) < SHORTEST_TOKEN:
        yield ConfigError("dashboard_token", f"has to have at least {SHORTEST_TOKEN} characters")
    elif token is not None and not _TOKEN.fullmatch(token):
        yield ConfigError("dashboard_token", "must be one line without blanks around it")
    yield from _of_the_proxy(config)
    for at, host in enumerate(config.dashboard_hosts):
        if not _HOST.fullmatch(host):
            message = f"{host!r}: is a name as browsers send it, such as oncebridge.example.com"
            yield ConfigError(f"dashboard_hosts[{at}]", message)


def exposure(config: "Config") -> ConfigError | None:
    """Find out whether anybody who reaches the dashboard would be let in."""
    if not config.dashboard or config.dashboard_token or config.dashboard_user_header:
        return None
    try:
        address = Listening.read(config.dashboard, "dashboard")
    except ConfigError:
        return None
    return None if address.is_here else too_open(config.dashboard)


def too_open(address: str) -> ConfigError:
    """Say that *address* is reached from elsewhere, and what to do about it."""
    return ConfigError(
        "dashboard",
        f"{address} may be reached from other machines, where everybody would be let in; set "
        "dashboard_token (such as env:DASHBOARD_TOKEN) or dashboard_user_header, or listen on "
        "127.0.0.1",
    )


def _of_the_proxy(config: "Config") -> Iterator[ConfigError]:
    header = config.dashboard_user_header
    if header is not None and not _HEADER.fullmatch(header):
        yield ConfigError("dashboard_user_header", f"{header!r}: is no name of a header")
    elif header is not None and header.lower() in _NEVER_A_NAME:
        yield ConfigError("dashboard_user_header", f"{header!r}: names nobody")
    for at, text in enumerate(config.dashboard_proxies):
        where = f"dashboard_proxies[{at}]"
        try:
            network = ip_network(text, strict=False)
        except ValueError:
            message = f"{text!r}: is an address or a network, such as 10.0.0.0/8"
            yield ConfigError(where, message)
            continue
        if network.prefixlen == 0:
            message = f"{text!r}: is everybody, who could then call themselves whatever they like"
            yield ConfigError(where, message)
