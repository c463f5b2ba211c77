"""
A policy that allows what is needed and nothing else, in three notations.

Where an address has only a name, Region and account are those of the stack that the policy is
deployed with, and in plain JSON `*`.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Final, Literal

from msgspec import Struct

from oncebridge.aws.templates.access import ACTIONS
from oncebridge.aws.templates.needs import ARN, Grant, Resource, of_arn
from oncebridge.errors import ConfigError

Format = Literal["json", "cloudformation", "terraform"]
FORMATS: Final = ("json", "cloudformation", "terraform")


class Known(Struct, frozen=True):
    """What is known besides the addresses."""

    region: str = ""
    account: str = ""
    keys: tuple[str, ...] = ()
    """ARNs of the keys with which queues, streams or secrets are encrypted."""

    def check(self) -> None:
        """Refuse what cannot stand in an ARN."""
        if not re.fullmatch(r"[a-z0-9-]{0,30}", self.region, re.ASCII):
            raise ConfigError("--region", f"{self.region!r} is not a Region")
        if not re.fullmatch(r"(\d{12})?", self.account, re.ASCII):
            raise ConfigError("--account", f"{self.account!r}: an account has 12 digits")


def policy(grants: Iterable[Grant], *, format: Format = "json", known: Known | None = None) -> str:  # noqa: A002
    """Write the policy that allows *grants* and nothing else."""
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
    return _WRITERS[format](statements)


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


def _as_json(statements: Mapping[str, list[str]]) -> str:
    document = {
        "Version": "2012-10-17",
        "Statement": [
            {
                "Sid": _sid(what),
                "Effect": "Allow",
                "Action": list(ACTIONS[what]),
                "Resource": resources,
            }
            for what, resources in statements.items()
        ],
    }
    return json.dumps(document, indent=2) + "\n"


_CLOUDFORMATION = """\
AWSTemplateFormatVersion: "2010-09-09"
Description: What oncebridge is allowed to do.

Resources:
  # Attach this to the role of whatever runs oncebridge.
  Policy:
    Type: AWS::IAM::ManagedPolicy
    Properties:
      Description: What oncebridge does.
      PolicyDocument:
        Version: "2012-10-17"
        Statement:
STATEMENTS

Outputs:
  PolicyArn:
    Value: !Ref Policy
"""


def _as_cloudformation(statements: Mapping[str, list[str]]) -> str:
    lines = []
    for what, resources in statements.items():
        lines += [f"          - Sid: {_sid(what)}", "            Effect: Allow"]
        lines += ["            Action:", *(f"              - {one}" for one in ACTIONS[what])]
        lines.append("            Resource:")
        for arn in resources:
            quoted = json.dumps(arn)
            lines.append(f"              - {'!Sub ' if '${' in arn else ''}{quoted}")
    return _CLOUDFORMATION.replace("STATEMENTS", "\n".join(lines))


_TERRAFORM = """\
# What oncebridge is allowed to do. Attach this to the role of whatever runs it.
DATA
resource "aws_iam_policy" "oncebridge" {
  name_prefix = "oncebridge-"

  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [
STATEMENTS
    ]
  })
}

output "oncebridge_policy_arn" {
  value = aws_iam_policy.oncebridge.arn
}
"""


def _as_terraform(statements: Mapping[str, list[str]]) -> str:
    lines = []
    for what, resources in statements.items():
        lines += ["      {", f'        Sid    = "{_sid(what)}"', '        Effect = "Allow"']
        lines += ["        Action = [", *(f'          "{one}",' for one in ACTIONS[what])]
        lines += ["        ]", "        Resource = ["]
        lines += [f"          {json.dumps(arn)}," for arn in resources]
        lines += ["        ]", "      },"]
    text = "\n".join(lines)
    asked = sorted(set(re.findall(r"\$\{data\.(\w+)\.current\.", text)))
    data = "".join(f'\ndata "{one}" "current" {{}}\n' for one in asked)
    return _TERRAFORM.replace("DATA", data, 1).replace("STATEMENTS", text, 1)


_WRITERS: Final = {
    "json": _as_json,
    "cloudformation": _as_cloudformation,
    "terraform": _as_terraform,
}
