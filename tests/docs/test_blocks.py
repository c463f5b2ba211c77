"""Every fenced block of every page is of one kind, and is tried as its kind can be."""

import asyncio
import json
import re
import sqlite3
from collections import Counter
from itertools import pairwise

import asyncpg
import hcl2
import promql_parser
import pytest
import yaml
from tests.docs.pages import ROOT, Block, blocks, every, fences, pages, prose
from tests.docs.world import World
from tests.servers.redis import RedisServer
from tests.servers.redis import running as redis_running

from oncebridge.service.config import load
from oncebridge.stores.postgres.store import PostgresStore
from oncebridge.stores.sqlite.store import SQLiteStore

KINDS = {
    "console": "run, or listed with the reason: test_sessions.py",
    "python": "run, and its output compared: test_python.py",
    "toml": "loaded",
    "json": "read",
    "yaml": "read",
    "hcl": "read",
    "sql": "run",
    "promql": "read",
    "redis": "run",
    "conf": "a server started with it",
    "text": "the output of the block before, or a picture",
    "": "a picture",
}
"""What becomes of a block, by its language. Another language fails until it has a place here."""
CONFIGURATION = "docs/configuration.md"


def test_every_block_is_of_one_kind():
    for page in pages():
        found = blocks(page)
        assert fences(page) == 2 * len(found), (
            f"{page}: a fence that opens nothing, or ends nothing"
        )
        for block in found:
            assert block.language in KINDS, f"{block.place}: how is {block.language!r} tried?"


def test_no_kind_is_left_that_no_page_has():
    assert {block.language for page in pages() for block in blocks(page)} == set(KINDS)


def test_the_documentation_has_blocks_to_try():
    counts = Counter(block.language for page in pages() for block in blocks(page))
    assert counts["console"] > 60
    assert counts["toml"] > 60
    assert counts["python"] >= 7


def test_indented_code_is_not_used_in_the_documentation():
    """Nobody could tell what it is, and no test would find it."""
    for page in pages():
        after = "\n" + prose(page)
        found = re.findall(r"\n\n( {4,}(?![-*] |\d+\. |\|)\S.*)", after)
        lists = [line for line in found if _is_of_a_list(after, line)]
        assert found == lists, (page, found)


def _is_of_a_list(text: str, line: str) -> bool:
    above = text[: text.index(line)].rstrip().splitlines()[::-1]
    for one in above:
        if re.match(r" *([-*]|\d+\.) ", one):
            return True
        if one and not one.startswith(" "):
            return False
    return False


# --- configurations -----------------------------------------------------------------------

WHOLE = [block for block in every("toml") if block.page != CONFIGURATION]
PARTS = [block for block in every("toml") if block.page == CONFIGURATION]


@pytest.mark.parametrize("block", WHOLE, ids=lambda block: block.place)
def test_a_configuration_is_in_order(block, tmp_path, request):
    world = World(block.page, tmp_path, request)
    _load(world, block.text)


def test_every_part_of_the_reference_is_in_order(tmp_path, request):
    world = World(CONFIGURATION, tmp_path, request)
    assert len(PARTS) > 40
    for block in PARTS:
        _load(world, _around(block))


def _load(world: World, text: str) -> None:
    """Load a configuration as the service does, with the files and secrets that it names."""
    for path in re.findall(r'"(/etc/[^"]+)"', text):
        text = text.replace(path, str(world.folder / "deploy" / "README.md"))
    world.write("oncebridge.toml", text)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in world.secrets(text).items():
            patch.setenv(name, value)
        assert load(world.folder / "oncebridge.toml").routes


def _around(block: Block) -> str:
    """Make a whole configuration of a part of one, by the headings above it."""
    _, part, *below = block.headings
    name = block.text.partition(" =")[0]
    if part == "Settings":
        needs_proxy = name == "dashboard_user_header"
        return _beside(
            name, {"dashboard_proxies": '["10.0.3.7"]'} if needs_proxy else {}, block.text
        )
    if part == "Routes":
        return "[[routes]]\n" + _beside(name, {"name": '"a"', "sink": '"-"'}, block.text)
    assert part == "Rules", block.place
    rule = "[[rules]]\n"
    if below[0] == "Tiers":
        more = {"key": '"content"'} | ({"sliding": "true"} if name == "max_window" else {})
        return f'{rule}name = "a"\n[[rules.tiers]]\n' + _beside(name, more, block.text)
    if below[0] in ("latest", "quiet"):
        needed = {"entity": '"detail.a"', "version": '"detail.b"'}
        if below[0] == "quiet":
            needed = {"entity": '"detail.a"', "state": '"detail.b"', "for": '"1s"'}
        return f'{rule}name = "a"\n[rules.{below[0]}]\n' + _beside(name, needed, block.text)
    return rule + _beside(name, {"name": '"a"'}, block.text)


