"""
A service with a rule for every verdict, and a reader of its pages.

Events are handed to its router, as a source would, and pages are asked for over HTTP.
"""

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from tests.dashboard.conftest import Visitor
from tests.http.live import Desk as Sink
from tests.http.live import Live
from tests.http.live import event as order

from oncebridge.engine.verdict import Outcome
from oncebridge.service import config
from oncebridge.service.addresses import SinkPlace

RULES = """
[[rules]]
name = "by id"
match = { detail-type = ["By Id"] }
key = "id"

[[rules]]
name = "states"
match = { detail-type = ["State"] }
key = ["detail.conversationId", "detail.version", "detail.copy"]
latest = { entity = "detail.conversationId", version = "detail.version" }
quiet = { entity = "detail.conversationId", state = "detail.state", for = "1h" }

[[rules]]
name = "noise"
match = { detail-type = ["Noise"] }
discard = true

[[rules]]
name = "as it is"
match = { detail-type = ["As It Is"] }
key = "none"

[[rules]]
name = "strict"
match = { detail-type = ["Strict"] }
key = ["detail.needed"]
on_missing = "dead"

[[rules]]
name = "tiers"
match = { detail-type = ["Tiers"] }
tiers = [{ key = "id", window = "5m" }, { key = ["detail.order"], window = "6d" }]

[[rules]]
name = "one organisation"
match = { source = [{ prefix = "aws.partner/genesys.com" }] }
scope = "organisation"
"""


NOTHING = "\N{EN DASH}"
"""What stands in a cell with nothing in it."""


def event(number: int = 1, **more: Any) -> bytes:
    """Make an event of an invented shop that is about a conversation."""
    detail = {"conversationId": f"conversation-{number}", "order": number}
    return order(number, **{"detail": detail, **more})


class World(Live):
    """A service that runs, and whoever looks at it."""

    visitor: Visitor

    def send(self, *raws: bytes) -> list[Outcome]:
        """Let events arrive together, and tell what became of each, on its last route."""
        answers = self.do(lambda: self.service.router.process(list(raws)))
        return [answer.outcomes[-1][1] if answer.outcomes else answer for answer in answers]

    def begin(self, raw: bytes) -> Any:
        """Let an event arrive, and do not wait for what becomes of it."""
        return asyncio.run_coroutine_threadsafe(self.service.router.process([raw]), self.loop)

    def page(self, path: str = "/decisions", status: int = 200) -> "Page":
        answer = self.visitor.get(path)
        assert answer.status == status, answer.text
        return Page(answer.text)

    def why(self, at: int = 0, search: str = "") -> "Page":
        """Open the page about an arrival: that at place *at* of the list, newest first."""
        rows = self.page(f"/decisions{search}").rows
        return self.page(rows[at]["why"])


@contextmanager
def world(
    folder: Path, more: str = "", *, rules: str = RULES, clock: Any = None, **settings: Any
) -> Iterator[World]:
    """Run a service; *more* is for the end of its configuration file."""
    given: dict[str, Any] = {
        "source": "http://127.0.0.1:0/events",
        "store": f"sqlite:{folder}/seen.db",
        "dead": f"sqlite:{folder}/dead.db",
        "dashboard": "127.0.0.1:0",
        "history": "all",
    }
    if "[[routes]]" not in more:
        given |= {"sink": "python:os:fsencode", "route": "crm"}
    text = "\n".join(f"{name} = {json.dumps(value)}" for name, value in (given | settings).items())
    file = folder / "oncebridge.toml"
    file.write_text(f"{text}\n{rules}\n{more}\n")
    sink = Sink()
    setup = config.with_sink(config.load(file, environment={}), SinkPlace("python:desk:take", sink))
    running = World(setup, sink, clock)
    running.start()
    running.visitor = Visitor(running.service.dashboard_url)
    try:
        yield running
    finally:
        sink.let_go()
        running.stop()


class Page(HTMLParser):
    """A page as one reads it: its words, its rows, its links."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.html = html
        self.rows: list[dict[str, str]] = []
        """The cells of each row of a table by their labels; `why` is where its link leads."""
        self.links: dict[str, str] = {}
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self._words: list[str] = []
        self._labels: list[str] = []
        self._link: tuple[str, list[str]] | None = None
        self.feed(html)
        self.close()

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", "".join(self._words)).replace(" ,", ",")

    def attributes(self, tag: str, **wanted: str) -> list[dict[str, str | None]]:
        """Give the attributes of the tags that have those wanted."""
        return [
            found
            for name, found in self.tags
            if name == tag and all(found.get(one) == value for one, value in wanted.items())
        ]

    @property
    def lead(self) -> str:
        """What is said first."""
        found = re.search(r'<p class="lead">(.*?)</p>', self.html, re.DOTALL)
        assert found
        return Page(found[1]).text.strip()

    def section(self, name: str) -> "Page":
        """Give the section under the heading with the id *name*."""
        (found,) = re.findall(
            rf'<section aria-labelledby="{name}">.*?</section>', self.html, re.DOTALL
        )
        return Page(found)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append((tag, found))
        if tag == "tr":
            self.rows.append({})
        if tag in ("td", "th"):
            self._labels.append(found.get("data-label") or "")
        if tag == "a":
            self._link = found.get("href") or "", []
        if tag in ("p", "li", "div", "dt", "dd", "td", "br", "h1", "h2", "summary"):
            self._words.append(" ")

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th") and self._labels:
            self._labels.pop()
        if tag == "tbody":
            self.rows = [row for row in self.rows if row]
        if tag == "a" and self._link:
            href, words = self._link
            text = " ".join("".join(words).split())
            self.links[text] = href
            if text.startswith("Why?") and self.rows:
                row, label = self.rows[-1], (self._labels or [""])[-1]
                row["why"] = href
                # It stands beside the verdict, and is no part of it.
                row[label] = row.get(label, "").removesuffix("".join(words).strip()).strip()
            self._link = None

    def handle_data(self, data: str) -> None:
        self._words.append(data)
        if self._link:
            self._link[1].append(data)
        if self._labels and self._labels[-1] and self.rows:
            row, label = self.rows[-1], self._labels[-1]
            row[label] = (row.get(label, "") + data).strip()
