"""
The operations of the model and those of the code are the same.

Spin runs each operation of `spec/store.pml` on every small record and prints what comes of it;
here `oncebridge.stores.transitions` is asked the same.
"""

import subprocess
from typing import NamedTuple

import pytest
from spec.search import HERE
from tests.servers.spin import Tools, translate

from oncebridge.events.key import Part
from oncebridge.stores import transitions as code
from oncebridge.stores.api import (
    HELD,
    Busy,
    Claim,
    ClaimAnswers,
    Commit,
    Duplicate,
    Extension,
    Fate,
    Memory,
    Mismatch,
    Record,
    Release,
    Reply,
    Want,
    Wants,
)

NOW, SOON = 1_000, 2_000
OPERATIONS = ("claim", "commit", "release", "unsent", "raise", "extend", "remember", "both")
ANSWERS = {
    Claim: "OK",
    Busy: "BUSY",
    Duplicate: "DUPLICATE",
    Mismatch: "MISMATCH",
    Reply.COMMITTED: "OK",
    Reply.RELEASED: "OK",
    Reply.EXTENDED: "OK",
    Reply.REMEMBERED: "OK",
    Reply.ALREADY: "ALREADY",
    Reply.FENCED: "FENCED",
    Reply.KNOWN: "KNOWN",
}
ABSENT, CLAIMED, DONE = range(3)


class Small(NamedTuple):
    """A record as the model has it."""

    state: int
    live: int
    token: int
    generation: int
    hash: int
    memo: int
    attempts: int


class Step(NamedTuple):
    """A line that Spin printed."""

    operation: str
    one: int
    other: int
    before: list[Small]
    said: str
    after: list[Small]


def name(number: int) -> bytes:
    """Give a token, generation, hash or memo; 0 is none."""
    return bytes([number]) * 16 if number else b""


def number(name: bytes) -> int:
    return name[0] if name else 0


def large(key: bytes, small: Small, ended: int) -> Record | None:
    """Make the code's record of the model's; one that is not live has ended by *ended*."""
    if small.state == ABSENT:
        return None
    return Record(
        key,
        name(small.token),
        name(small.generation),
        SOON if small.live else ended,
        small.attempts,
        name(small.hash),
        Fate.DELIVERED if small.state == DONE else None,
        name(small.memo),
        0,
        SOON,
    )


def small(record: Record | None) -> Small:
    if record is None:
        return Small(ABSENT, 0, 0, 0, 0, 0, 0)
    return Small(
        CLAIMED if record.fate is None else DONE,
        int(record.until_ms > NOW),
        number(record.token),
        number(record.generation),
        number(record.hash),
        number(record.memo),
        record.attempts,
    )


def records(words: list[str]) -> list[Small]:
    numbers = [int(word) for word in words]
    return [Small(*numbers[at : at + 7]) for at in range(0, len(numbers), 7)]


def step(line: str) -> Step:
    before, after = line.split(" > ")
    operation, one, other, *held = before.split()
    said, *left = after.split()
    return Step(operation, int(one), int(other), records(held), said, records(left))


def run(tools: Tools, *switches: str) -> list[Step]:
    argv = [*translate(tools), *switches, "-T", str(HERE / "operations.pml")]
    told = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60).stdout
    return [step(line) for line in told.splitlines() if line.startswith(OPERATIONS)]


@pytest.fixture(scope="module")
def steps(spin_tools) -> list[Step]:
    return run(spin_tools)


def in_code(step: Step, ended: int) -> tuple[str, list[Small]]:
    """Let the code do it; gives what is said and what stands afterwards."""
    keys = [bytes([at]) for at in range(len(step.before))]
    held = [large(key, one, ended) for key, one in zip(keys, step.before, strict=True)]
    if step.operation in ("claim", "both"):
        parts = tuple(Part(key, name(step.other)) for key in keys)
        want = Want(parts, name(step.one), name(3), SOON - NOW, 0)
        answer, written = code.claim(held, want, NOW)
        said = ANSWERS[type(answer)]
        if step.operation == "claim" and ClaimAnswers.of(Wants.of([want]), [answer]).each == [HELD]:
            said = "HELD"
    else:
        reply, new = changed(step, held[0], keys[0])
        said, written = ANSWERS[reply], [new] if new is not None else []
    stands = dict(zip(keys, held, strict=True))
    stands.update({record.key: record for record in written})
    return said, [small(stands[key]) for key in keys]


def changed(step: Step, held: Record | None, key: bytes) -> tuple[Reply, Record | None]:
    match step.operation:
        case "commit":
            asked = Commit(key, name(step.one), Fate.DELIVERED, SOON - NOW)
            return code.commit(held, asked, NOW)
        case "release":
            return code.release(held, Release(key, name(step.one)), NOW)
        case "unsent":
            return code.release(held, Release(key, name(step.one), unsent=True), NOW)
        case "raise":
            return code.release(held, Release(key, name(step.one), memo=name(step.other)), NOW)
        case "extend":
            return code.extend(held, Extension(key, name(step.one), SOON - NOW), NOW)
        case _:
            asked = Memory(key, name(step.one), Fate.DELIVERED, SOON - NOW)
            return code.remember(held, asked, NOW)


def differences(steps: list[Step], ended: int = NOW) -> list[Step]:
    return [one for one in steps if in_code(one, ended) != (one.said, one.after)]


@pytest.mark.parametrize("ended", [NOW - 1, NOW], ids=["past", "now"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_code_does_what_the_model_does(operation, ended, steps):
    assert differences([one for one in steps if one.operation == operation], ended) == []


@pytest.mark.parametrize(
    ("switch", "operations"),
    [
        ("UNFENCED", {"commit", "release", "unsent", "raise"}),
        ("COMMIT_ANY_LIFE", {"commit"}),
        ("COMMIT_BY_TOKEN", {"commit"}),
        ("KEEP_GENERATION", {"claim"}),
    ],
)
def test_a_model_that_does_otherwise_is_noticed(switch, operations, spin_tools):
    differ = differences(run(spin_tools, f"-D{switch}"))
    assert {one.operation for one in differ} == operations


def test_all_small_records_and_all_answers_come_up(steps):
    """Nothing is claimed of what was not tried."""
    alone = {one.before[0] for one in steps if one.operation == "claim"}
    rest = 3 * 3 * 3 * 2  # generations, contents, attempts, with and without a memo
    assert len(alone) == 1 + 2 * 3 * rest + 2 * rest  # nothing, claimed, done
    answers = {op: {one.said for one in steps if one.operation == op} for op in OPERATIONS}
    assert answers["claim"] == {"HELD", "OK", "BUSY", "DUPLICATE", "MISMATCH"}
    assert answers["both"] == {"OK", "BUSY", "DUPLICATE"}
    assert answers["commit"] == {"OK", "ALREADY", "FENCED"}
    assert answers["remember"] == {"OK", "KNOWN"}
    for operation in ("release", "unsent", "raise", "extend"):
        assert answers[operation] == {"OK", "FENCED"}
