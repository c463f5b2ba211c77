"""
A policy that allows what is needed and nothing else, in three notations.

Where an address has only a name, Region and account are those of the stack that the policy is
deployed with, and in plain JSON `*`.
"""

import json
import re
from collections.abc import Iterable, Sequence
from typing import Final, Literal

from msgspec import Struct

from oncebridge.aws.templates.access import ACTIONS
from oncebridge.aws.templates.needs import ARN, Grant, Resource, of_arn
from oncebridge.aws.templates.rendering import render
from oncebridge.errors import ConfigError

Format = Literal["json", "cloudformation", "terraform"]
FORMATS: Final = ("json", "cloudformation", "terraform")


class Known(Struct, frozen=True):
    """Region, account and keys that are not in the addresses."""

    region: str = ""
    account: str = ""
    keys: tuple[str, ...] = ()
    """ARNs of the keys that encrypt queues, streams or secrets."""

    def check(self) -> None:
        """Raise `ConfigError` for a Region or account that is not valid."""
        if not re.fullmatch(r"[a-z0-9-]{0,30}", self.region, re.ASCII):
            raise ConfigError("--region", f"{self.region!r} is not a Region")
        if not re.fullmatch(r"(\d{12})?", self.account, re.ASCII):
            raise ConfigError("--account", f"{self.account!r}: an account has 12 digits")


def policy(grants: Iterable[Grant], *, format: Format = "json", known: Known | None = None) -> str:  # noqa: A002
    """Return the policy that allows *grants* and nothing else."""
    known = known or Known()
    known.check()
    grants = [*grants, *map(_of_key, known.keys)]
    if not grants:
        raise ConfigError(
            "", "nothing of this configuration is on AWS, so there is nothing to allow"
        )
    statements: dict[str, list[str]] = {}
    for grant in grants:
        resources = statements.setdefault(grant.what, [])
        arn = _arn(grant.resource, known, _UNKNOWN[format])
        if arn not in resources:
            resources.append(arn)
    made = [_Statement(_sid(what), ACTIONS[what], arns) for what, arns in statements.items()]
    if format == "json":
        return _json(made)
    return render("policy", format, statements=made, data_sources=_data_sources(made))


class _Statement(Struct, frozen=True):
    sid: str
    actions: tuple[str, ...]
    resources: list[str]


def _of_key(arn: str) -> Grant:
    found = ARN.fullmatch(arn)
    if found is None or found[2] != "kms":
        raise ConfigError("--kms-key", f"{arn!r} is not the ARN of a key")
    return Grant("key.kms", of_arn(found))


_UNKNOWN: Final = {
    "json": ("aws", "*", "*"),
    "cloudformation": ("${AWS::Partition}", "${AWS::Region}", "${AWS::AccountId}"),
    "terraform": (
        "${data.aws_partition.current.partition}",
        "${data.aws_region.current.name}",
        "${data.aws_caller_identity.current.account_id}",
    ),
}


def _arn(resource: Resource, known: Known, unknown: tuple[str, str, str]) -> str:
    region = resource.region or known.region
    partition = resource.partition or _partition(region) or unknown[0]
    if resource.service == "s3":
        return f"arn:{partition}:s3:::{resource.name}"
    account = resource.account or known.account or unknown[2]
    return f"arn:{partition}:{resource.service}:{region or unknown[1]}:{account}:{resource.name}"


def _partition(region: str) -> str:
    if not region:
        return ""
    return {"cn": "aws-cn", "us-gov": "aws-us-gov"}.get(
        region.rpartition("-")[0].rpartition("-")[0], "aws"
    )


def _sid(what: str) -> str:
    return "".join(word.capitalize() for word in re.split(r"[._]", what))


def _json(statements: Sequence[_Statement]) -> str:
    document = {
        "Version": "2012-10-17",
        "Statement": [
            {
                "Sid": one.sid,
                "Effect": "Allow",
                "Action": one.actions,
                "Resource": one.resources,
            }
            for one in statements
        ],
    }
    return json.dumps(document, indent=2) + "\n"


_DATA: Final = re.compile(r"\$\{data\.(\w+)\.current\.")


def _data_sources(statements: Sequence[_Statement]) -> list[str]:
    """Return the data sources of Terraform that the ARNs refer to."""
    arns = [arn for one in statements for arn in one.resources]
    return sorted({name for arn in arns for name in _DATA.findall(arn)})
