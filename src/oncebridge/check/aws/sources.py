"""Check sources on AWS: queues, streams, functions, API destinations, and their rules."""

import json
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Final

from msgspec import Struct

from oncebridge.base.durations import format_duration
from oncebridge.check.aws import (
    feeds,
    mappings,
    queues,
    rules,
    streams,
    targets,
    window,
)
from oncebridge.check.aws.account import AwsLocation, NoSuchResource
from oncebridge.check.aws.commands import aws
from oncebridge.check.aws.context import AwsAddress, AwsContext
from oncebridge.check.aws.feeds import EventFeed, EventFeeds
from oncebridge.check.aws.mappings import Function, SourceMapping
from oncebridge.check.aws.queues import QueueDescription
from oncebridge.check.aws.streams import StreamDescription
from oncebridge.check.finding import Severity

_POST: Final = ("--http-method", "POST")


class SourceResult(Struct, frozen=True, kw_only=True):
    """What was found about one source."""

    queues: tuple[QueueDescription, ...] = ()
    feeds: tuple[EventFeeds, ...] = ()
    is_by_function: bool = False
    """Whether a function reads it."""
    function: Function | None = None
    """That function, if it could be read."""

    @property
    def role(self) -> str:
        """The role of that function."""
        return "" if self.function is None else self.function.role


async def check_source(context: AwsContext, address: AwsAddress) -> SourceResult:
    """Check a source that workers read."""
    if address.scheme == "sqs":
        queue = await queues.of_address(context, address)
        if queue is None:
            return SourceResult()
        _check_own_visibility(context, address)
        several = await mappings.of_source(context, queue.subject, queue.arn, address.where)
        mappings.check_beside_worker(context, queue, several)
        return SourceResult(queues=(queue,), feeds=(await _check_queue(context, queue),))
    # Every consumer of a stream gets all records, so other consumers do not matter.
    stream = await streams.of_address(context, address)
    return (
        SourceResult()
        if stream is None
        else SourceResult(feeds=(await _check_stream(context, stream),))
    )


async def check_function(context: AwsContext, name: str, where: AwsLocation) -> SourceResult:
    """Check a function that runs oncebridge, and its sources."""
    subject = f"function {name}"
    try:
        function = await mappings.function_of(context, name, where)
    except NoSuchResource:
        context.report(
            "function-missing",
            Severity.ERROR,
            subject,
            seen="the function does not exist in this account and Region",
            why="It cannot be checked.",
            fix="List the functions:\n"
            + aws(where, "lambda", "list-functions", "--query", "Functions[].FunctionName"),
        )
        return SourceResult()
    several = await mappings.of_function(context, name, where)
    found = await context.run_all(
        [
            *[partial(_check_read, mapping=mapping, where=where) for mapping in several],
            *([partial(_check_direct, function=function, where=where)] if function else []),
        ]
    )
    return SourceResult(
        queues=tuple(queue for one in found for queue in one.queues),
        feeds=tuple(feeds for one in found for feeds in one.feeds),
        is_by_function=True,
        function=function,
    )


async def _check_read(
    context: AwsContext, mapping: SourceMapping, where: AwsLocation
) -> SourceResult:
    """Check the source of a mapping."""
    try:
        if mapping.service == "sqs":
            queue = await queues.read_arn(context, mapping.source, where)
            await mappings.check_mapping(context, mapping, queue)
            if queue is None:
                return SourceResult()
            several = await mappings.of_source(context, queue.subject, queue.arn, where)
            mappings.check_others(context, queue, mapping, several)
            return SourceResult(queues=(queue,), feeds=(await _check_queue(context, queue),))
        if mapping.service == "kinesis":
            stream = await streams.read_arn(context, mapping.source, where)
            await mappings.check_mapping(context, mapping, None)
            if stream is not None:
                return SourceResult(feeds=(await _check_stream(context, stream),))
    except NoSuchResource:
        context.report(
            "source-missing",
            Severity.ERROR,
            mapping.subject,
            seen=f"{mapping.name} does not exist",
            why="The function receives nothing.",
            fix=f"Create it, or delete the mapping:\n{mapping.removal}",
        )
    return SourceResult()


# --- queues -----------------------------------------------------------------------------------


def _check_own_visibility(context: AwsContext, address: AwsAddress) -> None:
    """Check whether the worker's visibility timeout is longer than the lease."""
    visibility: timedelta = address.options.visibility
    lease = max(route.settings.lease for route in context.setup.routes)
    subject = f"queue {address.name}"
    if visibility > lease:
        duration = format_duration(visibility)
        context.report_passed(subject, f"visibility: oncebridge sets {duration}, and extends it")
        return
    context.report(
        "sqs-visibility",
        Severity.ERROR,
        subject,
        seen=f"source.visibility is {format_duration(visibility)}, lease {format_duration(lease)}",
        why="A message would be redelivered while its event is held. The worker does not start.",
        fix=f'Set it longer than the lease:\n[source]\nurl = "sqs://{address.name}"\n'
        f'visibility = "{format_duration(lease * 4)}"',
    )


async def _check_queue(context: AwsContext, queue: QueueDescription) -> EventFeeds:
    found = await feeds.feeds(context, queue.subject, queue.arn, queue.where)
    found = targets.with_changes(context, found, is_fifo=queue.is_fifo)
    await queues.check_source(context, queue)
    await rules.check_feeds(context, found, queue.where)
    targets.check_policy(context, queue, found.found)
    if queue.is_fifo:
        _check_fifo(context, queue, found.found)
    if found.found:
        queues.check_key(context, queue)
    window.check_window(context, found, retention=queue.retention)
    return found


