"""The pages that name files and functions of the code name those that are there."""

import ast
import re

import pytest
from tests.docs.pages import ROOT

SOURCE = ROOT / "src" / "oncebridge"
PAGES = ("architecture.md", "protocol.md")
PLACE = re.compile(r"`([\w/]+\.(?:py|lua|sql))`((?:: |, )`[\w.]+`(?:, `[\w.]+`)*)?")


def places() -> list[tuple[str, str, str]]:
    """Every file that a page names, with each function or class named after it."""
    found = []
    for page in PAGES:
        text = (ROOT / "docs" / page).read_text("utf-8")
        for path, names in PLACE.findall(text):
            listed = re.findall(r"`([\w.]+)`", names) if names.startswith(":") else []
            found += [(page, path, name) for name in listed or [""]]
    return found


def defined(path) -> set[str]:
    """The names that a module defines; those of classes also as `Class.name`."""
    found = set()
    tree = ast.parse(path.read_text("utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for inner in ast.walk(node):
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                    found |= {inner.name, f"{node.name}.{inner.name}"}
                elif isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name):
                    found |= {inner.target.id, f"{node.name}.{inner.target.id}"}
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
    return found


def test_the_pages_name_many_places():
    assert len(places()) > 100


@pytest.mark.parametrize(("page", "path", "name"), places(), ids=lambda one: one)
def test_what_a_page_names_is_there(page, path, name):
    file = ROOT / path if path.startswith(("tests/", "bench/", "spec/")) else SOURCE / path
    assert file.is_file(), f"docs/{page}"
    if name:
        assert name in defined(file), f"docs/{page}"


def test_the_table_of_layers_has_every_folder():
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    named = set(re.findall(r"^\| \d+ \| `(\w+)/`", text, re.MULTILINE))
    assert named == {path.name for path in SOURCE.iterdir() if any(path.glob("**/*.py"))}
