"""
How what an audit found is said, in the terminal as in the page.

Numbers first, in plain words; what came out of an event is spelt out, so that neither a
terminal nor a reader is led astray by it, and cut where it is longer than anybody reads.
"""

from typing import Final

from oncebridge.audit.report import (
    ArrivalExample,
    AuditReport,
    Difference,
    Gaps,
    NaiveKey,
    RulesComparison,
    Suspicion,
)
from oncebridge.base.formatting import (
    DAY,
    HOUR,
    MINUTE,
    NB,
    SECOND,
    elapsed,
    instant,
    many,
    share,
    size,
    spelt,
)
from oncebridge.engine.causes import Cause

WINDOWS: Final = ((5 * MINUTE, f"5{NB}min"), (DAY, f"24{NB}h"), (6 * DAY, f"6{NB}d"))
"""What people commonly choose: a FIFO queue's, EventBridge's, and ours."""
_BUCKETS: Final = (
    (SECOND, "within 1 s"),
    (10 * SECOND, "within 10 s"),
    (MINUTE, "within 1 min"),
    (5 * MINUTE, "within 5 min"),
    (HOUR, "within 1 h"),
    (DAY, "within 24 h"),
    (6 * DAY, "within 6 d"),
)

SUSPICIONS: Final[dict[str, tuple[str, str]]] = {
    "double-emission": (
        "double emission",
        "the same state of the same entity again at once, told as a new event",
    ),
    "out-of-order": (
        "out of order",
        "an older state of an entity came after a newer one, and would overwrite it",
    ),
    "id-reused": (
        "id reused",
        "the envelope id of another event with other content: an id is no safe key here",
    ),
    "other-content": (
        "other content",
        "dropped by its key, though it does not say what the first one said: it may be lost",
    ),
    "return": (
        "a return",
        "counted as a repeat, yet its entity had another state in between: it may be news",
    ),
}


# --- sentences ----------------------------------------------------------------------------


def count_duplicates(report: AuditReport) -> int:
    """Count the arrivals that are repeats."""
    return sum(found.count for found in report.causes)


def headline(report: AuditReport) -> str:
    """Say it all in one sentence."""
    if not report.events:
        return "There is no event in it."
    arrivals = f"{many(report.events, 'arrival')} {'is' if report.events == 1 else 'are'}"
    found = count_duplicates(report)
    if not found:
        return (
            f"{arrivals} {many(report.logical, 'event')}; none is a repeat{_late(report, 'came')}."
        )
    counted = many(found, "arrival is a repeat", "arrivals are repeats")
    told = f"{counted} ({share(found, report.events)})"
    return f"{arrivals} {many(report.logical, 'event')}; {told}{_late(report, 'more came')}."


def _late(report: AuditReport, came: str) -> str:
    """Say how many came again when the window was over."""
    if not report.after_window:
        return ""
    return f", and {report.after_window:,} {came} again after the window"


def recording_summary(report: AuditReport) -> str:
    """Return what was read, and of when it is."""
    told = f"{many(report.files, 'file')}, {size(report.size)}"
    if report.first_ms is not None and report.last_ms is not None:
        first = instant(report.first_ms, with_seconds=False)
        last = instant(report.last_ms, with_seconds=False)
        told += f", {first} to {last} UTC" if first != last else f", {first} UTC"
    return told


def clock_note(report: AuditReport) -> str:
    """Say how far the times can be trusted; nothing where they can."""
    match report.clock:
        case "recorded":
            return ""
        case "published":
            return (
                "The recording does not say when each event arrived. It is taken to have arrived "
                "when the newest event before it in its file was published, so the gaps are "
                "estimates, and rather too short than too long."
            )
        case "none":
            return "Neither the recording nor its events have times, so there are no gaps."


def gap_summary(gaps: Gaps) -> str:
    """Return how gaps lie in one line."""
    if gaps.count == 1:
        return f"after {elapsed(gaps.max_ms)}"
    return f"half within {elapsed(gaps.p50_ms)}, the longest {elapsed(gaps.max_ms)}"


