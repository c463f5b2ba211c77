import asyncio
import fcntl
import io
import json
import os
import resource
import struct
import subprocess
import sys
import termios
import threading
from contextlib import asynccontextmanager

import pytest
from tests.faults.doubles import event, eventually

from oncebridge import Closed, ConfigError, Delivery, No, SinkError, Unknown, Yes, parse
from oncebridge.sinks.stdout import StdoutSink, StdoutSinkOptions


def deliveries(*numbers, padding=0):
    return [
        Delivery(parse(event({"n": n, "padding": "x" * padding})), b"key %d" % n) for n in numbers
    ]


def numbers_in(text):
    lines = text.splitlines(keepends=True)
    assert all(line.endswith(b"\n") for line in lines)
    return [json.loads(line)["detail"]["n"] for line in lines]


class Pipe:
    """A pipe with a sink at one end and the test at the other."""

    def __init__(self):
        self.out, into = os.pipe()
        self.stream = os.fdopen(into, "wb")
        self.sink = StdoutSink(self.stream)
        self.is_read = True

    async def filled(self):
        """Wait until it takes no more."""
        await eventually(
            lambda: struct.unpack("i", fcntl.ioctl(self.out, termios.FIONREAD, b"    "))[0] > 60_000
        )

    async def read_rest(self):
        """Read until the writing end is closed, and close it."""
        found = []

        def read():
            while piece := os.read(self.out, 65536):
                found.append(piece)

        reader = threading.Thread(target=read)
        reader.start()
        await eventually(lambda: not self.sink._thread.is_busy)
        self.stream.close()
        reader.join()
        return b"".join(found)

    def stop_reading(self):
        if self.is_read:
            self.is_read = False
            os.close(self.out)


@pytest.fixture
async def pipe():
    pipe = Pipe()
    await pipe.sink.open()
    yield pipe
    await pipe.sink.aclose()
    pipe.stream.close()
    pipe.stop_reading()


async def test_each_event_is_a_line_at_once(pipe):
    raw = b'{"detail":\r\n{"n": 1}}\n'
    assert await pipe.sink.deliver([Delivery(parse(raw), b"k")]) == [Yes()]
    assert os.read(pipe.out, 1000) == b'{"detail":  {"n": 1}} \n'
    assert await pipe.sink.deliver(deliveries(2, 3)) == [Yes(), Yes()]
    assert numbers_in(os.read(pipe.out, 1000)) == [2, 3]
    assert await pipe.sink.deliver([]) == []


def test_it_is_the_standard_output_by_default():
    script = (
        "import asyncio\n"
        "from oncebridge import Delivery, parse\n"
        "from oncebridge.sinks.stdout import StdoutSink\n"
        "async def main():\n"
        "    print('first')\n"
        "    sink = StdoutSink.from_url('-')\n"
        "    await sink.open()\n"
        '    event = parse(b\'{"detail":{"n":7}}\')\n'
        "    print(await sink.deliver([Delivery(event, b'k')]))\n"
        "    await sink.aclose()\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, check=True, timeout=60
    )
    assert done.stdout == b'first\n{"detail":{"n":7}}\n[Yes()]\n'
    assert done.stderr == b""


async def test_a_slow_reader_does_not_stop_the_loop(pipe):
    batch = deliveries(*range(100), padding=5000)
    sending = asyncio.ensure_future(pipe.sink.deliver(batch))
    await pipe.filled()  # the loop is free all the while
    assert not sending.done()
    text = await pipe.read_rest()
    assert numbers_in(text) == list(range(100))
    assert await sending == [Yes()] * 100


async def test_when_the_reader_goes_the_rest_finds_the_door_closed(pipe):
    sending = asyncio.ensure_future(pipe.sink.deliver(deliveries(*range(100), padding=5000)))
    await pipe.filled()
    pipe.stop_reading()
    answers = await sending
    taken = answers.count(Yes())
    assert 0 < taken < 100
    assert answers[:taken] == [Yes()] * taken  # a pipe holds some
    assert {type(answer) for answer in answers[taken:]} == {Closed}
    assert [type(one) for one in await pipe.sink.deliver(deliveries(1, 2))] == [Closed, Closed]


async def test_while_the_reader_does_not_read_others_are_turned_away(pipe):
    sending = asyncio.ensure_future(pipe.sink.deliver(deliveries(*range(100), padding=5000)))
    await pipe.filled()
    (answer,) = await pipe.sink.deliver(deliveries(1))
    assert isinstance(answer, No)
    await pipe.read_rest()
    assert await sending == [Yes()] * 100


