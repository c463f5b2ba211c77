"""
Which buckets and prefixes the S3 store can use, and the rule that removes its old records.

Templates and checks need this too, so it imports no driver.

A lifecycle rule costs nothing. It counts days from the last write of an object. A record that has
to stay longer is padded to a size that the rule does not apply to. Tags would do the same, but
cost money.
"""

import re
from datetime import timedelta
from typing import Final

from msgspec import Struct

from oncebridge.errors import ConfigError

_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PREFIX: Final = re.compile(r"[A-Za-z0-9!_.()/-]{0,256}")
_DIRECTORY: Final = "--x-s3"
KEPT_SIZE: Final = 64 * 1024
"""Objects of this size or larger stay: the rule removes smaller ones only."""

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
        """True if it also removes records that were padded to stay."""
        return self.below is None or self.below > KEPT_SIZE


def checked_prefix(bucket: str, prefix: str) -> str:
    """Return *prefix* with a slash at its end; raise `ConfigError` if a name is not valid."""
    if bucket.endswith(_DIRECTORY):
        raise ConfigError(
            "",
            "directory buckets (S3 Express One Zone) are not supported: their requests are signed "
            "in another way, and they lose everything if their zone fails; use a general purpose "
            "bucket",
        )
    if not _BUCKET.fullmatch(bucket):
        raise ConfigError("", f"{bucket!r} is not a valid bucket name")
    folders = prefix.strip("/").split("/") if prefix.strip("/") else []
    if not _PREFIX.fullmatch(prefix) or any(folder in ("", ".", "..") for folder in folders):
        raise ConfigError(
            "",
            "a prefix has letters, digits, and ! _ . ( ) / - only, at most 256 of them, and no "
            "folder that is empty, . or ..",
        )
    return "".join(f"{folder}/" for folder in folders)


def days_of(duration: timedelta) -> int:
    """Return *duration* in days, rounded up; at least 1."""
    return max(-(-duration // _DAY), 1)


def rule_for(prefix: str, expire_after: timedelta) -> Expiry:
    """Return the rule that `oncebridge migrate` writes for *prefix*."""
    name = "-".join(["oncebridge", *prefix.split("/")]).rstrip("-")
    return Expiry(name, prefix, days_of(expire_after), KEPT_SIZE)
