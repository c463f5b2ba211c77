"""
Send entries in as few calls as their number and size allow.

The calls of one batch are made at the same time, or one after the other if order matters. If AWS
refuses a whole call for its content, the entries are sent in two halves, until the bad entry is
alone; the others are not affected. An entry that may have been accepted is not sent again.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Generic, TypeVar

from msgspec import Struct

from oncebridge.aws.client import AwsError, NotSent, Unclear
from oncebridge.errors import ConfigError
from oncebridge.sinks.api import Closed, Never, SinkAnswer, Unknown
from oncebridge.sinks.aws.answers import answer_to

T = TypeVar("T")


class Entry(Struct, Generic[T], frozen=True):
    """The content sent for one event, and how many bytes of a call it takes."""

    content: T
    size: int


class CallLimits(Struct, frozen=True):
    """How many entries and bytes fit into a call."""

    entries: int
    bytes: int
    each: int
    """How many bytes one entry may have."""


Send = Callable[[Sequence[T]], Awaitable[Sequence[SinkAnswer]]]
"""Make one call and return an answer for each entry; raise if the whole call fails."""


async def send_all(
    entries: Sequence[Entry[T] | Never],
    limits: CallLimits,
    send: Send[T],
    *,
    in_order: bool = False,
) -> list[SinkAnswer]:
    """Send all *entries* that can be sent; return an answer for each, in order."""
    answers: list[SinkAnswer] = [_unsent(entry, limits) for entry in entries]
    fitting = [
        (at, entry)
        for at, entry in enumerate(entries)
        if isinstance(entry, Entry) and entry.size <= limits.each
    ]
    parts = list(_parts([entry for _, entry in fitting], limits))
    given = await _send_parts(
        [[entry.content for entry in part] for part in parts], send, in_order=in_order
    )
    for (at, _), answer in zip(fitting, given, strict=True):
        answers[at] = answer
    return answers


def _unsent(entry: Entry[T] | Never, limits: CallLimits) -> Never:
    if isinstance(entry, Never):
        return entry
    return Never(f"too large: {entry.size} bytes; at most {limits.each} are accepted")


def _parts(entries: Sequence[Entry[T]], limits: CallLimits) -> Iterator[list[Entry[T]]]:
    part: list[Entry[T]] = []
    size = 0
    for entry in entries:
        if part and (len(part) == limits.entries or size + entry.size > limits.bytes):
            yield part
            part, size = [], 0
        part.append(entry)
        size += entry.size
    if part:
        yield part


async def _send_parts(
    parts: Sequence[Sequence[T]], send: Send[T], *, in_order: bool
) -> list[SinkAnswer]:
    if len(parts) == 1:
        return await _send_part(parts[0], send, in_order=in_order)
    if in_order:
        answered = [await _send_part(part, send, in_order=in_order) for part in parts]
    else:
        answered = await asyncio.gather(
            *[_send_part(part, send, in_order=in_order) for part in parts]
        )
    return [answer for answers in answered for answer in answers]


async def _send_part(part: Sequence[T], send: Send[T], *, in_order: bool) -> list[SinkAnswer]:
    answer: SinkAnswer
    try:
        answers = await send(part)
    except (AwsError, NotSent, Unclear) as error:
        answer = answer_to(error)
        if isinstance(answer, Never) and len(part) > 1:
            middle = len(part) // 2
            return await _send_parts([part[:middle], part[middle:]], send, in_order=in_order)
    except ConfigError as error:  # the credentials are gone
        answer = Closed(str(error))
    else:
        if len(answers) == len(part):
            return list(answers)
        answer = Unknown(f"AWS returned {len(answers)} answers for {len(part)} entries")
    return [answer] * len(part)
