"""Reports made up for the tests of what people see."""

from msgspec.structs import replace

from oncebridge.audit.report import (
    ArrivalExample,
    AuditReport,
    CauseFound,
    Difference,
    FieldStudy,
    Gaps,
    NaiveKey,
    NamedCounts,
    RulesComparison,
    Suspicion,
    TimeSlice,
)
from oncebridge.engine.causes import Cause
from oncebridge.engine.verdict import Verdict

GENESYS = "aws.partner/genesys.com/cloud/0f1e2d3c-0000-4000-8000-00000000abcd/prod"
SECOND = "aws.partner/genesys.com/cloud/0f1e2d3c-0000-4000-8000-00000000abcd/second"
SHOP = "com.example.shop"
TOPIC = "v2.detail.events.conversation.{id}.user.end"
PRESENCE = "v2.users.{id}.presence"
START_MS = 1_765_551_600_000
MINUTE, HOUR, DAY = 60_000, 3_600_000, 86_400_000
PASSED = {Verdict.DELIVERED, Verdict.CONFLICT, Verdict.BYPASSED}
BOUNDS = (10, 100, 1000, 10_000, MINUTE, 5 * MINUTE, HOUR, DAY, 3 * DAY, 6 * DAY)


def gaps(*counts: int, longest: int = 3 * HOUR) -> Gaps:
    """Put *counts* into the bins of `BOUNDS`, one after another."""
    histogram = tuple(zip(BOUNDS, counts, strict=False))
    return Gaps(sum(counts), 2100, 4 * MINUTE, 2 * HOUR, longest, histogram)


def example(line: int = 17, source: str = GENESYS, detail_type: str = TOPIC) -> ArrivalExample:
    return ArrivalExample(
        place=f"events.ndjson:{line}",
        id=f"6f0f3d5e-0000-4000-8000-{line:012}",
        source=source,
        detail_type=detail_type,
        entity="c0ffee00-0000-4000-8000-000000000001",
        gap_ms=2100,
        first_place="events.ndjson:3",
        first_id="6f0f3d5e-0000-4000-8000-000000000003",
    )


def cause(which: Cause, count: int, **more) -> CauseFound:
    return CauseFound(which, count, more.pop("gaps", gaps(0, 1, count - 1)), (example(),))


def tally(name: str, arrivals: int = 100, repeats: int = 30) -> NamedCounts:
    return NamedCounts(name, arrivals, repeats)


def study(source: str = SHOP, detail_type: str = "Order", **more) -> FieldStudy:
    known = {
        "sampled": 500,
        "volatile": ("detail.sentAt",),
        "identifying": "detail.orderId",
        "entity": None,
        "would_merge": 40,
    }
    return FieldStudy(source=source, detail_type=detail_type, **(known | more))


def difference(line: int = 5, before=Verdict.DELIVERED, after=Verdict.DUPLICATE) -> Difference:
    return Difference(
        place=f"events.ndjson:{line}",
        id=f"6f0f3d5e-0000-4000-8000-{line:012}",
        source=SHOP,
        detail_type="Order",
        before=before,
        after=after,
        passed_before=before in PASSED,
        passed_after=after in PASSED,
        rule_before="default",
        rule_after="orders",
        same_as="events.ndjson:2",
    )


def trial(count: int = 3) -> RulesComparison:
    differences = tuple(difference(line) for line in range(5, 5 + count))
    return RulesComparison(
        count, 0, count, ((Verdict.DELIVERED, Verdict.DUPLICATE, count),), differences
    )


def suspicion(kind: str, count: int = 41, *examples: ArrivalExample) -> Suspicion:
    return Suspicion(kind, count, examples or (example(), example(18, detail_type=PRESENCE)))


def report(**more) -> AuditReport:
    """Make the report of an ordinary recording, with what *more* says otherwise."""
    moments = tuple(
        TimeSlice(
            START_MS + n * 5 * MINUTE,
            {Verdict.DELIVERED: 150 + n % 7 * 20, Verdict.DUPLICATE: 20 + n % 5 * 30},
        )
        for n in range(48)
    )
    known = AuditReport(
        files=3,
        size=18_212_345,
        records=12_342,
        unreadable={"not-json": 2},
        unreadable_places=("events.ndjson:9", "more.ndjson.gz:4"),
        events=12_340,
        logical=9_001,
        verdicts={Verdict.DELIVERED: 9_001, Verdict.DUPLICATE: 3_339},
        after_window=0,
        clock="recorded",
        first_ms=START_MS,
        last_ms=START_MS + 4 * HOUR,
        causes=(
            cause(Cause.REDELIVERY, 1_820),
            cause(Cause.RE_EMISSION, 1_009),
            cause(Cause.SECOND_INTEGRATION, 400),
            cause(Cause.REPLAY, 110),
        ),
        gaps=gaps(12, 120, 900, 1100, 700, 300, 150, 57),
        suspicions=(suspicion("double-emission"), suspicion("out-of-order", 7)),
        over_time=moments,
        topics=(
            tally(TOPIC, 5_000, 1_900),
            tally(PRESENCE, 4_100, 1_000),
            tally("Order", 3_240, 439),
        ),
        entities=(tally("c0ffee00-0000-4000-8000-000000000001", 300, 210),),
        sources=(tally(GENESYS, 8_700, 2_500), tally(SECOND, 400, 400), tally(SHOP, 3_240, 439)),
        rules=(tally("genesys", 9_100, 2_900), tally("default", 3_240, 439)),
        naive=(
            NaiveKey("conversation-id", "conversationId only", 6_312, 41, (example(),)),
            NaiveKey("envelope-id", "envelope id only", 0, 1_519, (example(),)),
            NaiveKey("detail-hash", "hash of the whole detail", 0, 1_100, (example(),)),
            NaiveKey("five-minutes", "the same rules, 5 minutes", 0, 207, (example(),)),
        ),
        studies=(study(),),
        trial=None,
        window_ms=6 * DAY,
        took_s=1.2,
    )
    return replace(known, **more)


def empty() -> AuditReport:
    """Make the report of a recording with nothing in it."""
    return AuditReport(
        files=1,
        size=0,
        records=0,
        unreadable={},
        unreadable_places=(),
        events=0,
        logical=0,
        verdicts={},
        after_window=0,
        clock="none",
        first_ms=None,
        last_ms=None,
        causes=(),
        gaps=None,
        suspicions=(),
        over_time=(),
        topics=(),
        entities=(),
        sources=(),
        rules=(),
        naive=(),
        studies=(),
        trial=None,
        window_ms=6 * DAY,
        took_s=0.1,
    )
