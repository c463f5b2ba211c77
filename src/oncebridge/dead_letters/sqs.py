"""
Dead letters in an SQS queue: the event is the body, the reason is in message attributes.

A dead letter is in the queue before its event is acknowledged. If SQS gives no clear answer it is
sent again, so it may be in the queue twice, with the same number. If a batch fails, some of its
dead letters may be in the queue; all its events arrive again.

**Side effects of listing:** a queue can only be read by receiving messages. `list` receives every
dead letter, which increases its receive count and hides it from other readers for up to half a
minute, or until `aclose`. So the queue must have no redrive policy and no other consumer. SQS
removes dead letters at the end of its retention, after 14 days at most.
**Other messages:** messages that SQS itself or an EventBridge rule has moved into the same queue
are listed too, with the reason `foreign`.

The body is the event as text. An event that is not text, or has characters that SQS refuses, is
encoded as base64. One that would be too large is compressed with gzip. The attribute
`oncebridge-encoding` has the encoding.
"""

import asyncio
import base64
import binascii
import gzip
import hashlib
import logging
import zlib
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import ClassVar, Final, Self, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from oncebridge.aws.client import AwsError, NotSent, Unclear
from oncebridge.aws.options import AwsOptions
from oncebridge.aws.queue import (
    MOST_BYTES,
    MOST_ENTRIES,
    Message,
    Outgoing,
    QueueAddress,
    SqsQueue,
    TextAttribute,
    advice,
    refused_character,
    size_of,
    tens,
)
from oncebridge.base.clock import Clock, Dice, SystemDice, system_clock
from oncebridge.base.durations import format_duration
from oncebridge.dead_letters.api import DeadLetter
from oncebridge.errors import (
    ConfigError,
    DeadLetterError,
    DeadLetterRefused,
    StoreError,
    StoreUnavailable,
)
from oncebridge.sinks.api import Closed, Never, SinkAnswer, Yes
from oncebridge.sinks.aws.batches import CallLimits, Entry, send_all
from oncebridge.sinks.sqs import answer_to_failure

_T = TypeVar("_T")
_log = logging.getLogger("oncebridge")

_LIMITS: Final = CallLimits(MOST_ENTRIES, MOST_BYTES, MOST_BYTES)
_PAUSES_S: Final = (0.1, 0.4, 1.6)
_MOST_MESSAGE: Final = 2000
_MOST_UNPACKED: Final = 64 * 1024 * 1024

_READERS: Final = 4
_WAIT_S: Final = 1
_HIDDEN_S: Final = 30
_FRESH_S: Final = 10.0
_LEAVE_S: Final = 5.0
_MOST_SEEN: Final = 10_000
_MOST_SEEN_BYTES: Final = 256 * 1024 * 1024

_FIRST_MS: Final = 1_577_836_800_000  # 2020: numbers stay below 2**53, which all JSON readers take
_LOW_BITS: Final = 13
_LONGEST: Final = timedelta(days=14)

_PREFIX: Final = "oncebridge-"
_EMPTY: Final = "(empty)"
_FOREIGN: Final = "not written by oncebridge; SQS or EventBridge has moved it here"


class SqsDeadLettersOptions(AwsOptions, frozen=True, kw_only=True):
    """Options of dead letters in an SQS queue."""


class _SeenLetter(Struct, gc=False):
    """A dead letter as it was last received."""

    letter: DeadLetter
    handle: str
    at: float


