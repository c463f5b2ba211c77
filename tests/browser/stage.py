"""
The browser, and pages that are looked over while they are used.

Playwright's blocking calls run a loop of their own on the thread that makes them, where no other
test could run one any more. So it gets a thread to itself, and the tests in this folder run there
(see `conftest.py`).
"""

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from playwright.sync_api import expect, sync_playwright
from tests.servers import browser

PICTURES = Path(__file__).parents[2] / "build" / "screenshots"
DESK = {"width": 1280, "height": 900}
PHONE = {"width": 360, "height": 740}
WAIT_MS = 20_000
expect.set_options(timeout=WAIT_MS)


class Stage:
    """A thread with Playwright and one Chromium."""

    def __init__(self, program=None):
        self._pool = ThreadPoolExecutor(1, "playwright")
        self.run(self._open, str(program or browser.ready()))

    def _open(self, program):
        self._playwright = sync_playwright().start()
        self.browser = self._playwright.chromium.launch(
            executable_path=program, args=browser.flags(), timeout=60_000
        )

    def run(self, work, *args, **more):
        """Call *work* on the thread, and give what it gives."""
        return self._pool.submit(work, *args, **more).result()

    def close(self):
        self.run(self.browser.close)
        self.run(self._playwright.stop)
        self._pool.shutdown()


class Visits:
    """All pages of one test, and whatever was wrong on them."""

    def __init__(self, stage):
        self._stage = stage
        self._contexts = []
        self.problems = []

    def open(self, url, *, size=DESK, scheme="light", allowed=(), origin="", **more):
        """
        Open a page at *url* as somebody would who was never there before.

        *allowed* are parts of what may go wrong; anything else fails the test at its end. Nothing
        is fetched from elsewhere than *origin*, which is that of *url* unless it is given.
        """
        context = self._stage.browser.new_context(
            viewport=size,
            color_scheme=scheme,
            is_mobile=size is PHONE,
            has_touch=size is PHONE,
            timezone_id="Europe/Berlin",
            locale="en-GB",
            **more,
        )
        context.set_default_timeout(WAIT_MS)
        self._contexts.append(context)
        page = context.new_page()
        self._look_over(page, origin or url, allowed)
        page.goto(url)
        return page

    def _look_over(self, page, url, allowed):
        origin = urlsplit(url).netloc

        def wrong(text):
            if not any(part in text for part in allowed):
                self.problems.append(text)

        watched = {
            "console": lambda said: _heard(said.type, said.text),
            "pageerror": lambda error: f"error: {error}",
            "request": lambda request: _left(request, origin),
            "requestfailed": _failed,
            "response": _refused,
            "popup": lambda other: f"popup: {other.url}",
        }
        for name, look in watched.items():
            page.on(name, lambda what, look=look: wrong(told) if (told := look(what)) else None)
        page.on("dialog", lambda dialog: (wrong(f"dialog: {dialog.message}"), dialog.dismiss()))

    def close(self):
        for context in self._contexts:
            with suppress(Exception):  # a server that went may have taken it along
                context.close()
        assert not self.problems, "\n".join(self.problems)


def _heard(kind, text):
    return f"console: {text}" if kind in ("error", "warning") else ""


def _left(request, origin):
    return f"left the origin: {request.url}" if urlsplit(request.url).netloc != origin else ""


def _failed(request):
    # A page that is left gives up the answer it waited for.
    is_left = request.failure == "net::ERR_ABORTED"
    return "" if is_left else f"failed: {request.method} {request.url} {request.failure}"


def _refused(response):
    is_error = response.status >= 400
    return (
        f"answered: {response.status} {response.request.method} {response.url}" if is_error else ""
    )


def picture(page, name):
    """Keep how *page* looks, for people to look at."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=PICTURES / f"{name}.png", full_page=True, animations="disabled")


def overflow(page):
    """Tell by how many pixels the page is wider than its window, and what sticks out."""
    return page.evaluate(
        """() => {
          const root = document.scrollingElement;
          if (root.scrollWidth <= window.innerWidth) return [];
          const out = [...document.querySelectorAll("body *")].filter((one) => {
            if (one.closest(".scroll, pre") && !one.matches(".scroll, pre")) return false;
            return one.getBoundingClientRect().right > window.innerWidth + 1;
          });
          return [`${root.scrollWidth} > ${window.innerWidth}`,
                  ...out.slice(0, 8).map((one) => one.outerHTML.slice(0, 120))];
        }"""
    )
