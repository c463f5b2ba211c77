"""Rules: the configuration, counts of each rule, and a form to try events."""

import asyncio
import json
from typing import Any, Final
from weakref import WeakKeyDictionary

from oncebridge.dashboard import rule_descriptions
from oncebridge.dashboard.data import DashboardData
from oncebridge.dashboard.page import PageRequest, PageResponse, PageRoute, TemplatePage
from oncebridge.dashboard.try_events import TrialResult, try_events
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


class _RulesCache:
    """Kept for one dashboard."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self._reading = asyncio.Lock()
        self._reader: rule_descriptions.RuleDescriber | None = None

    async def reader(self, data: DashboardData) -> rule_descriptions.RuleDescriber:
        """Return the describer, made once in a thread: several hundred rules take a while."""
        async with self._reading:
            if self._reader is None:
                self._reader = await asyncio.to_thread(rule_descriptions.RuleDescriber, data.setup)
            return self._reader


_caches: WeakKeyDictionary[DashboardData, _RulesCache] = WeakKeyDictionary()


def _cache_of(data: DashboardData) -> _RulesCache:
    return _caches.setdefault(data, _RulesCache())


async def _show(data: DashboardData, request: PageRequest) -> PageResponse:  # noqa: ARG001 - like every page
    is_genesys = data.setup.config.preset == "genesys"
    example = json.dumps(_CONVERSATION if is_genesys else _ORDER, indent=2)
    return await _page(data, example, None)


async def _try(data: DashboardData, request: PageRequest) -> PageResponse:
    text = next(iter(request.form.get("event", ())), "")
    result = await _tried(data, text)
    # A very long text is not shown again.
    is_shown = len(text) <= _MOST_SHOWN
    return await _page(data, text if is_shown else "", result, is_shown=is_shown)


async def _tried(data: DashboardData, text: str) -> TrialResult:
    """Try one text at a time, so that events are not delayed."""
    lock = _cache_of(data).lock
    try:
        async with asyncio.timeout(_TURN_S):
            await lock.acquire()
    except TimeoutError:
        return TrialResult(refused="other users are trying events; try again in a moment")
    try:
        return await try_events(text, data.setup, data.store)
    finally:
        lock.release()


async def _page(
    data: DashboardData, text: str, result: TrialResult | None, *, is_shown: bool = True
) -> PageResponse:
    trouble = ""
    view = None
    try:
        async with asyncio.timeout(_VIEW_WITHIN_S):
            view = await data.view()
    except OncebridgeError as error:
        trouble = str(error)
    except TimeoutError:
        trouble = "the store did not answer in time"
    values: dict[str, Any] = {
        "book": (await _cache_of(data).reader(data)).book(view),
        "trouble": trouble,
        "text": text.encode("utf-8", "replace").decode(),
        "result": result,
        "is_shown": is_shown,
        "file": data.setup.file,
    }
    return TemplatePage("rules.html", values)


ROUTES: Final = (
    PageRoute("GET", "/rules", _show),
    PageRoute("POST", "/rules/try", _try),
)
