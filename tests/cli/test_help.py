"""Every command explains itself, within 80 columns."""

import os
import subprocess
import sys
from collections.abc import Iterator

import click
import pytest

from oncebridge.cli.app import app


def commands(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    if isinstance(command, click.Group):
        for name, inner in command.commands.items():
            yield from commands(inner, (*path, name))


ALL = list(commands(app))


def test_the_commands_are_those_that_are_promised():
    promised = "run init explain forget dead pause resume test schema completion demo simulate"
    promised += " copy migrate template audit check release resend dashboard"
    assert {path[0] for path in ALL if path} == set(promised.split())
    below = {
        "dead": {"list", "show", "replay", "drop"},
        "template": {"iam", "lambda", "table", "worker"},
    }
    for group, names in below.items():
        assert {path[1] for path in ALL if path[:1] == (group,) and len(path) > 1} == names


@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_a_command_has_an_example_that_stands_on_its_own_line(call, path):
    shown = call(*path, "--help").out
    if path[:1] in (("demo",), ("simulate",)):
        assert "oncebridge" in shown
        return
    _, _, examples = shown.partition("Examples:\n")
    assert any(line.strip().startswith("oncebridge") for line in examples.splitlines())
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_printed_for_a_shell(call, shell):
    assert "_ONCEBRIDGE_COMPLETE" in call("completion", shell).out


COMPLETE = "from oncebridge.cli.app import app; app(prog_name='oncebridge')"


def test_a_shell_is_told_what_can_follow(tmp_path):
    words = {"COMP_WORDS": "oncebridge dead re", "COMP_CWORD": "2"}
    done = subprocess.run(
        [sys.executable, "-c", COMPLETE],
        cwd=tmp_path,
        env=os.environ | words | {"_ONCEBRIDGE_COMPLETE": "bash_complete"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "plain,replay\n"


def test_a_mistake_in_the_configuration_is_told_in_plain_words(run, write):
    write("pipe.toml", 'windw = "2d"\nlease = 7')
    ran = run("explain", "x.json", "-c", "pipe.toml", code=2)
    assert "2 errors in pipe.toml" in ran.err
    assert "did you mean 'window'?" in ran.err


def test_output_that_nobody_reads_ends_quietly(tmp_path, write):
    write("events.ndjson", *[{"detail": {"n": n}} for n in range(3000)])
    for form in (["--json"], []):
        shell = f"{sys.executable} -m oncebridge explain events.ndjson {' '.join(form)} | head -n 1"
        done = subprocess.run(
            ["bash", "-c", shell], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.stdout.count("\n") == 1
        assert done.stderr.splitlines() == [
            "oncebridge: no verdicts: the store sqlite:oncebridge.db does not exist yet"
        ]
