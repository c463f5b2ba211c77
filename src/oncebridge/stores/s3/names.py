"""What buckets and prefixes may be called here. Nothing in this module needs a driver."""

import re
from typing import Final

from oncebridge.errors import ConfigError

_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PREFIX: Final = re.compile(r"[A-Za-z0-9!_.()/-]{0,256}")
_DIRECTORY: Final = "--x-s3"


def checked_prefix(bucket: str, prefix: str) -> str:
    """Return *prefix* with the slash at its end, or raise `ConfigError` for names that cannot be."""
    if bucket.endswith(_DIRECTORY):
        raise ConfigError(
            "",
            "directory buckets (S3 Express One Zone) are not supported: their requests are signed "
            "in another way, and they forget everything with their zone; use a general purpose "
            "bucket",
        )
    if not _BUCKET.fullmatch(bucket):
        raise ConfigError("", f"{bucket!r} is not the name of a bucket")
    folders = prefix.strip("/").split("/") if prefix.strip("/") else []
    if not _PREFIX.fullmatch(prefix) or any(folder in ("", ".", "..") for folder in folders):
        raise ConfigError(
            "",
            "a prefix has letters, digits, and ! _ . ( ) / - only, at most 256 of them, and no "
            "folder that is empty, . or ..",
        )
    return "".join(f"{folder}/" for folder in folders)
