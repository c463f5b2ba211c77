"""
The proxy for a target, as configured in the environment.

`HTTPS_PROXY`, `HTTP_PROXY` and `NO_PROXY` are read as Python's urllib reads them (lower case
first; no `HTTP_PROXY` under CGI), so they mean the same to botocore, which looks up
credentials. In addition, `ALL_PROXY` applies to targets without a proxy of their own, and
`NO_PROXY` may list addresses and networks (`10.0.0.0/8`).

No proxy is used for this host, and none for link-local addresses: a cloud's metadata services
return the credentials of the machine that asks, which must not be the proxy.
"""

import os
from contextlib import suppress
from ipaddress import ip_address, ip_network
from typing import Final
from urllib.request import getproxies_environment, proxy_bypass

from oncebridge.errors import ConfigError
from oncebridge.http.addresses import is_local, names_loopback, numeric_address
from oncebridge.http.target import HttpTarget

_METADATA: Final = ("169.254.169.254", "169.254.170.2", "[fd00:ec2::254]")


def proxy_for(target: HttpTarget) -> HttpTarget | None:
    """
    Return the proxy for *target*; None if it is reached directly.

    Raise `ConfigError` for a proxy that cannot be used. It quotes nothing of the address,
    which may contain a password.
    """
    found = getproxies_environment()
    kind = "https" if target.is_tls else "http"
    if kind not in found:
        kind = "all"
    url = found.get(kind)
    if url is None or _is_direct(target, found.get("no", "")):
        return None
    name = f"{kind.upper()}_PROXY"
    scheme, separator, _ = url.partition("://")
    if not separator:  # HOST:PORT alone is common, and botocore accepts it too
        url = f"http://{url.removeprefix('//')}"
    elif scheme.lower() != "http":
        what = "a SOCKS proxy" if scheme.lower().startswith("socks") else "not an http:// URL"
        message = (
            f"{name} in the environment is {what}, which is not supported; set it to "
            "http://HOST:PORT (https:// targets are encrypted inside the tunnel), or add "
            f"{target.host} to NO_PROXY"
        )
        raise ConfigError("", message)
    try:
        return HttpTarget.parse(url)
    except ValueError as error:
        message = f"{name} in the environment cannot be used: {error}; set it to http://HOST:PORT"
        raise ConfigError("", message) from None


def _is_direct(target: HttpTarget, no_proxy: str) -> bool:
    host = target.host
    address = numeric_address(host)
    if names_loopback(host) or (address and is_local(address)):
        return True
    if proxy_bypass(target.authority):
        return True
    if address:
        for entry in no_proxy.split(","):
            with suppress(ValueError):  # a host name
                if ip_address(address) in ip_network(entry.strip(" []"), strict=False):
                    return True
    return False


def keep_metadata_direct() -> None:
    """Add AWS's metadata services to `NO_PROXY`: botocore would ask them through the proxy."""
    given = getproxies_environment().get("no", "")
    if given != "*":
        os.environ["no_proxy"] = ",".join([*([given] if given else []), *_METADATA])
