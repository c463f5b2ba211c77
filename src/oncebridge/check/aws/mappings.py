"""Check Lambda event source mappings: batches, failures, retries."""

import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

from msgspec import Struct

from oncebridge.base.durations import format_duration
from oncebridge.check.aws.account import AwsLocation, NoSuchResource
from oncebridge.check.aws.commands import aws
from oncebridge.check.aws.context import AwsContext
from oncebridge.check.aws.queues import QueueDescription
from oncebridge.check.finding import Severity

_OFF: Final = ("Deleting", "Disabled", "Disabling")
_FEW: Final = 3
_FACTOR: Final = 6
"""AWS recommends a visibility timeout of so many times the function's timeout."""


class SourceMapping(Struct, frozen=True):
    """One mapping of a queue or stream to a function."""

    settings: Mapping[str, Any]
    where: AwsLocation

    @property
    def function(self) -> str:
        """The name of the function, without account and version."""
        return _name(str(self.settings.get("FunctionArn", "")))

    @property
    def source(self) -> str:
        """The ARN of the queue or stream, also where it is read by a consumer of its own."""
        return str(self.settings.get("EventSourceArn", "")).partition("/consumer/")[0]

    @property
    def name(self) -> str:
        """The name of the queue or stream."""
        return self.source.rpartition(":")[2].removeprefix("stream/")

    @property
    def subject(self) -> str:
        return f"mapping of {self.name} to {self.function}"

    @property
    def service(self) -> str:
        """The service that is read; empty for a source without an ARN, such as self-managed Kafka."""
        return "".join(self.source.split(":")[2:3])

    @property
    def is_stream(self) -> bool:
        return self.service == "kinesis"

    @property
    def is_enabled(self) -> bool:
        return str(self.settings.get("State", "Enabled")) not in _OFF

    @property
    def reports(self) -> bool:
        return "ReportBatchItemFailures" in (self.settings.get("FunctionResponseTypes") or ())

    @property
    def gathering(self) -> timedelta:
        return timedelta(seconds=int(self.settings.get("MaximumBatchingWindowInSeconds") or 0))

    @property
    def destination(self) -> str:
        """The failure destination; empty if there is none."""
        wanted = (self.settings.get("DestinationConfig") or {}).get("OnFailure") or {}
        return str(wanted.get("Destination") or "")

    @property
    def has_end(self) -> bool:
        """Whether Lambda ever gives up on a record of a stream."""
        limits = (
            self.settings.get("MaximumRetryAttempts"),
            self.settings.get("MaximumRecordAgeInSeconds"),
        )
        return any(limit is not None and int(limit) != -1 for limit in limits)

    def command(self, *change: str) -> str:
        """Return the command that changes it."""
        given = ("--uuid", self.settings.get("UUID"), *change)
        return aws(self.where, "lambda", "update-event-source-mapping", *given)

    @property
    def removal(self) -> str:
        """The command that deletes it."""
        given = ("--uuid", self.settings.get("UUID"))
        return aws(self.where, "lambda", "delete-event-source-mapping", *given)


def _name(function: str) -> str:
    """Return the name out of an ARN of a function, or of one of its versions."""
    parts = function.split(":")
    return parts[6] if len(parts) > 6 else parts[-1]


class Function(Struct, frozen=True):
    """A Lambda function."""

    name: str
    arn: str
    role: str
    timeout: timedelta
    has_dead_letters: bool


async def of_source(
    context: AwsContext, subject: str, arn: str, where: AwsLocation
) -> list[SourceMapping]:
    """List the mappings of a queue or stream."""
    functions = context.at("lambda", where)
    asked = functions.ask_all("ListEventSourceMappings", "EventSourceMappings", EventSourceArn=arn)
    found = await context.look_if_exists(subject, "which functions read it", asked)
    return [SourceMapping(one, where) for one in found or ()]


