"""
What people write first.

Each snippet is a faithful small version of something that circulates, and each is wrong in
one way (TESTPLAN §8). They share one interface: `await handle(raw)` tells whether the
source may forget the record. `Table` stands for the DynamoDB table, Redis or dict beside it.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from hashlib import sha256
from typing import Any

WINDOW_MS = 300_000


class Table:
    """A key-value store with the calls that snippets make; every call is a round trip."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self.clock = clock
        self.rows: dict[str, Any] = {}
        self.meanwhile: dict[str, Callable[[], Awaitable[Any]]] = {}
        """What happens during the next call of that name, once."""
        self.always: dict[str, Callable[[], Awaitable[Any]]] = {}
        self.after: dict[str, Callable[[], Awaitable[Any]]] = {}
        """What happens once the next call of that name has been applied."""

    async def _trip(self, name: str) -> None:
        await asyncio.sleep(0)
        if name in self.meanwhile:
            await self.meanwhile.pop(name)()
        if name in self.always:
            await self.always[name]()

    async def _applied(self, name: str) -> None:
        if name in self.after:
            await self.after.pop(name)()

    async def get(self, key: str) -> Any:
        await self._trip("get")
        return self.rows.get(key)

    async def put(self, key: str, value: Any) -> None:
        await self._trip("put")
        self.rows[key] = value
        await self._applied("put")

    async def add(self, key: str, value: Any) -> bool:
        """Put if there is nothing: `attribute_not_exists`, `SET NX`."""
        await self._trip("add")
        is_new = key not in self.rows
        if is_new:
            self.rows[key] = value
        await self._applied("add")
        return is_new

    async def delete(self, key: str) -> None:
        await self._trip("delete")
        self.rows.pop(key, None)


class Naive:
    """What snippets have in common."""

    def __init__(self, world: Any) -> None:
        self.table: Table = world.table
        self.send: Callable[[bytes], Awaitable[None]] = world.send
        self.now_ms: Callable[[], int] = world.clock

    def key(self, raw: bytes) -> str:
        return sha256(raw).hexdigest()


class GetThenPut(Naive):
    """i: look the key up, then write it."""

    async def handle(self, raw: bytes) -> bool:
        key = self.key(raw)
        if await self.table.get(key):
            return True
        await self.table.put(key, 1)
        await self.send(raw)
        return True


class NotExistsOnly(Naive):
    """ii: put if absent with a TTL, and trust that the TTL has removed what expired."""

    async def handle(self, raw: bytes) -> bool:
        if await self.table.add(self.key(raw), {"ttl": self.now_ms() + WINDOW_MS}):
            await self.send(raw)
        return True


class MarkThenProcess(Naive):
    """iii: mark first; whatever fails afterwards is lost."""

    async def handle(self, raw: bytes) -> bool:
        if await self.table.add(self.key(raw), 1):
            await self.send(raw)
        return True


class HashOfDetail(Naive):
    """iv and ix: hash `event.get("detail", {})`, whatever the record is."""

    def key(self, raw: bytes) -> str:
        detail = json.loads(raw).get("detail", {})
        return sha256(json.dumps(detail, sort_keys=True).encode()).hexdigest()

    async def handle(self, raw: bytes) -> bool:
        if await self.table.add(self.key(raw), 1):
            await self.send(raw)
        return True


class HashOfJoinedText(HashOfDetail):
    """ix: source, detail-type and detail simply written one after the other."""

    def key(self, raw: bytes) -> str:
        event = json.loads(raw)
        text = event["source"] + event["detail-type"] + json.dumps(event["detail"])
        return sha256(text.encode()).hexdigest()


class ConstantFallback(Naive):
    """v: a constant key where there is no other."""

    def key(self, raw: bytes) -> str:
        try:
            return str(json.loads(raw)["id"])
        except (ValueError, KeyError):
            return "unknown"

    async def handle(self, raw: bytes) -> bool:
        if await self.table.add(self.key(raw), 1):
            await self.send(raw)
        return True


class ConversationOnly(HashOfDetail):
    """vi: the conversation is the event."""

    def key(self, raw: bytes) -> str:
        return str(json.loads(raw)["detail"]["conversationId"])


class LastSeen(Naive):
    """vii: `timestamp <= last_seen` is old."""

    async def handle(self, raw: bytes) -> bool:
        detail = json.loads(raw)["detail"]
        last_seen = await self.table.get(detail["e"])
        if last_seen is not None and detail["v"] <= last_seen:
            return True
        await self.send(raw)
        await self.table.put(detail["e"], detail["v"])
        return True


class CompareThenSend(LastSeen):
    """vii: the comparison mended, but the send still comes later."""

    async def handle(self, raw: bytes) -> bool:
        detail = json.loads(raw)["detail"]
        last_seen = await self.table.get(detail["e"])
        if last_seen is not None and detail["v"] < last_seen:
            return True
        await self.table.put(detail["e"], detail["v"])
        await self.send(raw)
        return True


class SwallowsErrors(Naive):
    """viii: `except Exception: log` and answer 200."""

    async def handle(self, raw: bytes) -> bool:
        try:
            json.loads(raw)["detail"]
            if await self.table.add(self.key(raw), 1):
                await self.send(raw)
                await self.table.put(self.key(raw), 2)
        except Exception:  # noqa: BLE001 - the bug itself
            pass
        return True