async def test_a_batch_that_was_given_up_ends_with_a_whole_line(pipe):
    sending = asyncio.ensure_future(pipe.sink.deliver(deliveries(*range(100), padding=5001)))
    await pipe.filled()
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    await eventually(lambda: not pipe.sink._thread.is_busy)
    following = asyncio.ensure_future(pipe.sink.deliver(deliveries(1000, 1001)))
    await asyncio.sleep(0)  # it has begun
    numbers = numbers_in(await pipe.read_rest())
    assert await following == [Yes(), Yes()]
    assert numbers == [*range(len(numbers) - 2), 1000, 1001]
    assert 0 < len(numbers) < 50  # what was not begun was not sent


async def test_closing_does_not_wait_for_a_reader_that_stands_still(pipe):
    sending = asyncio.ensure_future(pipe.sink.deliver(deliveries(*range(100), padding=5000)))
    await pipe.filled()
    await pipe.sink.aclose()
    answers = await sending
    kinds = [type(answer) for answer in answers]
    taken = kinds.count(Yes)
    # the line that was begun may arrive or not
    assert kinds in (
        [Yes] * taken + rest for rest in ([Unknown] + [No] * (99 - taken), [No] * (100 - taken))
    )
    assert 0 < taken < 20


async def test_a_pipe_that_does_not_wait_is_waited_for(pipe):
    os.set_blocking(pipe.stream.fileno(), False)
    sending = asyncio.ensure_future(pipe.sink.deliver(deliveries(*range(100), padding=5000)))
    await pipe.filled()
    assert numbers_in(await pipe.read_rest()) == list(range(100))
    assert await sending == [Yes()] * 100


@asynccontextmanager
async def writing_to(stream):
    sink = StdoutSink(stream)
    await sink.open()
    yield sink
    await sink.aclose()
    await sink.aclose()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")  # noqa: PTH110
async def test_a_full_disk_is_a_no():
    with open("/dev/full", "wb", buffering=0) as full:  # noqa: ASYNC230, PTH123
        async with writing_to(full) as sink:
            answers = await sink.deliver(deliveries(1, 2))
    assert answers == [No("the standard output: No space left on device")] * 2


async def test_what_was_written_in_part_is_unknown_and_finished_later(tmp_path):
    path = tmp_path / "out"
    line = len(event({"n": 1, "padding": ""})) + 1
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with path.open("wb") as file:
        async with writing_to(file) as sink:
            resource.setrlimit(resource.RLIMIT_FSIZE, (line + 10, hard))
            try:
                answers = await sink.deliver(deliveries(1, 2, 3))
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            assert [type(answer) for answer in answers] == [Yes, Unknown, No]
            assert await sink.deliver(deliveries(4)) == [Yes()]
    assert numbers_in(path.read_bytes()) == [1, 2, 4]


async def test_a_stream_in_memory_will_do():
    stream = io.BytesIO()
    async with writing_to(stream) as sink:
        assert await sink.deliver(deliveries(1, 2, padding=10_000)) == [Yes(), Yes()]
    assert numbers_in(stream.getvalue()) == [1, 2]


async def test_a_stream_that_is_closed_is_refused_and_later_a_closed_door():
    stream = io.BytesIO()
    async with writing_to(stream) as sink:
        stream.close()
        assert [type(one) for one in await sink.deliver(deliveries(1))] == [Closed]
    with pytest.raises(SinkError, match="closed"):
        await StdoutSink(stream).open()


@pytest.mark.parametrize("stdout", [None, io.StringIO()])
async def test_without_a_standard_output_it_does_not_start(monkeypatch, stdout):
    monkeypatch.setattr(sys, "stdout", stdout)
    with pytest.raises(SinkError, match="no standard output"):
        await StdoutSink().open()


def test_its_address_is_a_dash():
    assert isinstance(StdoutSink.from_url("-", StdoutSinkOptions()), StdoutSink)
    for url in ("", "--", "-x", "file:-", "stdout:"):
        with pytest.raises(ConfigError, match="output is '-'") as caught:
            StdoutSink.from_url(url)
        assert caught.value.where == ""


def test_a_sink_announces_how_it_wants_its_deliveries():
    sink = StdoutSink()
    assert (sink.batch, sink.concurrency) == (100, 1)
    assert StdoutSink.Options is StdoutSinkOptions