def _beside(name: str, needed: dict[str, str], text: str) -> str:
    return "".join(f"{key} = {value}\n" for key, value in needed.items() if key != name) + text


# --- what is read -------------------------------------------------------------------------

READ = {"json": json.loads, "yaml": yaml.safe_load, "hcl": hcl2.loads}


@pytest.mark.parametrize("block", every(*READ), ids=lambda block: block.place)
def test_what_is_to_be_read_can_be(block):
    assert READ[block.language](block.text)


@pytest.mark.parametrize("block", every("promql"), ids=lambda block: block.place)
def test_queries_are_understood(block):
    queries = re.split(r"\n\s*\n", re.sub(r"^#.*\n", "", block.text, flags=re.MULTILINE).strip())
    assert all(promql_parser.parse(query) for query in queries)


# --- what runs on a server ----------------------------------------------------------------


@pytest.mark.parametrize("block", every("sql"), ids=lambda block: block.place)
def test_sql_runs(block, tmp_path, request):
    world = World(block.page, tmp_path, request)
    for database, text in _by_database(block.text):
        if database == "SQLite":
            asyncio.run(_made(tmp_path / "records.db"))
            with sqlite3.connect(tmp_path / "records.db") as db:
                db.executescript(text)
            db.close()
        else:
            asyncio.run(_on_postgres(world.database, text))


def _by_database(text: str) -> list[tuple[str, str]]:
    """Take apart what is for one database and for the other; without a word, it is Postgres."""
    parts = re.split(r"^-- (SQLite|Postgres)$", text, flags=re.MULTILINE)
    if len(parts) == 1:
        return [("Postgres", text)]
    return list(zip(parts[1::2], parts[2::2], strict=True))


async def _made(path):
    async with SQLiteStore(path):
        pass


async def _on_postgres(url, text):
    """Run it where the tables are, as somebody who may; nothing of it stays."""
    store = PostgresStore(url)
    try:
        await store.migrate()
    finally:
        await store.aclose()
    connection = await asyncpg.connect(url)
    try:
        deal = connection.transaction()
        await deal.start()
        if not await connection.fetch("SELECT FROM pg_roles WHERE rolname = 'oncebridge'"):
            await connection.execute("CREATE ROLE oncebridge")
        await connection.execute(text)
        await deal.rollback()
    finally:
        await connection.close()


def test_settings_and_rights_of_redis_are_taken(tmp_path):
    """A server starts with the settings, and takes the commands."""
    (settings,) = every("conf")
    options = dict(line.split(" ", 1) for line in settings.text.splitlines())
    server = RedisServer(
        tmp_path, **{name.replace("-", "_"): value for name, value in options.items()}
    )
    with redis_running(server):
        for name, value in options.items():
            assert server.ask("CONFIG", "GET", name) == {name.encode(): value.encode()}
        for block in every("redis"):
            assert all(server.ask(*line.split()) for line in block.text.splitlines())


# --- how pages are written ----------------------------------------------------------------


@pytest.mark.parametrize("page", [page for page in pages() if page.startswith("docs/")])
def test_a_page_reads_the_same_in_the_clone_and_on_the_site(page):
    """Lists and tables begin after a blank line, and nothing leads out of the site."""
    lines = prose(page).splitlines()
    for above, line in pairwise(lines):
        is_item = re.match(r"([-*]|1\.) ", line)
        if is_item and above.strip():
            assert re.match(r" *([-*]|\d+\.) |  ", above), f"{page}: {line}"
        if line.startswith("|") and above.strip():
            assert above.startswith("|"), f"{page}: {line}"
    for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", prose(page)):
        file = ((ROOT / page).parent / target).resolve()
        assert file.is_relative_to(ROOT / "docs"), f"{page}: {target} is not on the site"
        assert file.exists(), f"{page}: {target} is not there"
