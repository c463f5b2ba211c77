"""
`oncebridge audit`, without the command line: from recorded events to a report.

    read      cut the files into chunks, in order (`reading`)
    write     write a row for each arrival, in several processes (`workers`, `rows`)
    load      load the rows into DuckDB, in the order of arrival (`table`)
    judge     find the verdict of each arrival, as a gateway would (`verdicts`, `judge`)
    find      causes, gaps, suspicions, naive keys (`findings`, `suspicions`, `naive`)

Only temporary files are written, and they are always removed at the end.
"""

import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Final, Literal

from msgspec import Struct
from msgspec.structs import replace

from oncebridge.audit.comparison import compare
from oncebridge.audit.field_study import study_all
from oncebridge.audit.findings import Findings
from oncebridge.audit.naive import NaiveKeys
from oncebridge.audit.reading import Damage, File, Skipped, find_files, read_pieces
from oncebridge.audit.report import AuditReport, Difference
from oncebridge.audit.rows import ChunkSummary, Job
from oncebridge.audit.suspicions import SuspicionFinder
from oncebridge.audit.table import Chunk, Table, check_engine, check_folder, opened
from oncebridge.audit.verdicts import CANDIDATE, RULES, judge_all
from oncebridge.audit.workers import cpus, worker_pool
from oncebridge.base.clock import ms, steady_clock
from oncebridge.errors import ConfigError
from oncebridge.events.event import Limits
from oncebridge.events.rules import DEFAULT_WINDOW, Rule, RuleSet, Tier

Progress = Callable[[int, int], None]
"""Called with the bytes read so far, and the total."""

_QUIET: Final = timedelta(milliseconds=500)
_SMALL: Final = 8 << 20
_MOST_WORKERS: Final = 8
_DAY_MS: Final = 86_400_000
_MOST_PLACES: Final = 20
_LIMITS: Final = Limits()
_NAMESPACE: Final = "audit"


def audit(
    paths: Sequence[Path],
    rules: Sequence[Rule],
    *,
    window: timedelta = DEFAULT_WINDOW,
    candidate: Sequence[Rule] | None = None,
    candidate_window: timedelta | None = None,
    quiet: timedelta = _QUIET,
    bare: bool = False,
    limits: Limits = _LIMITS,
    workers: int | None = None,
    progress: Progress | None = None,
    differences: Callable[[Difference], None] | None = None,
    skipped: Skipped | None = None,
    most_examples: int = 5,
) -> AuditReport:
    """
    Read all events below *paths*, and return a report on their duplicates.

    Verdicts are those of *rules*; events that no rule matches are identified by their content,
    within *window*. With *candidate* rules, *differences* is called with each arrival for which
    they decide differently, in the order of arrival. *quiet* is the time within which the same
    state of an entity is suspected to be a double emission. `-` is standard input. *skipped* is
    called with the files that are named twice, and read once.

    Raise `ConfigError` if a file cannot be read, `AuditFailed` if the audit cannot be finished.
    """
    clock = steady_clock()
    begun_ms = clock()
    check_engine()
    files = find_files(paths, skipped)
    if not files:
        raise ConfigError(
            "files", "no files found; name a file, or a directory that contains files"
        )
    ours = _NumberedRules.of(rules, window)
    other = None if candidate is None else _NumberedRules.of(candidate, candidate_window or window)
    with tempfile.TemporaryDirectory(prefix="oncebridge-audit-") as name:
        check_folder(Path(name))
        job = Job(
            Path(name),
            ours.compiled,
            None if other is None else other.compiled,
            limits,
            bare,
            begun_ms + _DAY_MS,
        )
        recording = _write_rows(job, files, _how_many(workers, files), progress)
        with opened(job.folder) as table:
            table.load_arrivals(recording.chunks, candidate=other is not None)
            judge_all(table, ours.rules, RULES)
            names = [file.name for file in files]
            found = Findings(table, ours.rules, names, most_examples)
            found.name_causes()
            trial = None
            if other is not None:
                judge_all(table, other.rules, CANDIDATE)
                trial = compare(table, names, ours.rules, other.rules, differences)
            report = _report(table, found, recording, files)
            return replace(
                report,
                suspicions=SuspicionFinder(table, found, ours.rules, quiet, most_examples).all(),
                naive=NaiveKeys(table, found, most_examples).keys(),
                studies=study_all(recording.samples),
                trial=trial,
                window_ms=ms(window),
                took_s=(clock() - begun_ms) / 1000,
            )


class _NumberedRules(Struct, frozen=True):
    """A set of rules, by number and compiled; the last is the default rule."""

    rules: list[Rule]
    compiled: RuleSet

    @classmethod
    def of(cls, rules: Sequence[Rule], window: timedelta) -> "_NumberedRules":
        default = Rule(name="default", tiers=(Tier(window=window),))
        return cls([*rules, default], RuleSet(rules, namespace=_NAMESPACE, window=window))


