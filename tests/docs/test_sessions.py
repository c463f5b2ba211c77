"""Console sessions of the documentation go as they stand there, page by page, in a real shell."""

import re
from collections.abc import Iterator

import pytest
from tests.docs.commands import help_of
from tests.docs.pages import Block, blocks, every, pages
from tests.docs.shell import Command, Shell, commands
from tests.docs.unrun import UNRUN, oncebridge, unrun
from tests.docs.world import GIVEN, Given, World
from tests.docs.world import given as given_to
from tests.size import some

MADE = "docs/reference/commands.md"
"""Compared as a whole, in `test_reference.py`."""
SERVES = re.compile(r"oncebridge (run|dashboard|demo --stay)\b")
ENDS = re.compile(r"--source (file:|-)|--help")
MOMENT = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(\.\d+Z)?")
SHELLS = ("console",)
QUICK = ("README.md", "docs/quickstart.md", "docs/operating.md", "docs/stores/redis.md")
CONFIG = "oncebridge.toml"


def sessions(page: str) -> list[Block]:
    return [block for block in blocks(page) if block.language in SHELLS]


def all_commands() -> Iterator[tuple[Block, Command]]:
    for block in every(*SHELLS):
        yield from ((block, command) for command in commands(block.text))


RUN = [
    page
    for page in pages()
    if page != MADE
    and any(
        not unrun(one) and not one.by_root
        for block in sessions(page)
        for one in commands(block.text)
    )
]


@pytest.mark.parametrize("page", some(RUN, QUICK))
def test_the_sessions_of_a_page_go_as_it_says(page, tmp_path, request):
    world, given = World(page, tmp_path, request), given_to(page)
    given.prepare(world)
    said = "".join(block.text for block in blocks(page) if block.title or block.language in SHELLS)
    environment = {**world.environment(said + given.config), "COLUMNS": str(given.columns)}
    is_shown = any(block.title == CONFIG for block in blocks(page))
    with Shell(tmp_path, environment) as shell:
        section: tuple[str, ...] = ()
        for block in blocks(page):
            if block.headings[:2] != section:
                section = block.headings[:2]
                if not is_shown:
                    (tmp_path / CONFIG).unlink(missing_ok=True)
            if block.title:
                world.write(block.title, block.text)
            for command in commands(block.text) if block.language in SHELLS else ():
                if unrun(command) is None and not command.by_root:
                    go(shell, world, given, command)


def go(shell: Shell, world: World, given: Given, command: Command) -> None:
    """Type a command, and compare what it prints with what the page shows."""
    text = command.text
    for theirs, ours in given.instead.items():
        text = text.replace(theirs, ours)
    text = re.sub(r" …(?=\n)", "", text)  # and what else you set
    if f"-c {CONFIG}" in text and not (world.folder / CONFIG).exists():
        world.write(CONFIG, given.config)
    if SERVES.match(text) and not ENDS.search(text):
        code, printed = 0, shell.start(world.told(whole(text)))
    else:
        code, printed = shell.run(world.told(text))
        settle(world)
    printed = world.retold(printed).rstrip("\n") + "\n"
    if text.startswith("oncebridge demo"):  # it takes another port where this one is taken
        printed = re.sub(r"127\.0\.0\.1:\d+/.*", "127.0.0.1:8081/", printed)
    assert code in expected(given, text), f"{world.page}: $ {text}{printed}\nended with {code}"
    if command.shown.strip():
        assert re.match(pattern(command.shown), MOMENT.sub("…", printed)), (
            f"{world.page}: $ {text}{printed}\nbut the page shows\n{command.shown}"
        )


def whole(text: str) -> str:
    """Add what is elsewhere by default, and has to be a free port here."""
    line, _, rest = text.partition("\n")
    line = re.sub(r"\s+# .*", "", line) if not line.endswith("\\") else line
    if text.startswith("oncebridge run") and "--source" not in text and " -c " not in text:
        line += " --source http://127.0.0.1:8080/events"
    if text.startswith("oncebridge dashboard"):
        line += " --dashboard 127.0.0.1:8081"
    return f"{line}\n{rest}"


def settle(world: World) -> None:
    """Exchange the ports in a configuration that a command has just written."""
    file = world.folder / "oncebridge.toml"
    if file.exists() and (text := file.read_text()) != world.told(text):
        file.write_text(world.told(text))


def expected(given: Given, text: str) -> set[int]:
    if text.startswith("oncebridge check"):
        return {0, 1}  # whether there is something to find here, it has been looked for
    return {next((code for start, code in given.exits.items() if text.startswith(start)), 0)}


def pattern(shown: str) -> str:
    """Make a pattern of what is shown: a line with an ellipsis alone stands for any lines."""
    lines = MOMENT.sub("…", shown.rstrip("\n")).split("\n")
    made = ["(?:.*\n)*?" if line.strip() == "…" else re.escape(line) + "\n" for line in lines]
    return "".join(made) + ("" if lines[-1].strip() == "…" else r"\s*\Z")


def test_every_option_in_the_documentation_exists():
    """Those that are run show it themselves; this reaches the others, and is quick to tell."""
    seen = 0
    for block, command in all_commands():
        words = command.words
        if words and words[0] == "oncebridge" and block.page != MADE:
            ends = [at for at, word in enumerate(words) if word in ("sed", "head", "less", "jq")]
            oncebridge([one for one in words[1 : min(ends, default=None)] if one != "…"])
            seen += 1
    assert seen > 60


@pytest.mark.parametrize("kind", UNRUN, ids=lambda kind: kind.program)
def test_what_is_not_run_is_needed_and_names_what_is_there(kind):
    """Nothing is listed that no page has any more."""
    found = [command for _, command in all_commands() if unrun(command) is kind]
    assert found, f"no page has {kind.program} any more"
    for command in found:
        kind.check(command)


def test_commands_of_root_are_not_run_and_all_listed():
    for block, command in all_commands():
        if command.by_root:
            assert unrun(command) is not None, f"{block.place}: {command.text}"


def test_what_pages_take_for_given_is_needed():
    for page, given in GIVEN.items():
        said = "".join(block.text for block in sessions(page))
        assert page in RUN
        assert all(words in said for words in [*given.instead, *given.exits]), page


def test_help_is_as_wide_as_a_page():
    assert max(map(len, help_of(("run",)).splitlines())) <= 100
