"""
The table: which model, with which faults, and what has to come out.

A row is a model, switches for it and what is expected: that everything it asks for holds, or
that one thing does not. Small rows are run by the tests, all of them by `make model`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent

CLAIMS = {
    "I1": "nothing is lost: when all copies of an event are acknowledged, it was delivered",
    "I2": "a key becomes done once in a window",
    "I3": "of the attempts that delivered an event, one at most has no excuse",
    "I4": "no copy is acknowledged before its event was delivered",
    "I5": "what is done stays done until the window ends",
    "I6": "one worker at most holds a key with a lease that has not ended",
    "X1": "an event is delivered once at most, whatever happens",
    "R1": "no older version reaches the sink after a newer one, but for an excuse",
    "R2": "when all is acknowledged, the newest version is the sink's last, but for a stall",
    "R3": "no version is stale when a window has passed since the register was raised",
    "D1": "no event that the sink would accept ends in the dead letters",
    "D2": "one bad event alone does not open the breaker",
    "C1": "a claim that is sent again is not refused because of the first one",
    "L": "under weak fairness, every copy is acknowledged in the end",
}
"""By name, in plain words. The letters are those of the models."""

BITS = {name: 1 << at for at, name in enumerate(claim for claim in CLAIMS if claim != "L")}
"""As in `store.pml`."""

ALWAYS = ("I1", "I2", "I3", "I4", "I5", "I6")
_TIERS = ALWAYS[:-1]  # I6 is about one key
_REGISTER = (*_TIERS, "R1", "R2")
_REGISTER_WINDOW = (*_TIERS, "R1", "R3")  # R2 is about versions that are not forgotten
_ANSWERS = ("I1", "I3", "I4", "D1", "D2")
_CALLS = (*ALWAYS, "C1")

_FAULTS = {
    "CRASHES": ("crash", "crashes"),
    "STALLS": ("stall", "stalls"),
    "EARLY": ("early copy", "early copies"),
    "REFUSALS": ("refusal", "refusals"),
    "UNCLEAR": ("unclear answer", "unclear answers"),
    "DELAYS": ("late message", "late messages"),
    "UNHEARD": ("lost answer", "lost answers"),
    "LOSSES": ("data loss", "data losses"),
    "OUTAGES": ("outage", "outages"),
    "TROUBLES": ("trouble", "troubles"),
    "THROTTLES": ("throttling", "throttlings"),
    "UNSENT": ("unsent event", "unsent events"),
}


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    model: str
    what: str
    """The way that is checked, in a few words."""
    switches: tuple[str, ...] = ()
    workers: int = 2
    copies: int = 2
    faults: Mapping[str, int] = field(default_factory=dict)
    checks: tuple[str, ...] = ALWAYS
    breaks: str | None = None
    """What does not hold; None where everything asked for does."""
    is_full: bool = False
    """Too large for a test."""

    @property
    def files(self) -> frozenset[Path]:
        """Return the model's files."""
        return files_of(self.model)

    @property
    def is_live(self) -> bool:
        return self.checks == ("L",)

    @property
    def defines(self) -> list[str]:
        """Give what the preprocessor is told."""
        asked = sum(BITS.get(claim, 0) for claim in self.checks)
        values = {
            "WORKERS": self.workers,
            "COPIES": self.copies,
            "CHECKS": asked,
            **self.faults,
        }
        live = ["-DLIVE"] if self.is_live else []
        return [
            *(f"-D{switch}" for switch in self.switches),
            *(f"-D{name}={value}" for name, value in values.items()),
            *live,
        ]

    @property
    def setup(self) -> str:
        """Say how many of what."""
        faults = [
            f"{count} {_FAULTS[name][count > 1]}" for name, count in self.faults.items() if count
        ]
        return ", ".join(
            [f"{self.workers} \N{MULTIPLICATION SIGN} {self.copies}", *(faults or ["no faults"])]
        )


@cache
def files_of(model: str) -> frozenset[Path]:
    """Return a model's file, and the files that it includes."""
    path = HERE / f"{model}.pml"
    included = re.findall(r'#include "(\w+)\.pml"', path.read_text())
    return frozenset({path}).union(*(files_of(name) for name in included))


def _faults(**counts: int) -> dict[str, int]:
    return {name.upper(): count for name, count in counts.items()}


