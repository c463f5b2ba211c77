"""
The dashboard over real sockets, and a visitor who speaks HTTP by hand.

`service` starts a whole service with a dashboard: events go in at its source, pages are looked at.
`serve` starts a dashboard alone, beside a store, with views of the test's own if it likes.
"""

import asyncio
import http.client
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlencode, urlsplit

import pytest
from msgspec.structs import replace
from tests.http.live import Live, live

from oncebridge.dashboard import Dashboard, DashboardData
from oncebridge.dashboard.routes import VIEWS
from oncebridge.service import config
from oncebridge.service.addresses import StorePlace
from oncebridge.service.config import Setup

TOKEN = "a-token-of-thirty-two-characters"
_FIELD = re.compile(r'name="token" value="([^"]+)"')


@dataclass
class Answer:
    status: int
    headers: list[tuple[str, str]]
    raw: bytes

    def __getitem__(self, name: str) -> str:
        """Give the only value of a header."""
        (value,) = self.all(name)
        return value

    def all(self, name: str) -> list[str]:
        return [value for known, value in self.headers if known.lower() == name.lower()]

    @property
    def text(self) -> str:
        return self.raw.decode()

    @property
    def token(self) -> str:
        """The form token of the page."""
        return _FIELD.findall(self.text)[-1]


@dataclass
class Visitor:
    """A browser, as far as it matters here: it keeps cookies and says where a form came from."""

    url: str
    cookies: dict[str, str] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    """Sent with everything."""

    @property
    def host(self) -> str:
        return urlsplit(self.url).netloc

    def ask(
        self, method: str, path: str, body: bytes | None = None, **headers: str | None
    ) -> Answer:
        """Ask for *path*; a header of None is left out."""
        said = {"Host": self.host, "Accept": "text/html", **self.headers}
        said |= {name.replace("_", "-"): value for name, value in headers.items()}
        if self.cookies and "Cookie" not in said:
            said["Cookie"] = "; ".join(f"{name}={value}" for name, value in self.cookies.items())
        parts = urlsplit(self.url)
        with closing(http.client.HTTPConnection(parts.hostname, parts.port, timeout=20)) as line:
            line.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for name, value in said.items():
                if value is not None:
                    line.putheader(name, value)
            if body is not None:
                line.putheader("Content-Length", str(len(body)))
            line.endheaders(body)
            response = line.getresponse()
            answer = Answer(response.status, response.getheaders(), response.read())
        for cookie in answer.all("Set-Cookie"):
            name, _, value = cookie.partition(";")[0].partition("=")
            self.cookies.pop(name, None)
            if value:
                self.cookies[name] = value
        return answer

    def get(self, path: str = "/", **headers: str | None) -> Answer:
        return self.ask("GET", path, **headers)

    def post(self, path: str, form: dict[str, object], **headers: str | None) -> Answer:
        """Send a form, as a page of the dashboard would."""
        said = {
            "Origin": f"http://{self.host}",
            "Content_Type": "application/x-www-form-urlencoded",
            **headers,
        }
        return self.ask("POST", path, urlencode(form, doseq=True).encode(), **said)

    def log_in(self, token: str = TOKEN, **more: object) -> Answer:
        page = self.get("/login")
        return self.post("/login", {"token": page.token, "secret": token, **more})


def loaded(directory: Path, **flags: str) -> Setup:
    """Load a configuration with everything in *directory*, and a dashboard on a free port."""
    usual = {
        "source": "http://127.0.0.1:0/events",
        "store": f"sqlite:{directory / 'seen.db'}",
        "dead": f"sqlite:{directory / 'dead.db'}",
        "dashboard": "127.0.0.1:0",
        "route": "crm",
    }
    return config.load(environment={}, flags=usual | flags)


@dataclass
class Alone:
    """A dashboard without a service, in a thread."""

    setup: Setup
    more: dict
    visitor: Visitor | None = None
    data: DashboardData | None = None

    @contextmanager
    def up(self) -> Iterator["Alone"]:
        ready, failures = threading.Event(), []

        async def run() -> None:
            self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
            self._loop.set_exception_handler(lambda _, context: failures.append(context))
            store = self.setup.config.store.opened
            try:
                await store.open()
                self.data = DashboardData(self.setup, store)
                served = Dashboard(self.setup, self.data, **self.more)
                await served.open()
                self.visitor = Visitor(served.url)
                ready.set()
                await self._stop.wait()
                await served.aclose()
            except BaseException as failure:  # noqa: BLE001 - raised again by the test's thread
                failures.append(failure)
            finally:
                await store.aclose()
                ready.set()

        thread = threading.Thread(target=asyncio.run, args=(run(),), daemon=True)
        thread.start()
        assert ready.wait(20)
        try:
            if not failures:
                yield self
        finally:
            self._loop.call_soon_threadsafe(self._stop.set)
            thread.join(20)
        for failure in failures:
            raise failure if isinstance(failure, BaseException) else AssertionError(failure)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Visitor]]:
    """Serve a dashboard alone: *views* and *clock* if given, and else settings as flags."""
    with ExitStack() as stack:

        def serve(views=VIEWS, clock=None, store=None, **flags: str) -> Visitor:
            setup = loaded(tmp_path, **flags)
            more = {"views": views} | ({"clock": clock} if clock else {})
            if store is not None:
                place = StorePlace(setup.config.store.url, store)
                setup = replace(setup, config=replace(setup.config, store=place))
            return stack.enter_context(Alone(setup, more).up()).visitor

        yield serve


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Callable[..., tuple[Live, Visitor]]]:
    """Run a whole service with a dashboard; `live.sink` keeps what it is handed."""
    with ExitStack() as stack:

        def service(sink=None, **flags: str) -> tuple[Live, Visitor]:
            running = live(tmp_path, sink, **({"dashboard": "127.0.0.1:0"} | flags))
            started = stack.enter_context(running)
            return started, Visitor(started.service.dashboard_url)

        yield service
