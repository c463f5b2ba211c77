"""The table of the DynamoDB store, for CloudFormation and Terraform."""

import re
from datetime import timedelta

from oncebridge.aws.templates.rendering import Format, render
from oncebridge.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9_.-]{3,255}")

ACTIONS = (
    "dynamodb:BatchGetItem",
    "dynamodb:DeleteItem",
    "dynamodb:DescribeTable",
    "dynamodb:DescribeTimeToLive",
    "dynamodb:PartiQLInsert",
    "dynamodb:PartiQLUpdate",
    "dynamodb:PutItem",
    "dynamodb:Scan",
)
"""The actions of a worker; `oncebridge migrate` also needs those that create the table."""


def table(
    name: str = "oncebridge",
    *,
    format: Format = "cloudformation",  # noqa: A002
    window: timedelta | None = None,  # noqa: ARG001
) -> str:
    """
    Return the table *name*, and a policy for the workers that use it.

    Each item says when it ends, so the *window* makes no difference.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError("", f"{name!r} is not the name of a DynamoDB table")
    return render("table", format, name=name, actions=ACTIONS)