_EACH = _faults(crashes=1, stalls=1, early=1, refusals=1, unclear=1, delays=1)
_EACH_AND_LOST = {**_EACH, "UNHEARD": 1}

_BROKEN = [
    Row(
        "get-then-put",
        "naive",
        "look up, mark, send",
        ("GET_THEN_PUT",),
        checks=("I3",),
        breaks="I3",
    ),
    Row(
        "get-then-put-crash",
        "naive",
        "look up, mark, send",
        ("GET_THEN_PUT",),
        copies=1,
        faults=_faults(crashes=1),
        checks=("I1",),
        breaks="I1",
    ),
    Row(
        "mark-before-crash",
        "naive",
        "mark, then send",
        ("MARK_BEFORE",),
        faults=_faults(crashes=1),
        checks=("I1",),
        breaks="I1",
    ),
    Row(
        "mark-before-refusal",
        "naive",
        "mark, then send",
        ("MARK_BEFORE",),
        faults=_faults(refusals=1),
        checks=("I1",),
        breaks="I1",
    ),
    Row(
        "mark-before-once",
        "naive",
        "mark, then send (it loses, but does not repeat)",
        ("MARK_BEFORE",),
        faults=_faults(crashes=2, early=2, refusals=2),
        checks=("I3", "X1"),
    ),
    Row(
        "mark-after",
        "naive",
        "look up, send, mark",
        ("MARK_AFTER",),
        checks=("I3",),
        breaks="I3",
    ),
    Row(
        "mark-after-early",
        "naive",
        "look up, send, mark",
        ("MARK_AFTER",),
        copies=1,
        faults=_faults(early=1),
        checks=("I3",),
        breaks="I3",
    ),
    Row(
        "mark-after-lossless",
        "naive",
        "look up, send, mark (it repeats, but does not lose)",
        ("MARK_AFTER",),
        faults=_faults(crashes=2, early=2, refusals=2),
        checks=("I1", "I4"),
    ),
    Row(
        "no-lease",
        "oncebridge",
        "a claim without a lease",
        ("NO_LEASE",),
        copies=1,
        faults=_faults(crashes=1),
        checks=("L",),
        breaks="L",
    ),
    Row(
        "unfenced-done",
        "oncebridge",
        "commit and release without a fence",
        ("UNFENCED",),
        faults=_faults(stalls=1, refusals=1),
        checks=("I5",),
        breaks="I5",
    ),
    Row(
        "unfenced-holders",
        "oncebridge",
        "commit and release without a fence",
        ("UNFENCED",),
        faults=_faults(stalls=1, refusals=1),
        checks=("I6",),
        breaks="I6",
    ),
    Row(
        "unfenced-twice",
        "oncebridge",
        "commit and release without a fence",
        ("UNFENCED",),
        faults=_faults(stalls=1),
        checks=("I2",),
        breaks="I2",
    ),
    Row(
        "busy-acked-early",
        "oncebridge",
        "busy is acknowledged",
        ("ACK_BUSY",),
        checks=("I4",),
        breaks="I4",
    ),
    Row(
        "busy-acked",
        "oncebridge",
        "busy is acknowledged",
        ("ACK_BUSY",),
        copies=1,
        faults=_faults(crashes=1),
        checks=("I1",),
        breaks="I1",
    ),
    Row(
        "token-is-worker",
        "oncebridge",
        "the token is the worker's id",
        ("TOKEN_IS_WORKER",),
        faults=_faults(refusals=1, delays=1),
        checks=("I6",),
        breaks="I6",
    ),
    Row(
        "commit-any-life",
        "oncebridge",
        "commit does not look at the generation, and the window ends",
        ("COMMIT_ANY_LIFE", "NEXT"),
        faults=_faults(crashes=1, delays=1),
        checks=("I1",),
        breaks="I1",
    ),
    Row(
        "keep-generation",
        "oncebridge",
        "other content on a free key keeps the generation",
        ("KEEP_GENERATION", "OTHER"),
        faults=_faults(crashes=1, stalls=1),
        checks=("I1",),
        breaks="I1",
    ),
    Row(
        "header-is-key",
        "oncebridge",
        "two contents of a key have one header, and the receiver deduplicates",
        ("HEADER_IS_KEY", "OTHER", "RECEIVER"),
        faults=_faults(unclear=1),
        checks=("I1",),
        breaks="I1",
    ),
    Row(
        "header-hashed-twice",
        "oncebridge",
        "a content has another header in a conflict, and the receiver deduplicates",
        ("HASHED_TWICE", "OTHER", "RECEIVER"),
        faults=_faults(unclear=1),
        checks=("X1",),
        breaks="X1",
    ),
    Row(
        "short-window",
        "oncebridge",
        "the window is shorter than the source brings copies",
        ("SHORT_WINDOW", "NEXT"),
        copies=3,
        checks=("I1",),
        breaks="I1",
    ),
    Row(
        "tier-marked-while-busy",
        "tiers",
        "a tier is marked done while the other is busy",
        ("IN_TURN", "MARK_WHILE_BUSY"),
        faults=_faults(crashes=1),
        checks=("I1",),
        breaks="I1",
    ),
    Row(
        "tier-committed-alone",
        "tiers",
        "one tier of two is committed",
        ("COMMIT_FIRST_ONLY",),
        checks=("I3",),
        breaks="I3",
    ),
    Row(
        "compare-then-send",
        "register",
        "read the version, compare, send",
        ("COMPARE_THEN_SEND",),
        checks=("R1",),
        breaks="R1",
    ),
    Row(
        "version-at-claim",
        "register",
        "the version is written at the claim",
        ("SET_AT_CLAIM",),
        checks=("R1",),
        breaks="R1",
    ),
    Row(
        "commit-before-register",
        "register",
        "the event is committed before the register is raised",
        ("COMMIT_FIRST",),
        faults=_faults(crashes=1),
        checks=("R2",),
        breaks="R2",
    ),
    Row(
        "equal-is-stale",
        "register",
        "an equal version counts as older",
        ("DROP_EQUAL", "EQUAL"),
        checks=("I1",),
        breaks="I1",
    ),
    Row(
        "stale-renews",
        "register",
        "a stale arrival renews the register",
        ("FORGETS", "STALE_RENEWS"),
        copies=3,
        checks=("R3",),
        breaks="R3",
    ),
    Row(
        "claim-renews",
        "register",
        "a claim renews the register, until a stale arrival returns it",
        ("CLAIM_RENEWS", "FORGETS"),
        copies=3,
        faults=_faults(crashes=1),
        checks=("R3",),
        breaks="R3",
    ),
    Row(
        "stale-ends",
        "register",
        "a stale arrival ends the register",
        ("FORGETS", "STALE_ENDS"),
        copies=3,
        checks=("R1",),
        breaks="R1",
    ),
    Row(
        "debts-ignored",
        "debts",
        "a key is claimed without a check of the debts",
        ("IGNORE_DEBTS",),
        faults=_faults(outages=1),
        checks=("I3",),
        breaks="I3",
    ),
    Row(
        "debts-ignored-open",
        "debts",
        "delivered without a claim and without a check of the debts",
        ("FAIL_OPEN", "IGNORE_DEBTS"),
        faults=_faults(outages=1),
        checks=("I3",),
        breaks="I3",
    ),
    Row(
        "debts-one-key",
        "debts",
        "the debt of a conflict is not checked",
        ("FAIL_OPEN", "ONE_KEY", "OTHER"),
        copies=3,
        faults=_faults(outages=1),
        checks=("I3",),
        breaks="I3",
    ),
    Row(
        "debt-of-release",
        "debts",
        "a copy is a duplicate of an owed release",
        ("TRUST_RELEASE",),
        faults=_faults(outages=1, refusals=1),
        checks=("I1",),
        breaks="I1",
    ),
    Row(
        "debt-any-content",
        "debts",
        "a copy is a duplicate of an owed commit with other content",
        ("ANY_CONTENT", "OTHER"),
        faults=_faults(outages=1),
        checks=("I1",),
        breaks="I1",
    ),
    Row(
        "debt-for-ever",
        "debts",
        "an owed commit counts for ever, and the window ends",
        ("FOR_EVER", "NEXT"),
        faults=_faults(outages=1),
        checks=("I1",),
        breaks="I1",
    ),
    Row(
        "debt-from-payment",
        "debts",
        "the window begins when the debt is paid",
        ("FROM_PAYMENT", "NEXT"),
        faults=_faults(outages=1),
        checks=("I1",),
        breaks="I1",
    ),
    Row(
        "debt-holds-all",
        "debts",
        "a debt that cannot be paid holds back all keys",
        ("HOLD_ALL", "STUCK"),
        faults=_faults(outages=1),
        checks=("L",),
        breaks="L",
    ),
    Row(
        "throttled-counted",
        "answers",
        "a throttled event has had an attempt",
        ("COUNT_THROTTLED",),
        faults=_faults(throttles=3),
        checks=("D1",),
        breaks="D1",
    ),
    Row(
        "trouble-counted",
        "answers",
        "every answer of a closed or unwell sink is an attempt",
        ("COUNT_ALL",),
        faults=_faults(troubles=1),
        checks=("D1",),
        breaks="D1",
    ),
    Row(
        "forbidden-opens",
        "answers",
        "no answer of a closed sink is an attempt; one event is forbidden",
        ("COUNT_NONE", "FORBIDDEN"),
        checks=("D2",),
        breaks="D2",
    ),
    Row(
        "forbidden-stays",
        "answers",
        "no answer of a closed sink is an attempt; one event is forbidden, others pass, no age",
        ("COUNT_NONE", "FORBIDDEN", "NO_AGE", "STREAM"),
        checks=("L",),
        breaks="L",
    ),
    Row(
        "poison-stays",
        "answers",
        "an ordered source begins with a poison, no age",
        ("NO_AGE", "ORDERED", "POISON"),
        checks=("L",),
        breaks="L",
    ),
    Row(
        "unwell-is-no",
        "answers",
        "an unwell sink counts as one that did not accept the event",
        ("UNWELL_IS_NO",),
        faults=_faults(unclear=1, troubles=1),
        checks=("I3",),
        breaks="I3",
    ),
    Row(
        "draw-per-batch",
        "calls",
        "one draw for all claim calls of a batch, and a later wave has other content",
        ("ONE_DRAW", "OTHER"),
        faults=_faults(delays=1),
        checks=("I1",),
        breaks="I1",
    ),
    Row(
        "draw-per-batch-retry",
        "calls",
        "one draw for all claim calls of a batch, and a key is claimed again",
        ("ONE_DRAW",),
        faults=_faults(early=1, refusals=1, delays=1),
        checks=("I6",),
        breaks="I6",
    ),
    Row(
        "draw-mixed",
        "calls",
        "unanswered keys are claimed again together with others, under the old draw",
        ("MIX", "OTHER"),
        workers=1,
        copies=3,
        faults=_faults(delays=1, unheard=1),
        checks=("I1",),
        breaks="I1",
    ),
    Row(
        "resend-anew-busy",
        "calls",
        "unanswered keys are claimed again under a fresh draw",
        ("FRESH_RESEND",),
        faults=_faults(unheard=1),
        checks=("C1",),
        breaks="C1",
    ),
    Row(
        "release-by-token",
        "calls",
        "a release ends every hold with its token",
        ("RELEASE_ALL",),
        faults=_faults(early=1, refusals=1),
        checks=("I6",),
        breaks="I6",
    ),
    Row(
        "release-by-token-twice",
        "calls",
        "a release ends every hold with its token",
        ("RELEASE_ALL",),
        faults=_faults(early=1, refusals=1),
        checks=("I3",),
        breaks="I3",
    ),
    Row(
        "extend-by-token",
        "calls",
        "an extension prolongs every hold with its token, and succeeds if there is one",
        ("EXTEND_ALL",),
        faults=_faults(stalls=1, early=1),
        checks=("I6",),
        breaks="I6",
    ),
    Row(
        "generation-assumed",
        "calls",
        "a first attempt is committed under the generation that was asked for",
        ("ASSUME_GENERATION",),
        faults=_faults(early=1, unsent=1),
        checks=("I3",),
        breaks="I3",
    ),
    Row(
        "lease-from-resend",
        "calls",
        "the lease is counted from the last request, not from the first",
        ("LEASE_FROM_RESEND",),
        faults=_faults(stalls=1, early=1, unheard=1),
        checks=("I6",),
        breaks="I6",
    ),
]