def _how_many(workers: int | None, files: Sequence[File]) -> int:
    """Return the number of worker processes; 0 (only this process) for a small, known size."""
    if workers is not None:
        return workers
    if all(file.path is not None for file in files) and sum(f.size for f in files) < _SMALL:
        return 0
    return min(cpus(), _MOST_WORKERS)


# --- reading --------------------------------------------------------------------------------


class _Recording(Struct):
    """The result of reading all files."""

    chunks: list[Chunk]
    unreadable: dict[str, int]
    places: tuple[str, ...]
    samples: list[dict[tuple[str, str], list[bytes]]]


def _write_rows(
    job: Job, files: Sequence[File], workers: int, progress: Progress | None
) -> _Recording:
    """Read all files, and write a row for each arrival."""
    meter = _ProgressMeter(files, progress)
    origins: list[int] = []
    ends: list[int] = []
    summaries: dict[int, ChunkSummary] = {}
    damaged: list[Damage] = []

    def take(summary: ChunkSummary) -> None:
        summaries[summary.chunk] = summary
        meter.read(origins[summary.chunk], ends[summary.chunk])

    with worker_pool(job, workers) as pool:
        for item in read_pieces(files):
            if isinstance(item, Damage):
                damaged.append(item)
                continue
            origins.append(item.file)
            ends.append(item.read)
            for summary in pool.write(len(origins) - 1, item.work):
                take(summary)
        for summary in pool.finish():
            take(summary)
        samples = list(pool.samples)
    chunks = [Chunk(at, file, summaries[at]) for at, file in enumerate(origins)]
    return _Recording(chunks, *_unreadable(chunks, damaged, files), samples)


class _ProgressMeter:
    """Reports the progress of reading."""

    def __init__(self, files: Sequence[File], progress: Progress | None) -> None:
        self._sizes = [file.size for file in files]
        self._all = sum(self._sizes)
        self._progress = progress
        self._read = [0] * len(files)
        self._sum = 0

    def read(self, file: int, end: int) -> None:
        """Note that *file* is read up to *end*; progress never decreases."""
        further = min(end, self._sizes[file]) - self._read[file]
        if further > 0:
            self._read[file] += further
            self._sum += further
        if self._progress is not None:
            self._progress(self._sum, self._all)


def _unreadable(
    chunks: Sequence[Chunk], damaged: Sequence[Damage], files: Sequence[File]
) -> tuple[dict[str, int], tuple[str, ...]]:
    """Count the records without an event by reason, and return the first places."""
    counts: Counter[str] = Counter()
    places: list[tuple[int, int]] = []
    file, line = -1, 0
    for chunk in chunks:
        if chunk.file != file:
            file, line = chunk.file, 0
        counts.update(chunk.summary.unreadable)
        places += [(file, line + place) for place in chunk.summary.places]
        line += chunk.summary.lines
        if len(places) > 2 * _MOST_PLACES:
            places = places[:_MOST_PLACES]
    for damage in damaged:
        counts["bad-gzip"] += 1
        places.append((damage.file, damage.line))
    named = [f"{files[file].name}:{line + 1}" for file, line in sorted(places)[:_MOST_PLACES]]
    return dict(counts.most_common()), tuple(named)


# --- the report -----------------------------------------------------------------------------


def _report(
    table: Table, found: Findings, recording: _Recording, files: Sequence[File]
) -> AuditReport:
    """Return the part of the report that comes from the table."""
    verdicts = found.verdicts()
    tallies = found.tallies()
    times = table.times
    summaries = [chunk.summary for chunk in recording.chunks]
    return AuditReport(
        files=len(files),
        size=sum(file.size for file in files),
        records=sum(one.records for one in summaries),
        unreadable=recording.unreadable,
        unreadable_places=recording.places,
        events=sum(one.events for one in summaries),
        logical=found.count_events(verdicts),
        verdicts=verdicts,
        after_window=found.after_window(),
        clock=_clock(table, summaries),
        first_ms=times.first_ms if times.known else None,
        last_ms=times.last_ms if times.known else None,
        causes=found.causes(),
        gaps=found.gaps(),
        suspicions=(),
        over_time=found.over_time(),
        topics=tallies["topics"],
        entities=tallies["entities"],
        sources=tallies["sources"],
        rules=tallies["rules"],
        naive=(),
        studies=(),
        trial=None,
        window_ms=0,
        took_s=0,
    )


def _clock(
    table: Table, summaries: Sequence[ChunkSummary]
) -> Literal["recorded", "published", "none"]:
    """Return the origin of most times."""
    if not table.times.known:
        return "none"
    recorded = sum(one.recorded for one in summaries)
    return "recorded" if 2 * recorded > sum(one.events for one in summaries) else "published"
