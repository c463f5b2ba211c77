"""
The table: which model, with which faults, and what has to come out.

A row is a model, switches for it and what is expected: that everything it asks for holds, or
that one thing does not. Small rows are run by the tests, all of them by `make model`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

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
    "L": "under weak fairness, every copy is acknowledged in the end",
}
"""By name, in plain words. The letters are those of the models."""

BITS = {"I1": 1, "I2": 2, "I3": 4, "I4": 8, "I5": 16, "I6": 32, "X1": 64, "R1": 128, "R2": 256}
"""As in `store.pml`."""

ALWAYS = ("I1", "I2", "I3", "I4", "I5", "I6")
_TIERS = ALWAYS[:-1]  # I6 is about one key
_REGISTER = (*_TIERS, "R1", "R2")

_FAULTS = {
    "CRASHES": ("crash", "crashes"),
    "STALLS": ("stall", "stalls"),
    "EARLY": ("early copy", "early copies"),
    "REFUSALS": ("refusal", "refusals"),
    "UNCLEAR": ("unclear answer", "unclear answers"),
    "DELAYS": ("late message", "late messages"),
    "UNHEARD": ("lost answer", "lost answers"),
    "LOSSES": ("data loss", "data losses"),
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
]

ROWS = [*_BROKEN, *_EXCEPTIONS, *_SMALL, *_FULL]
SMALL = [row for row in ROWS if not row.is_full]


def by_name(name: str) -> Row:
    """Find a row; KeyError where there is none."""
    return {row.name: row for row in ROWS}[name]