_EXCEPTIONS = [
    Row(
        f"exception-{name}",
        "oncebridge",
        f"**ours**: a second delivery, by exception {number}",
        faults=_faults(**{name: 1}),
        checks=("X1",),
        breaks="X1",
    )
    for number, name in enumerate(("crashes", "stalls", "unclear", "delays"), 1)
]
"""Each of the four does happen: without an excuse counted, ours would be broken."""

_SMALL = [
    Row("ours", "oncebridge", "**ours**", faults=_EACH),
    Row(
        "ours-window",
        "oncebridge",
        "**ours**, and the window ends",
        ("NEXT",),
        faults=_EACH_AND_LOST,
    ),
    Row(
        "ours-contents",
        "oncebridge",
        "**ours**, and a copy has other content",
        ("OTHER",),
        faults=_faults(crashes=1, stalls=1, refusals=1, delays=1),
    ),
    Row(
        "ours-header",
        "oncebridge",
        "**ours**, a copy has other content, and the receiver deduplicates",
        ("OTHER", "RECEIVER"),
        faults=_faults(crashes=1, stalls=1, refusals=1, unclear=1),
        checks=(*ALWAYS, "X1"),
    ),
    Row(
        "ours-loss",
        "oncebridge",
        "**ours**, and the store loses data",
        faults=_faults(crashes=1, stalls=1, delays=1, losses=1),
        checks=("I1", "I3", "I4"),
    ),
    Row(
        "ours-live",
        "oncebridge",
        "**ours**",
        faults=_faults(crashes=1, stalls=1, refusals=1, delays=1),
        checks=("L",),
    ),
    Row(
        "ack-after-commit",
        "oncebridge",
        "acknowledged after the commit only",
        ("ACK_AFTER_COMMIT",),
        faults=_EACH,
    ),
    Row(
        "commit-by-token",
        "oncebridge",
        "commit fenced by the token",
        ("COMMIT_BY_TOKEN",),
        faults=_EACH,
    ),
    Row(
        "joint",
        "oncebridge",
        "**ours**, the sink in the store's transaction",
        ("JOINT",),
        faults=_EACH_AND_LOST,
        checks=(*ALWAYS, "X1"),
    ),
    Row(
        "safe-after-yes",
        "oncebridge",
        "**ours**, no crash between yes and commit",
        ("SAFE_AFTER_YES",),
        faults=_faults(crashes=3, refusals=2, early=1),
        checks=(*ALWAYS, "X1"),
    ),
    Row(
        "tiers",
        "tiers",
        "**ours**, two tiers in one step",
        faults=_faults(crashes=1, stalls=1, refusals=1),
        checks=_TIERS,
    ),
    Row(
        "tiers-in-turn",
        "tiers",
        "**ours**, two tiers one after the other",
        ("IN_TURN",),
        faults=_faults(crashes=1, stalls=1),
        checks=_TIERS,
    ),
    Row(
        "register",
        "register",
        "**ours**, newest wins",
        faults=_faults(crashes=1, stalls=1, refusals=1, unclear=1),
        checks=_REGISTER,
    ),
    Row(
        "register-equal",
        "register",
        "**ours**, newest wins, equal versions",
        ("EQUAL",),
        faults=_faults(crashes=1, stalls=1),
        checks=_REGISTER,
    ),
    Row(
        "register-window",
        "register",
        "**ours**, newest wins, and the window of the register ends",
        ("FORGETS",),
        copies=3,
        faults=_faults(crashes=1, stalls=1),
        checks=_REGISTER_WINDOW,
    ),
    Row(
        "debts",
        "debts",
        "**ours**, the store is unavailable",
        faults=_faults(crashes=1, stalls=1, early=1, refusals=1, unclear=1, outages=1),
        checks=_TIERS,
    ),
    Row(
        "debts-open",
        "debts",
        "**ours**, the store is unavailable, and events are delivered",
        ("FAIL_OPEN",),
        faults=_faults(crashes=1, stalls=1, refusals=1, unclear=1, outages=1),
        checks=_TIERS,
    ),
    Row(
        "debts-contents",
        "debts",
        "**ours**, the store is unavailable, and a copy has other content",
        ("FAIL_OPEN", "OTHER"),
        copies=3,
        faults=_faults(crashes=1, refusals=1, outages=1),
        checks=_TIERS,
    ),
    Row(
        "debts-window",
        "debts",
        "**ours**, the store is unavailable, and the window ends",
        ("FAIL_OPEN", "NEXT"),
        copies=3,
        faults=_faults(crashes=1, refusals=1, unclear=1, outages=1),
        checks=_TIERS,
    ),
    Row(
        "debts-live",
        "debts",
        "**ours**, the store is unavailable",
        faults=_faults(crashes=1, stalls=1, refusals=1, outages=2),
        checks=("L",),
    ),
    Row(
        "debts-stuck",
        "debts",
        "**ours**, the store is unavailable, and a debt cannot be paid",
        ("STUCK",),
        faults=_faults(outages=1, refusals=1),
        checks=("L",),
    ),
    Row(
        "answers",
        "answers",
        "**ours**, answers of the sink",
        faults=_faults(crashes=1, refusals=1, unclear=1, troubles=1, throttles=4),
        checks=_ANSWERS,
    ),
    Row(
        "answers-forbidden",
        "answers",
        "**ours**, answers of the sink, one event is forbidden",
        ("FORBIDDEN",),
        faults=_faults(crashes=1, refusals=1, unclear=1, troubles=1, throttles=4),
        checks=_ANSWERS,
    ),
    Row(
        "answers-poison",
        "answers",
        "**ours**, answers of the sink, one event is a poison",
        ("POISON",),
        faults=_faults(crashes=1, refusals=1, unclear=1, troubles=1, throttles=4),
        checks=_ANSWERS,
    ),
    Row(
        "answers-live",
        "answers",
        "**ours**, answers of the sink",
        faults=_faults(crashes=1, unclear=1, troubles=1, throttles=2),
        checks=("L",),
    ),
    Row(
        "answers-live-forbidden",
        "answers",
        "**ours**, answers of the sink, one event is forbidden",
        ("FORBIDDEN",),
        faults=_faults(crashes=1, unclear=1, troubles=1, throttles=1),
        checks=("L",),
    ),
    Row(
        "answers-live-stream",
        "answers",
        "**ours**, answers of the sink, one event is forbidden, others pass, no age",
        ("FORBIDDEN", "NO_AGE", "STREAM"),
        faults=_faults(crashes=1, troubles=1),
        checks=("L",),
    ),
    Row(
        "answers-live-ordered",
        "answers",
        "**ours**, answers of the sink, an ordered source begins with a poison",
        ("ORDERED", "POISON"),
        faults=_faults(crashes=1, unclear=1, troubles=1, throttles=1),
        checks=("L",),
    ),
    Row(
        "calls",
        "calls",
        "**ours**, one draw per claim call",
        faults=_faults(refusals=1, delays=1, unheard=1, unsent=1),
        checks=_CALLS,
    ),
    Row(
        "calls-stalls",
        "calls",
        "**ours**, one draw per claim call",
        faults=_faults(stalls=1, early=1, unclear=1, unheard=1),
        checks=_CALLS,
    ),
    Row(
        "calls-waves",
        "calls",
        "**ours**, one draw per claim call, two waves",
        ("OTHER",),
        faults=_faults(crashes=1, delays=1, unheard=1),
        checks=_CALLS,
    ),
    Row(
        "calls-three",
        "calls",
        "**ours**, one draw per claim call, two keys and two waves",
        ("OTHER",),
        copies=3,
        faults=_faults(delays=1, unheard=1),
        checks=_CALLS,
    ),
    Row(
        "calls-live",
        "calls",
        "**ours**, one draw per claim call, two waves",
        ("OTHER",),
        faults=_faults(refusals=1, delays=1, unheard=1),
        checks=("L",),
    ),
    Row(
        "calls-mixed",
        "calls",
        "unanswered keys are claimed again together with keys that are new to the draw",
        ("MIX_NEW", "OTHER"),
        copies=3,
        faults=_faults(delays=1, unheard=1),
        checks=_CALLS,
    ),
    Row(
        "calls-resend-anew",
        "calls",
        "unanswered keys are claimed again under a fresh draw",
        ("FRESH_RESEND",),
        faults=_faults(early=1, delays=1, unheard=1),
    ),
]

