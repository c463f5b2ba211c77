"""Time that moves when a test says so."""


class ManualClock:
    """
    A `oncebridge.base.clock.Clock` that stands still until it is moved.

    `advance` moves it on; set `now_ms` to put it anywhere, also back.
    """

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self.now_ms = now_ms

    def __call__(self) -> int:
        return self.now_ms

    def __repr__(self) -> str:
        return f"ManualClock({self.now_ms})"

    def advance(self, ms: int) -> None:
        """Move on by *ms*; time set back on purpose is written `clock.now_ms = …`."""
        if ms < 0:
            raise ValueError(f"a clock advances by 0 ms or more, not by {ms}")
        self.now_ms += ms
