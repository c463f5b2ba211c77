"""The whole visit, in order: where events come from, the store, where they go, rights, time."""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final

from msgspec.structs import replace

from oncebridge.aws.templates.needs import Grant, Resource
from oncebridge.base.clock import Clock
from oncebridge.check.aws import (
    buckets,
    mappings,
    queues,
    rights,
    rules,
    sinks,
    sources,
    tables,
)
from oncebridge.check.aws import (
    overlaps as twice,
)
from oncebridge.check.aws.account import Reader, Where
from oncebridge.check.aws.context import Spot, Visit, secrets
from oncebridge.check.aws.queues import Queue
from oncebridge.check.aws.rights import Principal
from oncebridge.check.aws.sources import Brought
from oncebridge.check.finding import Checkup, Severity
from oncebridge.check.proxies import check_proxy
from oncebridge.http.target import HttpTarget
from oncebridge.service.config import Setup

_FEW: Final = 3
_OFF_MS: Final = 5_000
_FAR_OFF_MS: Final = 60_000


async def check(
    setup: Setup,
    checkup: Checkup,
    *,
    functions: Sequence[str],
    destinations: Sequence[str],
    role: str | None,
    clock: Clock | None,
) -> None:
    """See `oncebridge.check.aws.check_aws`."""
    reader = Reader(clock)
    visit = Visit(setup, checkup, reader)
    try:
        await _Tour(visit, role).go(functions, destinations)
        _check_clock(visit, reader)
        for url in reader.endpoints():
            check_proxy(HttpTarget.parse(url), checkup)
    finally:
        await reader.aclose()


class _Tour:
    """What is learned on the way, for what is looked at later."""

    def __init__(self, visit: Visit, role: str | None) -> None:
        self._visit = visit
        self._role = role
        self._sources: list[Queue] = []
        self._by_function: list[Queue] = []
        self._queues: list[Queue] = []
        self._functions: list[Brought] = []

    async def go(self, functions: Sequence[str], destinations: Sequence[str]) -> None:
        visit = self._visit
        home = _home(visit)
        brought = await visit.beside(
            [
                *[partial(sources.check_source, spot=spot) for spot in self._of("source")],
                *[partial(sources.check_function, name=name, where=home) for name in functions],
                *[
                    partial(sources.check_destination, name=name, where=home)
                    for name in destinations
                ],
                *[partial(_check_store, spot=spot) for spot in self._of("store")],
            ]
        )
        self._sources = [queue for one in brought for queue in one.queues]
        self._queues = list(self._sources)
        self._functions = [one for one in brought if one.function is not None]
        self._by_function = [queue for one in brought if one.is_by_function for queue in one.queues]
        fed = [feeds for one in brought for feeds in one.feeds]
        several = [feed for feeds in fed for feed in feeds.found]
        works: list[Callable[[Visit], Awaitable[None]]] = [
            partial(twice.check_twice, several=fed),
            *[
                partial(sinks.check_sink, spot=spot, by_function=self._by_function, several=several)
                for spot in self._of("sink")
            ],
            *[partial(self._check_dead, spot=spot) for spot in self._of("dead")],
        ]
        if rules.is_genesys(visit, several):
            works.append(partial(rules.check_partner_sources, where=home))
        await visit.beside(works)
        await self._check_rights(home)

    def _of(self, kind: str) -> list[Spot]:
        return [spot for spot in self._visit.spots if spot.kind == kind]

    async def _check_dead(self, visit: Visit, spot: Spot) -> None:
        queue = await queues.of_spot(visit, spot)
        if queue is None:
            return
        self._queues.append(queue)
        await queues.check_dead(visit, queue, self._sources, self._by_function)
        if queue.arn in [source.arn for source in self._sources]:
            return
        several = await mappings.of_source(visit, queue.subject, queue.arn, spot.where)
        enabled = [mapping for mapping in several if mapping.is_enabled]
        if enabled:
            visit.find(
                "dead-has-consumer",
                Severity.WARNING,
                queue.subject,
                seen=f"Lambda reads it for {', '.join(mapping.function for mapping in enabled)}",
                why="The function takes the dead letters away: `oncebridge dead` finds none.",
                fix="Take the mapping away, if the function does not keep them:\n"
                + "\n".join(mapping.command("--no-enabled") for mapping in enabled[:_FEW]),
            )

    async def _check_rights(self, home: Where) -> None:
        visit = self._visit
        who = await rights.caller(visit, home)
        if who is None:
            return
        seen = {queue.arn: queue for queue in self._queues}
        own = [grant for spot in visit.spots for grant in spot.grants] + secrets(visit.setup)
        if not self._functions or self._role or self._of("source"):
            asked = Principal(self._role or who.arn, who.account, who.region)
            await rights.check_rights(visit, asked, own, seen, home)
        for one in self._functions:
            asked = Principal(one.role, who.account, who.region)
            await rights.check_rights(visit, asked, _of_function(own, one.queues), seen, home)


async def _check_store(visit: Visit, spot: Spot) -> Brought:
    check = tables.check_table if spot.scheme == "dynamodb" else buckets.check_bucket
    await check(visit, spot)
    return Brought()


def _of_function(grants: Sequence[Grant], found: Sequence[Queue]) -> list[Grant]:
    """Return what a function does: Lambda reads for it, and it only writes dead letters."""
    kept = [
        replace(grant, what="function.dead") if grant.what == "dead.sqs" else grant
        for grant in grants
        if not grant.what.startswith("source.")
    ]
    for queue in found:
        _, partition, service, region, account, name = queue.arn.split(":", 5)
        kept.append(Grant("function.sqs", Resource(service, name, region, account, partition)))
    return kept


def _home(visit: Visit) -> Where:
    """Return where to ask what is no address's own: where the first address is."""
    for spot in visit.spots:
        if spot.kind != "sink":
            return Where(spot.where.region, spot.where.profile)
    return Where()


def _check_clock(visit: Visit, reader: Reader) -> None:
    clock = reader.clock
    subject = "this host's clock"
    if clock.error_ms is None:
        return  # no answer came, and that was said
    off_s = clock.offset_ms / 1000
    side = "behind" if off_s > 0 else "ahead of"
    if abs(clock.offset_ms) <= _OFF_MS:
        visit.fine(subject, "it agrees with AWS's")
        return
    visit.find(
        "clock-aws",
        Severity.ERROR if abs(clock.offset_ms) > _FAR_OFF_MS else Severity.WARNING,
        subject,
        seen=f"it is {abs(off_s):.1f} s {side} AWS's",
        why="Claims end too early or too late by that much, and from 5 minutes on AWS refuses "
        "every signature. With a store on AWS, oncebridge does not start (max_skew).",
        fix="Keep it by NTP:\ntimedatectl set-ntp true\n"
        "(on EC2: chrony with server 169.254.169.123)",
    )
