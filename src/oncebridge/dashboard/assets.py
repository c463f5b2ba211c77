"""
Static files: style, script, icon.

They are read when the dashboard is made and served from memory by exact name: no file path is
ever built from a request.
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
    """One file."""

    body: bytes
    packed: bytes
    """The file compressed by gzip; empty if that is not shorter."""
    content_type: str
    tag: str
    """Changes with the content."""


def assets() -> dict[str, Asset]:
    """Return the files of this package by their URL path."""
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
