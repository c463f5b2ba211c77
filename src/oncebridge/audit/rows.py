"""
Write a row for each arrival, with the columns that the report needs.

Rows are lines of text in a temporary file, because DuckDB loads that fastest without more
libraries. They contain ids, topics, entities and hashes, and nothing else of an event. Texts with
few values (source, account, topic, rule) are written once, and rows have their number.

The columns (see `COLUMNS`) are those of the report's queries, so that no record is read twice.
Hashes of 64 bits are Python's own, which are equal within one run only; they are used for counts.
Whether two events are the same is decided by 128 bits of their key.
"""

import re
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal

import msgspec
from msgspec import Struct

from oncebridge.audit.order import arrival_times
from oncebridge.audit.reading import Block, RecordBatch, content_of
from oncebridge.audit.unpacking import Unpacker
from oncebridge.events.event import Event, Limits, Unreadable
from oncebridge.events.key import ContentKey, Part
from oncebridge.events.rules import Plan, Rule, RuleSet, Span, Version
from oncebridge.events.summary import (
    body_of,
    conversation_of,
    entity_finder,
    happened_ms,
    published_ms,
    state_of,
)
from oncebridge.genesys.preset import genesys_rules

COLUMNS: Final = {
    "running": "BIGINT",  # the latest time in the chunk so far
    "chunk": "INTEGER",
    "idx": "INTEGER",  # within the chunk
    "line": "INTEGER",  # counted from the chunk's first line
    "recorded": "BIGINT",  # when it arrived, where the recording says so
    "kind": "INTEGER",
    "key": "UUID",
    "content": "UUID",  # the fingerprint, where the rule compares it
    "plan": "VARCHAR",  # for what has more than one key, see `ComplexPlan`
    "id": "UUID",
    "entity": "UUID",
    "conversation": "UUID",
    "detail": "BIGINT",  # a hash of the whole detail
    "said": "BIGINT",  # a hash of what counts in it, where the rule does not compare it
    "state": "BIGINT",  # a hash of its body, without the times in it
    "happened": "BIGINT",  # the event's own time; -1: there is no time in it at all
}
CANDIDATE_COLUMNS: Final = {"key2": "UUID", "content2": "UUID", "plan2": "VARCHAR"}
KIND_COLUMNS: Final = {
    "kind": "INTEGER",
    "source": "VARCHAR",
    "account": "VARCHAR",
    "region": "VARCHAR",
    "topic": "VARCHAR",
    "replay": "VARCHAR",
    "rule": "INTEGER",
    "action": "VARCHAR",
    "rule2": "INTEGER",
    "action2": "VARCHAR",
}
NAME_COLUMNS: Final = {"name": "UUID", "text": "VARCHAR"}
LINK_COLUMNS: Final = {"one": "UUID", "other": "UUID"}

_MOST_KINDS: Final = 20_000
_MOST_NAMES: Final = 50_000
_MOST_TEXT: Final = 8 << 20
"""Limit on the characters of names, and of kinds, in memory."""
_MOST_PLACES: Final = 20
_MOST_CONTENTS: Final = 500
_LONGEST: Final = 300  # the source of a partner may have 256
_UUID: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class Job(Struct, frozen=True):
    """The settings that all workers of one audit share."""

    folder: Path
    rules: RuleSet
    candidate: RuleSet | None
    limits: Limits
    bare: bool
    latest_ms: int
    """Later times are treated as wrong."""


class ChunkSummary(Struct, array_like=True):
    """A worker's summary of one chunk."""

    chunk: int
    lines: int = 0
    """Lines of the file in it; 0 if rows have lines of the file."""
    records: int = 0
    events: int = 0
    recorded: int = 0
    """How many arrivals have a time that was recorded."""
    earliest_recorded_ms: int | None = None
    latest_recorded_ms: int | None = None
    first_ms: int | None = None
    """The first time, and all three below: see `oncebridge.audit.order`."""
    latest_ms: int | None = None
    """The latest confirmed time, for the chunks after it."""
    end_ms: int | None = None
    """The latest."""
    unreadable: dict[str, int] = {}
    places: list[int] = []
    """Lines of the first records without an event."""


class _Part(Part, frozen=True, array_like=True, gc=False):
    """A part as a row has it: without the names of its fields."""


