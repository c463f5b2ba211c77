"""
The sentences of an audit report, shared by the terminal and the page.

Text that came out of an event is spelt out, so that it cannot control a terminal, and cut.
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
    format_count,
    format_elapsed,
    format_instant,
    format_share,
    format_size,
    printable,
)
from oncebridge.engine.causes import Cause

WINDOWS: Final = ((5 * MINUTE, f"5{NB}min"), (DAY, f"24{NB}h"), (6 * DAY, f"6{NB}d"))
"""Common windows: of an SQS FIFO queue, of EventBridge's retries, and our default."""
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
        "the same state of the same entity arrived again at once, as a new event",
    ),
    "out-of-order": (
        "out of order",
        "an older state of an entity arrived after a newer one and would overwrite it",
    ),
    "id-reused": (
        "id reused",
        "another event with other content had the same envelope id: the id is not a safe key",
    ),
    "other-content": (
        "other content",
        "dropped by its key, but its content differs from the first one: an event may be lost",
    ),
    "return": (
        "return to an earlier state",
        "counted as a duplicate, but the entity had another state in between: it may be a change",
    ),
}


# --- sentences ----------------------------------------------------------------------------


def count_duplicates(report: AuditReport) -> int:
    """Count the arrivals that are duplicates."""
    return sum(found.count for found in report.causes)


def headline(report: AuditReport) -> str:
    """Return the result in one sentence."""
    if not report.events:
        return "No events found."
    arrivals = f"{format_count(report.events, 'arrival')} {'contains' if report.events == 1 else 'contain'}"
    found = count_duplicates(report)
    if not found:
        return f"{arrivals} {format_count(report.logical, 'event')}; no duplicates{_late(report, 'arrived')}."
    counted = format_count(found, "arrival is a duplicate", "arrivals are duplicates")
    duplicates = f"{counted} ({format_share(found, report.events)})"
    return f"{arrivals} {format_count(report.logical, 'event')}; {duplicates}{_late(report, 'more arrived')}."


def _late(report: AuditReport, verb: str) -> str:
    """Return how many arrived again after the window."""
    if not report.after_window:
        return ""
    return f", and {report.after_window:,} {verb} again after the window"


def recording_summary(report: AuditReport) -> str:
    """Return what was read, and the time that it covers."""
    text = f"{format_count(report.files, 'file')}, {format_size(report.size)}"
    if report.first_ms is not None and report.last_ms is not None:
        first = format_instant(report.first_ms, with_seconds=False)
        last = format_instant(report.last_ms, with_seconds=False)
        text += f", {first} to {last} UTC" if first != last else f", {first} UTC"
    return text


def clock_note(report: AuditReport) -> str:
    """Return a note if the times are estimated or missing, otherwise an empty string."""
    match report.clock:
        case "recorded":
            return ""
        case "published":
            return (
                "The recording has no arrival times. Each event is assumed to have arrived when the "
                "newest event before it in its file was published, so gaps are estimates, and more "
                "likely too short than too long."
            )
        case "none":
            return "Neither the recording nor its events have times, so no gaps are reported."


def gap_summary(gaps: Gaps) -> str:
    """Return the distribution of gaps in a few words."""
    if gaps.count == 1:
        return f"after {format_elapsed(gaps.max_ms)}"
    return f"half within {format_elapsed(gaps.p50_ms)}, all within {format_elapsed(gaps.max_ms)}"


def gap_sentence(gaps: Gaps) -> str:
    """Return the distribution of gaps in a sentence."""
    return (
        f"Half arrived within {format_elapsed(gaps.p50_ms)}, 90 % within {format_elapsed(gaps.p90_ms)}, "
        f"99 % within {format_elapsed(gaps.p99_ms)}, the last after {format_elapsed(gaps.max_ms)}."
    )


def missed(gaps: Gaps, window_ms: int) -> int:
    """Count the duplicates that arrived after a window of *window_ms*."""
    return sum(count for bound, count in gaps.histogram if bound > window_ms)


