"""The bucket of the S3 store: what its lifecycle rules remove, and what its versions keep."""

from collections.abc import Mapping, Sequence
from typing import Any

from oncebridge.check.aws.account import NoSuchResource
from oncebridge.check.aws.commands import aws, migrate
from oncebridge.check.aws.context import AwsAddress, AwsContext
from oncebridge.check.finding import Severity
from oncebridge.stores.s3.lifecycle_rule import PASSED_OVER, Expiry, days_of


async def check_bucket(context: AwsContext, address: AwsAddress) -> None:
    """Look at the bucket of a store."""
    bucket = address.name
    subject = f"bucket {bucket}"
    s3 = context.at("s3", address.where)
    try:
        asked = s3.ask("GetBucketVersioning", Bucket=bucket)
        versions = await context.look(subject, "whether it keeps versions", asked)
    except NoSuchResource:
        context.report(
            "store-missing",
            Severity.ERROR,
            subject,
            seen="there is no such bucket",
            why="oncebridge does not start without it.",
            fix="Put the name in the address right, or make the bucket:\n"
            + migrate(address.where, "s3", bucket),
        )
        return
    prefix = address.grants[1].resource.name.removeprefix(f"{bucket}/").removesuffix("*")
    asked = s3.ask("GetBucketLifecycleConfiguration", Bucket=bucket)
    try:
        found = await context.look(subject, "its lifecycle rules", asked)
    except NoSuchResource:
        found = {"Rules": []}
    told = None if found is None else found.get("Rules") or []
    if told is not None:
        _check_rules(context, subject, address, prefix, told)
    _check_versions(context, address, prefix, versions, told)


def _check_rules(
    context: AwsContext,
    subject: str,
    address: AwsAddress,
    prefix: str,
    told: Sequence[Mapping[str, Any]],
) -> None:
    rules = [rule for one in told if (rule := _expiry(one)) is not None]
    rules = [
        rule for rule in rules if prefix.startswith(rule.prefix) or rule.prefix.startswith(prefix)
    ]
    windows = [route.settings.window for route in context.setup.routes]
    wished = max(days_of(address.options.expire_after), *map(days_of, windows))
    command = migrate(address.where, "s3", f"{address.name}/{prefix}".rstrip("/"))
    for rule in rules:
        if rule.days < wished:
            context.report(
                "s3-lifecycle",
                Severity.ERROR,
                subject,
                seen=f"rule {rule.id} removes records "
                + (f"after {rule.days} days" if rule.days else "on a date, whatever their age")
                + f"; they are needed for {wished} (window and expire_after)",
                why="What is removed is forgotten: its event passes a second time.",
                fix=f"Change that rule; oncebridge makes one of its own:\n{command}",
            )
        elif rule.removes_all:
            context.report(
                "s3-lifecycle",
                Severity.WARNING,
                subject,
                seen=f"rule {rule.id} removes objects of every size after {rule.days} days",
                why="Records that have to stay for longer, such as that a route is paused, are "
                "made large so that a rule passes over them. This one does not.",
                fix=f"Limit it to objects smaller than {PASSED_OVER} bytes "
                f"(ObjectSizeLessThan), as ours is:\n{command}",
            )
        else:
            context.report_passed(subject, f"rule {rule.id} removes records after {rule.days} days")
    covering = [rule for rule in rules if prefix.startswith(rule.prefix)]
    if not covering and address.options.expiry == "lifecycle":
        context.report(
            "s3-lifecycle",
            Severity.WARNING,
            subject,
            seen="no lifecycle rule removes old records",
            why="They stay for ever: the bucket, and what it costs, only grows.",
            fix=f"Make the rule:\n{command}",
        )


def _check_versions(
    context: AwsContext,
    address: AwsAddress,
    prefix: str,
    versions: Mapping[str, Any] | None,
    told: Sequence[Mapping[str, Any]] | None,
) -> None:
    if versions is None or told is None:
        return
    subject = f"bucket {address.name}"
    is_cleaned = any(
        "NoncurrentVersionExpiration" in one
        and one.get("Status") == "Enabled"
        and prefix.startswith(_prefix(one))
        for one in told
    )
    if versions.get("Status") != "Enabled" or is_cleaned:
        context.report_passed(subject, "old versions do not pile up")
        return
    context.report(
        "s3-versioning",
        Severity.WARNING,
        subject,
        seen="it keeps versions, and no lifecycle rule removes old ones",
        why="Each event is written twice, and each first version stays and costs for ever.",
        fix="Turn versioning off for a bucket of oncebridge's own, or have old versions removed:\n"
        + aws(
            address.where,
            "s3api",
            "put-bucket-versioning",
            *("--bucket", address.name, "--versioning-configuration", "Status=Suspended"),
        ),
    )


def _expiry(rule: Mapping[str, Any]) -> Expiry | None:
    """Read a rule; None where it removes none of our objects, which have no tags."""
    expiry = rule.get("Expiration") or {}
    days = 0 if "Date" in expiry else expiry.get("Days")
    where = rule.get("Filter") or {}
    both = where.get("And") or {}
    above = both.get("ObjectSizeGreaterThan") or where.get("ObjectSizeGreaterThan") or 0
    is_ours = not where.get("Tag") and not both.get("Tags") and int(above) < PASSED_OVER
    if rule.get("Status") != "Enabled" or days is None or not is_ours:
        return None
    below = both.get("ObjectSizeLessThan") or where.get("ObjectSizeLessThan")
    return Expiry(str(rule.get("ID", "")), _prefix(rule), int(days), int(below) if below else None)


def _prefix(rule: Mapping[str, Any]) -> str:
    """Return what the objects begin with that a rule is for."""
    where = rule.get("Filter") or {}
    both = where.get("And") or {}
    return str(both.get("Prefix") or where.get("Prefix") or rule.get("Prefix") or "")
