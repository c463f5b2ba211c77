"""A clock that a test controls."""


class ManualClock:
    """
    A clock that does not move by itself (`oncebridge.base.clock.Clock`).

    `advance` moves it forward; set `now_ms` to move it anywhere, also back.
    """

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self.now_ms = now_ms

    def __call__(self) -> int:
        return self.now_ms

    def __repr__(self) -> str:
        return f"ManualClock({self.now_ms})"

    def advance(self, ms: int) -> None:
        """Move forward by *ms*; to move back, set `clock.now_ms`."""
        if ms < 0:
            raise ValueError(f"a clock advances by 0 ms or more, not by {ms}; set now_ms instead")
        self.now_ms += ms
