"""Run the checks on AWS: sources, store, sinks, dead letters, rights, clock."""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final

from msgspec.structs import replace

from oncebridge.aws.templates.needs import Grant, Resource
from oncebridge.base.clock import Clock
from oncebridge.check.aws import (
    buckets,
    mappings,
    overlaps,
    queues,
    rights,
    rules,
    sinks,
    sources,
    tables,
)
from oncebridge.check.aws.account import AwsLocation, AwsReader
from oncebridge.check.aws.context import AwsAddress, AwsContext, secrets
from oncebridge.check.aws.queues import QueueDescription
from oncebridge.check.aws.rights import Principal
from oncebridge.check.aws.sources import SourceResult
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
    reader = AwsReader(clock)
    context = AwsContext(setup, checkup, reader)
    try:
        await _AwsChecks(context, role).go(functions, destinations)
        _check_clock(context, reader)
        for url in reader.endpoints():
            check_proxy(HttpTarget.parse(url), checkup)
    finally:
        await reader.aclose()


class _AwsChecks:
    """Runs the checks in order; later ones use the results of earlier ones."""

    def __init__(self, context: AwsContext, role: str | None) -> None:
        self._context = context
        self._role = role
        self._sources: list[QueueDescription] = []
        self._by_function: list[QueueDescription] = []
        self._queues: list[QueueDescription] = []
        self._functions: list[SourceResult] = []

    async def go(self, functions: Sequence[str], destinations: Sequence[str]) -> None:
        context = self._context
        home = _home(context)
        brought = await context.run_all(
            [
                *[partial(sources.check_source, address=address) for address in self._of("source")],
                *[partial(sources.check_function, name=name, where=home) for name in functions],
                *[
                    partial(sources.check_destination, name=name, where=home)
                    for name in destinations
                ],
                *[partial(_check_store, address=address) for address in self._of("store")],
            ]
        )
        self._sources = [queue for one in brought for queue in one.queues]
        self._queues = list(self._sources)
        self._functions = [one for one in brought if one.function is not None]
        self._by_function = [queue for one in brought if one.is_by_function for queue in one.queues]
        fed = [feeds for one in brought for feeds in one.feeds]
        several = [feed for feeds in fed for feed in feeds.found]
        works: list[Callable[[AwsContext], Awaitable[None]]] = [
            partial(overlaps.check_overlaps, several=fed),
            *[
                partial(
                    sinks.check_sink,
                    address=address,
                    by_function=self._by_function,
                    several=several,
                )
                for address in self._of("sink")
            ],
            *[partial(self._check_dead, address=address) for address in self._of("dead")],
        ]
        if rules.is_genesys(context, several):
            works.append(partial(rules.check_partner_sources, where=home))
        await context.run_all(works)
        await self._check_rights(home)

    def _of(self, kind: str) -> list[AwsAddress]:
        return [address for address in self._context.aws_addresses if address.kind == kind]

    async def _check_dead(self, context: AwsContext, address: AwsAddress) -> None:
        queue = await queues.of_address(context, address)
        if queue is None:
            return
        self._queues.append(queue)
        await queues.check_dead(context, queue, self._sources, self._by_function)
        if queue.arn in [source.arn for source in self._sources]:
            return
        several = await mappings.of_source(context, queue.subject, queue.arn, address.where)
        enabled = [mapping for mapping in several if mapping.is_enabled]
        if enabled:
            context.report(
                "dead-has-consumer",
                Severity.WARNING,
                queue.subject,
                seen=f"Lambda reads it for {', '.join(mapping.function for mapping in enabled)}",
                why="The function consumes the dead letters: `oncebridge dead` finds none.",
                fix="Disable the mapping, if the function does not keep them:\n"
                + "\n".join(mapping.command("--no-enabled") for mapping in enabled[:_FEW]),
            )

    async def _check_rights(self, home: AwsLocation) -> None:
        context = self._context
        who = await rights.caller(context, home)
        if who is None:
            return
        seen = {queue.arn: queue for queue in self._queues}
        own = [grant for address in context.aws_addresses for grant in address.grants] + secrets(
            context.setup
        )
        if not self._functions or self._role or self._of("source"):
            asked = Principal(self._role or who.arn, who.account, who.region)
            await rights.check_rights(context, asked, own, seen, home)
        for one in self._functions:
            asked = Principal(one.role, who.account, who.region)
            await rights.check_rights(context, asked, _of_function(own, one.queues), seen, home)


async def _check_store(context: AwsContext, address: AwsAddress) -> SourceResult:
    check = tables.check_table if address.scheme == "dynamodb" else buckets.check_bucket
    await check(context, address)
    return SourceResult()


def _of_function(grants: Sequence[Grant], found: Sequence[QueueDescription]) -> list[Grant]:
    """Return the grants of a function: Lambda reads for it, and it only writes dead letters."""
    kept = [
        replace(grant, what="function.dead") if grant.what == "dead.sqs" else grant
        for grant in grants
        if not grant.what.startswith("source.")
    ]
    for queue in found:
        _, partition, service, region, account, name = queue.arn.split(":", 5)
        kept.append(Grant("function.sqs", Resource(service, name, region, account, partition)))
    return kept


def _home(context: AwsContext) -> AwsLocation:
    """Return the location for calls without an address: that of the first address."""
    for address in context.aws_addresses:
        if address.kind != "sink":
            return AwsLocation(address.where.region, address.where.profile)
    return AwsLocation()


def _check_clock(context: AwsContext, reader: AwsReader) -> None:
    clock = reader.clock
    subject = "this host's clock"
    if clock.error_ms is None:
        return  # no response, which is reported already
    off_s = clock.offset_ms / 1000
    side = "behind" if off_s > 0 else "ahead of"
    if abs(clock.offset_ms) <= _OFF_MS:
        context.report_passed(subject, "it matches the clock of AWS")
        return
    context.report(
        "clock-aws",
        Severity.ERROR if abs(clock.offset_ms) > _FAR_OFF_MS else Severity.WARNING,
        subject,
        seen=f"it is {abs(off_s):.1f} s {side} the clock of AWS",
        why="Leases end too early or too late by that much, and from 5 minutes on AWS rejects every "
        "signature. With a store on AWS, oncebridge does not start (max_skew).",
        fix="Synchronise it by NTP:\ntimedatectl set-ntp true\n"
        "(on EC2: chrony with server 169.254.169.123)",
    )
