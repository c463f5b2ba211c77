"""
Checks the settings of the dashboard.

It shows events and allows actions on them, so it is for this machine only, unless users have to
log in.
"""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from oncebridge.base.secrets import find_weakness
from oncebridge.errors import ConfigError
from oncebridge.http.addresses import ListenAddress
from oncebridge.http.client_address import proxy_errors
from oncebridge.http.cross_site import host_errors

if TYPE_CHECKING:
    from oncebridge.service.config import Config

_HEADER: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_NEVER_A_NAME: Final = {"host", "cookie", "authorization", "origin", "connection", "content-length"}


def dashboard_errors(config: "Config") -> Iterator[ConfigError]:
    """Yield the errors in the settings of the dashboard."""
    address = None
    if config.dashboard:
        try:
            address = ListenAddress.read(config.dashboard, "dashboard")
        except ConfigError as error:
            yield error
    if address is not None and address.port > 65535:
        yield ConfigError("dashboard", "the port must be from 0 to 65535")
    if config.dashboard_token is not None:
        why = find_weakness(config.dashboard_token.reveal(), in_header=True)
        if why is not None:
            yield ConfigError("dashboard_token", why)
    yield from _proxy_errors(config)
    yield from host_errors(config.dashboard_hosts, "dashboard_hosts")


def exposure_error(config: "Config") -> ConfigError | None:
    """Return an error if other machines could use the dashboard without logging in."""
    if not config.dashboard or config.dashboard_token or config.dashboard_user_header:
        return None
    try:
        address = ListenAddress.read(config.dashboard, "dashboard")
    except ConfigError:
        return None
    return None if address.is_loopback else not_local_error(config.dashboard)


def not_local_error(address: str) -> ConfigError:
    """Return the error for an *address* that other machines can reach."""
    return ConfigError(
        "dashboard",
        f"other machines can reach {address}, and could use it without logging in; set "
        "dashboard_token (such as env:DASHBOARD_TOKEN) or dashboard_user_header, or listen on "
        "127.0.0.1",
    )


def _proxy_errors(config: "Config") -> Iterator[ConfigError]:
    header = config.dashboard_user_header
    if header is not None and not _HEADER.fullmatch(header):
        yield ConfigError("dashboard_user_header", f"{header!r} is not the name of a header")
    elif header is not None and header.lower() in _NEVER_A_NAME:
        yield ConfigError("dashboard_user_header", f"{header!r} does not name a user")
    elif header is not None and not config.dashboard_proxies:
        message = "has no trusted proxy; set dashboard_proxies to the address of your proxy"
        yield ConfigError("dashboard_user_header", message)
    yield from proxy_errors(config.dashboard_proxies, "dashboard_proxies")
