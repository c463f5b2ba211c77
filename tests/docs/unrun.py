"""
What the documentation tells people to type, and no test here runs: each with the reason.

Such a command is still looked at: that the options, operations, targets, extras and files which it
names are there. An entry that no page needs any more has to go.
"""

import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import botocore.session
import click
import yaml
from botocore import xform_name
from click.testing import CliRunner
from tests.docs.pages import ROOT
from tests.docs.shell import Command

from oncebridge.cli.app import LazyCommand, app


@dataclass(frozen=True)
class Unrun:
    """A kind of command that is not run."""

    program: str
    reason: str
    check: Callable[[Command], None]

    def is_in(self, command: Command) -> bool:
        return bool(re.search(rf"(^|[\s(;|&]){self.program}(?=\s|$)", command.text))


def _look(_command: Command) -> None:
    """There is nothing in it that we could know."""


# --- oncebridge inside of something else --------------------------------------------------


def oncebridge(words: Sequence[str]) -> None:
    """Find the command and the options that *words*, behind `oncebridge`, name."""
    command: click.Command = app
    names = []
    for word in words:
        if isinstance(command, click.Group) and not word.startswith("-"):
            assert word in command.commands, f"there is no oncebridge {' '.join([*names, word])}"
            command = command.commands[word]
            command = command.load() if isinstance(command, LazyCommand) else command
            names.append(word)
        elif word.startswith("-") and word != "-":
            known = {one for parameter in command.params for one in parameter.opts} | {"--help"}
            option = word.partition("=")[0]
            assert option in known, f"{option} is no option of oncebridge {' '.join(names)}"


def _inside(command: Command) -> None:
    """Look at the call of oncebridge at the end of a command, and at the files it names."""
    words = command.words
    for at, word in enumerate(words):
        if word == "-f":
            assert (ROOT / words[at + 1]).exists(), words[at + 1]
    last = len(words) - 1 - words[::-1].index("oncebridge") if "oncebridge" in words else None
    if last is not None and words[last + 1 :] and words[last + 1] in app.commands:
        oncebridge(words[last + 1 :])


# --- AWS ----------------------------------------------------------------------------------

_GLOBAL = {"--query", "--output", "--region", "--profile", "--endpoint-url"}
_CUSTOM = {
    ("s3", "mb"): set(),
    ("s3", "cp"): {"--recursive"},
    ("s3", "sync"): {"--delete", "--exclude", "--include"},
    ("logs", "tail"): {"--since", "--follow", "--format"},
    ("cloudformation", "deploy"): {
        *("--stack-name", "--template-file", "--capabilities", "--parameter-overrides"),
    },
}
"""Commands of the AWS CLI that are no operations of an API, with options from its manual."""


def _aws(command: Command) -> None:
    """Look the operation and its options up in the models of AWS; parameters in our templates."""
    for words in _calls(command):
        service, operation, *rest = words
        options = {word.partition("=")[0] for word in rest if word.startswith("--")}
        custom = _CUSTOM.get((service, operation))
        known = _members(service, operation) if custom is None else custom
        assert options <= known | _GLOBAL, (words, options - known - _GLOBAL)
        if (service, operation) == ("cloudformation", "deploy"):
            given = rest[rest.index("--parameter-overrides") + 1 :]
            names = {one.partition("=")[0] for one in given if "=" in one}
            assert names <= _parameters(), names - _parameters()


def _calls(command: Command) -> Iterator[list[str]]:
    words = command.words
    starts = [at for at, word in enumerate(words) if word == "aws"]
    for at, end in zip(starts, [*starts[1:], len(words)], strict=True):
        yield words[at + 1 : end]


@cache
def _members(service: str, operation: str) -> set[str]:
    model = botocore.session.Session().get_service_model(service)
    found = [one for one in model.operation_names if xform_name(one, "-") == operation]
    assert found, f"AWS has no {service} {operation}"
    shape = model.operation_model(found[0]).input_shape
    return {f"--{xform_name(name, '-')}" for name in shape.members} if shape else set()


class _Loader(yaml.SafeLoader):
    """Reads a template; what its functions would give does not matter here."""


_Loader.add_multi_constructor("!", lambda _loader, _suffix, _node: None)


@cache
def _parameters() -> frozenset[str]:
    found: set[str] = set()
    for kind in ("lambda", "worker"):
        printed = CliRunner().invoke(app, ["template", kind])
        assert printed.exit_code == 0, printed.output
        found |= set(yaml.load(printed.stdout, _Loader)["Parameters"])
    return frozenset(found)


# --- what installs ------------------------------------------------------------------------

_PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def _extras(command: Command) -> None:
    """Look the extras up in the project."""
    named = re.findall(r"(?:oncebridge|\.)\[([\w,]+)\]", command.text)
    assert named or "-r " in command.text, command.text
    for extras in named:
        unknown = set(extras.split(",")) - _PROJECT["optional-dependencies"].keys()
        assert not unknown, f"no such extra: {unknown}"


def _target(command: Command) -> None:
    """Look the targets up in the Makefile."""
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = [word for word in command.words[1:] if "=" not in word]
    assert set(named) <= set(targets), set(named) - set(targets)


def _file(command: Command) -> None:
    """Look for the files of the repository that it names."""
    for word in command.words:
        if re.match(r"(deploy|bench|examples|requirements|fuzz|spec|tests)/", word):
            assert (ROOT / word).exists(), word


def _rows(command: Command) -> None:
    """Look for the rows of the model that it names."""
    rows = (ROOT / "spec" / "rows.py").read_text()
    for option, name in pairwise(command.words):
        if option in {"--only", "--trail"}:
            assert f'"{name}' in rows, f"there is no row {name}"


UNRUN = (
    Unrun("aws", "needs an AWS account; what it leaves behind is put there instead", _aws),
    Unrun(r"(?:\S*/)?pip3? install", "needs a package index; the tests have it installed", _extras),
    Unrun("make", "has a job of its own, or calls what is run here", _target),
    Unrun("kubectl", "needs a cluster", _inside),
    Unrun("docker", "needs a daemon and base images", _inside),
    Unrun("ssh", "needs another machine", _look),
    Unrun(r"curl .*worker\.example\.com\S*", "needs another machine", _look),
    Unrun("edit", "is your editor", _look),
    Unrun(r"python3(\.\d+)? -m venv", "the tests run in an environment already", _look),
    Unrun(r"\. \.venv/bin/activate", "the tests run in an environment already", _look),
    Unrun(r"python deploy/lambda/build\.py", "needs a package index; tests/aws builds it", _file),
    Unrun(r"python -m spec\.check", "tests/spec runs it, and compares what is shown", _rows),
    Unrun("build/fuzz/bin/python", "has an environment of its own; tests/fuzz runs it", _file),
    Unrun("systemctl", "needs root and systemd; tests/unit reads the unit", _look),
    Unrun("journalctl", "needs root and systemd", _look),
    Unrun("install -[dm]", "needs root", _file),
)


def unrun(command: Command) -> Unrun | None:
    """Tell which of them *command* is, if any."""
    return next((one for one in UNRUN if one.is_in(command)), None)