def missed(gaps: Gaps, window_ms: int) -> int:
    """Count the repeats that come later than a window of *window_ms* reaches."""
    return sum(count for bound, count in gaps.histogram if bound > window_ms)


def window_sentences(report: AuditReport) -> list[str]:
    """Say what the gaps mean for the window."""
    gaps = report.gaps
    if gaps is None:
        return []
    told = []
    for window_ms, name in WINDOWS:
        if window_ms > report.window_ms:
            break  # what comes later than the window counts as new, and has no gap
        late = missed(gaps, window_ms)
        if not late:
            told.append(f"A window of {name} would have been long enough for all of them.")
            break
        told.append(f"A window of {name} would have missed {many(late, 'repeat')}.")
    long_ms = (report.last_ms or 0) - (report.first_ms or 0)
    if 0 < long_ms < report.window_ms:
        told.append(f"The recording is {elapsed(long_ms)} long, so no longer gap can be in it.")
    if gaps.max_ms * 3 >= report.window_ms * 2:
        told.append(
            f"The longest gap comes near the window of {elapsed(report.window_ms)}, and what came "
            "later counts as new: try a longer one, such as --window 30d."
        )
    return told


def buckets(gaps: Gaps) -> list[tuple[str, int]]:
    """Gather the histogram in few rows with names, without empty ones at the end."""
    rows = [0] * (len(_BUCKETS) + 1)
    for bound, number in gaps.histogram:
        at = next((n for n, (edge, _) in enumerate(_BUCKETS) if bound <= edge), len(_BUCKETS))
        rows[at] += number
    names = [*(name for _, name in _BUCKETS), "later"]
    last = max((at for at, number in enumerate(rows) if number), default=-1)
    return list(zip(names, rows, strict=True))[: last + 1]


def naive_outcome(key: NaiveKey) -> str:
    """Say what a simple key would have done."""
    if key.lost and key.let_through:
        return (
            f"would have lost {many(key.lost, 'event')} and let "
            f"{many(key.let_through, 'repeat')} through"
        )
    if key.lost:
        return f"would have lost {many(key.lost, 'event')}"
    if key.let_through:
        return f"would have let {many(key.let_through, 'repeat')} through"
    return "would have been right, on this recording"


def example_text(one: ArrivalExample, how: str = "repeats") -> str:
    """Say where an example is, and which one it repeats or follows."""
    told = spelt(one.place)
    return f"{told} {how} {spelt(one.first_place)}" if one.first_place else told


def suspicion_text(found: Suspicion) -> tuple[str, str]:
    """Name a suspicion, and say what it means."""
    return SUSPICIONS[found.kind]


def comparison_sentences(trial: RulesComparison) -> list[str]:
    """Say what candidate rules would do otherwise."""
    if not trial.changed:
        return ["The candidate would do the same with every arrival."]
    told = [f"The candidate would do otherwise with {many(trial.changed, 'arrival')}."]
    if trial.more:
        told.append(f"It would pass on {trial.more:,} more.")
    if trial.fewer:
        told.append(
            f"It would no longer pass on {trial.fewer:,}: look at these before you take it."
        )
    return told


def delivery_change(one: Difference) -> str:
    """Say whether an arrival is passed on, where its verdicts are the same."""
    if one.before is not one.after:
        return ""
    return "now passed on" if one.passed_after else "no longer passed on"


def advice_at_origin(cause: Cause) -> str:
    """Say what is better put right at the root than deduplicated, if anything is."""
    return _AT_THE_ROOT.get(cause, "")


_AT_THE_ROOT: Final = {
    Cause.SECOND_INTEGRATION: (
        "Several integrations send the same topics. Unless you want that, let each topic go "
        "through one of them (Genesys Cloud: Admin, Integrations, topic filtering)."
    ),
    Cause.SECOND_BUS: (
        "Two accounts or Regions carry the same events. Look for a rule that forwards from one "
        "bus to another, and for two rules that feed one target."
    ),
    Cause.REDELIVERY: (
        "Many are delivered again because somebody did not answer in time. A queue's visibility "
        "timeout should be six times that of its function; an API destination wants its answer "
        "within 5 s; and two rules that match one event deliver it twice."
    ),
}
