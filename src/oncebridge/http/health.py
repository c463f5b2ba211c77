"""The responses of `/healthz` and `/readyz`."""

from collections.abc import Sequence

import msgspec

from oncebridge.http.server import Response

ALIVE = Response(200, b'{"alive":true}')
_READY = Response(200, b'{"ready":true}')
_encode = msgspec.json.Encoder().encode


def readiness(reasons: list[str], warnings: Sequence[str] = ()) -> Response:
    """Return 200 if there are no *reasons* for not being ready, else 503 with them."""
    if not reasons:
        return Response(200, _encode({"ready": True, "warnings": warnings})) if warnings else _READY
    body = _encode({"ready": False, "reasons": reasons})
    return Response(503, body, headers=(("Retry-After", "1"),))
