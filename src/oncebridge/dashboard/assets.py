"""
What pages need beside themselves: style, script, sign.

All of it is read when the dashboard is made and served from memory, by exact name: no path is
ever made of what a client sends.
"""

import gzip
from hashlib import blake2b
from importlib.resources import files
from typing import Final

from msgspec import Struct

_TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
}


class Asset(Struct, frozen=True):
    """One file, as it is sent."""

    body: bytes
    packed: bytes
    """The same by gzip; empty where that is no shorter."""
    content_type: str
    tag: str
    """Another as soon as one byte is another."""


def assets() -> dict[str, Asset]:
    """Read the files of this package, by the paths at which they are served."""
    found = files("oncebridge.dashboard").joinpath("static").iterdir()
    return {
        f"/static/{file.name}": _asset(file.read_bytes(), kind)
        for file in found
        if file.is_file() and (kind := _TYPES.get(f".{file.name.rpartition('.')[2]}"))
    }


def _asset(body: bytes, content_type: str) -> Asset:
    packed = gzip.compress(body, 9, mtime=0)
    tag = f'"{blake2b(body, digest_size=12).hexdigest()}"'
    return Asset(body, packed if len(packed) < len(body) else b"", content_type, tag)
