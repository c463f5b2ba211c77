"""What queues and topics share that keep groups in order and deduplicate by themselves."""

import hashlib
import re
from typing import Final

from oncebridge.base.clock import Dice
from oncebridge.errors import ConfigError
from oncebridge.sinks.api import Delivery

_MOST_ID: Final = 128
_GROUP = re.compile(r"[!-~]{1,128}")


def fifo_id(name: bytes) -> str:
    """Write *name* so that it is no longer than an id may be."""
    text = name.hex()
    return text if len(text) <= _MOST_ID else hashlib.sha256(name).hexdigest()


def deduplication_id(delivery: Delivery, dice: Dice) -> str:
    """
    Return the id by which the receiver knows a repeat of this very delivery, and nothing else.

    For five minutes the receiver drops whatever has the same id: the next window's event, other
    content, and what was not claimed (a rule without key, shadow mode) must have another.
    """
    key = delivery.sent_as or delivery.key
    if delivery.generation:
        return fifo_id(key + delivery.generation)
    if key and delivery.unprotected:
        return hashlib.sha256(key + delivery.event.raw).hexdigest()
    return dice.tokens(1)[0].hex()


def checked_group(group: str | None, what: str, *, is_fifo: bool) -> str:
    """Check the group that all messages are to be in; empty: none."""
    if group is None:
        return ""
    if not is_fifo:
        raise ConfigError("group", f"is for FIFO {what}, whose names end in .fifo")
    if not _GROUP.fullmatch(group):
        raise ConfigError("group", "must have 1 to 128 characters: letters, digits, punctuation")
    return group
