"""What is printed says it in plain words, on any width, and cannot harm a terminal."""

import pytest
from msgspec.structs import replace
from rich.console import Console
from tests.audit.reports import DAY, HOUR, MINUTE, empty, gaps, report, trial
from tests.audit.test_html import NASTY, nasty

from oncebridge.audit import text as report_text
from oncebridge.audit.report import NaiveKey
from oncebridge.audit.suggest import suggest
from oncebridge.audit.terminal import show
from oncebridge.base import formatting as figures


def printed(found, width: int = 80) -> list[str]:
    console = Console(highlight=False, markup=False, emoji=False, width=width, no_color=True)
    with console.capture() as captured:
        show(found, suggest(found), console)
    return captured.get().splitlines()


def flat(found) -> str:
    return " ".join(" ".join(line.split()) for line in printed(found))


def test_the_first_sentence_is_the_answer():
    lines = printed(report())
    assert lines[2] == "12,340 arrivals contain 9,001 events; 3,339 arrivals are duplicates (27 %)."


def test_the_order_is_that_of_the_questions():
    text = "\n".join(printed(report(trial=trial(3))))
    heads = (
        *("Duplicates by cause", "Time since the first arrival", "Topics with most duplicates"),
        "Sources",
        *("What a simple key would have done", "Needs review", "Unreadable: 2 records"),
        *("The candidate rules", "Suggested configuration"),
    )
    places = [text.index(head) for head in heads]
    assert places == sorted(places)


@pytest.mark.parametrize("width", [80, 100, 118, 200])
def test_it_fits(width):
    lines = printed(report(trial=trial(25)), width)
    until = lines.index("Suggested configuration")
    assert max(map(len, lines[:until])) <= width
    assert not [line for line in lines if line != line.rstrip()]


def test_numbers_and_units_stay_together_as_plain_blanks():
    text = "\n".join(printed(report()))
    assert figures.NB not in text
    assert "\ue000" not in text
    assert "\n    s," not in text


def test_twenty_differences_are_shown_and_the_rest_counted():
    text = flat(report(trial=trial(25)))
    assert text.count("delivered → duplicate") == 21
    assert "and 5 more; write all of them with --differences FILE" in text


def test_nothing_out_of_an_event_reaches_the_terminal_as_it_is():
    console = Console(force_terminal=True, width=100, color_system="truecolor")
    with console.capture() as captured:
        found = nasty()
        show(found, suggest(found), console)
    text = captured.get()
    assert "\u202e" not in text
    assert "\\x1b[31m" in text
    # Only our own styles begin with an escape, and none of them is followed by what was there.
    assert NASTY not in text


def test_brackets_are_no_markup():
    assert "[bold]x[/bold]" in flat(
        report(rules=(replace(report().rules[0], name="[bold]x[/bold]"),))
    )


def test_a_recording_without_events_says_so():
    assert "No events found." in flat(empty())
    assert "Suggested" not in flat(empty())


def test_other_verdicts_are_named():
    from oncebridge.engine.verdict import Verdict

    found = report(verdicts={Verdict.DELIVERED: 5, Verdict.STALE: 2, Verdict.DEAD: 1})
    assert "Including 2 stale, 1 dead." in flat(found)


def test_how_times_were_found_is_said_unless_they_were_recorded():
    assert "has no arrival times" in flat(report(clock="published"))
    assert "Neither the recording" in flat(report(clock="none", gaps=None))
    assert "has no arrival times" not in flat(report())


# --- words --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ms", "told"),
    [
        (0, "0 ms"),
        (999, "999 ms"),
        (1000, "1 s"),
        (2100, "2.1 s"),
        (12_345, "12 s"),
        (90_000, "1 min 30 s"),
        (15 * MINUTE, "15 min"),
        (4 * HOUR + 12 * MINUTE, "4 h 12 min"),
        (26 * HOUR, "1 d 2 h"),
        (6 * DAY, "6 d"),
        (40 * DAY, "40 d"),
    ],
)
def test_times_are_told_in_two_units(ms, told):
    assert figures.format_elapsed(ms).replace(figures.NB, " ") == told


@pytest.mark.parametrize(
    ("part", "whole", "told"),
    [
        (0, 0, "0 %"),
        (0, 9, "0 %"),
        (9, 9, "100 %"),
        (1, 1000, "<1 %"),
        (999, 1000, ">99 %"),
        (1, 3, "33 %"),
    ],
)
def test_none_and_all_are_said_only_where_they_are_so(part, whole, told):
    assert figures.format_share(part, whole).replace(figures.NB, " ") == told


@pytest.mark.parametrize(
    ("lost", "let_through", "told"),
    [
        (312, 41, "would have lost 312 events and delivered 41 duplicates"),
        (1, 0, "would have lost 1 event"),
        (0, 2, "would have delivered 2 duplicates"),
        (0, 0, "would have been correct on this recording"),
    ],
)
def test_a_naive_key_is_judged_in_words(lost, let_through, told):
    assert report_text.naive_outcome(NaiveKey("envelope-id", "", lost, let_through, ())) == told


@pytest.mark.parametrize(
    ("counts", "window_ms", "told"),
    [
        ((9,), 6 * DAY, ["A window of 5 min would have covered all of them."]),
        (
            (9, 0, 0, 0, 0, 0, 2, 1),
            6 * DAY,
            [
                "A window of 5 min would have missed 3 duplicates.",
                "A window of 24 h would have covered all of them.",
            ],
        ),
        ((9, 0, 0, 0, 0, 0, 0, 1), HOUR, ["A window of 5 min would have missed 1 duplicate."]),
    ],
)
def test_windows_are_judged_by_the_gaps(counts, window_ms, told):
    found = report(gaps=gaps(*counts, longest=1000), window_ms=window_ms, last_ms=None)
    assert [line.replace(figures.NB, " ") for line in report_text.window_sentences(found)] == told


def test_a_recording_cannot_hold_gaps_that_are_longer_than_itself():
    assert report_text.window_sentences(report())[-1].startswith("The recording covers 4\xa0h")
    assert not report_text.window_sentences(report(window_ms=HOUR))[-1].startswith("The recording")


def test_gaps_that_come_near_the_window_are_a_warning():
    found = report(gaps=gaps(1, longest=5 * DAY))
    assert "Try a longer window" in report_text.window_sentences(found)[-1]


def test_one_of_each_is_said_in_the_singular():
    found = replace(report(), events=2, logical=1, causes=report().causes[:1])
    found = replace(found, causes=(replace(found.causes[0], count=1),))
    assert report_text.headline(found).startswith(
        "2 arrivals contain 1 event; 1 arrival is a duplicate"
    )
    late = replace(found, events=5, after_window=3)
    assert report_text.headline(late).endswith(
        "(20\xa0%), and 3 more arrived again after the window."
    )
    late = replace(found, causes=(), after_window=1)
    assert report_text.headline(late).endswith(
        "no duplicates, and 1 arrived again after the window."
    )


def test_long_names_are_cut_in_the_middle():
    assert figures.shorten("abcdefghijklmnop", 9) == "abcdef…op"
    assert figures.shorten("short", 9) == "short"
