"""The HTTP source on a real socket: it answers or hangs up, and never with a 500."""

import asyncio
import re
import sys
from contextlib import suppress
from datetime import timedelta

import atheris

with atheris.instrument_imports(include=["oncebridge"]):
    from oncebridge.base.clock import SystemDice
    from oncebridge.base.options import Size
    from oncebridge.base.secrets import Secret
    from oncebridge.engine.gateway import Gateway
    from oncebridge.engine.router import RouteEntry, Router, RouterAnswer
    from oncebridge.engine.verdict import Verdict
    from oncebridge.http.auth import AuthOptions
    from oncebridge.sources.api import Host
    from oncebridge.sources.http.source import HttpSource, HttpSourceOptions
    from oncebridge.stores.memory import MemoryStore

NOW_MS = 1_790_000_000_000
STATUS = re.compile(rb"HTTP/1\.1 ([1-5][0-9][0-9]) [A-Za-z -]+\r\n")
DELIVERED = RouterAnswer(acknowledge=True, verdict=Verdict.DELIVERED)
LATER = RouterAnswer(acknowledge=False, verdict=Verdict.BUSY)


class Inbox:
    """Say yes to what has an even length, and `later` to the rest."""

    def put(self, raws, answered):
        for at, raw in enumerate(raws):
            answered(at, LATER if len(raw) % 2 else DELIVERED)

    def not_ready(self) -> list[str]:
        return []


def options(**auth) -> HttpSourceOptions:
    return HttpSourceOptions(max_body=Size(4096), body_time=timedelta(seconds=2), **auth)


class Door:
    """Two sources, one of them guarded, and a loop to talk to them."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.unhandled: list[dict] = []
        self.loop.set_exception_handler(lambda _, context: self.unhandled.append(context))
        self.store = MemoryStore()
        gateway = Gateway(store=self.store, sink=lambda _: None)
        host = Host(
            Router([RouteEntry(gateway)]), Inbox(), self.store, 100, lambda: NOW_MS, SystemDice()
        )
        secrets = {
            "api_keys": "apple-key-of-a-mill",
            "basic": "mill:grain-in-the-sacks",
            "oauth": "a:chalk-on-the-board",
            "hmac": "cedar-secret-of-the-wood",
        }
        assert set(secrets) < set(AuthOptions.__struct_fields__)
        guarded = options(**{kind: (Secret(text),) for kind, text in secrets.items()})
        self.sources = [
            HttpSource.from_url("http://127.0.0.1:0/e", some) for some in (options(), guarded)
        ]
        for source in self.sources:
            self.loop.run_until_complete(source.open(host))

    def look(self, data: bytes) -> None:
        for source in self.sources:
            said = self.loop.run_until_complete(talk(source.port, data))
            assert not said or said.startswith(b"HTTP/1.1 "), said
            statuses = [int(status) for status in STATUS.findall(said)]
            assert 500 not in statuses, said
            waits = statuses.count(503) + statuses.count(429)
            assert waits == said.count(b"Retry-After: "), said
            assert not self.unhandled, self.unhandled

    def close(self) -> None:
        for source in self.sources:
            self.loop.run_until_complete(source.aclose())
        self.loop.close()


async def talk(port: int, data: bytes) -> bytes:
    async with asyncio.timeout(10):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        said = b""
        with suppress(ConnectionError):
            writer.write(data)
            writer.write_eof()
            said = await reader.read()
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
        return said


if __name__ == "__main__":
    atheris.Setup(sys.argv, Door().look)
    atheris.Fuzz()
