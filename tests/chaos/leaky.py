"""
`oncebridge run` with a leak, to be convicted: for every event that it sends, it keeps some memory
and a file open. `python -m tests.chaos.leaky run …` takes what `oncebridge run` takes.
"""

import os
from collections.abc import Sequence
from typing import Any, Final

from oncebridge.cli import main
from oncebridge.sinks.api import Delivery
from oncebridge.sinks.http import HttpSink

LEAK_BYTES: Final = 100_000
_kept: list[Any] = []
_deliver = HttpSink.deliver


async def _leaking(self: HttpSink, deliveries: Sequence[Delivery]) -> Any:
    _kept.extend((b"x" * LEAK_BYTES, os.open(os.devnull, os.O_RDONLY)) for _ in deliveries)
    return await _deliver(self, deliveries)


if __name__ == "__main__":
    HttpSink.deliver = _leaking  # type: ignore[method-assign]
    main()
