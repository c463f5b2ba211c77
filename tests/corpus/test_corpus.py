"""
Nothing that can arrive crashes it, hangs it, or is acknowledged without a place to be.

Each case goes by HTTP (as it is, packed, in chunks, between good events, through the spool)
and in a file. What is not delivered lies in the dead letters, byte for byte.
"""

import asyncio
import gzip
import itertools
import time

import pytest
from tests.corpus.bad_input import CASES, DAMAGED, REFUSED
from tests.http.live import PATH, event, live, prepare, read_answer

from oncebridge.errors import OncebridgeError

BOUND_S = 30.0
numbers = itertools.count(1)
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
unpacked = [case for case in CASES.values() if "Content-Encoding" not in case.headers]
lines_only = [
    case
    for case in CASES.values()
    if b"\n" not in case.body.strip() and case.body.strip() and "gzip" not in case.name
    if case.http != REFUSED
]


@pytest.fixture(scope="module")
def door(tmp_path_factory):
    with live(tmp_path_factory.mktemp("corpus")) as running:
        yield running


class Seen:
    """What reached the sink and the dead letters since the last look."""

    def __init__(self, running):
        self._running = running
        self.look()

    def look(self):
        running = self._running
        self._delivered = len(running.sink.taken)
        letters = running.buried()
        self._last = letters[-1].number if letters else 0
        self._arrived = running.balance()["arrived"]

    @property
    def delivered(self):
        return self._running.sink.bodies[self._delivered :]

    @property
    def buried(self):
        return [letter for letter in self._running.buried() if letter.number > self._last]

    @property
    def arrived(self):
        return self._running.balance()["arrived"] - self._arrived


def check(answer, case, seen):
    """Check that what was answered is what became of it, and is what was expected."""
    assert answer.took < BOUND_S
    if case.http == REFUSED:
        assert answer.status == 413
        assert seen.arrived == 0
        assert not seen.delivered + seen.buried
        return
    assert answer.status == 200
    assert len(answer.verdicts) == len(case.http)
    # The same bytes may have been there before, in another case or another form.
    verdicts = [
        expected if said == "duplicate" else said
        for said, expected in zip(answer.verdicts, case.http, strict=True)
    ]
    assert verdicts == case.http
    assert seen.arrived == len(verdicts)
    assert len(seen.buried) == answer.verdicts.count("dead")
    assert len(seen.delivered) == answer.verdicts.count("delivered")
    raws = [letter.raw for letter in seen.buried] + seen.delivered
    if not case.name.startswith("gzip in gzip"):
        assert all(raw in case.body for raw in raws)
        assert len(verdicts) > 1 or case.body[:1] == b"[" or raws in ([case.body], [])
    check_letters(seen.buried, case)
    keys = [result["key"] for result in answer.results if result["verdict"] == "dead"]
    assert sorted(keys) == sorted(letter.key.hex() for letter in seen.buried)


def check_letters(letters, case):
    for letter in letters:
        assert not letter.is_keyed
        assert case.reason in (None, letter.reason)
        assert b"flour" not in letter.message.encode()


@every_case
def test_by_http(door, case):
    seen = Seen(door)
    answer = door.ask("POST", body=case.body, headers=case.headers)
    check(answer, case, seen)
    assert door.passes(next(numbers))


@every_case
def test_by_http_in_chunks(door, case):
    seen = Seen(door)
    sizes = itertools.cycle([1, 7, 4096, 100_000])
    with door.line() as line:
        head = [f"POST {PATH} HTTP/1.1", "Host: localhost", "Transfer-Encoding: chunked"]
        head += [f"{name}: {value}" for name, value in case.headers.items()]
        sent = ["\r\n".join([*head, "", ""]).encode()]
        at = 0
        while at < len(case.body):
            piece = case.body[at : at + next(sizes)]
            sent.append(b"%x\r\n%b\r\n" % (len(piece), piece))
            at += len(piece)
        try:
            line.sendall(b"".join([*sent, b"0\r\n\r\n"]))
        except (ConnectionResetError, BrokenPipeError):
            assert case.http == REFUSED
        answer = read_answer(line)
    check(answer, case, seen)
    assert door.passes(next(numbers))


@pytest.mark.parametrize("case", unpacked, ids=[case.name for case in unpacked])
def test_by_http_packed(door, case):
    seen = Seen(door)
    packed = gzip.compress(case.body, compresslevel=1)
    headers = {**case.headers, "Content-Encoding": "gzip"}
    answer = door.ask("POST", body=packed, headers=headers)
    if 200 * len(packed) < len(case.body) and case.http != REFUSED:
        # Packed too tightly, it is kept as it came.
        assert (answer.status, answer.verdicts) == (200, ["dead"])
        assert [letter.raw for letter in seen.buried] == [packed]
        assert "gzip" in seen.buried[0].message
    else:
        check(answer, case, seen)
    assert door.passes(next(numbers))