def window_sentences(report: AuditReport) -> list[str]:
    """Return what the gaps mean for the window."""
    gaps = report.gaps
    if gaps is None:
        return []
    sentences = []
    for window_ms, name in WINDOWS:
        if window_ms > report.window_ms:
            break  # what comes later than the window counts as new, and has no gap
        late = missed(gaps, window_ms)
        if not late:
            sentences.append(f"A window of {name} would have covered all of them.")
            break
        sentences.append(f"A window of {name} would have missed {format_count(late, 'duplicate')}.")
    long_ms = (report.last_ms or 0) - (report.first_ms or 0)
    if 0 < long_ms < report.window_ms:
        sentences.append(
            f"The recording covers {format_elapsed(long_ms)}, so it cannot contain a longer gap."
        )
    if gaps.max_ms * 3 >= report.window_ms * 2:
        sentences.append(
            f"The longest gap is close to the window of {format_elapsed(report.window_ms)}, and arrivals "
            "after the window count as new. Try a longer window, such as --window 30d."
        )
    return sentences


def buckets(gaps: Gaps) -> list[tuple[str, int]]:
    """Return the histogram in a few named rows, without empty ones at the end."""
    rows = [0] * (len(_BUCKETS) + 1)
    for bound, number in gaps.histogram:
        at = next((n for n, (edge, _) in enumerate(_BUCKETS) if bound <= edge), len(_BUCKETS))
        rows[at] += number
    names = [*(name for _, name in _BUCKETS), "later"]
    last = max((at for at, number in enumerate(rows) if number), default=-1)
    return list(zip(names, rows, strict=True))[: last + 1]


def naive_outcome(key: NaiveKey) -> str:
    """Return what a simple key would have done."""
    if key.lost and key.let_through:
        return (
            f"would have lost {format_count(key.lost, 'event')} and delivered "
            f"{format_count(key.let_through, 'duplicate')}"
        )
    if key.lost:
        return f"would have lost {format_count(key.lost, 'event')}"
    if key.let_through:
        return f"would have delivered {format_count(key.let_through, 'duplicate')}"
    return "would have been correct on this recording"


def example_text(one: ArrivalExample) -> str:
    """Return where an example is, and where the arrival is that it is compared with."""
    place = printable(one.place)
    return f"{place} (earlier arrival: {printable(one.first_place)})" if one.first_place else place


def suspicion_text(found: Suspicion) -> tuple[str, str]:
    """Return the title and the meaning of a suspicion."""
    return SUSPICIONS[found.kind]


def comparison_sentences(trial: RulesComparison) -> list[str]:
    """Return what candidate rules would decide differently."""
    if not trial.changed:
        return ["The candidate rules decide the same for every arrival."]
    sentences = [
        f"The candidate rules decide differently for {format_count(trial.changed, 'arrival')}."
    ]
    if trial.more:
        sentences.append(f"They would deliver {trial.more:,} more.")
    if trial.fewer:
        sentences.append(
            f"They would no longer deliver {trial.fewer:,}: check these before you use the rules."
        )
    return sentences


def delivery_change(one: Difference) -> str:
    """Return whether an arrival is delivered, if that changes and the verdict does not."""
    if one.before is not one.after:
        return ""
    return "now delivered" if one.passed_after else "no longer delivered"


def advice_at_origin(cause: Cause) -> str:
    """Return how to avoid duplicates of this cause where they arise; empty if unknown."""
    return _AT_ORIGIN.get(cause, "")


_AT_ORIGIN: Final = {
    Cause.SECOND_INTEGRATION: (
        "Several integrations send the same topics. If that is not intended, select each topic in "
        "one integration only (Genesys Cloud: Admin, Integrations, topic filtering)."
    ),
    Cause.SECOND_BUS: (
        "Two accounts or Regions carry the same events. Check for a rule that forwards from one "
        "bus to another, and for two rules with the same target."
    ),
    Cause.REDELIVERY: (
        "Many events are redelivered because a receiver did not answer in time. Set the visibility "
        "timeout of a queue to six times the timeout of its function, answer an API destination "
        "within 5 s, and check for two rules that match the same event."
    ),
}
