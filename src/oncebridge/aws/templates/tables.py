"""The table of the DynamoDB store, for those who deploy with CloudFormation or Terraform."""

import re
from datetime import timedelta
from typing import Literal

from oncebridge.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9_.-]{3,255}")

_CLOUDFORMATION = """\
AWSTemplateFormatVersion: "2010-09-09"
Description: The table in which oncebridge remembers what was passed on.

Parameters:
  TableName:
    Type: String
    Default: {name}

Resources:
  Table:
    Type: AWS::DynamoDB::Table
    DeletionPolicy: Retain
    UpdateReplacePolicy: Retain
    Properties:
      TableName: !Ref TableName
      BillingMode: PAY_PER_REQUEST
      DeletionProtectionEnabled: true
      AttributeDefinitions:
        - AttributeName: k
          AttributeType: B
      KeySchema:
        - AttributeName: k
          KeyType: HASH
      TimeToLiveSpecification:
        AttributeName: x
        Enabled: true

  # Attach this to the role of whatever runs oncebridge.
  Policy:
    Type: AWS::IAM::ManagedPolicy
    Properties:
      Description: What oncebridge does with its table.
      PolicyDocument:
        Version: "2012-10-17"
        Statement:
          - Effect: Allow
            Action:
{actions}
            Resource: !GetAtt Table.Arn

Outputs:
  Store:
    Description: What to set as the store of oncebridge.
    Value: !Sub dynamodb://${{TableName}}?region=${{AWS::Region}}
  PolicyArn:
    Value: !Ref Policy
"""

_TERRAFORM = """\
# The table in which oncebridge remembers what was passed on.

variable "oncebridge_table" {{
  type    = string
  default = "{name}"
}}

resource "aws_dynamodb_table" "oncebridge" {{
  name                        = var.oncebridge_table
  billing_mode                = "PAY_PER_REQUEST"
  deletion_protection_enabled = true
  hash_key                    = "k"

  attribute {{
    name = "k"
    type = "B"
  }}

  ttl {{
    attribute_name = "x"
    enabled        = true
  }}
}}

# Attach this to the role of whatever runs oncebridge.
resource "aws_iam_policy" "oncebridge_table" {{
  name_prefix = "oncebridge-table-"

  policy = jsonencode({{
    Version = "2012-10-17"
    Statement = [{{
      Effect = "Allow"
      Action = [
{actions}
      ]
      Resource = aws_dynamodb_table.oncebridge.arn
    }}]
  }})
}}

output "oncebridge_store" {{
  description = "What to set as the store of oncebridge."
  value       = "dynamodb:${{aws_dynamodb_table.oncebridge.arn}}"
}}
"""

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
"""What a worker is allowed to do; `oncebridge migrate` needs to create the table besides."""


def table(
    name: str = "oncebridge",
    *,
    format: Literal["cloudformation", "terraform"] = "cloudformation",  # noqa: A002
    window: timedelta | None = None,  # noqa: ARG001
) -> str:
    """
    Write the table *name*, and a policy for whoever uses it.

    Each item says when it ends, so the *window* makes no difference.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError("", f"{name!r} is not the name of a DynamoDB table")
    if format == "terraform":
        actions = "\n".join(f'        "{action}",' for action in ACTIONS)
        return _TERRAFORM.format(name=name, actions=actions)
    actions = "\n".join(f"              - {action}" for action in ACTIONS)
    return _CLOUDFORMATION.format(name=name, actions=actions)
