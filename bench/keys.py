"""
A key: read the event, apply the rule, write the canonical form, hash it.

Beside it the three lines that people write by hand, and the floor: the fastest decoder, encoder
and hash at hand, one after the other, with nothing proven about what was read. Our keys tell
numbers apart that are the same as doubles; this is checked before anything is measured.
"""

import hashlib
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec
from table import COST, Effort, Line, Measure, Measured, Results, Topic, at_most, middle, times
from traffic import EVENTS, IGNORED, RULE, naive_key

from oncebridge.events.event import Unreadable, read
from oncebridge.events.rules import RuleSet

KINDS = {
    "key-compact": "compact",
    "key-compact-ignore": "compact, two fields ignored",
    "key-pretty": "pretty-printed",
    "key-pretty-ignore": "pretty-printed, two fields ignored",
}
AIM = 1.35
"""At most so many times the cost of the floor."""


def row(*, pretty: bool, ignore: bool) -> Measure:
    def measure(effort: Effort) -> Measured:
        raws = [path.read_bytes() for path in sorted(EVENTS.glob("*.json"))]
        if not pretty:
            raws = [
                json.dumps(json.loads(raw), ensure_ascii=False, separators=(",", ":")).encode()
                for raw in raws
            ]
        rules = RuleSet([RULE] if ignore else [], namespace="default")
        ignored = IGNORED if ignore else ()
        check_decimals(rules)

        def ours() -> None:
            for raw in raws:
                key_of(raw, rules)

        def naive() -> None:
            for raw in raws:
                naive_key(raw, ignored)

        def floor() -> None:
            for raw in raws:
                detail = msgspec.json.decode(raw)["detail"]
                hashlib.sha256(msgspec.json.encode(detail, order="sorted")).digest()

        took = in_turn([ours, naive, floor], rounds=20 if effort.quick else 100)
        first, second, third = (seconds / len(raws) * 1e6 for seconds in took)
        size = statistics.mean(map(len, raws))
        return {"ours": first, "peer": second, "floor": third, "bytes": size}

    return measure


def key_of(raw: bytes, rules: RuleSet) -> bytes:
    """Make a key as the gateway does."""
    event = read(raw, apart=rules.apart)
    if isinstance(event, Unreadable):
        raise SystemExit(event.message)
    terms = rules.terms(event)
    key = terms.key_of(event) if terms.key_of is not None else None
    if key is None:
        raise SystemExit("an event has no key")
    return key


def check_decimals(rules: RuleSet) -> None:
    """Stop if decimals that differ, but are the same double, have one key."""
    template = b'{"version":"0","id":"a","source":"b","detail-type":"c","detail":{"amount":%b}}'
    numbers = (b"0.1", b"0.1000000000000000001", b"0.10")
    one, other, same = (key_of(template % number, rules) for number in numbers)
    if one == other or one != same:
        raise SystemExit("keys do not compare decimals exactly")


def in_turn(works: Sequence[Callable[[], None]], *, rounds: int) -> list[float]:
    """Time *works* one after the other, many times; the medians, in seconds of CPU."""
    took: list[list[float]] = [[] for _ in works]
    for work in works:
        work()
    for _ in range(rounds):
        for spent, work in zip(took, works, strict=True):
            begins = time.thread_time()
            for _ in range(5):
                work()
            spent.append((time.thread_time() - begins) / 5)
    return [statistics.median(spent) for spent in took]


def ratios(results: Results, name: str) -> list[float]:
    """Return the cost of a key compared with the floor, run by run."""
    return [run["ours"] / run["floor"] for run in results[name]]


def line(results: Results, name: str, work: str) -> Line:
    runs, found = results[name], ratios(results, name)
    ours, peer, floor = (middle(runs, side, "{:.1f} µs") for side in ("ours", "peer", "floor"))
    return Line(
        work, ours, f"{peer} json + sha256", floor, times(found, COST), *at_most(found, AIM, COST)
    )


def lines(results: Results) -> Iterator[Line]:
    for name, how in KINDS.items():
        yield line(results, name, f"key, {how}")


TOPIC = Topic(
    "keys",
    "Keys",
    {name: row(pretty="pretty" in name, ignore="ignore" in name) for name in KINDS},
    lines,
    "CPU time per event, for events like those of Genesys, 1.1 KB when compact. The floor decodes, "
    "encodes in order and hashes with msgspec and hashlib, without checks and with numbers as doubles. "
    "Ours compares decimals exactly. The ratio is to the floor.",
)
