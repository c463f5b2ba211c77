"""Check the bucket of the S3 store: lifecycle rules and versions."""

from collections.abc import Mapping, Sequence
from typing import Any

from oncebridge.aws.s3_buckets import KEPT_SIZE, Expiry, days_of
from oncebridge.check.aws.account import NoSuchResource
from oncebridge.check.aws.commands import aws, migrate
from oncebridge.check.aws.context import AwsAddress, AwsContext
from oncebridge.check.finding import Severity


async def check_bucket(context: AwsContext, address: AwsAddress) -> None:
    """Check the bucket of a store."""
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
            seen="the bucket does not exist",
            why="oncebridge does not start without it.",
            fix="Fix the name in the address, or create the bucket:\n"
            + migrate(address.where, "s3", bucket),
        )
        return
    prefix = address.grants[1].resource.name.removeprefix(f"{bucket}/").removesuffix("*")
    asked = s3.ask("GetBucketLifecycleConfiguration", Bucket=bucket)
    try:
        found = await context.look(subject, "its lifecycle rules", asked)
    except NoSuchResource:
        found = {"Rules": []}
    raw_rules = None if found is None else found.get("Rules") or []
    if raw_rules is not None:
        _check_rules(context, subject, address, prefix, raw_rules)
    _check_versions(context, address, prefix, versions, raw_rules)


def _check_rules(
    context: AwsContext,
    subject: str,
    address: AwsAddress,
    prefix: str,
    raw_rules: Sequence[Mapping[str, Any]],
) -> None:
    rules = [rule for one in raw_rules if (rule := _expiry(one)) is not None]
    rules = [
        rule for rule in rules if prefix.startswith(rule.prefix) or rule.prefix.startswith(prefix)
    ]
    windows = [route.settings.window for route in context.setup.routes]
    required = max(days_of(address.options.expire_after), *map(days_of, windows))
    command = migrate(address.where, "s3", f"{address.name}/{prefix}".rstrip("/"))
    for rule in rules:
        if rule.days < required:
            context.report(
                "s3-lifecycle",
                Severity.ERROR,
                subject,
                seen=f"rule {rule.id} removes records "
                + (f"after {rule.days} days" if rule.days else "on a date, whatever their age")
                + f"; they are needed for {required} (window and expire_after)",
                why="When its record is removed, an event that is redelivered is delivered twice.",
                fix=f"Change that rule; oncebridge creates its own:\n{command}",
            )
        elif rule.removes_all:
            context.report(
                "s3-lifecycle",
                Severity.WARNING,
                subject,
                seen=f"rule {rule.id} removes objects of every size after {rule.days} days",
                why="Records that must stay longer, such as a paused route, are large so that a "
                "lifecycle rule with a size limit skips them. This rule does not skip them.",
                fix=f"Limit it to objects smaller than {KEPT_SIZE} bytes "
                f"(ObjectSizeLessThan), like the rule of oncebridge:\n{command}",
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
            why="They are never removed: the bucket and its cost grow without limit.",
            fix=f"Create the rule:\n{command}",
        )


def _check_versions(
    context: AwsContext,
    address: AwsAddress,
    prefix: str,
    versions: Mapping[str, Any] | None,
    raw_rules: Sequence[Mapping[str, Any]] | None,
) -> None:
    if versions is None or raw_rules is None:
        return
    subject = f"bucket {address.name}"
    is_cleaned = any(
        "NoncurrentVersionExpiration" in one
        and one.get("Status") == "Enabled"
        and prefix.startswith(_prefix(one))
        for one in raw_rules
    )
    if versions.get("Status") != "Enabled" or is_cleaned:
        context.report_passed(subject, "old versions are not kept, or are removed")
        return
    context.report(
        "s3-versioning",
        Severity.WARNING,
        subject,
        seen="versioning is on, and no lifecycle rule removes old versions",
        why="Each event is written twice, and each first version is kept and paid for forever.",
        fix="Turn versioning off if the bucket is for oncebridge alone, or remove old versions:\n"
        + aws(
            address.where,
            "s3api",
            "put-bucket-versioning",
            *("--bucket", address.name, "--versioning-configuration", "Status=Suspended"),
        ),
    )


def _expiry(rule: Mapping[str, Any]) -> Expiry | None:
    """Return the expiry of a rule; None if it removes no object of oncebridge (they have no tags)."""
    expiry = rule.get("Expiration") or {}
    days = 0 if "Date" in expiry else expiry.get("Days")
    where = rule.get("Filter") or {}
    both = where.get("And") or {}
    above = both.get("ObjectSizeGreaterThan") or where.get("ObjectSizeGreaterThan") or 0
    is_ours = not where.get("Tag") and not both.get("Tags") and int(above) < KEPT_SIZE
    if rule.get("Status") != "Enabled" or days is None or not is_ours:
        return None
    below = both.get("ObjectSizeLessThan") or where.get("ObjectSizeLessThan")
    return Expiry(str(rule.get("ID", "")), _prefix(rule), int(days), int(below) if below else None)


def _prefix(rule: Mapping[str, Any]) -> str:
    """Return the prefix of a rule."""
    where = rule.get("Filter") or {}
    both = where.get("And") or {}
    return str(both.get("Prefix") or where.get("Prefix") or rule.get("Prefix") or "")
