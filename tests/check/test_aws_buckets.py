"""The bucket of the S3 store."""

from collections.abc import Callable
from typing import Any

import pytest
from tests.check.aws_account import client, codes
from tests.servers.aws import fresh
from tests.servers.guarded_aws import GuardedAws

from oncebridge.check.aws import check_aws
from oncebridge.check.finding import Checkup, Severity
from oncebridge.service.addresses import StorePlace
from oncebridge.service.config import load

ERROR, WARNING = Severity.ERROR, Severity.WARNING


@pytest.fixture(autouse=True)
def administrator(guarded_aws: GuardedAws, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", guarded_aws.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")


@pytest.fixture
def s3(guarded_aws: GuardedAws) -> Any:
    return client(guarded_aws.endpoint, "s3")


@pytest.fixture
async def bucket(s3: Any) -> str:
    """Make a bucket as `oncebridge migrate` does."""
    name = fresh("bucket")
    store = StorePlace.of(f"s3://{name}/keys").opened
    try:
        assert len(await store.migrate()) == 2
    finally:
        await store.aclose()
    return name


async def check(bucket: str, **settings: str) -> Checkup:
    flags = {"source": "-", "sink": "-", "dead": "memory:", "store": f"s3://{bucket}/keys"}
    checkup = Checkup()
    await check_aws(load(flags=flags | settings, environment={}), checkup)
    return checkup


def rule(days: int, **more: Any) -> Callable[[Any, str], None]:
    def plant(s3: Any, bucket: str) -> None:
        expiry = {
            "ID": "old",
            "Status": "Enabled",
            "Filter": {"Prefix": "keys/"},
            "Expiration": {"Days": days},
            **more,
        }
        s3.put_bucket_lifecycle_configuration(
            Bucket=bucket, LifecycleConfiguration={"Rules": [expiry]}
        )

    return plant


def no_rule(s3: Any, bucket: str) -> None:
    s3.delete_bucket_lifecycle(Bucket=bucket)


def versions(s3: Any, bucket: str) -> None:
    small = {"And": {"Prefix": "keys/", "ObjectSizeLessThan": 65536}}
    rule(7, Filter=small)(s3, bucket)
    s3.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})


def versions_of_others(s3: Any, bucket: str) -> None:
    """Rules that remove old versions, of something else or not at all."""
    small = {"And": {"Prefix": "keys/", "ObjectSizeLessThan": 65536}}
    own = {"ID": "own", "Status": "Enabled", "Filter": small, "Expiration": {"Days": 7}}
    gone = {"NoncurrentVersionExpiration": {"NoncurrentDays": 1}}
    off = {"ID": "off", "Status": "Disabled", "Filter": {"Prefix": ""}, **gone}
    logs = {"ID": "logs", "Status": "Enabled", "Filter": {"Prefix": "logs/"}, **gone}
    s3.put_bucket_lifecycle_configuration(
        Bucket=bucket, LifecycleConfiguration={"Rules": [own, off, logs]}
    )
    s3.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})


async def test_a_rule_for_large_objects_only(bucket: str, s3: Any) -> None:
    rules = s3.get_bucket_lifecycle_configuration(Bucket=bucket)["Rules"]
    large = {"ID": "large", "Status": "Enabled", "Filter": {"ObjectSizeGreaterThan": 10_000_000}}
    s3.put_bucket_lifecycle_configuration(
        Bucket=bucket,
        LifecycleConfiguration={"Rules": [*rules, large | {"Expiration": {"Days": 1}}]},
    )
    assert codes(await check(bucket)) == []


async def test_a_bucket_as_migrate_makes_it(bucket: str, s3: Any) -> None:
    s3.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    checkup = await check(bucket)
    assert codes(checkup) == []
    assert f"bucket {bucket}" in {one.subject for one in checkup.passed}


@pytest.mark.parametrize(
    ("plant", "code", "severity"),
    [
        (no_rule, "s3-lifecycle", WARNING),
        (rule(3), "s3-lifecycle", ERROR),
        (rule(30), "s3-lifecycle", WARNING),
        (rule(30, Filter={"Prefix": "other/"}), "s3-lifecycle", WARNING),
        (rule(30, Status="Disabled"), "s3-lifecycle", WARNING),
        (rule(30, Expiration={"Date": "2030-01-01T00:00:00Z"}), "s3-lifecycle", ERROR),
        (versions, "s3-versioning", WARNING),
        (versions_of_others, "s3-versioning", WARNING),
    ],
)
async def test_a_bucket_with_a_fault(
    bucket: str, s3: Any, plant: Callable[[Any, str], None], code: str, severity: Severity
) -> None:
    plant(s3, bucket)
    checkup = await check(bucket)
    assert codes(checkup) == [code]
    assert [one.severity for one in checkup.findings] == [severity]


async def test_a_window_that_outlasts_the_rule(bucket: str) -> None:
    checkup = await check(bucket, window="9d")
    assert codes(checkup) == ["s3-lifecycle"]
    assert "after 7 days; they are needed for 9" in checkup.findings[0].seen


async def test_a_bucket_that_is_not_there() -> None:
    assert codes(await check("nobody-has-made-it")) == ["store-missing"]