_MANY = _faults(crashes=2, stalls=2, early=1, refusals=1, unclear=1, delays=1, unheard=1)

_FULL = [
    Row(
        "full-2x2",
        "oncebridge",
        "**ours**",
        faults={**_MANY, "DELAYS": 2},
        is_full=True,
    ),
    Row("full-3x2", "oncebridge", "**ours**", workers=3, faults=_MANY, is_full=True),
    Row("full-2x3", "oncebridge", "**ours**", copies=3, faults=_MANY, is_full=True),
    Row(
        "full-3x3",
        "oncebridge",
        "**ours**",
        workers=3,
        copies=3,
        faults=_EACH_AND_LOST,
        is_full=True,
    ),
    Row(
        "full-many",
        "oncebridge",
        "**ours**",
        workers=3,
        copies=3,
        faults={**_EACH_AND_LOST, "CRASHES": 2},
        is_full=True,
    ),
    Row(
        "full-window",
        "oncebridge",
        "**ours**, and the window ends",
        ("NEXT",),
        workers=3,
        copies=3,
        faults=_MANY,
        is_full=True,
    ),
    Row(
        "full-contents",
        "oncebridge",
        "**ours**, and a copy has other content",
        ("OTHER",),
        copies=3,
        faults=_EACH,
        is_full=True,
    ),
    Row(
        "full-header",
        "oncebridge",
        "**ours**, a copy has other content, and the receiver deduplicates",
        ("OTHER", "RECEIVER"),
        copies=3,
        faults=_EACH,
        checks=(*ALWAYS, "X1"),
        is_full=True,
    ),
    Row(
        "full-loss",
        "oncebridge",
        "**ours**, and the store loses data",
        faults={**_EACH_AND_LOST, "LOSSES": 1},
        checks=("I1", "I3", "I4"),
        is_full=True,
    ),
    Row(
        "full-live",
        "oncebridge",
        "**ours**",
        faults={**_MANY, "UNHEARD": 0},
        checks=("L",),
        is_full=True,
    ),
    Row(
        "full-live-window",
        "oncebridge",
        "**ours**, and the window ends",
        ("NEXT",),
        copies=3,
        faults=_EACH_AND_LOST,
        checks=("L",),
        is_full=True,
    ),
    Row(
        "full-ack-after-commit",
        "oncebridge",
        "acknowledged after the commit only",
        ("ACK_AFTER_COMMIT",),
        workers=3,
        faults=_MANY,
        is_full=True,
    ),
    Row(
        "full-live-ack-after-commit",
        "oncebridge",
        "acknowledged after the commit only",
        ("ACK_AFTER_COMMIT",),
        faults=_EACH_AND_LOST,
        checks=("L",),
        is_full=True,
    ),
    Row(
        "full-commit-by-token",
        "oncebridge",
        "commit fenced by the token",
        ("COMMIT_BY_TOKEN",),
        workers=3,
        faults=_MANY,
        is_full=True,
    ),
    Row(
        "full-joint",
        "oncebridge",
        "**ours**, the sink in the store's transaction",
        ("JOINT",),
        workers=3,
        faults={**_MANY, "DELAYS": 2},
        checks=(*ALWAYS, "X1"),
        is_full=True,
    ),
    Row(
        "full-safe-after-yes",
        "oncebridge",
        "**ours**, no crash between yes and commit",
        ("SAFE_AFTER_YES",),
        workers=3,
        copies=3,
        faults=_faults(crashes=4, early=3, refusals=4, unheard=2),
        checks=(*ALWAYS, "X1"),
        is_full=True,
    ),
    Row(
        "full-tiers",
        "tiers",
        "**ours**, two tiers in one step",
        workers=3,
        copies=3,
        faults=_faults(crashes=1, stalls=1, early=1, refusals=1),
        checks=_TIERS,
        is_full=True,
    ),
    Row(
        "full-tiers-in-turn",
        "tiers",
        "**ours**, two tiers one after the other",
        ("IN_TURN",),
        copies=3,
        faults=_faults(crashes=2, stalls=2, early=1, refusals=1),
        checks=_TIERS,
        is_full=True,
    ),
    Row(
        "full-register",
        "register",
        "**ours**, newest wins",
        faults=_faults(crashes=2, stalls=1, early=1, refusals=1, unclear=1),
        checks=_REGISTER,
        is_full=True,
    ),
    Row(
        "full-register-3x2",
        "register",
        "**ours**, newest wins",
        workers=3,
        faults=_faults(crashes=1, stalls=1, refusals=1),
        checks=_REGISTER,
        is_full=True,
    ),
    Row(
        "full-register-equal",
        "register",
        "**ours**, newest wins, equal versions",
        ("EQUAL",),
        faults=_faults(crashes=1, stalls=1, early=1, refusals=1, unclear=1),
        checks=_REGISTER,
        is_full=True,
    ),
    Row(
        "full-register-window",
        "register",
        "**ours**, newest wins, and the window of the register ends",
        ("FORGETS",),
        copies=3,
        faults=_faults(crashes=1, stalls=1, unclear=1),
        checks=_REGISTER_WINDOW,
        is_full=True,
    ),
    Row(
        "full-debts",
        "debts",
        "**ours**, the store is unavailable",
        copies=3,
        faults=_faults(crashes=1, stalls=1, early=1, refusals=1, unclear=1, outages=2),
        checks=_TIERS,
        is_full=True,
    ),
    Row(
        "full-debts-open",
        "debts",
        "**ours**, the store is unavailable, and events are delivered",
        ("FAIL_OPEN",),
        copies=3,
        faults=_faults(crashes=2, stalls=1, early=1, refusals=1, unclear=1, outages=2),
        checks=_TIERS,
        is_full=True,
    ),
    Row(
        "full-debts-contents",
        "debts",
        "**ours**, the store is unavailable, and a copy has other content",
        ("FAIL_OPEN", "OTHER"),
        copies=3,
        faults=_faults(crashes=1, stalls=1, refusals=1, unclear=1, outages=2),
        checks=_TIERS,
        is_full=True,
    ),
    Row(
        "full-debts-window",
        "debts",
        "**ours**, the store is unavailable, and the window ends",
        ("FAIL_OPEN", "NEXT"),
        copies=3,
        faults=_faults(crashes=2, stalls=2, refusals=1, unclear=1, outages=2),
        checks=_TIERS,
        is_full=True,
    ),
    Row(
        "full-debts-live",
        "debts",
        "**ours**, the store is unavailable, and events are delivered",
        ("FAIL_OPEN",),
        copies=3,
        faults=_faults(crashes=1, stalls=1, refusals=1, unclear=1, outages=2),
        checks=("L",),
        is_full=True,
    ),
    Row(
        "full-answers",
        "answers",
        "**ours**, answers of the sink, one event is a poison",
        ("POISON",),
        workers=3,
        faults=_faults(crashes=1, unclear=2, troubles=2, throttles=4),
        checks=_ANSWERS,
        is_full=True,
    ),
    Row(
        "full-answers-live",
        "answers",
        "**ours**, answers of the sink, one event is a poison",
        ("POISON",),
        faults=_faults(crashes=2, refusals=1, unclear=2, troubles=3, throttles=4),
        checks=("L",),
        is_full=True,
    ),
    Row(
        "full-calls",
        "calls",
        "**ours**, one draw per claim call",
        faults=_faults(crashes=1, early=1, delays=1, unheard=1),
        checks=_CALLS,
        is_full=True,
    ),
    Row(
        "full-calls-stalls",
        "calls",
        "**ours**, one draw per claim call",
        faults=_faults(crashes=1, stalls=1, early=1, unheard=1, unsent=1),
        checks=_CALLS,
        is_full=True,
    ),
    Row(
        "full-calls-waves",
        "calls",
        "**ours**, one draw per claim call, two waves",
        ("OTHER",),
        faults=_faults(crashes=1, early=1, delays=1, unheard=1),
        checks=_CALLS,
        is_full=True,
    ),
    Row(
        "full-calls-waves-stalls",
        "calls",
        "**ours**, one draw per claim call, two waves",
        ("OTHER",),
        faults=_faults(crashes=1, stalls=1, refusals=1, delays=1, unheard=1),
        checks=_CALLS,
        is_full=True,
    ),
    Row(
        "full-calls-three",
        "calls",
        "**ours**, one draw per claim call, two keys and two waves",
        ("OTHER",),
        copies=3,
        faults=_faults(refusals=1, delays=1, unheard=1),
        checks=_CALLS,
        is_full=True,
    ),
    Row(
        "full-calls-late",
        "calls",
        "**ours**, one draw per claim call, two waves",
        ("OTHER",),
        workers=1,
        faults=_faults(crashes=1, refusals=1, delays=2, unheard=2),
        checks=_CALLS,
        is_full=True,
    ),
    Row(
        "full-calls-live",
        "calls",
        "**ours**, one draw per claim call, two waves",
        ("OTHER",),
        faults=_faults(crashes=1, delays=1, unheard=1),
        checks=("L",),
        is_full=True,
    ),
]

ROWS = [*_BROKEN, *_EXCEPTIONS, *_SMALL, *_FULL]
SMALL = [row for row in ROWS if not row.is_full]


def by_name(name: str) -> Row:
    """Find a row; KeyError where there is none."""
    return {row.name: row for row in ROWS}[name]
