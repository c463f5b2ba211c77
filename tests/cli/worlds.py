"""What the tests of operators' commands share: invented events, and setups in memory."""

import json
from pathlib import Path

from oncebridge.service.config import Setup, load

SHOP = "com.example.shop"


def event(order: object = 7, *, id: str | None = "a1", source: str = SHOP, **more) -> dict:  # noqa: A002
    envelope = {"id": id, "source": source, "detail-type": "Order", **more}
    return {"detail": {"order": order}} | {n: v for n, v in envelope.items() if v is not None}


def raw(envelope: dict) -> bytes:
    return json.dumps(envelope).encode()


def setup_of(tmp_path: Path, text: str = "") -> Setup:
    """Load a configuration whose places are all in memory unless *text* says otherwise."""
    places = {"store": "memory:", "dead": "memory:", "sink": "-"}
    named = [f'{n} = "{v}"' for n, v in places.items() if f"\n{n} = " not in f"\n{text}"]
    if "[[routes]]" in text:
        named = [line for line in named if not line.startswith("sink")]
    path = tmp_path / "world.toml"
    path.write_text("\n".join([*named, text]))
    return load(path, environment={})
