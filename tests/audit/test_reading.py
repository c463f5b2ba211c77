"""Whatever shape a recording has, the same events are found in it, each at its place."""

import gzip
import io
import json
import os
import sys
from pathlib import Path

import pytest
from tests.audit.recordings import audited, event, lines, raw

from oncebridge import ConfigError
from oncebridge.audit import reading
from oncebridge.audit.engine import audit
from oncebridge.audit.reading import Block, Damage, RecordBatch, find_files, read_pieces

THREE = [event(1), event(2, at_s=1), event(1, id="other", at_s=2)]
ONE_TO_THREE = ["delivered", "delivered", "duplicate"]


def found(path, expected=ONE_TO_THREE, **options):
    report, told = audited(path, **options)
    assert [verdict for _, verdict, _ in told] == expected
    assert report.events == len(expected)
    return report, [place.removeprefix(f"{path}:") for place, *_ in told]


def written(tmp_path, content, name="recorded"):
    path = tmp_path / name
    path.write_bytes(content)
    return path


NDJSON = lines(*(json.dumps(each).encode() for each in THREE))
PRETTY = "\n".join(json.dumps(each, indent=2) for each in THREE).encode()
BOM = b"\xef\xbb\xbf"


@pytest.mark.parametrize(
    ("content", "at"),
    [
        (NDJSON, ["1", "2", "3"]),
        (NDJSON.rstrip(), ["1", "2", "3"]),
        (NDJSON.replace(b"\n", b"\r\n"), ["1", "2", "3"]),
        (NDJSON.replace(b"\n", b"\n\n \n"), ["1", "4", "7"]),
        (b"\n\n" + NDJSON, ["3", "4", "5"]),
        (BOM + NDJSON, ["1", "2", "3"]),
        (json.dumps(THREE).encode(), ["1", "1", "1"]),
        (json.dumps(THREE, indent=1).encode(), None),
        (PRETTY, None),
        (NDJSON.replace(b"\n", b""), ["1", "1", "1"]),
        (json.dumps({"Records": THREE}, indent=2).encode(), ["1", "1", "1"]),
    ],
    ids=[
        *("lines", "no-end", "crlf", "blank", "blank-first", "bom"),
        *("array", "array-pretty", "pretty", "concatenated", "records"),
    ],
)
@pytest.mark.parametrize("is_packed", [False, True])
def test_every_shape_gives_the_same(content, at, is_packed, tmp_path):
    path = written(tmp_path, gzip.compress(content) if is_packed else content)
    report, places = found(path)
    if at is not None:
        assert places == at
    assert report.unreadable == {}
    assert report.size == path.stat().st_size


def test_places_are_right_however_a_file_is_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "_BLOCK", 1000)
    monkeypatch.setattr(reading, "_TAIL", 300)
    texts = [raw(number, at_s=number % 60) for number in range(1, 60)]
    texts[10] = b""
    texts[20] = b"not json"
    path = written(tmp_path, lines(*texts))
    pieces = list(read_pieces(find_files([path])))
    assert len(pieces) > 5
    assert all(isinstance(piece.work, Block) for piece in pieces)
    assert sum(piece.work.size for piece in pieces) == path.stat().st_size
    report, told = audited(path)
    there = [n for n in range(1, 60) if n not in (11, 21)]
    assert [int(place.rpartition(":")[2]) for place, *_ in told] == there
    assert report.unreadable_places == (f"{path}:21",)
    assert report.records == 58


def test_a_directory_is_read_in_the_order_of_names(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".hidden").mkdir()
    written(tmp_path, raw(1, id="hidden"), ".hidden/a.json")
    written(tmp_path, raw(1, id="hidden"), ".a.json")
    written(tmp_path, gzip.compress(raw(1, id="second")), "b/2.gz")
    written(tmp_path, json.dumps([event(1, id="first")]).encode(), "a.json")
    written(tmp_path, b"", "c-empty.ndjson")
    report, told = audited(tmp_path)
    assert report.files == 3
    assert told == [
        (f"{tmp_path}/a.json:1", "delivered", ""),
        (f"{tmp_path}/b/2.gz:1", "duplicate", f"{tmp_path}/a.json:1"),
    ]