def _check_fifo(context: AwsContext, queue: QueueDescription, several: Sequence[EventFeed]) -> None:
    for feed in several:
        if not targets.has_group(feed):
            context.report(
                "rule-fifo-group",
                Severity.ERROR,
                feed.subject,
                seen=f"its target {queue.name} is a FIFO queue, but it has no MessageGroupId",
                why="SQS rejects messages without one: nothing is delivered.",
                fix=feed.fix(
                    "Use the field by which events must stay in order, such as the conversation"
                ),
            )
        if queue.attributes.get("ContentBasedDeduplication") != "true":
            context.report(
                "sqs-fifo-no-dedup",
                Severity.ERROR,
                queue.subject,
                seen=f"ContentBasedDeduplication is off, and {feed.subject} sends to it",
                why="A rule cannot set a deduplication id, and SQS rejects messages without one: "
                "nothing is delivered.",
                fix=queue.command(ContentBasedDeduplication="true"),
            )


# --- streams, and functions that are called directly ------------------------------------------


async def _check_stream(context: AwsContext, stream: StreamDescription) -> EventFeeds:
    streams.check_source(context, stream)
    found = await feeds.feeds(context, stream.subject, stream.arn, stream.where)
    found = targets.with_changes(context, found, is_stream=True)
    await rules.check_feeds(context, found, stream.where)
    for feed in found.found:
        if targets.needs_key(context, feed):
            context.report(
                "kinesis-partition-key",
                Severity.WARNING,
                feed.subject,
                seen=f"its target {stream.name} has no PartitionKeyPath",
                why="EventBridge uses the id of the event instead, so events of one entity are spread "
                "over all shards and arrive in any order. This configuration needs their order "
                "(latest, order).",
                fix=feed.fix("Use the field by which events must stay in order"),
            )
    window.check_window(context, found, retention=stream.retention)
    return found


async def _check_direct(
    context: AwsContext, function: Function, where: AwsLocation
) -> SourceResult:
    """Check rules that call the function directly."""
    subject = f"function {function.name}"
    found = await feeds.feeds(context, subject, function.arn, where)
    if not found.found:
        return SourceResult()
    found = targets.with_changes(context, found)
    await rules.check_feeds(context, found, where)
    window.check_window(context, found)
    if not function.has_dead_letters:
        await _check_failures(context, function, where)
    return SourceResult(feeds=(found,))


async def _check_failures(context: AwsContext, function: Function, where: AwsLocation) -> None:
    """Check whether events are kept when a function that is called directly fails."""
    subject = f"function {function.name}"
    asked = context.at("lambda", where).ask(
        "GetFunctionEventInvokeConfig", FunctionName=function.name
    )
    operation = "update-function-event-invoke-config"  # which keeps all other settings
    try:
        settings = await context.look(subject, "its failure destination", asked)
    except NoSuchResource:
        settings, operation = {}, "put-function-event-invoke-config"
    if settings is None:
        return
    ends = settings.get("DestinationConfig") or {}
    if (ends.get("OnFailure") or {}).get("Destination"):
        context.report_passed(subject, "it keeps events that fail")
        return
    kept = {name: end for name, end in ends.items() if (end or {}).get("Destination")}
    required = json.dumps({**kept, "OnFailure": {"Destination": "QUEUE-ARN"}})
    given = ("--function-name", function.name, "--destination-config", required)
    context.report(
        "function-no-destination",
        Severity.ERROR,
        subject,
        seen="rules call it directly, but it has no failure destination",
        why="Lambda makes three attempts in all, and then drops the event.",
        fix="Use a queue in between, or set a queue as failure destination:\n"
        + aws(where, "lambda", operation, *given),
    )


# --- API destinations -------------------------------------------------------------------------


async def check_destination(context: AwsContext, name: str, where: AwsLocation) -> SourceResult:
    """Check an API destination that leads to an HTTP source, and its rules."""
    subject = f"API destination {name}"
    try:
        asked = context.at("events", where).ask("DescribeApiDestination", Name=name)
        destination = await context.look(subject, "its state and its rules", asked)
    except NoSuchResource:
        context.report(
            "destination-missing",
            Severity.ERROR,
            subject,
            seen="the API destination does not exist in this account and Region",
            why="It cannot be checked.",
            fix="List the API destinations:\n" + aws(where, "events", "list-api-destinations"),
        )
        return SourceResult()
    if destination is None:
        return SourceResult()
    state, method = destination.get("ApiDestinationState"), destination.get("HttpMethod")
    if state == "ACTIVE" and method == "POST":
        context.report_passed(subject, "it is active, and uses POST")
    else:
        context.report(
            "destination-unfit",
            Severity.ERROR,
            subject,
            seen=f"its state is {state}, its method {method}",
            why="oncebridge accepts events by POST only. An inactive destination sends nothing: its "
            "connection is not authorised.",
            fix="Use POST, and check its connection:\n"
            + aws(where, "events", "update-api-destination", "--name", name, *_POST)
            + "\n"
            + aws(where, "events", "describe-connection", "--name", _connection(destination)),
        )
    found = await feeds.feeds(
        context, subject, str(destination.get("ApiDestinationArn", "")), where
    )
    found = targets.with_changes(context, found)
    await rules.check_feeds(context, found, where)
    window.check_window(context, found)
    return SourceResult(feeds=(found,))


def _connection(destination: dict[str, Any]) -> str:
    """Return the name of the connection, out of its ARN."""
    parts = str(destination.get("ConnectionArn", "")).split("/")
    return parts[1] if len(parts) > 1 else "CONNECTION"