async def of_function(context: AwsContext, name: str, where: AwsLocation) -> list[SourceMapping]:
    """List the mappings that call a function."""
    functions = context.at("lambda", where)
    asked = functions.ask_all("ListEventSourceMappings", "EventSourceMappings", FunctionName=name)
    found = await context.look_if_exists(f"function {name}", "what it reads", asked)
    return [SourceMapping(one, where) for one in found or ()]


async def function_of(context: AwsContext, name: str, where: AwsLocation) -> Function | None:
    """Read a function, or the version that an ARN names; raises `NoSuchResource`."""
    asked = context.at("lambda", where).ask("GetFunctionConfiguration", FunctionName=name)
    found = await context.look(f"function {_name(name)}", "its timeout and role", asked)
    if found is None:
        return None
    return Function(
        str(found.get("FunctionName", name)),
        str(found.get("FunctionArn", "")),
        str(found.get("Role", "")),
        timedelta(seconds=int(found.get("Timeout", 3))),
        bool((found.get("DeadLetterConfig") or {}).get("TargetArn")),
    )


# --- checks -----------------------------------------------------------------------


async def check_mapping(
    context: AwsContext, mapping: SourceMapping, queue: QueueDescription | None
) -> None:
    """Check a mapping of a function that runs oncebridge, and its *queue*, if it has one."""
    _check_mapping(context, mapping)
    if queue is not None and mapping.is_enabled:
        await _check_visibility(context, mapping, queue)


def check_others(
    context: AwsContext,
    queue: QueueDescription,
    own: SourceMapping,
    several: Sequence[SourceMapping],
) -> None:
    """Check whether other functions read the queue of a function."""
    enabled = [mapping for mapping in several if mapping.is_enabled]
    others = [mapping for mapping in enabled if mapping.function != own.function]
    if len(enabled) < 2:
        return
    names = ", ".join(sorted(mapping.function for mapping in enabled))
    spare = others or [
        one for one in enabled if one.settings.get("UUID") != own.settings.get("UUID")
    ]
    context.report(
        "mapping-several",
        Severity.ERROR,
        queue.subject,
        seen=f"{len(enabled)} mappings read it: {names}",
        why="Each message goes to only one of them. Each function receives a random part of the "
        "events.",
        fix="Use a queue for each function, as further targets of the rule; or remove "
        f"all mappings but that of {own.function}:\n"
        + "\n".join(mapping.removal for mapping in spare[:_FEW]),
    )


def check_beside_worker(
    context: AwsContext, queue: QueueDescription, several: Sequence[SourceMapping]
) -> None:
    """Check whether Lambda reads a queue that workers of this configuration read."""
    enabled = [mapping for mapping in several if mapping.is_enabled]
    if not enabled:
        context.report_passed(queue.subject, "only workers read it, no function")
        return
    names = ", ".join(sorted(mapping.function for mapping in enabled))
    context.report(
        "mapping-and-worker",
        Severity.ERROR,
        queue.subject,
        seen=f"it is the source of this configuration, and Lambda reads it for {names}",
        why="Each message goes to only one of them: the workers receive a part of the events, and "
        "the function the rest. This works only if both run oncebridge with the same store and the "
        "same routes.",
        fix="If the function runs oncebridge, do not run workers (and check it with --function "
        f"{enabled[0].function}). Otherwise use a queue for each, or disable the mapping:\n"
        + "\n".join(mapping.command("--no-enabled") for mapping in enabled[:_FEW]),
    )


def _check_mapping(context: AwsContext, mapping: SourceMapping) -> None:
    subject = mapping.subject
    if not mapping.is_enabled:
        context.report(
            "mapping-disabled",
            Severity.WARNING,
            subject,
            seen=f"its state is {mapping.settings.get('State')}",
            why="It reads nothing: events wait until their retention ends, and are lost.",
            fix=mapping.command("--enabled"),
        )
        return
    if mapping.reports:
        context.report_passed(subject, "ReportBatchItemFailures is on")
    else:
        context.report(
            "mapping-batch-failures",
            Severity.ERROR,
            subject,
            seen="ReportBatchItemFailures is off",
            why="Lambda ignores the response of the function. Events that oncebridge returns to be "
            "retried are " + ("skipped" if mapping.is_stream else "deleted") + ", and lost.",
            fix=mapping.command("--function-response-types", "ReportBatchItemFailures"),
        )
    if (mapping.settings.get("FilterCriteria") or {}).get("Filters"):
        context.report(
            "mapping-filter",
            Severity.NOTE,
            subject,
            seen="it has filter criteria",
            why="Events that do not match are deleted before oncebridge receives them, and not counted.",
            fix="If that is not intended, filter in the rule, or in oncebridge with `discard`:\n"
            + mapping.command("--filter-criteria", "{}"),
        )
    if mapping.is_stream:
        _check_stream_mapping(context, subject, mapping)


