"""Group and deduplication id of messages for FIFO queues and topics."""

import hashlib
import re
from typing import Final

from oncebridge.base.clock import Dice
from oncebridge.errors import ConfigError
from oncebridge.sinks.api import Delivery

_MOST_ID: Final = 128
_GROUP = re.compile(r"[!-~]{1,128}")


def fifo_id(name: bytes) -> str:
    """Return *name* as hex; its hash if that is longer than an id may be."""
    text = name.hex()
    return text if len(text) <= _MOST_ID else hashlib.sha256(name).hexdigest()


def deduplication_id(delivery: Delivery, dice: Dice) -> str:
    """
    Return an id that only further attempts at this delivery share.

    For five minutes the queue or topic drops messages with the same id. So an event of the next
    window, other content, and an event that was not claimed (a rule without key, shadow mode)
    must have another id.
    """
    key = delivery.sent_as or delivery.key
    if delivery.generation:
        return fifo_id(key + delivery.generation)
    if key and delivery.unprotected:
        return hashlib.sha256(key + delivery.event.raw).hexdigest()
    return dice.tokens(1)[0].hex()


def checked_group(group: str | None, what: str, *, is_fifo: bool) -> str:
    """Return the message group, empty if there is none; raise `ConfigError` if it is not valid."""
    if group is None:
        return ""
    if not is_fifo:
        raise ConfigError("group", f"is for FIFO {what} only (their names end in .fifo)")
    if not _GROUP.fullmatch(group):
        raise ConfigError("group", "must have 1 to 128 characters: letters, digits, punctuation")
    return group