def test_standard_input_is_a_dash(monkeypatch, tmp_path):
    with os.fdopen(os.memfd_create("in"), "w+b") as file:
        file.write(NDJSON)
        file.seek(0)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(file))
        _, told = audited(Path("-"), workers=0)
    assert [place for place, *_ in told] == ["-:1", "-:2", "-:3"]


def test_what_is_not_there_is_said_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"gone\.ndjson: no such file"):
        audit([tmp_path / "gone.ndjson"], [])
    with pytest.raises(ConfigError, match="files: no files found"):
        audit([tmp_path], [])


def test_a_gzip_file_is_read_as_far_as_it_goes(tmp_path):
    whole = gzip.compress(lines(*(raw(n) for n in range(5_000))))
    path = written(tmp_path, whole[: len(whole) // 2])
    report, told = audited(path)
    assert report.unreadable.get("bad-gzip") == 1
    assert 1_000 < report.events < 5_000
    assert int(report.unreadable_places[-1].rpartition(":")[2]) >= len(told)
    damage = [each for each in read_pieces(find_files([path])) if isinstance(each, Damage)]
    assert len(damage) == 1


def test_nothing_of_the_other_files_is_lost_behind_a_damaged_one(tmp_path):
    written(tmp_path, b"\x1f\x8bno gzip at all", "1.gz")
    written(tmp_path, NDJSON, "2.ndjson")
    report, _ = audited(tmp_path)
    assert report.unreadable == {"bad-gzip": 1}
    assert report.unreadable_places == (f"{tmp_path}/1.gz:1",)
    assert report.events == 3


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_line_without_end_is_refused_and_the_rest_is_read(is_packed, tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "MOST_RECORD", 10_000)
    endless = b'{"detail": "' + b"x" * 50_000 + b'"}'
    content = lines(raw(1), endless, raw(1, id="other"))
    path = written(tmp_path, gzip.compress(content) if is_packed else content)
    monkeypatch.setattr(reading, "_BLOCK", 2_000)
    report, places = found(path, ["delivered", "duplicate"])
    assert places == ["1", "3"]
    assert report.unreadable == {"too-large": 1}
    assert report.unreadable_places == (f"{path}:2",)


def dumps(name, many, **beside):
    texts = [json.dumps(event(n % 7, id=f"i{n}", at_s=n % 60)) for n in range(many)]
    if name == "events":
        held = [{"timestamp": 1_773_915_300_000 + n, "message": t} for n, t in enumerate(texts)]
    else:
        held = [{"MessageId": str(n), "ReceiptHandle": "r", "Body": t} for n, t in enumerate(texts)]
    return {name: held, **beside}


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("name", ["events", "Messages"])
def test_a_dump_that_is_too_large_for_one_record_is_read_piece_by_piece(
    name, indent, is_packed, tmp_path, monkeypatch
):
    monkeypatch.setattr(reading, "MOST_RECORD", 20_000)
    dump = dumps(name, 300, searchedLogStreams=[], nextToken="a, b: [c]", more=1.5, none=None)
    content = json.dumps(dump, indent=indent).encode()
    assert len(content) > 60_000
    path = written(tmp_path, gzip.compress(content) if is_packed else content)
    report = audit([path], [])
    assert (report.events, report.logical, report.unreadable) == (300, 7, {})
    assert report.clock == ("recorded" if name == "events" else "published")


def test_dumps_behind_each_other_are_all_read(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "MOST_RECORD", 20_000)
    several = "\n".join(json.dumps(dumps("Messages", many), indent=4) for many in (200, 5, 5))
    report = audit([written(tmp_path, several.encode())], [])
    assert (report.events, report.unreadable) == (210, {})
    small = "\n".join(json.dumps(dumps("Messages", 5), indent=4) for _ in range(5))
    report = audit([written(tmp_path, small.encode())], [])
    assert (report.events, report.logical) == (25, 5)


def test_batches_are_made_of_what_is_no_plain_lines(tmp_path):
    path = written(tmp_path, gzip.compress(NDJSON))
    pieces = list(read_pieces(find_files([path])))
    assert all(isinstance(piece.work, RecordBatch) for piece in pieces)
    assert [line for piece in pieces for line in piece.work.lines] == [0, 1, 2]
    assert b"".join(raw for piece in pieces for raw in piece.work.raws) == NDJSON.replace(
        b"\n", b""
    )
    assert pieces[-1].read == path.stat().st_size
