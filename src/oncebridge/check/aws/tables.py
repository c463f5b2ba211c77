"""Check the table of the DynamoDB store: state, key, capacity, replicas, expiry."""

from collections.abc import Mapping
from typing import Any, Final

from oncebridge.check.aws.account import NoSuchResource
from oncebridge.check.aws.commands import aws, migrate
from oncebridge.check.aws.context import AwsAddress, AwsContext
from oncebridge.check.finding import Severity

_LOW_WRITES: Final = 100
_WRITES_EACH: Final = 2
"""Writes of an event: a claim and a commit."""


async def check_table(context: AwsContext, address: AwsAddress) -> None:
    """Check the table of a store."""
    subject = f"table {address.name}"
    dynamodb = context.at("dynamodb", address.where)
    try:
        asked = dynamodb.ask("DescribeTable", TableName=address.name)
        found = await context.look(subject, "its key, capacity and replicas", asked)
    except NoSuchResource:
        context.report(
            "store-missing",
            Severity.ERROR,
            subject,
            seen="the table does not exist",
            why="oncebridge does not start without it.",
            fix="Fix the name or Region in the address, or create the table:\n"
            + migrate(address.where, "dynamodb", address.name),
        )
        return
    table = (found or {}).get("Table") or {}
    if table:
        _check_state(context, subject, address, table)
        _check_key(context, subject, address, table)
        _check_replicas(context, subject, table)
        _check_capacity(context, subject, address, table)
        await _check_deletion(context, subject, address, table)
    if table.get("MultiRegionConsistency") != "STRONG":  # those have no expiry
        await _check_expiry(context, subject, address)


def _check_state(
    context: AwsContext, subject: str, address: AwsAddress, table: Mapping[str, Any]
) -> None:
    state = table.get("TableStatus", "ACTIVE")
    if state in ("ACTIVE", "UPDATING"):
        context.report_passed(subject, f"it is {state.lower()}")
        return
    named = ("--table-name", address.name)
    fix = "Enable the KMS key of the table, or its grant:\n" + aws(
        address.where, "dynamodb", "describe-table", *named, "--query", "Table.SSEDescription"
    )
    if state == "CREATING":
        fix = "Wait until it is created:\n" + aws(
            address.where, "dynamodb", "wait", "table-exists", *named
        )
    elif not str(state).startswith("INACCESSIBLE"):
        fix = "Use another table, or restore this one:\n" + migrate(
            address.where, "dynamodb", f"{address.name}-new"
        )
    context.report(
        "dynamodb-status",
        Severity.ERROR,
        subject,
        seen=f"its state is {state}",
        why="It cannot be read or written, so nothing is delivered.",
        fix=fix,
    )


def _check_key(
    context: AwsContext, subject: str, address: AwsAddress, table: Mapping[str, Any]
) -> None:
    keys = [(one["AttributeName"], one["KeyType"]) for one in table.get("KeySchema") or ()]
    kinds = {
        one["AttributeName"]: one["AttributeType"]
        for one in table.get("AttributeDefinitions") or ()
    }
    if keys == [("k", "HASH")] and kinds.get("k") == "B":
        context.report_passed(subject, "its key is right")
        return
    has = ", ".join(f"{name} ({kinds.get(name, '?')}, {kind})" for name, kind in keys)
    context.report(
        "dynamodb-key",
        Severity.ERROR,
        subject,
        seen=f"its key is {has}; it must be k (B, HASH) alone",
        why="It was created for something else. oncebridge does not start with it.",
        fix="Create a separate table for oncebridge:\n"
        + migrate(address.where, "dynamodb", f"{address.name}-oncebridge"),
    )


