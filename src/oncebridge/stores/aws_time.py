"""The time of a store at AWS."""

import logging
from collections.abc import Mapping
from typing import Final

from oncebridge.aws.options import AwsStoreOptions
from oncebridge.aws.skewed_clock import SkewedClock
from oncebridge.base.clock import Clock, ms

_log = logging.getLogger("oncebridge")

_WARN_EVERY_MS: Final = 60_000


class AwsTime:
    """
    The time of *clock*, with warnings if this host's is off; *store* and *place* are for the log.

    *given* is for tests: it is used without correction, and without a margin.
    """

    def __init__(
        self,
        clock: SkewedClock,
        options: AwsStoreOptions,
        given: Clock | None,
        store: str,
        place: Mapping[str, str],
    ) -> None:
        self._clock = clock
        self._given = given
        self._max_skew_ms = ms(options.max_skew)
        self._event = f"oncebridge.{store}_clock"
        self._place = place
        self._warned_ms = 0
        self.margin_ms = 0 if given else self._max_skew_ms

    def now_ms(self) -> int:
        if self._given is not None:
            return self._given()
        now, offset_ms = self._clock.now_ms(), self._clock.offset_ms
        if abs(offset_ms) > self._max_skew_ms and now - self._warned_ms > _WARN_EVERY_MS:
            self._warned_ms = now
            _log.warning(f"{self._event}_is_off", extra={**self._place, "offset_ms": offset_ms})
        return now

    def check(self) -> None:
        """Raise `ConfigError` if this host's clock is off; warn if that is not known."""
        if self._given is None and not self._clock.check(self._max_skew_ms):
            _log.warning(f"{self._event}_unknown", extra=self._place)

    def health(self) -> dict[str, int | None]:
        """Return that the offset is not known, if no answer had a date yet."""
        is_unknown = self._given is None and self._clock.error_ms is None
        return {"clock_offset_ms": None} if is_unknown else {}
