"""
Where people may look from: an address to listen at, and whether it is this machine's own.

`HOST:PORT` as people write it, or the same as an address of the web. Only what is plainly
written as this machine (`localhost`, `127.…`, `[::1]`) counts as it: a name may stand for one
address today and for another tomorrow.
"""

import re
from typing import Final
from urllib.parse import urlsplit

from msgspec import Struct

from oncebridge.errors import ConfigError
from oncebridge.http.addresses import names_loopback

_HOST: Final = re.compile(r"[0-9A-Za-z._-]+|[0-9A-Fa-f:.]+(%[0-9A-Za-z._-]+)?")


class ListenAddress(Struct, frozen=True):
    """A host and a port."""

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
        is_name = host is not None and _HOST.fullmatch(host)
        if not host or not is_name or port is None or not is_plain or not is_ours:
            raise ConfigError(where, "is HOST:PORT and no more, such as 127.0.0.1:8081")
        return cls(host, port)

    @property
    def is_here(self) -> bool:
        """Return whether only this machine reaches it."""
        return names_loopback(self.host)

    @property
    def name(self) -> str:
        """The host as it is written in an address of the web."""
        return f"[{self.host}]" if ":" in self.host else self.host