class SqsDeadLetters:
    """Keep dead letters in the standard queue at *address*."""

    Options: ClassVar[type[SqsDeadLettersOptions]] = SqsDeadLettersOptions

    def __init__(
        self,
        address: QueueAddress,
        options: SqsDeadLettersOptions | None = None,
        *,
        clock: Clock = system_clock,
        dice: Dice | None = None,
    ) -> None:
        if address.is_fifo:
            raise ConfigError("", "dead letters need a standard queue; this is a FIFO queue")
        self._queue = SqsQueue(address, options or SqsDeadLettersOptions(), polls=_READERS)
        self._clock = clock
        self._dice = dice or SystemDice()
        self._last = 0
        self._seen: dict[int, dict[str, _SeenLetter]] = {}
        """By number and id of the message: a dead letter may be in the queue twice."""
        self._seen_bytes = 0
        self._refreshed_at: float | None = None
        self._refreshing = asyncio.Lock()

    @classmethod
    def from_url(cls, url: str, options: SqsDeadLettersOptions | None = None) -> Self:
        """Use the queue of `sqs://NAME`, `sqs:URL` or `sqs:ARN`."""
        return cls(QueueAddress.parse(url), options)

    async def open(self) -> None:
        """Find the queue and check its settings; a queue that is unavailable is only logged."""
        try:
            await self._queue.open()
            settings = await self._queue.settings()
        except (AwsError, NotSent, Unclear) as error:
            if isinstance(error, AwsError) and error.is_missing:
                raise ConfigError("", advice(error, "SendMessage", self._queue.name)) from None
            level = logging.INFO if _is_denied(error) else logging.WARNING
            extra = {"queue": self._queue.name, "error": str(error)}
            _log.log(level, "oncebridge.dead_letters_not_checked", extra=extra)
            return
        if settings.max_receives is not None:
            extra = {"queue": self._queue.name, "do": "remove its redrive policy"}
            _log.warning("oncebridge.dead_letters_move_on", extra=extra)
        if settings.retention < _LONGEST:
            after = format_duration(settings.retention)
            extra = {"queue": self._queue.name, "after": after, "do": "set its retention to 14d"}
            _log.warning("oncebridge.dead_letters_end_early", extra=extra)

    # --- putting -------------------------------------------------------------------------

    async def put(self, letters: Sequence[DeadLetter]) -> None:
        left = [self._entry(str(at), letter) for at, letter in enumerate(letters)]
        self._refreshed_at = None
        for pause_s in (*_PAUSES_S, None):
            answers = await send_all(left, _LIMITS, self._send)
            left = [
                entry
                for entry, answer in zip(left, answers, strict=True)
                if not isinstance(answer, Yes)
            ]
            if not left:
                return
            failed = [answer for answer in answers if not isinstance(answer, Yes)]
            final = [answer for answer in failed if isinstance(answer, Never | Closed)]
            if final or pause_s is None:
                reason = (final or failed)[0].reason
                raise DeadLetterError(f"the queue {self._queue.name}: {reason}")
            await asyncio.sleep(pause_s)

    async def _send(self, messages: Sequence[Outgoing]) -> Sequence[SinkAnswer]:
        return [answer_to_failure(failure) for failure in await self._queue.send(messages)]

    def _entry(self, name: str, letter: DeadLetter) -> Entry[Outgoing]:
        fields = {
            "number": str(self._next_number()),
            "reason": letter.reason,
            "message": _text(letter.message),
            "route": letter.route,
            "rule": letter.rule,
            "key": letter.key.hex(),
            "attempts": str(letter.attempts),
            "maybe-delivered": "true" if letter.maybe_delivered else "",
            "buried-ms": str(letter.buried_ms),
        }
        raw = letter.raw
        while True:
            entry, size = _fitting(name, raw, fields)
            if entry is not None:
                return entry
            if letter.is_keyed:
                raise DeadLetterRefused(
                    f"the queue {self._queue.name} takes {MOST_BYTES} bytes; the dead letter has "
                    f"{size}, even when compressed"
                )
            # It is not an event and cannot be replayed; its beginning shows what it was.
            raw = raw[: len(raw) // 2]
            cut = f"only its first {len(raw)} bytes are kept: {letter.message}"
            fields["message"] = _text(cut)

    def _next_number(self) -> int:
        """Return a number made of the time and a random part, as other workers do the same."""
        low = int(self._dice.fraction() * (1 << _LOW_BITS))
        number = (max(self._clock() - _FIRST_MS, 0) << _LOW_BITS) + low + 1
        self._last = max(number, self._last + 1)
        return self._last

    # --- listing -------------------------------------------------------------------------

    async def list(self, *, after: int = 0, limit: int = 100) -> list[DeadLetter]:
        await self._refresh()
        numbers = sorted([number for number in self._seen if number > after])[:limit]
        return [self._shown(number) for number in numbers]

    def _copies(self) -> Iterator[_SeenLetter]:
        return (seen for copies in self._seen.values() for seen in copies.values())

    def _shown(self, number: int) -> DeadLetter:
        return next(iter(self._seen[number].values())).letter

    async def _refresh(self) -> None:
        """Receive all messages, unless that was done just now."""
        now = asyncio.get_running_loop().time()
        async with self._refreshing:
            if self._refreshed_at is not None and now - self._refreshed_at < _FRESH_S:
                return
            self._forget_before(now - _HIDDEN_S)
            self._seen_bytes = sum([len(seen.letter.raw) for seen in self._copies()])
            reading = [
                _answered(self._receive_all(), "ReceiveMessage", self._queue.name)
                for _ in range(_READERS)
            ]
            for error in await asyncio.gather(*reading, return_exceptions=True):
                if error is not None:
                    raise error
            self._refreshed_at = now

    def _forget_before(self, at: float) -> None:
        """Forget messages that are visible again: they are received again, if they still exist."""
        for number, copies in list(self._seen.items()):
            kept = {name: seen for name, seen in copies.items() if seen.at >= at}
            self._seen[number] = kept
            if not kept:
                del self._seen[number]

    async def _receive_all(self) -> None:
        is_new = True
        while is_new:
            if self._is_full():
                extra = {"queue": self._queue.name, "seen": len(self._seen)}
                _log.warning("oncebridge.dead_letters_not_all_seen", extra=extra)
                return
            messages = await self._queue.receive(
                wait_s=_WAIT_S,
                visibility_s=_HIDDEN_S,
                system=("SentTimestamp",),
                attributes=("All",),
            )
            is_new = any([self._note(message) for message in messages])  # noqa: C419 - all of them

    def _is_full(self) -> bool:
        return len(self._seen) >= _MOST_SEEN or self._seen_bytes >= _MOST_SEEN_BYTES

    def _note(self, message: Message) -> bool:
        """Remember a dead letter; return True if it is new."""
        letter = _read(message)
        copies = self._seen.setdefault(letter.number, {})
        is_new = message.message_id not in copies
        self._seen_bytes += len(letter.raw) if is_new else 0
        at = asyncio.get_running_loop().time()
        copies[message.message_id] = _SeenLetter(letter, message.receipt_handle, at)
        return is_new

    # --- dropping ------------------------------------------------------------------------

    async def drop(self, numbers: Sequence[int]) -> int:
        wanted = list(dict.fromkeys(numbers))
        if not self._seen.keys() >= set(wanted):
            await self._refresh()
        doomed = [
            (number, name, seen.handle)
            for number in wanted
            if number in self._seen
            for name, seen in self._seen[number].items()
            # Two dead letters with the same number are listed one after the other.
            if seen.letter == self._shown(number)
        ]
        dropped: set[int] = set()
        for ten in tens(doomed):
            deleting = self._queue.delete([handle for *_, handle in ten])
            answers = await _answered(deleting, "DeleteMessage", self._queue.name)
            for (number, name, _), failure in zip(ten, answers, strict=True):
                if failure is None:
                    dropped.add(number)
                    del self._seen[number][name]
        for number in dropped:
            if not self._seen[number]:
                del self._seen[number]
        return len(dropped)

    async def aclose(self) -> None:
        """Make the messages that were received visible to other readers again."""
        handles = [seen.handle for seen in self._copies()]
        self._seen = {}
        self._refreshed_at = None
        releasing = [
            self._queue.change_visibility([(handle, 0) for handle in ten]) for ten in tens(handles)
        ]
        with suppress(TimeoutError):
            async with asyncio.timeout(_LEAVE_S):
                await asyncio.gather(*releasing, return_exceptions=True)
        await self._queue.aclose()


# --- a dead letter as a message ------------------------------------------------------------


def _text(message: str) -> str:
    return message.encode(errors="replace").decode()[:_MOST_MESSAGE]


def _fitting(
    name: str, raw: bytes, fields: Mapping[str, str]
) -> tuple[Entry[Outgoing] | None, int]:
    """Return the message for a dead letter, None if it is too large; and its size."""
    size = 0
    for encoding, body in _bodies(raw):
        attributes = {
            _PREFIX + word: TextAttribute.of(value)
            for word, value in {**fields, "encoding": encoding}.items()
            if value
        }
        size = size_of(body.encode(), attributes)
        if size <= MOST_BYTES:
            return Entry(Outgoing(name, body, attributes), size), size
    return None, size


def _bodies(raw: bytes) -> Iterator[tuple[str, str]]:
    """Yield encodings of an event that SQS accepts, the simplest first: name and text."""
    if not raw:
        yield "empty", _EMPTY
        return
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        text = "\0"
    if not refused_character(text):
        yield "", text
    else:
        yield "base64", base64.b64encode(raw).decode()
    yield "gzip", base64.b64encode(gzip.compress(raw, mtime=0)).decode()


def _raw(body: str, encoding: str) -> bytes:
    try:
        match encoding:
            case "empty":
                return b""
            case "base64":
                return base64.b64decode(body, validate=True)
            case "gzip":
                packed = base64.b64decode(body, validate=True)
                return zlib.decompressobj(wbits=31).decompress(packed, _MOST_UNPACKED)
    except (binascii.Error, zlib.error):
        pass  # not written by oncebridge, or changed since
    return body.encode()


def _read(message: Message) -> DeadLetter:
    fields = {
        name.removeprefix(_PREFIX): one.string_value
        for name, one in message.message_attributes.items()
        if name.startswith(_PREFIX)
    }
    sent_ms = _number(message.attributes.get("SentTimestamp", ""))
    letter = DeadLetter(
        _raw(message.body, fields.get("encoding", "")),
        fields.get("reason", "foreign"),
        fields.get("message", ""),
        fields.get("route", ""),
        fields.get("rule", ""),
        _key(fields.get("key", "")),
        _number(fields.get("attempts", "")),
        "maybe-delivered" in fields,
        _number(fields.get("buried-ms", "")) or sent_ms,
        _number(fields.get("number", "")),
    )
    if letter.number:
        return letter
    # A number that every reader computes in the same way.
    digest = hashlib.sha256(message.message_id.encode()).digest()
    low = int.from_bytes(digest[:2]) >> (16 - _LOW_BITS)
    number = (max(sent_ms - _FIRST_MS, 0) << _LOW_BITS) + low + 1
    return replace(letter, number=number, message=letter.message or _FOREIGN)


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 17 else 0


def _key(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        return b""


# --- calls -----------------------------------------------------------------------------------


def _is_denied(error: Exception) -> bool:
    return isinstance(error, AwsError) and error.is_denied


async def _answered(call: Awaitable[_T], action: str, queue: str) -> _T:
    """Make a call for an operator; raise `StoreError` that says what to do."""
    try:
        return await call
    except AwsError as error:
        kind = StoreUnavailable if error.retryable else StoreError
        raise kind(advice(error, action, queue)) from None
    except (NotSent, Unclear) as error:
        raise StoreUnavailable(f"the queue {queue}: {error}") from None
