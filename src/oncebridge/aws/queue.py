"""
A queue of Amazon SQS, named by its name, its URL or its ARN.

Its URL is found out once, and stands in the body of every call. Calls go to the endpoint of the
AWS configuration, never to the host of that URL.

A call takes ten entries at most, and one that succeeds may still have failed for some of them:
each entry has an answer of its own. Nothing is sent twice here; a call ends as
`oncebridge.aws.client` says, in `AwsError`, `NotSent` or `Unclear` where it has no answer.
"""

import re
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final, Self, TypeVar
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from oncebridge.aws.addresses import name_and_region
from oncebridge.aws.client import AwsClient, AwsError, NotSent, SampleCall, Unclear
from oncebridge.aws.options import AwsOptions
from oncebridge.errors import ConfigError

_T = TypeVar("_T")

MOST_ENTRIES: Final = 10
MOST_BYTES: Final = 1_048_576
"""Of a message, and of all messages of a call together; attributes count."""
NO_ANSWER = (AwsError, NotSent, Unclear)
"""How a call can fail as a whole."""

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
"""What a message cannot hold."""


class QueueAddress(Struct, frozen=True):
    """Which queue is meant."""

    name: str
    url: str = ""
    """Empty where it has to be asked for."""
    account: str = ""
    region: str | None = None

    @property
    def is_fifo(self) -> bool:
        return self.name.endswith(".fifo")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `sqs://NAME`, `sqs://NAME?region=REGION`, `sqs:https://…/ACCOUNT/NAME` or `sqs:ARN`."""
        found = cls._parse(text.removeprefix("sqs:")) if text.startswith("sqs:") else None
        if found is None or not _NAME.fullmatch(found.name):
            raise ConfigError(
                "",
                f"{text!r}: a queue is sqs://NAME, sqs: and its URL "
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
    """An attribute of a message; others than texts are read as empty."""

    data_type: str
    string_value: str = ""

    @classmethod
    def of(cls, text: str) -> Self:
        """Write a text, which must not be empty; a character that SQS refuses is replaced."""
        return cls("String", _REFUSED.sub("\ufffd", text))


class Message(Struct, frozen=True, gc=False, rename="pascal"):
    """A message that was received."""

    message_id: str
    receipt_handle: str
    body: str = ""
    attributes: dict[str, str] = {}
    """What SQS says of it, where asked."""
    message_attributes: dict[str, TextAttribute] = {}
    """What the sender says of it, where asked."""


class Outgoing(Struct, frozen=True, gc=False, rename="pascal", omit_defaults=True):
    """A message to send; *id* tells it from the others of a call."""

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
    def passes(self) -> bool:
        """True if the same entry may succeed later."""
        return not self.sender_fault or AwsError(400, self.code, "").retryable


class QueueSettings(Struct, frozen=True):
    """What is set at the queue."""

    retention: timedelta
    max_receives: int | None
    """After so many, SQS moves a message to its own dead-letter queue; None: never."""
    max_bytes: int
    """How large a message may be."""


class _MessageHandle(Struct, frozen=True, gc=False, rename="pascal", omit_defaults=True):
    """An entry about a message that was received."""

    id: str
    receipt_handle: str
    visibility_timeout: int | None = None


class _UrlReply(Struct, rename="pascal"):
    queue_url: str


class _ReceiveReply(Struct, rename="pascal"):
    messages: list[Message] | None = None
    """None or absent where there are none."""


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
_located = msgspec.json.Decoder(_UrlReply).decode
_received = msgspec.json.Decoder(_ReceiveReply).decode
_batched = msgspec.json.Decoder(_BatchReply).decode
_described = msgspec.json.Decoder(_AttributesReply).decode


class SqsQueue:
    """
    The queue at *address*.

    *polls* is how many receives may wait at once; other calls never wait behind them.
    """

    def __init__(self, address: QueueAddress, options: AwsOptions, *, polls: int = 1) -> None:
        if address.region is not None and options.region not in (None, address.region):
            raise ConfigError("region", f"the address of the queue says {address.region}")
        self.name = address.name
        self.is_fifo = address.is_fifo
        self._address = address
        self._url = address.url
        self._timeout = options.timeout
        self._client = AwsClient(
            SampleCall("sqs", "get_queue_url", {"QueueName": address.name}),
            region=address.region or options.region,
            endpoint=options.endpoint,
            profile=options.profile,
            timeout=options.timeout,
            connect_timeout=options.connect_timeout,
            connections=_CONNECTIONS + polls,
        )

    async def open(self) -> None:
        """
        Find the queue; safe to repeat, and done by the first call otherwise.

        What a human must put right raises `ConfigError`.
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
        """Close all connections; safe to repeat."""
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
        Take up to *most* messages, waiting *wait_s* for the first one.

        *system* and *attributes* name what to tell of them, by SQS and by their sender.
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
        return (await self._call("ReceiveMessage", _received, asked, within)).messages or []

    async def delete(self, handles: Sequence[str]) -> list[Failure | None]:
        """Delete up to ten messages; None for each that is gone."""
        entries = [_MessageHandle(str(at), handle) for at, handle in enumerate(handles)]
        return await self._batch("DeleteMessageBatch", entries)

    async def change_visibility(self, changes: Sequence[tuple[str, int]]) -> list[Failure | None]:
        """Hide up to ten messages for so many seconds from now on; None for each that is."""
        entries = [_MessageHandle(str(at), *change) for at, change in enumerate(changes)]
        return await self._batch("ChangeMessageVisibilityBatch", entries)

    async def send(self, messages: Sequence[Outgoing]) -> list[Failure | None]:
        """Send up to ten messages of `MOST_BYTES` together; None for each that was taken."""
        return await self._batch("SendMessageBatch", messages)

    async def settings(self) -> QueueSettings:
        """Read what is set at the queue."""
        asked = {"AttributeNames": ["All"]}
        found = (await self._call("GetQueueAttributes", _described, asked)).attributes or {}
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
        self._url = _read(_located, answer).queue_url

    async def _batch(
        self, operation: str, entries: Sequence[_MessageHandle | Outgoing]
    ) -> list[Failure | None]:
        answer = await self._call(operation, _batched, {"Entries": entries})
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
    """Say what to do where SQS said no to *action*, for good."""
    if error.is_missing:
        return (
            f"there is no SQS queue {queue} in this Region and account; create it, or name it by "
            "its ARN"
        )
    if error.is_denied:
        return f"AWS denies sqs:{action} on the queue {queue}; allow it: {error.message or error}"
    return f"SQS refuses {action} on the queue {queue}: {error}"


def refused_character(text: str) -> str:
    """Name the first character of *text* that a message cannot hold; empty if there is none."""
    found = _REFUSED.search(text)
    return f"U+{ord(found[0]):04X}" if found else ""


def size_of(body: bytes, attributes: dict[str, TextAttribute]) -> int:
    """Count what a message takes of `MOST_BYTES`."""
    return len(body) + sum(
        [
            len(name) + len(one.data_type) + len(one.string_value.encode())
            for name, one in attributes.items()
        ]
    )


def _max_receives(policy: str) -> int | None:
    try:
        return int(msgspec.json.decode(policy, type=_Redrive).max_receive_count) or None
    except (msgspec.MsgspecError, ValueError):
        return None


def _read(decode: Callable[[bytes], _T], body: bytes) -> _T:
    try:
        return decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise Unclear("the answer of SQS cannot be read") from None
