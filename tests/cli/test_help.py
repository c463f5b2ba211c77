"""Every command explains itself, within 80 columns."""

import os
import subprocess
import sys
from collections.abc import Iterator

import click
import pytest

from oncebridge.cli.app import LazyCommand, app


def commands(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    command = command.load() if isinstance(command, LazyCommand) else command
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


@pytest.mark.parametrize("command", app.commands.values(), ids=lambda command: command.name)
def test_the_table_of_commands_has_the_first_sentence_of_their_help(command):
    loaded = command.load()
    assert loaded.name == command.name
    assert " ".join(loaded.help.partition("\n\n")[0].split()) == command.help


DRIVERS = {"asyncio", "duckdb", "httptools", "jinja2", "msgspec", "rich", "sqlite3", "uvloop"}


@pytest.mark.parametrize(
    ("arguments", "environment", "shown"),
    [
        (["--version"], {}, "oncebridge, version"),
        (["--help"], {}, "Find the duplicates in recorded events, and their causes."),
        (
            [],
            {
                "_ONCEBRIDGE_COMPLETE": "bash_complete",
                "COMP_WORDS": "oncebridge re",
                "COMP_CWORD": "1",
            },
            "plain,release\nplain,resend\nplain,resume\n",
        ),
    ],
    ids=["version", "help", "completion"],
)
def test_what_runs_no_command_loads_no_command(tmp_path, arguments, environment, shown):
    code = (
        "import sys\n"
        "from oncebridge.cli import main\n"
        f"sys.argv = {['oncebridge', *arguments]!r}\n"
        "try:\n    main()\n"
        "except SystemExit:\n    print(*sys.modules, sep='\\n', file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert shown in done.stdout
    loaded = set(done.stderr.split())
    ours = {name for name in loaded if name.startswith("oncebridge")}
    assert ours == {"oncebridge", "oncebridge.cli", "oncebridge.cli.app"}
    assert not loaded & DRIVERS


def test_a_package_that_is_missing_is_named(tmp_path):
    code = (
        "import sys\n"
        "sys.modules['rich'] = None\n"
        "from oncebridge.cli import main\n"
        "sys.argv = ['oncebridge', 'explain', 'x.json']\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == (
        "oncebridge: the command line needs rich: pip install 'oncebridge[service]'\n"
    )


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
