"""
A queue of Amazon SQS, addressed by its name, its URL or its ARN.

Its URL is looked up once, and sent in the body of every call. Calls go to the endpoint of the
AWS configuration, never to the host of that URL.

A call has at most ten entries, and some of them may fail although the call succeeds: each entry
has a result of its own. Nothing is sent twice here; a call that fails raises `AwsError`,
`NotSent` or `Unclear`, as `oncebridge.aws.client` describes.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Final, Self, TypeVar
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from oncebridge.aws.addresses import name_and_region
from oncebridge.aws.client import AwsClient, AwsError, SampleCall, Unclear
from oncebridge.aws.options import AwsOptions
from oncebridge.errors import ConfigError

_T = TypeVar("_T")

MOST_ENTRIES: Final = 10
MOST_BYTES: Final = 1_048_576
"""Of a message, and of all messages of a call together; attributes count."""

_CONNECTIONS: Final = 32
_NAME = re.compile(r"[A-Za-z0-9_-]{1,80}|[A-Za-z0-9_-]{1,75}\.fifo")
_ARN = re.compile(r"arn:aws[a-z-]*:sqs:(?P<region>[a-z0-9-]+):(?P<account>\d{12}):(?P<name>[^:/]+)")
_PATH = re.compile(r"/(?P<account>\d{12})/(?P<name>[^/]+)")
_HOST = re.compile(
    r"(?:[a-z0-9.-]+\.)?sqs(?:-fips)?\.(?P<region>[a-z0-9-]+)\.(?:vpce\.)?"
    r"(?:amazonaws\.com(?:\.cn)?|api\.aws)"
    r"|(?P<older>[a-z0-9-]+)\.queue\.amazonaws\.com"
)
_REFUSED = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that a message cannot contain."""


