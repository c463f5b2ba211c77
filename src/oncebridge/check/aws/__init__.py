"""
Check the resources of a configuration on AWS, without changing them.

Every check works with the rights that the caller has. A check that is denied is reported with the
IAM action that it needs, and the others continue.
"""

from collections.abc import Sequence
from typing import Final

from oncebridge.base.clock import Clock
from oncebridge.check.finding import Checkup
from oncebridge.service.addresses import scheme_of
from oncebridge.service.config import Setup

CODES: Final = frozenset(
    {
        # where events come from
        *("source-missing", "function-missing", "destination-missing", "destination-unfit"),
        *("window-horizon", "key-rights"),
        *("sqs-visibility", "sqs-no-redrive", "sqs-redrives-early", "sqs-redrive-target"),
        *("sqs-redrive-retention", "sqs-delay", "sqs-policy-open", "sqs-policy-closed"),
        *("sqs-policy-unclear", "sqs-aws-key", "sqs-fifo-content-dedup", "sqs-fifo-no-dedup"),
        *("kinesis-retention", "kinesis-partition-key"),
        # rules and buses
        *("rule-none", "rule-disabled", "rule-retries", "rule-no-dead-letters"),
        *("rule-dead-letters-missing", "rule-fifo-group", "rules-overlap", "target-twice"),
        *("target-input", "genesys-two-buses", "genesys-pending", "bus-archive"),
        # Lambda
        *("mapping-batch-failures", "mapping-and-worker", "mapping-several", "mapping-disabled"),
        *("mapping-filter", "mapping-blocks-shard", "mapping-no-destination", "mapping-bisect"),
        "function-no-destination",
        # stores
        *("store-missing", "dynamodb-status", "dynamodb-key", "dynamodb-replicated"),
        *("dynamodb-capacity", "dynamodb-ttl", "dynamodb-deletion"),
        *("s3-lifecycle", "s3-versioning"),
        # where events go
        *("sink-missing", "sink-is-source", "sink-feeds-source"),
        *("dead-missing", "dead-is-source", "dead-is-redrive-target", "dead-retention"),
        *("dead-has-redrive", "dead-has-consumer", "dead-unencrypted"),
        # who, and when
        *("rights-missing", "clock-aws"),
    }
)
"""All codes of findings there are on AWS; each is a heading of docs/check-aws.md."""

ON_AWS: Final = ("dynamodb", "events", "kinesis", "s3", "sns", "sqs")
"""The schemes of addresses that are there."""


async def check_aws(
    setup: Setup,
    checkup: Checkup,
    *,
    functions: Sequence[str] = (),
    destinations: Sequence[str] = (),
    role: str | None = None,
    clock: Clock | None = None,
) -> None:
    """
    Check all resources of *setup* on AWS, and add the results to *checkup*.

    *functions* are Lambda functions that run oncebridge: their configuration has no source, so
    their sources are found through them. *destinations* are the names of API destinations that
    lead to an HTTP source of this configuration. *role* is the ARN of the role whose rights are
    checked; otherwise the caller's, and for a function those of its own role. *clock* is for tests.
    Without an address on AWS, and without these, AWS is not called.
    """
    config = setup.config
    places = [*config.source, config.store, config.dead, *(route.sink for route in setup.routes)]
    is_there = any(scheme_of(place.url) in ON_AWS for place in places)
    if not (is_there or functions or destinations):
        return
    try:
        from oncebridge.check.aws import run  # noqa: PLC0415 - botocore is an extra
    except ImportError:
        checkup.report_not_checked(
            "AWS", "all resources", "a package: pip install 'oncebridge[aws]'"
        )
        return
    await run.check(
        setup, checkup, functions=functions, destinations=destinations, role=role, clock=clock
    )
