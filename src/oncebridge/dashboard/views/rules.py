"""Rules: what is configured, what each matched, and a box to try an event."""

import asyncio
import json
from typing import Any, Final
from weakref import WeakKeyDictionary

from oncebridge.dashboard import rule_descriptions as rulebook
from oncebridge.dashboard.data import Desk
from oncebridge.dashboard.page import Answer, Ask, Route, Shown
from oncebridge.dashboard.try_events import Result, try_out
from oncebridge.errors import OncebridgeError

_ORDER: Final = {
    "version": "0",
    "id": "0d5e7c1a-6c58-4d0e-9d0c-2f6a1b7c9e10",
    "detail-type": "Order Placed",
    "source": "com.example.shop",
    "account": "123456789012",
    "time": "2026-03-02T09:15:00Z",
    "region": "eu-central-1",
    "resources": [],
    "detail": {"orderId": "o-1001", "status": "placed", "total": 42},
}
_CONVERSATION: Final = {
    **_ORDER,
    "detail-type": "v2.detail.events.conversation.{id}.acd.start",
    "source": "aws.partner/genesys.com/cloud/7d3a9b52-0000-4000-8000-5c1f0e2d4b6a/example",
    "detail": {
        "topicName": "v2.detail.events.conversation.c0ffee00-0000-4000-8000-000000000001.acd.start",
        "version": "2",
        "timestamp": "2026-03-02T09:15:00.120Z",
        "eventBody": {
            "eventTime": 1772442900080,
            "conversationId": "c0ffee00-0000-4000-8000-000000000001",
            "queueId": "0badcafe-0000-4000-8000-000000000002",
            "mediaType": "VOICE",
        },
        "metadata": {"CorrelationId": "5eed0000-0000-4000-8000-000000000003"},
    },
}


_TURN_S: Final = 20.0
_VIEW_WITHIN_S: Final = 5.0
_MOST_SHOWN: Final = 512 * 1024


class _Kept:
    """What is kept for one desk."""

    def __init__(self) -> None:
        self.trying = asyncio.Lock()
        self._reading = asyncio.Lock()
        self._reader: rulebook.Reader | None = None

    async def reader(self, desk: Desk) -> rulebook.Reader:
        """Read the configuration once, beside the loop: some hundred rules take their time."""
        async with self._reading:
            if self._reader is None:
                self._reader = await asyncio.to_thread(rulebook.Reader, desk.setup)
            return self._reader


_kept: WeakKeyDictionary[Desk, _Kept] = WeakKeyDictionary()


def _of(desk: Desk) -> _Kept:
    return _kept.setdefault(desk, _Kept())


async def _show(desk: Desk, ask: Ask) -> Answer:  # noqa: ARG001 - like every page
    is_genesys = desk.setup.config.preset == "genesys"
    example = json.dumps(_CONVERSATION if is_genesys else _ORDER, indent=2)
    return await _page(desk, example, None)


async def _try(desk: Desk, ask: Ask) -> Answer:
    text = next(iter(ask.form.get("event", ())), "")
    result = await _tried(desk, text)
    # Whoever has pasted so much does not read it here again.
    is_shown = len(text) <= _MOST_SHOWN
    return await _page(desk, text if is_shown else "", result, is_shown=is_shown)


async def _tried(desk: Desk, text: str) -> Result:
    """Try one text after the other: events come first, and need the processor too."""
    trying = _of(desk).trying
    try:
        async with asyncio.timeout(_TURN_S):
            await trying.acquire()
    except TimeoutError:
        return Result(refused="others are trying events just now; try again in a moment")
    try:
        return await try_out(text, desk.setup, desk.store)
    finally:
        trying.release()


async def _page(desk: Desk, text: str, result: Result | None, *, is_shown: bool = True) -> Answer:
    trouble = ""
    view = None
    try:
        async with asyncio.timeout(_VIEW_WITHIN_S):
            view = await desk.view()
    except OncebridgeError as error:
        trouble = str(error)
    except TimeoutError:
        trouble = "the store did not answer in time"
    values: dict[str, Any] = {
        "book": (await _of(desk).reader(desk)).book(view),
        "trouble": trouble,
        "text": text.encode("utf-8", "replace").decode(),
        "result": result,
        "is_shown": is_shown,
        "file": desk.setup.file,
    }
    return Shown("rules.html", values)


ROUTES: Final = (
    Route("GET", "/rules", _show),
    Route("POST", "/rules/try", _try),
)
