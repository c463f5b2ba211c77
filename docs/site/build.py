"""
What the build of the site needs besides MkDocs.

A page whose head says `include: FILE` is that file of the repository. And the built site loads
nothing from elsewhere, or the build fails: a page that asks another host for a script, a style, a
font or a picture tells that host who reads it, and cannot be read where there is no network.
Links that people follow are another matter.
"""  # noqa: INP001 - a file for MkDocs, not part of a package

import logging
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]
_LINK = re.compile(r"\[([^\]\n]+)\]\((?!https?:|#)([^)\s#]+)(#[^)\s]*)?\)")

_ELSEWHERE = re.compile(r"^\s*(?:[a-z][a-z0-9+.-]*:)?//", re.IGNORECASE)
_OF_A_STYLE = re.compile(r"url\(\s*['\"]?([^'\")]+)|@import\s+['\"]([^'\"]+)")
_LOADED = {"src", "srcset", "data", "poster", "background", "xlink:href"}
_LINKED = {"alternate", "author", "canonical", "help", "license", "next", "prev", "search"}
"""What a `link` may say without anything being fetched."""


def on_startup(**kwargs: Any) -> None:  # noqa: ARG001 - as MkDocs calls it
    """Let warnings be heard: with `--quiet`, MkDocs drops them before `--strict` counts them."""
    log = logging.getLogger("mkdocs")
    log.setLevel(min(log.level, logging.WARNING))


def on_page_markdown(markdown: str, page: Any, **kwargs: Any) -> str:  # noqa: ARG001 - as MkDocs calls it
    """Put the file in the place of a page that only names one."""
    name = page.meta.get("include")
    return included(_ROOT / name) if name else markdown


def included(file: Path) -> str:
    """Read a file of the repository as a page of `docs`: links to other pages lead there."""

    def linked(found: re.Match[str]) -> str:
        text, target, place = found[1], found[2], found[3] or ""
        page = (file.parent / target).resolve()
        docs = _ROOT / "docs"
        if page.suffix == ".md" and page.is_relative_to(docs):
            return f"[{text}]({page.relative_to(docs)}{place})"
        return text  # it is not part of the site

    return _LINK.sub(linked, file.read_text("utf-8"))


class _Reader(HTMLParser):
    """Collects what a page has a browser fetch by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self._in_style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.loads += [given[name] for name in _LOADED & given.keys()]
        if tag == "link" and not set(given.get("rel", "").lower().split()) <= _LINKED:
            self.loads.append(given.get("href", ""))
        if tag in ("image", "use"):
            self.loads.append(given.get("href", ""))
        self.loads += _of_a_style(given.get("style", ""))
        self._in_style = tag == "style"

    def handle_data(self, data: str) -> None:
        if self._in_style:
            self.loads += _of_a_style(data)


def _of_a_style(text: str) -> list[str]:
    return [one or other for one, other in _OF_A_STYLE.findall(text)]


def loads(page: str) -> list[str]:
    """Give what an HTML page loads by itself."""
    reader = _Reader()
    reader.feed(page)
    reader.close()
    return reader.loads


def from_elsewhere(site: Path) -> Iterator[tuple[Path, str]]:
    """Find what the pages and styles of *site* load from another host."""
    for file in sorted(site.rglob("*.html")):
        yield from ((file, one) for one in loads(file.read_text("utf-8")) if _ELSEWHERE.match(one))
    for file in sorted(site.rglob("*.css")):
        found = _of_a_style(file.read_text("utf-8"))
        yield from ((file, one) for one in found if _ELSEWHERE.match(one))


def on_post_build(config: Any, **kwargs: Any) -> None:  # noqa: ARG001 - as MkDocs calls it
    """Look at the site that was just built."""
    from mkdocs.exceptions import PluginError  # noqa: PLC0415 - the rest is used without MkDocs

    site = Path(config["site_dir"])
    found = [f"{file.relative_to(site)}: {one}" for file, one in from_elsewhere(site)]
    if found:
        raise PluginError("the site loads from elsewhere:\n  " + "\n  ".join(found))