def _check_stream_mapping(context: AwsContext, subject: str, mapping: SourceMapping) -> None:
    destination = json.dumps({"OnFailure": {"Destination": mapping.destination or "QUEUE-ARN"}})
    flags = ("--destination-config", destination)
    if not mapping.has_end:
        context.report(
            "mapping-blocks-shard",
            Severity.WARNING,
            subject,
            seen="it retries for as long as the stream keeps a record "
            "(MaximumRetryAttempts and MaximumRecordAgeInSeconds are -1)",
            why="Unreadable records go to the dead letters. But a batch that crashes the function (out "
            "of memory, timeout) blocks its shard until the stream drops the records.",
            fix="Limit the retries, and set a failure destination:\n"
            + mapping.command("--maximum-retry-attempts", "100", *flags),
        )
    elif not mapping.destination:
        context.report(
            "mapping-no-destination",
            Severity.ERROR,
            subject,
            seen="it gives up on records (MaximumRetryAttempts "
            f"{mapping.settings.get('MaximumRetryAttempts')}, MaximumRecordAgeInSeconds "
            f"{mapping.settings.get('MaximumRecordAgeInSeconds')}) and has no failure destination",
            why="After an outage of that length, records are skipped without a trace.",
            fix="Set a failure destination, so that skipped records can be read again from the stream:\n"
            + mapping.command(*flags),
        )
    else:
        context.report_passed(subject, "it has a failure destination")
    if not mapping.settings.get("BisectBatchOnFunctionError"):
        context.report(
            "mapping-bisect",
            Severity.WARNING,
            subject,
            seen="BisectBatchOnFunctionError is off",
            why="A record that crashes the function makes the whole batch fail, each time.",
            fix=mapping.command("--bisect-batch-on-function-error"),
        )


async def _check_visibility(
    context: AwsContext, mapping: SourceMapping, queue: QueueDescription
) -> None:
    try:
        function = await function_of(
            context, str(mapping.settings.get("FunctionArn")), mapping.where
        )
    except NoSuchResource:
        return
    if function is None:
        return
    required = function.timeout * _FACTOR + mapping.gathering
    lease = max(route.settings.lease for route in context.setup.routes)
    least = max(function.timeout + mapping.gathering, lease)
    numbers = (
        f"VisibilityTimeout is {format_duration(queue.visibility)}, the timeout of "
        f"{function.name} {format_duration(function.timeout)}"
        + (
            f", its batching window {format_duration(mapping.gathering)}"
            if mapping.gathering
            else ""
        )
    )
    if queue.visibility >= max(required, lease):
        context.report_passed(queue.subject, f"visibility: {numbers}")
        return
    seconds = max(required, lease).total_seconds()
    is_short = queue.visibility < least
    context.report(
        "sqs-visibility",
        Severity.ERROR if is_short else Severity.WARNING,
        queue.subject,
        seen=f"{numbers}; lease is {format_duration(lease)}",
        why="Messages become visible while the function still processes them: they are redelivered, "
        "found busy, and use up their receives."
        if is_short
        else "When Lambda throttles the function, messages wait inside Lambda, and are redelivered "
        "without an attempt. AWS recommends six times the timeout of the function.",
        fix=f"Raise the visibility timeout:\n{queue.command(VisibilityTimeout=f'{seconds:.0f}')}",
    )
