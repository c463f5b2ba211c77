"""The pages of the documentation, taken apart into their fenced blocks."""

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(
    r"^(?P<indent> *)(?P<fence>`{3,})(?P<info>[^\n`]*)\n(?P<text>.*?)^(?P=indent)(?P=fence) *$",
    re.DOTALL | re.MULTILINE,
)
_TITLE = re.compile(r'title="([^"]*)"')
_HEADING = re.compile(r"^(#+) +(.*?) *$", re.MULTILINE)

PICTURES = ("", "text")
"""What is only to be looked at, unless it stands right behind something that prints."""


@dataclass(frozen=True)
class Block:
    """One fenced block, with where it stands and what it follows."""

    page: str
    line: int
    language: str
    title: str
    text: str
    headings: tuple[str, ...]
    """The headings above it, outermost first."""
    output: str | None = None
    """What the page shows right behind it, as what it prints."""
    is_output: bool = False

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[str]:
    """Name every page that people read, by its path."""
    found = [*ROOT.glob("*.md"), *ROOT.glob("[a-z]*/README.md"), *(ROOT / "docs").rglob("*.md")]
    return sorted(page.relative_to(ROOT).as_posix() for page in found)


@cache
def blocks(page: str) -> tuple[Block, ...]:
    """Take a page apart."""
    text = (ROOT / page).read_text("utf-8")
    found = list(_FENCE.finditer(text))
    made = []
    for at, match in enumerate(found):
        language, _, rest = match["info"].strip().partition(" ")
        title = _TITLE.search(rest)
        after = found[at + 1] if at + 1 < len(found) else None
        before = made[-1] if made else None
        made.append(
            Block(
                page=page,
                line=text.count("\n", 0, match.start()) + 1,
                language=language,
                title=title[1] if title else "",
                text=textwrap.dedent(match["text"]) if match["indent"] else match["text"],
                headings=_headings(text, match.start(), found),
                output=after["text"] if after and _prints(match, after, text) else None,
                is_output=bool(before and before.output is not None),
            )
        )
    return tuple(made)


def every(*languages: str) -> list[Block]:
    """Give the blocks of all pages that are in one of *languages*."""
    return [one for page in pages() for one in blocks(page) if one.language in languages]


def fences(page: str) -> int:
    """Count the lines that open or close a block, however they are meant."""
    return len(re.findall(r"^ *`{3,}", (ROOT / page).read_text("utf-8"), re.MULTILINE))


def prose(page: str) -> str:
    """Give a page without its blocks."""
    return _FENCE.sub("", (ROOT / page).read_text("utf-8"))


def _prints(block: re.Match[str], after: re.Match[str], text: str) -> bool:
    nothing_between = not text[block.end() : after.start()].strip()
    return (
        block["info"].startswith("python") and after["info"].strip() == "text" and nothing_between
    )


def _headings(text: str, end: int, found: list[re.Match[str]]) -> tuple[str, ...]:
    trail: list[tuple[int, str]] = []
    for depth, heading in _outside(text, end, found):
        trail = [*(one for one in trail if one[0] < depth), (depth, heading)]
    return tuple(heading for _, heading in trail)


def _outside(text: str, end: int, found: list[re.Match[str]]) -> Iterator[tuple[int, str]]:
    for heading in _HEADING.finditer(text, 0, end):
        if not any(one.start() < heading.start() < one.end() for one in found):
            yield len(heading[1]), heading[2]