def _check_replicas(context: AwsContext, subject: str, table: Mapping[str, Any]) -> None:
    regions = [one.get("RegionName", "") for one in table.get("Replicas") or ()]
    is_replicated = regions or table.get("GlobalTableVersion") == "2017.11.29"
    if not is_replicated or table.get("MultiRegionConsistency") == "STRONG":
        context.report_passed(subject, "its writes are strongly consistent")
        return
    context.report(
        "dynamodb-replicated",
        Severity.ERROR,
        subject,
        seen="it is a global table with eventual consistency"
        + (f", with replicas in {', '.join(regions)}" if regions else ""),
        why="Conditions are evaluated in one Region only, so two Regions can both deliver the same "
        "event. oncebridge does not start with it.",
        fix="Use a table in one Region, or create a global table with strong consistency "
        "(--multi-region-consistency STRONG, three Regions).",
    )


def _check_capacity(
    context: AwsContext, subject: str, address: AwsAddress, table: Mapping[str, Any]
) -> None:
    billing = (table.get("BillingModeSummary") or {}).get("BillingMode", "PROVISIONED")
    throughput = table.get("ProvisionedThroughput") or {}
    writes = int(throughput.get("WriteCapacityUnits") or 0)
    if billing == "PAY_PER_REQUEST":
        context.report_passed(subject, "capacity: on demand")
    elif writes >= _LOW_WRITES:
        context.report_passed(subject, f"capacity: {writes} writes a second")
    else:
        context.report(
            "dynamodb-capacity",
            Severity.WARNING,
            subject,
            seen=f"it is provisioned for {writes} writes a second, which are "
            f"{writes / _WRITES_EACH:g} events",
            why="An event needs two writes. At a higher rate, events are throttled and returned to the "
            "source: they are late, and after an outage the backlog does not shrink.",
            fix="Use on-demand capacity:\n"
            + _update(address, "table", "--billing-mode", "PAY_PER_REQUEST"),
        )


async def _check_deletion(
    context: AwsContext, subject: str, address: AwsAddress, table: Mapping[str, Any]
) -> None:
    if table.get("DeletionProtectionEnabled"):
        context.report_passed(subject, "protected from deletion")
        return
    asked = context.at("dynamodb", address.where).ask(
        "DescribeContinuousBackups", TableName=address.name
    )
    found = await context.look_if_exists(subject, "whether it can be restored", asked)
    if found is None:
        return
    recovery = (found.get("ContinuousBackupsDescription") or {}).get(
        "PointInTimeRecoveryDescription"
    )
    if (recovery or {}).get("PointInTimeRecoveryStatus") == "ENABLED":
        context.report_passed(subject, "it can be restored")
        return
    context.report(
        "dynamodb-deletion",
        Severity.NOTE,
        subject,
        seen="it has neither deletion protection nor point-in-time recovery",
        why="If the table is lost, every event that is redelivered is delivered again.",
        fix=_update(address, "table", "--deletion-protection-enabled"),
    )


async def _check_expiry(context: AwsContext, subject: str, address: AwsAddress) -> None:
    asked = context.at("dynamodb", address.where).ask("DescribeTimeToLive", TableName=address.name)
    found = await context.look_if_exists(subject, "its time to live", asked)
    if found is None:
        return
    expiry = found.get("TimeToLiveDescription") or {}
    state, attribute = expiry.get("TimeToLiveStatus", "DISABLED"), expiry.get("AttributeName", "")
    is_on = str(state).startswith("ENABL")
    if is_on and attribute == "x":
        context.report_passed(subject, "time to live: on x")
        return
    required = "--time-to-live-specification"
    fix = "Let DynamoDB remove expired records:\n" + _update(
        address, "time-to-live", required, "Enabled=true,AttributeName=x"
    )
    if is_on:
        fix = "Turn it off, wait an hour, and turn it on for x:\n" + _update(
            address, "time-to-live", required, f"Enabled=false,AttributeName={attribute}"
        )
    context.report(
        "dynamodb-ttl",
        Severity.WARNING,
        subject,
        seen=f"time to live is on {attribute!r}, not on 'x'" if is_on else "time to live is off",
        why="Expired records are never removed: the table and its cost grow without limit.",
        fix=fix,
    )


def _update(address: AwsAddress, what: str, *change: str) -> str:
    """Return the command that changes the table."""
    return aws(address.where, "dynamodb", f"update-{what}", "--table-name", address.name, *change)
