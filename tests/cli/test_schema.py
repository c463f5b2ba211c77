"""The schema and the page say what the loader does."""

import json
import re
import tomllib
from pathlib import Path

import jsonschema_rs
import pytest

from oncebridge.base.options import settings_of
from oncebridge.cli.init import KINDS, starter
from oncebridge.errors import ConfigError
from oncebridge.events.rule_options import RuleOptions
from oncebridge.service.config import PREFIX, Config, load
from oncebridge.service.reference import json_schema, markdown

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SCHEMA = jsonschema_rs.Draft202012Validator(json_schema())


def is_loaded(text: str, tmp_path: Path) -> bool:
    path = tmp_path / "sample.toml"
    path.write_text(text)
    try:
        load(path, environment={})
    except ConfigError:
        return False
    return True


GOOD = [
    "",
    'window = "2d"\nlease = "45.5s"\nbatch = 10\nexplain = false\nrate = "100/s"',
    'source = "-"\nstore = "memory:"\nsink = "file:out.ndjson"\ndead = "file:dead.ndjson"',
    'source = ["file:a.ndjson", { url = "http://127.0.0.1:1/x", max_body = "1MiB" }]',
    'source = { url = "file:a.ndjson", resume = false }',
    'store = { url = "sqlite:x.db", busy_timeout = "3s" }',
    'sink = { url = "https://crm.example.com/x", headers = { A = "b" }, concurrency = 3 }',
    'limits = { max_bytes = "1MiB", max_depth = 20 }',
    '[[rules]]\nname = "a"\nkey = ["detail.x"]\nmatch = { source = ["s"] }\nwindow = "5m"',
    '[[rules]]\nname = "a"\ntiers = [{ key = "id", window = "5m" }, { key = "content" }]',
    """
    [[rules]]
    name = "a"
    entity = "detail.x"
    quiet = { state = "detail.y", for = "500ms" }
    latest = { version = "detail.z" }
    """,
    """
    [[routes]]
    name = "a"
    sink = "-"
    mode = "shadow"
    [[routes]]
    name = "b"
    sink = { url = "file:b", keep = 3 }
    match = { source = ["x"] }
    [[routes.rules]]
    name = "r"
    """,
]
BAD = [
    'windw = "2d"',
    "window = 2",
    'window = "2 days"',
    "batch = 0",
    "batch = 1.5",
    'batch = "many"',
    'mode = "shadwo"',
    "explain = 1",
    'source = "ftp://x"',
    'store = "nothing"',
    "store = {}",
    'store = { url = "sqlite:x.db", max_keys = 3 }',
    'sink = { url = "file:x", concurrency = 3 }',
    'sink = { url = "https://crm.example.com/x", method = "GET" }',
    'sink = ""',
    "limits = { max_depth = 1 }",
    'limits = "small"',
    'rules = "all"',
    '[[rules]]\nkey = "id"',
    '[[rules]]\nname = "a"\nkey = 7',
    '[[rules]]\nname = "a"\nwindow = "long"',
    '[[rules]]\nname = "a"\ntiers = [{ kee = "id" }]',
    '[[rules]]\nname = "a"\nquiet = { state = "detail.y" }',
    '[[rules]]\nname = "a"\non_missing = "panic"',
    '[[routes]]\nname = "a"',
    '[[routes]]\nname = "a"\nsink = "-"\nstore = "memory:"',
]


@pytest.mark.parametrize("text", GOOD)
def test_what_the_loader_takes_the_schema_accepts(text, tmp_path):
    assert is_loaded(text, tmp_path)
    SCHEMA.validate(tomllib.loads(text))


@pytest.mark.parametrize("text", BAD)
def test_what_the_loader_refuses_the_schema_rejects(text, tmp_path):
    assert not is_loaded(text, tmp_path)
    assert not SCHEMA.is_valid(tomllib.loads(text))


@pytest.mark.parametrize("kind", KINDS)
def test_the_schema_accepts_the_starters(kind):
    SCHEMA.validate(tomllib.loads(starter(kind)))


def snippets() -> list[tuple[str, str]]:
    """Find the whole configurations in the documentation; a page of settings has parts only."""
    return [
        (page.name, text)
        for page in PAGES
        if page.name != "configuration.md"
        for text in re.findall(r"```toml\n(.*?)```", page.read_text(), re.DOTALL)
        if "[[test]]" not in text
    ]


def test_configurations_in_the_documentation_are_valid():
    for name, text in snippets():
        assert SCHEMA.is_valid(tomllib.loads(text)), (name, text)
    SCHEMA.validate(tomllib.loads((ROOT / "examples" / "rules" / "oncebridge.toml").read_text()))


def test_every_example_of_a_setting_is_valid(tmp_path, monkeypatch):
    """Each is taken as the page shows it, and loaded."""
    page = markdown()
    settings = page[: page.index("\n## Rules")]
    found = re.findall(r"```toml\n(.*?)\n```", settings, re.DOTALL)
    assert len(found) > 15
    for text in found:
        for name in re.findall(r"env:(\w+)", text):
            monkeypatch.setenv(name, "a secret of nobody's")
        # One that is believed from a proxy only cannot be set alone.
        beside = "dashboard_proxies = ['10.0.0.8']\n" if "user_header" in text else ""
        assert is_loaded(beside + text, tmp_path), text
        SCHEMA.validate(tomllib.loads(text))
    rules = page[page.index("\n## Rules") : page.index("\n## Routes")]
    names = {setting.name for setting in settings_of(RuleOptions)}
    for text in re.findall(r"```toml\n(.*?)\n```", rules, re.DOTALL):
        name = text.split(" = ")[0]
        if name in names - {"name", "max_window", "ignore", "window"}:
            assert is_loaded(f'[[rules]]\nname = "a"\n{text}', tmp_path), text


def test_the_page_in_the_documentation_is_up_to_date():
    written = (ROOT / "docs" / "configuration.md").read_text()
    assert written == markdown(), "oncebridge schema --markdown > docs/configuration.md"


def test_the_page_has_every_setting_and_its_variable():
    page = markdown()
    for setting in settings_of(Config):
        assert f"### `{setting.name}`" in page
        assert setting.doc.text in page
        if setting.name not in ("rules", "routes"):
            assert f"{PREFIX}{setting.name.upper()}" in page


def test_the_command_prints_the_schema_and_the_page(run, call):
    told = json.loads(run("schema").out)
    assert told == json_schema()
    assert told["$schema"].startswith("https://json-schema.org/")
    assert told["title"]
    assert call("schema", "--markdown").out == markdown()