@pytest.mark.parametrize("case", lines_only, ids=[case.name for case in lines_only])
def test_by_http_between_two_good_ones(door, case):
    seen = Seen(door)
    one, two = event(next(numbers), region="x"), event(next(numbers), region="x")
    body = b"\n".join([one, case.body, two])
    answer = door.post(body, kind="application/x-ndjson")
    assert answer.status == 200
    first, middle, last = answer.verdicts
    assert (first, last) == ("delivered", "delivered")
    # An array is no event, and neither is what follows or lacks something: a line is a line.
    assert middle in ("delivered", "duplicate", "dead")
    assert len(seen.buried) == (middle == "dead")
    assert all(letter.raw == case.body.strip(b" \t\r\n") for letter in seen.buried)
    assert seen.arrived == 3


def test_through_the_spool_it_ends_the_same(tmp_path):
    with live(tmp_path, spool=f"{tmp_path}/spool.db") as running:
        expected = []
        for case in CASES.values():
            answer = running.ask("POST", body=case.body, headers=case.headers)
            assert answer.took < BOUND_S
            if case.http == REFUSED:
                assert answer.status == 413
                continue
            assert answer.status == (202 if case.http else 200)
            expected += case.http
        running.until(lambda: running.counts["arrived"] == len(expected))
        running.until(lambda: running.counts["in_flight"] == 0)
        counts = running.balance()
        letters = running.buried()
        assert counts["dead"] == len(letters) == len({(one.raw, one.reason) for one in letters})
        assert counts["delivered"] + counts["duplicate"] + counts["dead"] == len(expected)
        assert counts["dead"] <= expected.count("dead")
        assert counts["delivered"] == len(running.sink.taken)
        running.until(lambda: running.service.spool.depth == 0)


def run_file(folder, path):
    """Read a file to its end; give the service, and what it stumbled over."""
    running = prepare(folder, source=f"file:{path}")
    failure = None
    try:
        asyncio.run(asyncio.wait_for(running._serve(), BOUND_S))
    except OncebridgeError as error:
        failure = error
    return running, failure


def letters_in(folder):
    from oncebridge.dead_letters.sqlite import SQLiteDeadLetters

    async def read():
        place = SQLiteDeadLetters(f"{folder}/dead.db")
        try:
            return await place.list(limit=1000)
        finally:
            await place.aclose()

    return asyncio.run(read())


@every_case
def test_in_a_file(tmp_path, case):
    path = tmp_path / "input"
    path.write_bytes(case.body)
    began = time.monotonic()
    running, failure = run_file(tmp_path, path)
    assert time.monotonic() - began < BOUND_S
    is_damaged = case.file[-1:] == DAMAGED
    assert (failure is not None) is is_damaged
    expected = case.file[:-1] if is_damaged else case.file
    books = running.service.router.gateways[0].books
    assert books.balance
    assert books.in_flight == 0
    assert books.arrived == len(expected)
    letters, delivered = letters_in(tmp_path), running.sink.bodies
    assert len(letters) == expected.count("dead")
    assert len(delivered) == expected.count("delivered")
    check_letters(letters, case)
    if not case.body.startswith(b"\x1f\x8b"):
        check_nothing_is_left_out(case.body, delivered + [letter.raw for letter in letters])
    for letter in letters:
        assert letter.message.startswith("line ") or letter.reason == "unkeyable"
    check_the_next_file(tmp_path)


def check_nothing_is_left_out(body, records):
    """Check that records are parts of the file, and that only layout is left without them."""
    for record in sorted(records, key=len, reverse=True):
        if len(record) == 64 * 1024:
            assert body.lstrip().startswith(record)
            return
        assert record in body
        body = body.replace(record, b"", 1)
    assert not body.removeprefix(b"\xef\xbb\xbf").strip(b" \t\r\n[],"), body[:100]


def check_the_next_file(folder):
    good = event(next(numbers))
    path = folder / "next"
    path.write_bytes(good)
    running, failure = run_file(folder, path)
    assert failure is None
    assert running.sink.bodies == [good]


def test_a_file_that_was_damaged_says_so_and_can_be_read_again(tmp_path):
    path = tmp_path / "input"
    good = [event(number) for number in range(1000)]
    packed = gzip.compress(b"\n".join(good))
    path.write_bytes(packed[:-200])
    running, failure = run_file(tmp_path, path)
    assert "truncated" in str(failure)
    before = running.sink.bodies
    assert len(before) > 100
    path.write_bytes(packed)
    running, failure = run_file(tmp_path, path)
    assert failure is None
    assert not set(before) & set(running.sink.bodies)
    left = set(good) - set(before) - set(running.sink.bodies)
    assert not left
