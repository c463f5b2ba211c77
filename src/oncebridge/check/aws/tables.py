"""The table of the DynamoDB store: whether it can keep the promises, and cleans up."""

from collections.abc import Mapping
from typing import Any, Final

from oncebridge.check.aws.account import NoSuchResource
from oncebridge.check.aws.commands import aws, migrate
from oncebridge.check.aws.context import AwsAddress, AwsContext
from oncebridge.check.finding import Severity

_LOW_WRITES: Final = 100
_WRITES_EACH: Final = 2
"""What an event costs: a claim and a commit."""


async def check_table(context: AwsContext, address: AwsAddress) -> None:
    """Look at the table of a store."""
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
            seen="there is no such table",
            why="oncebridge does not start without it.",
            fix="Put the name or Region in the address right, or make the table:\n"
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
    fix = "Give it back the key that it is encrypted with (KMS: enable it, or its grant):\n" + aws(
        address.where, "dynamodb", "describe-table", *named, "--query", "Table.SSEDescription"
    )
    if state == "CREATING":
        fix = "Wait until it is there:\n" + aws(
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
        why="Nothing can be read from it or written to it, so nothing is passed on.",
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
        context.report_passed(subject, "its key is oncebridge's")
        return
    has = ", ".join(f"{name} ({kinds.get(name, '?')}, {kind})" for name, kind in keys)
    context.report(
        "dynamodb-key",
        Severity.ERROR,
        subject,
        seen=f"its key is {has}; it has to be k (B, HASH) alone",
        why="It was made for something else. oncebridge does not start with it.",
        fix="Give oncebridge a table of its own:\n"
        + migrate(address.where, "dynamodb", f"{address.name}-oncebridge"),
    )


def _check_replicas(context: AwsContext, subject: str, table: Mapping[str, Any]) -> None:
    regions = [one.get("RegionName", "") for one in table.get("Replicas") or ()]
    is_replicated = regions or table.get("GlobalTableVersion") == "2017.11.29"
    if not is_replicated or table.get("MultiRegionConsistency") == "STRONG":
        context.report_passed(subject, "one place decides who was first")
        return
    context.report(
        "dynamodb-replicated",
        Severity.ERROR,
        subject,
        seen="it is a global table with eventual consistency"
        + (f", with replicas in {', '.join(regions)}" if regions else ""),
        why="A condition is looked at in one Region only, so two Regions can both be the first to "
        "pass on the same event. oncebridge does not start with it.",
        fix="Use a table in one Region, or make a global table with strong consistency "
        "(--multi-region-consistency STRONG, three Regions).",
    )


def _check_capacity(
    context: AwsContext, subject: str, address: AwsAddress, table: Mapping[str, Any]
) -> None:
    billing = (table.get("BillingModeSummary") or {}).get("BillingMode", "PROVISIONED")
    told = table.get("ProvisionedThroughput") or {}
    writes = int(told.get("WriteCapacityUnits") or 0)
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
            why="An event takes two writes. What comes faster is throttled and handed back: it is "
            "late, and after an outage the backlog does not shrink.",
            fix="Pay by request:\n"
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
    told = (found.get("ContinuousBackupsDescription") or {}).get("PointInTimeRecoveryDescription")
    if (told or {}).get("PointInTimeRecoveryStatus") == "ENABLED":
        context.report_passed(subject, "it can be restored")
        return
    context.report(
        "dynamodb-deletion",
        Severity.NOTE,
        subject,
        seen="it has neither deletion protection nor point-in-time recovery",
        why="Without its table oncebridge takes every event for new that comes again.",
        fix=_update(address, "table", "--deletion-protection-enabled"),
    )


async def _check_expiry(context: AwsContext, subject: str, address: AwsAddress) -> None:
    asked = context.at("dynamodb", address.where).ask("DescribeTimeToLive", TableName=address.name)
    found = await context.look_if_exists(subject, "its time to live", asked)
    if found is None:
        return
    told = found.get("TimeToLiveDescription") or {}
    state, attribute = told.get("TimeToLiveStatus", "DISABLED"), told.get("AttributeName", "")
    is_on = str(state).startswith("ENABL")
    if is_on and attribute == "x":
        context.report_passed(subject, "time to live: on x")
        return
    wished = "--time-to-live-specification"
    fix = "Have DynamoDB remove what is over:\n" + _update(
        address, "time-to-live", wished, "Enabled=true,AttributeName=x"
    )
    if is_on:
        fix = "Turn it off, wait an hour, and turn it on for x:\n" + _update(
            address, "time-to-live", wished, f"Enabled=false,AttributeName={attribute}"
        )
    context.report(
        "dynamodb-ttl",
        Severity.WARNING,
        subject,
        seen=f"time to live is on {attribute!r}, not on 'x'" if is_on else "time to live is off",
        why="What oncebridge has remembered stays for ever: the table, and what it costs, only "
        "grows.",
        fix=fix,
    )


def _update(address: AwsAddress, what: str, *change: str) -> str:
    """Write what changes the table."""
    return aws(address.where, "dynamodb", f"update-{what}", "--table-name", address.name, *change)
