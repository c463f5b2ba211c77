"""The URL of a target, split into the parts that a request needs."""

import base64
import re
from ipaddress import IPv6Address
from typing import Self
from urllib.parse import unquote_to_bytes, urlsplit

from msgspec import Struct

VISIBLE = re.compile(r"[!-\[\]-~]+")  # printable ASCII, but no space and no backslash
_HOST = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?")
_PORTS = {"http": 80, "https": 443}


class HttpTarget(Struct, frozen=True):
    """A URL in parts, as a request needs them."""

    host: str
    port: int
    is_tls: bool
    path: str
    """With the query, as it was written."""
    authorization: str
    """The header for the user and password in the URL; empty if there are none."""

    @classmethod
    def parse(cls, url: str) -> Self:
        """Return the parts of *url*; raise `ValueError` with a reason that quotes nothing of it."""
        if not VISIBLE.fullmatch(url):
            raise ValueError(
                "the URL has a space, a backslash, or a character that is not ASCII; "
                "percent-encode it (a host name in its xn-- form)"
            )
        scheme, separator, rest = url.partition("://")
        scheme = scheme.lower()
        if not separator or scheme not in _PORTS:
            raise ValueError("the URL must start with https:// or http://")
        if "#" in url:
            raise ValueError(
                "the URL has a fragment (from the # on), which is never sent; remove it"
            )
        try:
            parts = urlsplit(url)
            host, port = parts.hostname or "", parts.port
        except ValueError:
            raise ValueError("the host or port of the URL cannot be read") from None
        if port == 0:
            raise ValueError("the port of the URL is 0; it must be from 1 to 65535")
        if not host:
            raise ValueError("the URL has no host")
        if not (_is_ipv6(host) if ":" in host else _HOST.fullmatch(host)):
            raise ValueError("the host of the URL is neither a host name nor an address")
        path = rest[len(parts.netloc) :]
        return cls(
            host,
            port or _PORTS[scheme],
            scheme == "https",
            path if path.startswith("/") else f"/{path}",
            _basic(parts.username, parts.password),
        )

    @property
    def host_header(self) -> str:
        """The host for the `Host` header: with the port only if it is not the default."""
        usual = _PORTS["https" if self.is_tls else "http"]
        return self.authority.removesuffix(f":{usual}") if self.port == usual else self.authority

    @property
    def authority(self) -> str:
        """The host and the port, with an IPv6 address in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __repr__(self) -> str:
        # the path of a webhook is often its secret
        return f"<HttpTarget {self.host_header}>"


def _is_ipv6(host: str) -> bool:
    try:
        return "%" not in str(IPv6Address(host))  # a zone has a meaning on this host only
    except ValueError:
        return False


def _basic(user: str | None, password: str | None) -> str:
    if not user and not password:
        return ""
    name = unquote_to_bytes(user or "")
    if b":" in name:
        raise ValueError("the user in the URL has a colon, which Basic authentication cannot carry")
    both = name + b":" + unquote_to_bytes(password or "")
    return f"Basic {base64.b64encode(both).decode()}"
