"""Check Kinesis streams."""

from datetime import timedelta
from shlex import quote
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from oncebridge.base.durations import format_duration
from oncebridge.check.aws.account import AwsLocation, NoSuchResource
from oncebridge.check.aws.commands import aws
from oncebridge.check.aws.context import AwsAddress, AwsContext
from oncebridge.check.finding import Severity

_USUAL = timedelta(hours=24)


class StreamDescription(Struct, frozen=True):
    """A stream as Kinesis describes it."""

    name: str
    arn: str
    where: AwsLocation
    retention: timedelta
    key: str

    @property
    def subject(self) -> str:
        return f"stream {self.name}"


async def read(
    context: AwsContext, name: str, where: AwsLocation, *, arn: str = ""
) -> StreamDescription | None:
    """Read a stream, by its *arn* if it may be in another account; raises `NoSuchResource`."""
    named = {"StreamARN": arn} if arn else {"StreamName": name}
    asked = context.at("kinesis", where).ask("DescribeStreamSummary", **named)
    found = await context.look(f"stream {name}", "its settings", asked)
    if found is None:
        return None
    summary: dict[str, Any] = found.get("StreamDescriptionSummary") or {}
    retention = timedelta(hours=int(summary.get("RetentionPeriodHours", 24)))
    return StreamDescription(
        name, str(summary.get("StreamARN", "")), where, retention, str(summary.get("KeyId", ""))
    )


async def read_arn(context: AwsContext, arn: str, where: AwsLocation) -> StreamDescription | None:
    """Read the stream with this ARN, which may be in another account."""
    _, _, _, region, _, name = arn.split(":", 5)
    there = replace(where, region=region or where.region)
    return await read(context, name.removeprefix("stream/"), there, arn=arn)


async def of_address(context: AwsContext, address: AwsAddress) -> StreamDescription | None:
    """Read the stream of an address; a missing one is a finding."""
    try:
        known = address.resource
        arn = ""
        if known.account:
            arn = f"arn:{known.partition}:kinesis:{known.region}:{known.account}:{known.name}"
        return await read(context, address.name, address.where, arn=arn)
    except NoSuchResource:
        context.report(
            f"{address.kind}-missing",
            Severity.ERROR,
            f"stream {address.name}",
            seen="the stream does not exist",
            why="oncebridge does not start without it.",
            fix="Fix the name or Region in the address, or create the stream:\n"
            + aws(
                address.where,
                "kinesis",
                "create-stream",
                *("--stream-name", address.name, "--stream-mode-details", "StreamMode=ON_DEMAND"),
            ),
        )
        return None


def check_source(context: AwsContext, stream: StreamDescription) -> None:
    """Check the settings of a source stream."""
    if stream.retention <= _USUAL:
        context.report(
            "kinesis-retention",
            Severity.NOTE,
            stream.subject,
            seen=f"it keeps records for {format_duration(stream.retention)}",
            why="Kinesis then drops records, read or not: after an outage of a day, events are lost.",
            fix="Keep them for four days (at a small cost per shard hour):\n"
            + aws(
                stream.where,
                "kinesis",
                "increase-stream-retention-period",
                *("--retention-period-hours", 96, "--stream-arn", stream.arn),
            ),
        )
    else:
        context.report_passed(
            stream.subject, f"keeps records for {format_duration(stream.retention)}"
        )
    if stream.key and "alias/aws/" not in stream.key:
        context.report(
            "key-rights",
            Severity.NOTE,
            stream.subject,
            seen="it is encrypted with a KMS key of yours",
            why="The reader of the stream needs kms:Decrypt on the key, and EventBridge's role "
            "kms:GenerateDataKey.",
            fix=f"oncebridge template iam -c oncebridge.toml --kms-key {quote(stream.key)}",
        )
