"""Decisions as a gateway tells them, of invented events."""

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from tests.faults.doubles import CountingDice

from oncebridge.engine.causes import Cause
from oncebridge.engine.hooks import Decision, Decisions
from oncebridge.engine.verdict import First, Outcome, Verdict
from oncebridge.events.event import Event, parse
from oncebridge.events.key import make_key
from oncebridge.observe.counts import Counts
from oncebridge.observe.history import HistoryQuery, SearchResult
from oncebridge.observe.history_writer import HistoryWriter
from oncebridge.observe.report import Report, State
from oncebridge.testing.clock import ManualClock

NOW_MS = ManualClock().now_ms
TOPIC = "v2.detail.events.conversation.{id}.acd.end"


def key(number: int) -> bytes:
    return make_key("crm", b"content", "shop", "Order", (str(number).encode(),))


def event(number: int = 1, detail: Any = None, **envelope: Any) -> Event:
    body = {"conversationId": f"conversation-{number}", "ani": "tel:+15555550100"}
    return parse(
        json.dumps(
            {
                "version": "0",
                "id": f"id-{number}",
                "detail-type": TOPIC,
                "source": "aws.partner/genesys.com/cloud/org/prod",
                "account": "123456789012",
                "time": "2026-01-02T03:04:05Z",
                "region": "eu-central-1",
                "resources": [],
                "detail": detail or {"eventBody": body},
                **envelope,
            }
        ).encode()
    )


def decision(
    number: int = 1,
    verdict: Verdict = Verdict.DELIVERED,
    *,
    at_ms: int = NOW_MS,
    of: Event | None = None,
    first: First | None = None,
    **outcome: Any,
) -> Decision:
    given = {"rule": "calls", "key": key(number), "first": first, **outcome}
    told = Outcome(verdict, True, **given)
    return Decision("crm", of or event(number), told, at_ms, 0.012, 2)


def together(*decisions: Decision) -> Decisions:
    """Return decisions as a hook gets them."""
    first = decisions[0]
    return Decisions(
        first.route,
        [one.event for one in decisions],
        [one.outcome for one in decisions],
        first.arrived_ms,
        first.took_s,
        [one.attempt for one in decisions],
    )


def remember(kept: HistoryWriter, *decisions: Decision, cause: Cause | None = None) -> None:
    """Record decisions that were made together."""
    kept.decided(together(*decisions), [cause] * len(decisions))


def recorder(store: Any, worker: str = "w1", **more: Any) -> HistoryWriter:
    given = {
        "mode": "all",
        "keep": timedelta(days=1),
        "payloads": None,
        "clock": ManualClock(),
        "dice": CountingDice(),
        **more,
    }
    return HistoryWriter(store, worker, **given)


def report(
    worker: HistoryWriter | str, *, history: int | None = None, at_ms: int = NOW_MS
) -> Report:
    name, pages = (worker, 0) if isinstance(worker, str) else (worker.worker, worker.pages)
    state = State(name, "box", 1, "1.0", 5, at_ms, history=pages if history is None else history)
    return Report(state, Counts())


async def everything(archive: Any, reports: Sequence[Report], **query: Any) -> SearchResult:
    found: SearchResult = await archive.search(HistoryQuery(limit=1_000_000, **query), reports)
    return found


def numbers(found: SearchResult) -> list[int]:
    return [seen.row.number for seen in found.rows]