class _Span(Span, frozen=True, array_like=True, gc=False):
    """A span as a row has it."""


class ComplexPlan(Struct, frozen=True, array_like=True):
    """A plan with several keys, or an entity's register, as a row has it."""

    parts: tuple[_Part, ...]
    spans: tuple[_Span, ...]
    entity: bytes
    version: tuple[Literal["number", "instant"], str] | None
    """As text: an integer may have any number of digits."""
    state: bytes

    @classmethod
    def of(cls, plan: Plan) -> "ComplexPlan":
        return cls(
            tuple([_Part(short(part.key), part.hash, part.slide_ms) for part in plan.parts]),
            tuple([_Span(span.window_ms, span.hard_ms) for span in plan.spans]),
            short(plan.entity),
            None if plan.version is None else (plan.version[0], repr(plan.version[1])),
            blake2b(plan.state, digest_size=16).digest() if plan.state else b"",
        )

    def plan(self, rule: Rule) -> Plan:
        """Return the plan, under its *rule*."""
        version: Version | None = None
        if self.version is not None:
            kind, text = self.version
            number = int(text) if text.lstrip("-").isdecimal() else float(text)
            version = kind, number
        return Plan(rule, "deduplicate", self.parts, self.spans, self.entity, version, self.state)

    def write(self) -> str:
        return _pack(self).hex()

    @classmethod
    def read(cls, text: str) -> "ComplexPlan":
        return _unpack(bytes.fromhex(text))


_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(ComplexPlan).decode
_encode = msgspec.json.Encoder().encode


def short(key: bytes) -> bytes:
    """Return 128 bits of a key: enough, and DuckDB has a type for them."""
    return key[1:17]