class LocalClock(Naive):
    """x: the end of the window by the worker's own clock."""

    def __init__(self, world: Any, offset_ms: int = 0) -> None:
        super().__init__(world)
        self._offset_ms = offset_ms

    async def handle(self, raw: bytes) -> bool:
        now = self.now_ms() + self._offset_ms
        ends = await self.table.get(self.key(raw))
        if ends is not None and now < ends:
            return True
        await self.table.put(self.key(raw), now + WINDOW_MS)
        await self.send(raw)
        return True


LEASE_MS = 30_000


class Claiming(Naive):
    """A claim with a lease, done well but for what a subclass gets wrong."""

    async def claim(self, key: str) -> str:
        row = await self.table.get(key)
        if row is not None and row["done"] and self.now_ms() < row["until"]:
            return "duplicate"
        if row is not None and not row["done"] and self.now_ms() < row["until"]:
            return "busy"
        # in one step with the get, as a conditional write would do it
        self.table.rows[key] = {"done": False, "until": self.now_ms() + LEASE_MS}
        return "ok"

    async def commit(self, key: str) -> None:
        await self.table._trip("commit")
        self.table.rows[key] = {"done": True, "until": self.now_ms() + WINDOW_MS}

    async def handle(self, raw: bytes) -> bool:
        key = self.key(raw)
        answer = await self.claim(key)
        if answer != "ok":
            return answer == "duplicate"
        try:
            await self.send(raw)
        except Exception:  # noqa: BLE001 - whatever it was, the record comes again
            await self.table.delete(key)
            return False
        await self.commit(key)
        return True


class BusyIsDuplicate(Claiming):
    """xi: somebody else is at it, so it is done."""

    async def handle(self, raw: bytes) -> bool:
        if await self.claim(self.key(raw)) != "ok":
            return True
        await self.send(raw)
        await self.commit(self.key(raw))
        return True


class Unfenced(Claiming):
    """xii: whoever held a key may release and commit it for ever."""


class UnfencedCommit(Claiming):
    """xii: a release that spares what is done, and a commit that asks for nothing."""

    async def handle(self, raw: bytes) -> bool:
        key = self.key(raw)
        answer = await self.claim(key)
        if answer != "ok":
            return answer == "duplicate"
        try:
            await self.send(raw)
        except Exception:  # noqa: BLE001 - whatever it was, the record comes again
            row = await self.table.get(key)
            if not row["done"]:
                await self.table.delete(key)
            return False
        await self.commit(key)
        return True


class FreeHeartbeat(Claiming):
    """xiii: a heartbeat that runs until somebody stops it."""

    async def handle(self, raw: bytes) -> bool:
        key = self.key(raw)
        if await self.claim(key) != "ok":
            return False

        async def beat() -> None:
            while True:
                await asyncio.sleep(LEASE_MS / 3000)
                self.table.rows[key]["until"] = self.now_ms() + LEASE_MS

        heart = asyncio.create_task(beat())
        try:
            await self.send(raw)
            await self.commit(key)
        finally:
            heart.cancel()
        return True


class FreshTokenOnResend(Naive):
    """xiv: a client library that resends, over a claim that does not know its own."""

    async def handle(self, raw: bytes) -> bool:
        key = self.key(raw)
        for _ in range(3):
            try:
                is_ours = await self.table.add(key, {"until": self.now_ms() + LEASE_MS})
                break
            except ConnectionError:
                continue
        if not is_ours:
            return False  # busy, against itself
        await self.send(raw)
        return True


class ThroughFloats(Naive):
    """xv: parsed with floats, passed on as dumped again."""

    async def handle(self, raw: bytes) -> bool:
        event = json.loads(raw, parse_int=float)
        again = json.dumps(event).encode()
        if await self.table.add(sha256(again).hexdigest(), 1):
            await self.send(again)
        return True


class CountsEveryNack(Naive):
    """xvi: any failure is an attempt, and after three the record goes to the dead letters."""

    def __init__(self, world: Any) -> None:
        super().__init__(world)
        self.attempts: dict[bytes, int] = {}
        self.dead: list[bytes] = []

    async def handle(self, raw: bytes) -> bool:
        try:
            if await self.table.add(self.key(raw), 1):
                await self.send(raw)
        except Exception:  # noqa: BLE001 - counted, and given up
            self.attempts[raw] = self.attempts.get(raw, 0) + 1
            if self.attempts[raw] < 3:
                return False
            self.dead.append(raw)
        return True


class ShortWindow(Naive):
    """xix: five minutes ought to be enough."""

    async def handle(self, raw: bytes) -> bool:
        ends = await self.table.get(self.key(raw))
        if ends is not None and self.now_ms() < ends:
            return True
        await self.table.put(self.key(raw), self.now_ms() + WINDOW_MS)
        await self.send(raw)
        return True


class NegativeRetryAfter(Claiming):
    """xx: `Retry-After: until - now`, by two clocks."""

    async def retry_after_ms(self, raw: bytes, behind_ms: int) -> int:
        row = await self.table.get(self.key(raw))
        return int(row["until"] - (self.now_ms() + behind_ms))
