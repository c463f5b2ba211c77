"""Small recordings, and what an audit says of each arrival in them."""

import json

from oncebridge import Rule
from oncebridge.audit.engine import audit

START = "2026-03-19T10:15:"
START_MS = 1_773_915_300_000
"""When the first minute of a recording begins."""

CONTENT = Rule.parse({"name": "content"})
NEVER = Rule.parse({"name": "never", "discard": True})
"""With which no other rule agrees."""


def event(number=1, *, id=None, at_s=0, **envelope):  # noqa: A002
    """Make an event; its content is told by *number*, its publication by *at_s*."""
    whole = {
        "version": "0",
        "id": id or f"00000000-0000-4000-a000-{number:012}",
        "detail-type": "Order",
        "source": "shop",
        "account": "123456789012",
        "time": f"{START}{at_s:02}Z" if at_s is not None else None,
        "region": "us-east-1",
        "resources": [],
    }
    whole |= {name.replace("_", "-"): value for name, value in envelope.items()}
    whole.setdefault("detail", {"n": number})
    return {name: value for name, value in whole.items() if value is not None}


def raw(*args, **kwargs):
    return json.dumps(event(*args, **kwargs), separators=(",", ":")).encode()


def lines(*events):
    return b"".join(each + b"\n" for each in events)


def audited(paths, rules=(CONTENT,), **options):
    """Audit, and give the report with place, verdict and original of each arrival."""
    told = []

    def note(difference):
        told.append((difference.place, difference.before.value, difference.same_as))

    paths = paths if isinstance(paths, list) else [paths]
    report = audit(paths, rules, candidate=[NEVER], differences=note, **options)
    return report, told