class RowWriter:
    """
    Writes the rows of chunks, as one of several *workers*.

    Its files are named by their content and its number.
    """

    def __init__(self, job: Job, worker: int, workers: int) -> None:
        self._job = job
        self._unpacker = Unpacker(job.limits, bare=job.bare, apart=job.rules.apart)
        self._kinds = _Kinds(job, worker, workers)
        self._names = _Names(job.folder / f"names-{worker}")
        self._entities = [entity_finder(rule) for rule in (*job.rules.rules, None)]
        self._rows = (job.folder / f"rows-{worker}").open("wb", buffering=0)
        self._links = (job.folder / f"links-{worker}").open("wb")
        self._links2 = (job.folder / f"links2-{worker}").open("wb")
        self._lines: list[str] = []
        self._summary = ChunkSummary(0)
        self._times: list[int | None] = []
        self._contents = [_Content.of(rule) for rule in (*job.rules.rules, None)]
        self.samples = Samples()

    def write(self, chunk: int, work: Block | RecordBatch) -> ChunkSummary:
        """Write the rows of one chunk."""
        self._summary = ChunkSummary(chunk, unreadable={}, places=[])
        content = content_of(work)
        self._summary.lines = content.lines
        self._summary.records = len(content.records)
        for line, raw in content.records:
            if raw is None:
                self._refuse(line, "too-large")
            else:
                self._take(raw, line)
        self._write_rows()
        return self._summary

    def _write_rows(self) -> None:
        """Write the rows of the chunk: arrival times are known once all of it is read."""
        order, summary = arrival_times(self._times), self._summary
        rows = zip(order.latest, self._lines, strict=True)
        text = "".join([f"{'' if at is None else at}\t{line}" for at, line in rows])
        self._rows.write(text.encode())
        self._lines.clear()
        self._times.clear()
        summary.first_ms, summary.latest_ms = order.first_ms, order.sure_ms
        summary.end_ms = order.end_ms

    def close(self) -> None:
        """Finish all files."""
        for file in (self._rows, self._links, self._links2):
            file.close()
        self._kinds.close()
        self._names.close()

    # --- records ----------------------------------------------------------------------------

    def _take(self, raw: bytes, line: int) -> None:
        """Write a row for each event in *raw*, or count why there is none."""
        if raw[:1] == b"{":
            event = self._unpacker.read(raw)
            if type(event) is Event and not event.bare:
                self._add(event, line, None)
                return
        for opened, at_ms in self._unpacker.unpack(raw):
            if isinstance(opened, Unreadable):
                self._refuse(line, opened.reason)
            else:
                self._add(opened, line, at_ms)

    def _refuse(self, line: int, reason: str) -> None:
        counts, places = self._summary.unreadable, self._summary.places
        counts[reason] = counts.get(reason, 0) + 1
        if len(places) < _MOST_PLACES and line not in places[-1:]:
            places.append(line)

    def _add(self, event: Event, line: int, at_ms: int | None) -> None:
        """Write one row."""
        summary, job = self._summary, self._job
        if at_ms is not None and at_ms > job.latest_ms:
            at_ms = None
        if at_ms is not None:
            self._note_recorded(at_ms)
            self._times.append(at_ms)
        else:
            at = published_ms(event)
            self._times.append(at if at is not None and at <= job.latest_ms else None)
        plan = job.rules.plan(event)
        other = None if job.candidate is None else job.candidate.plan(event)
        kind, rule = self._kinds.number(event, plan, other)
        if rule == len(job.rules.rules):
            self.samples.add(event)
        detail, name = event.detail, self._names.name
        body = body_of(detail)
        entity = self._entities[rule](event, body)
        conversation = conversation_of(detail, body)
        entity_name = name(entity)
        conversation_name = entity_name if conversation == entity else name(conversation)
        recorded = "" if at_ms is None else at_ms
        content = self._contents[rule]
        said = "" if content is None else content.said(event)
        hashed = hash((event.kept, _encode([detail.get(each) for each in event.apart])))
        text = (
            f"{summary.chunk}\t{summary.events}\t{line}\t{recorded}\t{kind}\t"
            f"{self._planned(plan, self._links)}\t{name(event.id)}\t{entity_name}\t"
            f"{conversation_name}\t{hashed}\t{said}\t{state_of(body)}\t{happened_ms(event, body)}"
        )
        if other is not None:
            text += f"\t{self._planned(other, self._links2)}"
        self._lines.append(text + "\n")
        summary.events += 1

    def _note_recorded(self, at_ms: int) -> None:
        summary = self._summary
        summary.recorded += 1
        first, last = summary.earliest_recorded_ms, summary.latest_recorded_ms
        summary.earliest_recorded_ms = at_ms if first is None else min(first, at_ms)
        summary.latest_recorded_ms = at_ms if last is None else max(last, at_ms)

    def _planned(self, plan: Plan, links: BinaryIO) -> str:
        """Return the columns `key`, `content` and `plan`."""
        parts = plan.parts
        if not parts:
            return "\t\t"
        key = parts[-1].key[1:17].hex()
        if len(plan.rule.tiers) == 1 and not plan.entity:
            return f"{key}\t{parts[0].hash.hex()}\t"
        written = ComplexPlan.of(plan)
        others = [part.key for part in written.parts[:-1]]
        if written.entity:
            others.append(written.entity)
        links.writelines(f"{key}\t{other.hex()}\n".encode() for other in others)
        return f"{key}\t\t{written.write()}"


class _Content:
    """
    Hashes the content of events whose rule does not compare it.

    Fields that any key of the rule ignores do not count; nor, in an event of Genesys, those that
    the preset ignores: they change with every publication.
    """

    def __init__(self, rule: Rule) -> None:
        self._ignored = [path for tier in rule.tiers for path in rule.content_of(tier).ignore]
        self._known: dict[tuple[str, str], ContentKey] = {}

    @classmethod
    def of(cls, rule: Rule | None) -> "_Content | None":
        """Return one for *rule*; None if its keys are the content, or compare it."""
        if rule is None or all(
            tier.check or isinstance(tier.key, ContentKey) for tier in rule.tiers
        ):
            return None
        return cls(rule)

    def said(self, event: Event) -> int:
        """Return the hash of the content that counts."""
        content = self._known.get((event.source, event.detail_type))
        return hash((content or self._find(event)).body(event))

    def _find(self, event: Event) -> ContentKey:
        ignored = dict.fromkeys(self._ignored)
        preset = next((rule for rule in genesys_rules() if rule.takes(event)), None)
        if preset is not None:
            for tier in preset.tiers:
                ignored |= dict.fromkeys(preset.content_of(tier).ignore)
        content = ContentKey(list(ignored))
        if not event.bare:
            if len(self._known) >= _MOST_CONTENTS:
                self._known.clear()
            self._known[event.source, event.detail_type] = content
        return content


