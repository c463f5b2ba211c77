"""The reference is whole: every public name, every command, every verdict, as they are."""

import inspect
import re
from importlib import import_module

import pytest
from tests.docs.commands import commands, page
from tests.docs.pages import ROOT

from oncebridge.engine.verdict import HANDED_BACK, Verdict

REFERENCE = ROOT / "docs" / "reference"
PUBLIC = [
    (module, name)
    for module in ("oncebridge", "oncebridge.aws", "oncebridge.testing")
    for name in import_module(module).__all__
]


def shown() -> set[str]:
    """Give what the pages of the API show: names, and members that a module's entry lists."""
    found: set[str] = set()
    entries = r"^::: (\S+)\n((?:    .*\n)*)"
    for file in REFERENCE.glob("api*.md"):
        for name, options in re.findall(entries, f"{file.read_text()}\n", re.MULTILINE):
            listed = re.search(r"members: \[([^\]]*)\]", options)
            if listed:
                found |= {f"{name}.{member.strip()}" for member in listed[1].split(",")}
            elif "show_root_heading: false" in options:
                found |= {f"{name}.{member}" for member in vars(import_module(name))}
            else:
                found.add(name)
    return found


SHOWN = shown()


@pytest.mark.parametrize(("module", "name"), PUBLIC, ids=".".join)
def test_every_public_name_is_on_a_page(module, name):
    homes = {f"{module}.{name}", f"oncebridge.{name}"}
    found = getattr(import_module(module), name)
    homes |= {f"{getattr(found, '__module__', module)}.{name}"}
    if name == "SinkAnswer":
        homes.add(
            "oncebridge.sinks.api.SinkAnswer"
        )  # a union knows neither its name nor its module
    assert homes & SHOWN, f"{name} is on no page below docs/reference"


@pytest.mark.parametrize("name", sorted(SHOWN))
def test_every_name_on_a_page_is_there(name):
    module, _, last = name.rpartition(".")
    assert hasattr(import_module(module), last)


def test_every_public_name_says_what_it_is():
    for module, name in PUBLIC:
        found = getattr(import_module(module), name)
        if inspect.isclass(found) or inspect.isfunction(found):
            assert (found.__doc__ or "").strip(), name


def test_the_page_of_commands_is_up_to_date():
    written = (REFERENCE / "commands.md").read_text()
    assert written == page(), "python -m tests.docs.commands > docs/reference/commands.md"


def test_there_is_help_for_every_command():
    assert len(list(commands())) > 20


def rows(text: str) -> dict[str, str]:
    """Read the table of verdicts: each with the response to the source."""
    found = re.findall(
        r"^\| `(\w+)` \| .* \| (acknowledge|return for retry) \|$", text, re.MULTILINE
    )
    return dict(found)


@pytest.mark.parametrize("file", ["README.md", "docs/reference/verdicts.md"])
def test_every_verdict_is_explained(file):
    told = rows((ROOT / file).read_text())
    assert told == {
        str(verdict): "return for retry" if verdict in HANDED_BACK else "acknowledge"
        for verdict in Verdict
    }
