from datetime import timedelta

import pytest

from oncebridge import ConfigError
from oncebridge.base.durations import format_duration, parse_duration


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("500ms", timedelta(milliseconds=500)),
        ("1ms", timedelta(milliseconds=1)),
        ("30s", timedelta(seconds=30)),
        ("5m", timedelta(minutes=5)),
        ("36h", timedelta(hours=36)),
        ("6d", timedelta(days=6)),
        ("3650d", timedelta(days=3650)),
        ("1.5h", timedelta(minutes=90)),
        ("0.25s", timedelta(milliseconds=250)),
        ("007s", timedelta(seconds=7)),
        (" 30s ", timedelta(seconds=30)),
        (timedelta(seconds=3), timedelta(seconds=3)),
    ],
)
def test_what_is_a_duration(text, expected):
    assert parse_duration(text, "window") == expected


@pytest.mark.parametrize(
    "text",
    [
        *("", "s", "30", "30 s", "-5s", "+5s", "5S", "5 minutes", "1h30m", "1e3s", ".5s", "5.s"),
        *("\u0663s", "1_000s", "infs", "nans", "5s\0", "5s\n5s", "0x5s"),
        *(None, 30, 30.0, True, [], {}, b"30s"),
    ],
)
def test_what_is_none_says_how_to_write_one(text):
    with pytest.raises(ConfigError, match="500ms, 30s, 5m, 36h, 6d") as caught:
        parse_duration(text, "rules[0].window")
    assert caught.value.where == "rules[0].window"
    assert repr(text) in caught.value.message


@pytest.mark.parametrize(
    "text",
    [
        *("0s", "0ms", "0.0001ms", "0.4ms", "3651d", "100000h", "9" * 400 + "d"),
        *(timedelta(0), timedelta(seconds=-1), timedelta(days=4000), timedelta.max),
    ],
)
def test_what_is_too_short_or_too_long_is_refused(text):
    with pytest.raises(ConfigError, match="at least 1ms and at most 3650d") as caught:
        parse_duration(text, "lease")
    assert caught.value.where == "lease"


@pytest.mark.parametrize("text", ["1ms", "999ms", "1s", "90s", "5m", "36h", "6d", "3650d", "7m"])
def test_what_is_written_reads_back(text):
    duration = parse_duration(text, "x")
    assert parse_duration(format_duration(duration), "x") == duration


@pytest.mark.parametrize(
    ("duration", "text"),
    [
        (timedelta(milliseconds=1), "1ms"),
        (timedelta(milliseconds=1500), "1500ms"),
        (timedelta(seconds=90), "90s"),
        (timedelta(minutes=60), "1h"),
        (timedelta(hours=24), "1d"),
        (timedelta(hours=36), "36h"),
        (timedelta(microseconds=1500), "1.5ms"),
        (timedelta(0), "0ms"),
    ],
)
def test_a_duration_is_written_in_the_largest_unit_that_divides_it(duration, text):
    assert format_duration(duration) == text
