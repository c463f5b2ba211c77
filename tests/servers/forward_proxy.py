"""
A forward proxy on loopback: proxy.py, which comes with the packages.

It finds every name below `.example` on this host, as a proxy finds names that its clients cannot
look up, and writes down what it was asked. `python -m proxy` runs it, so it can be killed,
stopped and started again on its port.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from proxy.http.parser import HttpParser
from proxy.http.proxy import HttpProxyBasePlugin
from tests.servers.process import Process, free_port, listens

USER, PASSWORD = "worker", "invented pa:ss/word@"  # as it is, it would not fit into a URL
_QUOTED = "invented%20pa%3Ass%2Fword%40"
_FILE = "TEST_PROXY_ASKED"


class Clerk(HttpProxyBasePlugin):  # type: ignore[misc]
    """Runs inside of the proxy."""

    def resolve_dns(self, host: str, port: int) -> tuple[str | None, None]:
        return ("127.0.0.1" if host.endswith(".example") else None), None

    def handle_client_request(self, request: HttpParser) -> HttpParser | None:
        asked = {
            "method": request.method.decode(),
            "host": f"{request.host.decode()}:{request.port}",
            "headers": {name.decode(): value.decode() for name, value in request.headers.values()},
        }
        with Path(os.environ[_FILE]).open("a") as file:
            file.write(json.dumps(asked) + "\n")
        return request


class ForwardProxy:
    """A proxy, for which users may need a password."""

    def __init__(self, folder: Path, *, is_guarded: bool = False) -> None:
        self.port = free_port()
        self.is_guarded = is_guarded
        self._asked = folder / f"asked-{self.port}.ndjson"
        self.process = Process(
            [
                *(sys.executable, "-m", "proxy", "--hostname", "127.0.0.1", "--port", self.port),
                *("--num-acceptors", "1", "--num-workers", "1", "--log-level", "WARNING"),
                *("--plugins", f"{__name__}.{Clerk.__name__}"),
                *(("--basic-auth", f"{USER}:{PASSWORD}") if is_guarded else ()),
            ],
            log=folder / f"proxy-{self.port}.log",
            ready=lambda: listens(self.port),
            env={_FILE: str(self._asked), "PYTHONPATH": str(Path(__file__).parents[2])},
        )

    @property
    def url(self) -> str:
        """The address, with what it takes to be let in."""
        return self.url_for(_QUOTED) if self.is_guarded else f"http://127.0.0.1:{self.port}"

    def url_for(self, password: str) -> str:
        return f"http://{USER}:{password}@127.0.0.1:{self.port}"

    @property
    def asked(self) -> list[dict[str, Any]]:
        """What was asked for and let in, in order."""
        if not self._asked.exists():
            return []
        return [json.loads(line) for line in self._asked.read_text().splitlines()]


@pytest.fixture
def start_proxy(tmp_path: Path) -> Iterator[Callable[..., ForwardProxy]]:
    """Start proxies, and end them with the test."""
    started: list[ForwardProxy] = []

    def start(**options: bool) -> ForwardProxy:
        proxy = ForwardProxy(tmp_path, **options)
        proxy.process.start()
        started.append(proxy)
        return proxy

    yield start
    for proxy in started:
        proxy.process.kill()


@pytest.fixture
def proxies_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Name proxies in the environment, and none but those: `proxies_of(HTTPS_PROXY=url)`."""
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)

    def name_them(**proxies: str) -> None:
        for name, url in proxies.items():
            monkeypatch.setenv(name, url)

    return name_them