# --- texts ----------------------------------------------------------------------------------


class _Kinds:
    """Numbers for the combinations of source, account, topic, rule and action."""

    def __init__(self, job: Job, worker: int, workers: int) -> None:
        self._file = (job.folder / f"kinds-{worker}").open("wb")
        self._numbers: dict[Any, tuple[int, int]] = {}
        self._room = _MOST_TEXT
        self._next, self._step = worker, workers
        self._rules = {id(rule): number for number, rule in enumerate(job.rules.rules)}
        self._default = len(self._rules)
        others = job.candidate.rules if job.candidate is not None else ()
        self._rules2 = {id(rule): number for number, rule in enumerate(others)}
        self._default2 = len(self._rules2)

    def number(self, event: Event, plan: Plan, other: Plan | None) -> tuple[int, int]:
        """Return the number of the kind, and that of its rule."""
        kind: Any = (
            event.source,
            event.detail_type,
            event.account,
            event.region,
            event.replay_name,
            id(plan.rule),
            plan.action,
        )
        if other is not None:
            kind = kind, id(other.rule), other.action
        found = self._numbers.get(kind)
        return self._add(kind, event, plan, other) if found is None else found

    def _add(self, kind: Any, event: Event, plan: Plan, other: Plan | None) -> tuple[int, int]:
        texts = event.source, event.account, event.region, event.detail_type, event.replay_name
        self._room -= sum(len(text or "") for text in texts)
        if len(self._numbers) >= _MOST_KINDS or self._room < 0:
            self._numbers.clear()  # a sender can invent any number of sources
            self._room = _MOST_TEXT
        rule = self._rules.get(id(plan.rule), self._default)
        found = self._numbers[kind] = self._next, rule
        fields = [str(self._next), *(_written(text or "") for text in texts)]
        fields += [str(rule), plan.action]
        if other is not None:
            fields += [str(self._rules2.get(id(other.rule), self._default2)), other.action]
        else:
            fields += ["", ""]
        self._file.write(("\t".join(fields) + "\n").encode())
        self._next += self._step
        return found

    def close(self) -> None:
        self._file.close()


class _Names:
    """
    Names of 128 bits for ids and entities.

    A UUID is its own name, and most are UUIDs. Other texts are written to a file.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._seen: dict[str, str] = {}
        self._room = _MOST_TEXT

    def name(self, text: str | None) -> str:
        """Return the name of *text*; empty if it is empty."""
        if not text:
            return ""
        if len(text) == 36 and _UUID.fullmatch(text):
            return text
        found = self._seen.get(text)
        if found is None:
            self._room -= len(text)
            if len(self._seen) >= _MOST_NAMES or self._room < 0:
                self._seen.clear()
                self._room = _MOST_TEXT
            found = self._seen[text] = blake2b(text.encode(), digest_size=16).hexdigest()
            self._file.write(f"{found}\t{_written(text)}\n".encode())
        return found

    def close(self) -> None:
        self._file.close()


def _written(text: str) -> str:
    """Return a text without tabs and line ends, as JSON."""
    return _encode(text[:_LONGEST]).decode()


def as_read(text: str | None) -> str:
    """Return the text that `_written` wrote."""
    return "" if text is None else str(msgspec.json.decode(text))


# --- samples --------------------------------------------------------------------------------


class Samples:
    """
    Samples of events that no rule matches, by source and detail-type.

    Limited in number and size; in memory only, since these are whole events.
    """

    most_kinds: Final = 50
    most_of_kind: Final = 2_000
    most_bytes: Final = 16 << 20

    def __init__(self) -> None:
        self._left = self.most_bytes
        self.kinds: dict[tuple[str, str], list[bytes]] = {}

    def add(self, event: Event) -> None:
        kind = event.source, event.detail_type
        taken = self.kinds.get(kind)
        if taken is None:
            if len(self.kinds) >= self.most_kinds:
                return
            taken = self.kinds[kind] = []
        if len(taken) < self.most_of_kind and self._left > len(event.raw):
            self._left -= len(event.raw)
            taken.append(event.canonical)
