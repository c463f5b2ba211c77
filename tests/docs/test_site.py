"""The site has every page in one of four places, and loads nothing from elsewhere."""

import importlib.util
import re

import pytest
import yaml
from tests.docs.pages import ROOT

SPEC = importlib.util.spec_from_file_location("site_build", ROOT / "docs" / "site" / "build.py")
build = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(build)


class _Loader(yaml.SafeLoader):
    """Reads the settings without making what they name."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda _loader, suffix, _node: suffix)
SETTINGS = yaml.load((ROOT / "mkdocs.yml").read_text(), _Loader)


def pages_in(nav) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [page for part in parts for page in pages_in(part)]


def test_the_site_has_four_sections():
    assert [next(iter(one)) for one in SETTINGS["nav"]] == [
        "Home",
        "Tutorials",
        "How-to",
        "Reference",
        "Concepts",
    ]


def test_every_page_has_one_place_in_the_site():
    named = pages_in(SETTINGS["nav"])
    docs = ROOT / "docs"
    there = {page.relative_to(docs).as_posix() for page in docs.rglob("*.md")}
    assert len(named) == len(set(named))
    assert set(named) == there, "put it into the nav of mkdocs.yml"


def test_every_mistake_in_a_link_fails_the_build():
    told = SETTINGS["validation"]
    assert set(told["links"].values()) == set(told["nav"].values()) == {"warn"}
    assert "anchors" in told["links"]


def test_the_site_is_set_to_ask_nobody():
    assert SETTINGS["theme"]["font"] is False
    assert not {"repo_url", "site_url", "extra_javascript"} & SETTINGS.keys()
    assert "analytics" not in SETTINGS["extra"]
    plugins = [one if isinstance(one, str) else next(iter(one)) for one in SETTINGS["plugins"]]
    assert plugins == ["search", "mkdocstrings"]


def test_a_drawing_needs_no_script_from_elsewhere():
    """The theme would fetch Mermaid from another host."""
    for page in (ROOT / "docs").rglob("*.md"):
        assert "```mermaid" not in page.read_text(), page


@pytest.mark.parametrize(
    "page",
    [
        '<script src="https://cdn.example.com/a.js"></script>',
        '<script src="//cdn.example.com/a.js"></script>',
        '<link rel="stylesheet" href="https://cdn.example.com/a.css">',
        '<link rel="preconnect" href="https://cdn.example.com">',
        '<img src="HTTPS://cdn.example.com/a.png">',
        '<img srcset="https://cdn.example.com/a.png 2x">',
        '<p style="background: url(https://cdn.example.com/a.png)">',
        "<style>@import 'https://cdn.example.com/a.css';</style>",
        "<style>@font-face { src: url('https://cdn.example.com/a.woff2') }</style>",
        '<iframe src="https://cdn.example.com/">',
        '<svg><use href="https://cdn.example.com/a.svg#b"></svg>',
    ],
)
def test_what_a_page_loads_from_elsewhere_is_found(page, tmp_path):
    (tmp_path / "index.html").write_text(page)
    assert list(build.from_elsewhere(tmp_path))


@pytest.mark.parametrize(
    "page",
    [
        '<script src="assets/a.js"></script>',
        '<a href="https://example.com/">somewhere</a>',
        '<link rel="canonical" href="https://example.com/">',
        '<img src="data:image/png;base64,AAAA">',
        "<style>a { background: url('a.png') }</style>",
        "<code>https://example.com</code>",
    ],
)
def test_what_a_page_only_links_to_is_fine(page, tmp_path):
    (tmp_path / "index.html").write_text(page)
    assert not list(build.from_elsewhere(tmp_path))


def test_a_style_from_elsewhere_is_found_in_its_file(tmp_path):
    (tmp_path / "a.css").write_text("@font-face { src: url(https://cdn.example.com/a.woff2) }")
    assert [one for _, one in build.from_elsewhere(tmp_path)] == ["https://cdn.example.com/a.woff2"]


@pytest.mark.parametrize("page", ["containers.md", "changelog.md"])
def test_a_file_of_the_repository_is_a_page_with_links_that_lead_somewhere(page):
    head = (ROOT / "docs" / page).read_text()
    (name,) = re.findall(r"^include: (\S+)$", head, re.MULTILINE)
    text = build.included(ROOT / name)
    assert text.startswith("# ")
    for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text):
        assert (ROOT / "docs" / target).is_file(), target
    assert f"`{name}`" in head
