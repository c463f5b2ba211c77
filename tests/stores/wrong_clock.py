"""
A store in a process whose clock is wrong.

`python -m tests.stores.wrong_clock SECONDS PORT PLACE` moves the clock before anything else is
imported, and then serves the store at PLACE as `wired` serves its own, so that the test can ask
it from a process whose clock is right.
"""

import datetime as dt
import sys
import time


def move_clock(seconds: float) -> None:
    """Let everything in this process that asks for the time of day hear another one."""
    real, real_ns = time.time, time.time_ns
    moved_ns = int(seconds * 1e9)

    class Moved(dt.datetime):
        @classmethod
        def now(cls, tz: dt.tzinfo | None = None) -> "Moved":
            return cls.fromtimestamp(time.time(), tz)

        @classmethod
        def utcnow(cls) -> "Moved":
            return cls.now(dt.UTC).replace(tzinfo=None)

    time.time = lambda: real() + seconds
    time.time_ns = lambda: real_ns() + moved_ns
    dt.datetime = Moved  # type: ignore[misc]


if __name__ == "__main__":
    move_clock(float(sys.argv[1]))
    import asyncio

    import msgspec
    from tests.stores.kinds import open_store
    from tests.stores.wired import serve

    asyncio.run(serve(int(sys.argv[2]), open_store(**msgspec.json.decode(sys.argv[3]))))
