"""
The rule by which a bucket removes old records by itself, which costs nothing.

A rule counts days from an object's last write. A record that has to stay longer than that is
made larger than the rule goes for, so that the rule passes over it: that needs no tags, which
cost, and no second place to look at. Nothing in this module needs a driver.
"""

from datetime import timedelta
from typing import Final

from msgspec import Struct

PASSED_OVER: Final = 64 * 1024
"""Objects of this size and more stay; the rule is for smaller ones only."""

_DAY: Final = timedelta(days=1)


class Expiry(Struct, frozen=True):
    """A rule that removes objects under *prefix*, *days* after their last write."""

    id: str
    prefix: str
    days: int
    below: int | None = None
    """Only objects smaller than this."""

    @property
    def removes_all(self) -> bool:
        """Whether it removes also what is large in order to stay."""
        return self.below is None or self.below > PASSED_OVER


def days_of(duration: timedelta) -> int:
    """Count days, a part of one as a whole one."""
    return max(-(-duration // _DAY), 1)


def rule_for(prefix: str, expire_after: timedelta) -> Expiry:
    """Return our rule for *prefix*."""
    name = "-".join(["oncebridge", *prefix.split("/")]).rstrip("-")
    return Expiry(name, prefix, days_of(expire_after), PASSED_OVER)