class QueueAddress(Struct, frozen=True):
    """The address of a queue."""

    name: str
    url: str = ""
    """Empty if it has to be looked up."""
    account: str = ""
    region: str | None = None

    @property
    def is_fifo(self) -> bool:
        return self.name.endswith(".fifo")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `sqs://NAME`, `sqs://NAME?region=REGION`, `sqs:https://…/ACCOUNT/NAME`, `sqs:ARN`."""
        found = cls._parse(text.removeprefix("sqs:")) if text.startswith("sqs:") else None
        if found is None or not _NAME.fullmatch(found.name):
            raise ConfigError(
                "",
                f"{text!r}: is not a queue; write sqs://NAME, sqs: and its URL "
                "(https://sqs.REGION.amazonaws.com/ACCOUNT/NAME), or sqs: and its ARN",
            )
        return found

    @classmethod
    def _parse(cls, rest: str) -> Self | None:
        if arn := _ARN.fullmatch(rest):
            return cls(arn["name"], "", arn["account"], arn["region"])
        if rest.startswith("//"):
            found = name_and_region(rest, None)
            return cls(found[0], region=found[1]) if found else None
        try:
            parts = urlsplit(rest)
        except ValueError:
            return None
        path = _PATH.fullmatch(parts.path)
        if parts.scheme not in ("http", "https") or path is None or parts.query or parts.fragment:
            return None
        host = _HOST.fullmatch(parts.hostname or "")
        region = (host["region"] or host["older"]) if host else None
        return cls(path["name"], rest, path["account"], region)


class TextAttribute(Struct, frozen=True, gc=False, rename="pascal", omit_defaults=True):
    """An attribute of a message; one that is not text is read as empty."""

    data_type: str
    string_value: str = ""

    @classmethod
    def of(cls, text: str) -> Self:
        """Write a text, which must not be empty; a character that SQS refuses is replaced."""
        return cls("String", _REFUSED.sub("\ufffd", text))


class Message(Struct, frozen=True, gc=False, rename="pascal"):
    """A received message."""

    message_id: str
    receipt_handle: str
    body: str = ""
    attributes: dict[str, str] = {}
    """The requested attributes set by SQS."""
    message_attributes: dict[str, TextAttribute] = {}
    """The requested attributes set by the sender."""


class Outgoing(Struct, frozen=True, gc=False, rename="pascal", omit_defaults=True):
    """A message to send; *id* is unique within a call."""

    id: str
    message_body: str
    message_attributes: dict[str, TextAttribute] = {}
    message_group_id: str = ""
    message_deduplication_id: str = ""


class Failure(Struct, frozen=True, gc=False, rename="pascal"):
    """Why one entry of a call failed."""

    id: str
    code: str = ""
    message: str = ""
    sender_fault: bool = False

    @property
    def is_transient(self) -> bool:
        """True if the same entry may succeed later."""
        return not self.sender_fault or AwsError(400, self.code, "").retryable


class QueueSettings(Struct, frozen=True):
    """The attributes of a queue."""

    retention: timedelta
    max_receives: int | None
    """After so many receives, SQS moves a message to its dead-letter queue; None for never."""
    max_bytes: int
    """The maximum size of a message."""


class _MessageHandle(Struct, frozen=True, gc=False, rename="pascal", omit_defaults=True):
    """An entry about a received message."""

    id: str
    receipt_handle: str
    visibility_timeout: int | None = None


class _UrlReply(Struct, rename="pascal"):
    queue_url: str


class _ReceiveReply(Struct, rename="pascal"):
    messages: list[Message] | None = None
    """None or absent if there are none."""


class _DoneEntry(Struct, gc=False, rename="pascal"):
    id: str


class _BatchReply(Struct, rename="pascal"):
    successful: list[_DoneEntry] | None = None
    failed: list[Failure] | None = None


class _AttributesReply(Struct, rename="pascal"):
    attributes: dict[str, str] | None = None


class _Redrive(Struct, rename="camel"):
    max_receive_count: int | str = 0


_encode = msgspec.json.Encoder().encode
_decode_url = msgspec.json.Decoder(_UrlReply).decode
_decode_messages = msgspec.json.Decoder(_ReceiveReply).decode
_decode_batch = msgspec.json.Decoder(_BatchReply).decode
_decode_attributes = msgspec.json.Decoder(_AttributesReply).decode


class SqsQueue:
    """
    The queue at *address*.

    *polls* is the number of concurrent receives; other calls never wait for them.
    """

    def __init__(self, address: QueueAddress, options: AwsOptions, *, polls: int = 1) -> None:
        if address.region is not None and options.region not in (None, address.region):
            raise ConfigError(
                "region",
                f"is {options.region}, but the address of the queue has {address.region}; remove "
                "one of them",
            )
        self.name = address.name
        self._address = address
        self._url = address.url
        self._timeout = options.timeout
        self._client = AwsClient(
            SampleCall("sqs", "get_queue_url", {"QueueName": address.name}),
            options,
            region=address.region,
            connections=_CONNECTIONS + polls,
        )

    async def open(self) -> None:
        """
        Look up the URL of the queue; otherwise the first call does it. May be called again.

        Raise `ConfigError` if the configuration has to be fixed.
        """
        await self._client.open()
        if not self._url:
            try:
                await self._locate()
            except AwsError as error:
                if error.retryable:
                    raise
                raise ConfigError("", advice(error, "GetQueueUrl", self.name)) from None

    async def aclose(self) -> None:
        """Close all connections; may be called again."""
        await self._client.aclose()

    async def receive(
        self,
        *,
        most: int = MOST_ENTRIES,
        wait_s: int,
        visibility_s: int,
        system: Sequence[str] = (),
        attributes: Sequence[str] = (),
    ) -> list[Message]:
        """
        Receive up to *most* messages, waiting up to *wait_s* for the first one.

        *system* and *attributes* are the requested attributes of SQS and of the sender.
        """
        asked: dict[str, Any] = {
            "MaxNumberOfMessages": most,
            "WaitTimeSeconds": wait_s,
            "VisibilityTimeout": visibility_s,
        }
        if system:
            asked["MessageSystemAttributeNames"] = system
        if attributes:
            asked["MessageAttributeNames"] = attributes
        within = self._timeout + timedelta(seconds=wait_s)
        return (await self._call("ReceiveMessage", _decode_messages, asked, within)).messages or []

    async def delete(self, handles: Sequence[str]) -> list[Failure | None]:
        """Delete up to ten messages; return None for each that was deleted."""
        entries = [_MessageHandle(str(at), handle) for at, handle in enumerate(handles)]
        return await self._batch("DeleteMessageBatch", entries)

    async def change_visibility(self, changes: Sequence[tuple[str, int]]) -> list[Failure | None]:
        """Hide up to ten messages for so many seconds from now; return None for each success."""
        entries = [_MessageHandle(str(at), *change) for at, change in enumerate(changes)]
        return await self._batch("ChangeMessageVisibilityBatch", entries)

    async def send(self, messages: Sequence[Outgoing]) -> list[Failure | None]:
        """Send up to ten messages of `MOST_BYTES` in total; return None for each that was accepted."""
        return await self._batch("SendMessageBatch", messages)

    async def settings(self) -> QueueSettings:
        """Return the attributes of the queue."""
        asked = {"AttributeNames": ["All"]}
        found = (await self._call("GetQueueAttributes", _decode_attributes, asked)).attributes or {}
        return QueueSettings(
            timedelta(seconds=int(found.get("MessageRetentionPeriod", 0))),
            _max_receives(found.get("RedrivePolicy", "")),
            int(found.get("MaximumMessageSize", MOST_BYTES)),
        )

    # --- a call --------------------------------------------------------------------------

    async def _locate(self) -> None:
        asked = {"QueueName": self.name}
        if self._address.account:
            asked["QueueOwnerAWSAccountId"] = self._address.account
        answer = await self._client.call("GetQueueUrl", _encode(asked))
        self._url = _read(_decode_url, answer).queue_url

    async def _batch(
        self, operation: str, entries: Sequence[_MessageHandle | Outgoing]
    ) -> list[Failure | None]:
        answer = await self._call(operation, _decode_batch, {"Entries": entries})
        done = {one.id for one in answer.successful or ()}
        failed = {one.id: one for one in answer.failed or ()}
        return [
            None if entry.id in done else failed.get(entry.id) or Failure(entry.id, "NoAnswer")
            for entry in entries
        ]

    async def _call(
        self,
        operation: str,
        decode: Callable[[bytes], _T],
        asked: dict[str, Any],
        within: timedelta | None = None,
    ) -> _T:
        if not self._url:
            await self._locate()
        body = _encode({"QueueUrl": self._url, **asked})
        return _read(decode, await self._client.call(operation, body, within=within))


def advice(error: AwsError, action: str, queue: str) -> str:
    """Return what to do about an error of SQS that a retry does not fix."""
    if error.is_missing:
        return (
            f"there is no SQS queue {queue} in this Region and account; create it, or use its ARN"
        )
    if error.is_denied:
        return f"AWS denies sqs:{action} on the queue {queue}; allow it: {error.message or error}"
    return f"SQS refuses {action} on the queue {queue}: {error}"


def refused_character(text: str) -> str:
    """Return the first character of *text* that a message cannot contain; empty if there is none."""
    found = _REFUSED.search(text)
    return f"U+{ord(found[0]):04X}" if found else ""


def size_of(body: bytes, attributes: dict[str, TextAttribute]) -> int:
    """Return the size of a message as it counts for `MOST_BYTES`."""
    return len(body) + sum(
        [
            len(name) + len(one.data_type) + len(one.string_value.encode())
            for name, one in attributes.items()
        ]
    )


def tens(items: Sequence[_T]) -> Iterator[list[_T]]:
    """Yield *items* in lists that one call takes."""
    for at in range(0, len(items), MOST_ENTRIES):
        yield list(items[at : at + MOST_ENTRIES])


def _max_receives(policy: str) -> int | None:
    try:
        return int(msgspec.json.decode(policy, type=_Redrive).max_receive_count) or None
    except (msgspec.MsgspecError, ValueError):
        return None


def _read(decode: Callable[[bytes], _T], body: bytes) -> _T:
    try:
        return decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise Unclear("the response of SQS cannot be read") from None
