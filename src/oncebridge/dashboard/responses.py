"""Responses with the security headers, and gzip."""

import gzip
from typing import Final
from urllib.parse import quote

from msgspec.structs import replace

from oncebridge.dashboard.assets import Asset
from oncebridge.http.server import Request, Response

_Headers = tuple[tuple[str, str], ...]
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
SAFE: Final[_Headers] = (
    ("Content-Security-Policy", _POLICY),
    ("X-Content-Type-Options", "nosniff"),
    # Without a referrer, forms would be sent with `Origin: null`, and the origin is checked.
    ("Referrer-Policy", "same-origin"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
)
_NEVER: Final = (("Cache-Control", "no-store"),)
_ASK_AGAIN: Final = (("Cache-Control", "no-cache"),)
_VARIES: Final = (("Vary", "Accept-Encoding"),)
_PACKED: Final = (("Content-Encoding", "gzip"),)
_HTML: Final = "text/html; charset=utf-8"
TEXT: Final = "text/plain; charset=utf-8"
_WORTH_PACKING: Final = 1000
_LEVEL: Final = 5


def html(request: Request, status: int, text: str, headers: _Headers = ()) -> Response:
    """Return a page, which is not cached."""
    return _answer(request, status, text.encode("utf-8", "replace"), _HTML, headers)


def text(
    request: Request, status: int, body: bytes, content_type: str = TEXT, headers: _Headers = ()
) -> Response:
    """Return plain text or another content type, which is not cached."""
    return _answer(request, status, body, content_type, headers)


def _answer(
    request: Request, status: int, body: bytes, content_type: str, headers: _Headers
) -> Response:
    headers = (*SAFE, *_NEVER, *_VARIES, *headers)
    if len(body) >= _WORTH_PACKING and takes_gzip(request):
        body, headers = gzip.compress(body, _LEVEL, mtime=0), (*headers, *_PACKED)
    return Response(status, body, content_type, headers)


def asset(request: Request, found: Asset) -> Response:
    """Return a static file, or 304 if the browser has it."""
    headers = (*SAFE, *_ASK_AGAIN, *_VARIES, ("ETag", found.tag))
    known = [tag.strip() for tag in (request.header(b"if-none-match") or b"").split(b",")]
    if found.tag.encode() in [tag.removeprefix(b"W/") for tag in known]:
        return Response(304, headers=headers)
    if found.packed and takes_gzip(request):
        return Response(200, found.packed, found.content_type, (*headers, *_PACKED))
    return Response(200, found.body, found.content_type, headers)


def redirect(to: str, headers: _Headers = ()) -> Response:
    """Redirect the browser to a page of this dashboard (GET)."""
    return Response(303, headers=(*SAFE, *_NEVER, ("Location", address(to)), *headers))


def address(to: str) -> str:
    """Return a path encoded for a header; raise `ValueError` if it leads to another site."""
    if not is_here(to):
        raise ValueError("leads to another site")
    return quote(to, safe="/?&=%#:;,+@!$'()*~-._")


def with_safe_headers(response: Response) -> Response:
    """Add the security headers to *response*."""
    return replace(response, headers=(*SAFE, *_NEVER, *response.headers))


def is_here(to: str) -> bool:
    """Return True if *to* is a path of this dashboard, however a browser reads it."""
    is_path = to.startswith("/") and not to.startswith(("//", "/\\"))
    return is_path and to.isprintable() and "\\" not in to


def takes_gzip(request: Request) -> bool:
    """Return True if the client accepts gzip."""
    for one in b",".join(request.values(b"accept-encoding")).lower().split(b","):
        name, _, rest = one.strip().partition(b";")
        if name.strip() in (b"gzip", b"*"):
            weight = rest.replace(b" ", b"").removeprefix(b"q=")
            return weight.rstrip(b"0") not in (b"0.", b"") or not rest
    return False
