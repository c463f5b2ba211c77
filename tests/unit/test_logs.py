"""One line for each thing that happens: for people, for programs, and for neither a secret."""

import json
import logging
import sys

import pytest

from oncebridge.base.secrets import Address, Secret
from oncebridge.service import logs

CANARY = "c4n4ry-5hh"


class Terminal:
    """A standard error that is a terminal, or is none."""

    def __init__(self, *, is_terminal):
        self._is_terminal = is_terminal
        self.written = ""

    def isatty(self):
        return self._is_terminal

    def write(self, text):
        self.written += text

    def flush(self):
        pass

    @property
    def lines(self):
        return self.written.splitlines()


@pytest.fixture
def stderr(monkeypatch):
    log = logging.getLogger("oncebridge")
    before = list(log.handlers), log.level, log.propagate

    def become(*, is_terminal=False):
        terminal = Terminal(is_terminal=is_terminal)
        monkeypatch.setattr(sys, "stderr", terminal)
        return terminal

    yield become
    log.handlers[:], log.level, log.propagate = before
    log.setLevel(before[1])


def log():
    return logging.getLogger("oncebridge")


def test_elsewhere_a_line_is_json_with_its_fields(stderr):
    terminal = stderr()
    logs.set_up("info", "auto")
    log().info("oncebridge.batch", extra={"route": "crm", "delivered": 3})
    (line,) = terminal.lines
    told = json.loads(line)
    assert (told["event"], told["level"]) == ("oncebridge.batch", "info")
    assert (told["route"], told["delivered"]) == ("crm", 3)
    assert told["time"].endswith("Z")
    assert told.keys() == {"event", "level", "route", "delivered", "time"}


def test_on_a_terminal_a_line_is_for_people_with_a_colour_where_it_matters(stderr):
    terminal = stderr(is_terminal=True)
    logs.set_up("info", "auto")
    log().info("oncebridge.up_again", extra={"route": "crm"})
    log().warning("oncebridge.down", extra={"route": "crm"})
    plain, coloured = terminal.lines
    assert plain[9:] == "up again route=crm"
    assert coloured[9:] == "\x1b[33mdown\x1b[0m route=crm"


def test_the_form_can_be_chosen(stderr):
    terminal = stderr(is_terminal=True)
    logs.set_up("info", "json")
    log().info("oncebridge.ready")
    assert json.loads(terminal.lines[0])["event"] == "oncebridge.ready"
    terminal = stderr()
    logs.set_up("info", "text")
    log().error("oncebridge.down")
    assert terminal.lines[0][9:] == "down"


@pytest.mark.parametrize("level", ["debug", "info", "warning", "error"])
def test_less_than_the_level_is_not_written(stderr, level):
    terminal = stderr()
    logs.set_up(level, "json")
    for each in ("debug", "info", "warning", "error"):
        getattr(log(), each)(f"oncebridge.{each}")
    names = ["debug", "info", "warning", "error"]
    assert [json.loads(line)["level"] for line in terminal.lines] == names[names.index(level) :]


def test_setting_up_twice_writes_once(stderr):
    terminal = stderr()
    logs.set_up("info", "json")
    logs.set_up("info", "json")
    log().info("oncebridge.ready")
    assert len(terminal.lines) == 1


def test_a_line_goes_to_what_is_standard_error_at_that_moment(stderr):
    first = stderr()
    logs.set_up("info", "json")
    second = stderr()
    log().info("oncebridge.ready")
    assert (len(first.lines), len(second.lines)) == (0, 1)


@pytest.mark.parametrize("form", ["json", "text"])
def test_an_exception_is_told_by_its_type_and_never_by_its_text(stderr, form):
    terminal = stderr()
    logs.set_up("debug", form)
    try:
        int(CANARY)
    except ValueError as error:
        log().exception("oncebridge.batch_failed")
        log().error("oncebridge.batch_failed", exc_info=error)
    assert len(terminal.lines) == 2
    assert all("ValueError" in line for line in terminal.lines)
    assert CANARY not in terminal.written
    assert "Traceback" not in terminal.written


@pytest.mark.parametrize("form", ["json", "text"])
def test_a_secret_and_the_password_of_an_address_stay_hidden(stderr, form):
    terminal = stderr()
    logs.set_up("debug", form)
    fields = {"secret": Secret(CANARY), "url": Address(f"redis://:{CANARY}@h/0")}
    log().info("oncebridge.ready", extra=fields)
    assert CANARY not in terminal.written
    assert "redis://***@h/0" in terminal.written


@pytest.mark.parametrize("form", ["json", "text"])
def test_whatever_a_field_holds_a_line_stays_one_line(stderr, form):
    terminal = stderr()
    logs.set_up("debug", form)
    values = ["a\nb", "\r", "\x1b[2J", "\u2028", "\ud800", "caf\u00e9", None, 1.5, b"x", [1], {}]
    for value in values:
        log().info("oncebridge.batch", extra={"route": value})
    assert len(terminal.lines) == len(values)
    assert not any(character in terminal.written for character in "\r\x1b\u2028\ud800")
    assert "caf" in terminal.written


def test_our_lines_stay_ours(stderr, caplog):
    stderr()
    logs.set_up("info", "json")
    log().info("oncebridge.ready")
    assert not caplog.records  # the root's handlers would print them a second time
