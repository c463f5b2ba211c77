"""
The trace context of an event, for distributed tracing.

It is a `traceparent` of the W3C, or inside of AWS the header of X-Ray. Both are read; any other
text is ignored. The context is transported next to an event and never in it: the bytes of the
event stay unchanged.
"""

import re
from typing import Final

NAME: Final = "traceparent"
"""The name of the context in headers, attributes and members of an event."""
XRAY_ATTRIBUTE: Final = "AWSTraceHeader"
"""What SQS calls the context of X-Ray."""
XRAY_HEADER: Final = b"x-amzn-trace-id"

_PARENT = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})"
    r"(?P<more>-[\x21-\x7e]{0,400})?",
    re.ASCII,
)
_ROOT = re.compile(r"1-([0-9a-f]{8})-([0-9a-f]{24})", re.ASCII)
_SPAN = re.compile(r"[0-9a-f]{16}", re.ASCII)
_MOST_XRAY: Final = 500


class BytesWithContext(bytes):
    """
    The bytes of an event with the trace context that arrived with them.

    The event that is read from it has both: the bytes (*raw*), and the context.
    """

    raw: bytes
    context: str

    @classmethod
    def of(cls, raw: bytes, context: str) -> "BytesWithContext":
        """Return *raw* with *context*, which is a `traceparent`."""
        carried = cls(raw)
        carried.raw = raw
        carried.context = context
        return carried


def read_traceparent(text: object) -> str:
    """Return a `traceparent` as it is forwarded; empty if *text* is not one."""
    found = _PARENT.fullmatch(text) if isinstance(text, str) else None
    if found is None or not (found["trace"].strip("0") and found["span"].strip("0")):
        return ""
    # Version 00 ends here. A later one may be longer, and ff is not a valid version.
    if found["version"] == "ff" or (found["version"] == "00" and found["more"] is not None):
        return ""
    return _written(found["trace"], found["span"], is_sampled=bool(int(found["flags"], 16) & 1))


def read_xray(text: object) -> str:
    """
    Return the header of X-Ray as a `traceparent`; empty if *text* is not one.

    A header without a parent, as a load balancer adds, belongs to no known request.
    """
    if not isinstance(text, str) or len(text) > _MOST_XRAY:
        return ""
    parts = [part.strip().partition("=") for part in text.split(";")]
    named = {name: value for name, _, value in parts}
    root = _ROOT.fullmatch(named.get("Root", ""))
    span = named.get("Parent", "")
    if root is None or not _SPAN.fullmatch(span):
        return ""
    trace = root[1] + root[2]
    if not (trace.strip("0") and span.strip("0")):
        return ""
    return _written(trace, span, is_sampled=named.get("Sampled") == "1")


def xray_of(traceparent: str) -> str:
    """Return a `traceparent` as a header of X-Ray; empty if it is not one."""
    found = _PARENT.fullmatch(traceparent)
    if found is None:
        return ""
    trace, sampled = found["trace"], int(found["flags"], 16) & 1
    return f"Root=1-{trace[:8]}-{trace[8:]};Parent={found['span']};Sampled={sampled}"


def _written(trace: str, span: str, *, is_sampled: bool) -> str:
    return f"00-{trace}-{span}-{'01' if is_sampled else '00'}"
