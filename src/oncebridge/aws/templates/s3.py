"""The bucket of the S3 store, for those who deploy with CloudFormation or Terraform."""

from datetime import timedelta
from typing import Literal

from oncebridge.aws.s3_buckets import checked_prefix, rule_for

_CLOUDFORMATION = """\
AWSTemplateFormatVersion: "2010-09-09"
Description: The bucket in which oncebridge remembers what was passed on.

Parameters:
  BucketName:
    Type: String
    Default: {bucket}

Resources:
  Bucket:
    Type: AWS::S3::Bucket
    DeletionPolicy: Retain
    UpdateReplacePolicy: Retain
    Properties:
      BucketName: !Ref BucketName
      BucketEncryption:
        ServerSideEncryptionConfiguration:
          - ServerSideEncryptionByDefault:
              SSEAlgorithm: AES256
      OwnershipControls:
        Rules:
          - ObjectOwnership: BucketOwnerEnforced
      PublicAccessBlockConfiguration:
        BlockPublicAcls: true
        BlockPublicPolicy: true
        IgnorePublicAcls: true
        RestrictPublicBuckets: true
      # Records go some days after their last write. Those that have to stay longer are larger
      # than this rule goes for.
      LifecycleConfiguration:
        Rules:
          - Id: {rule}
            Status: Enabled
            Prefix: "{prefix}"
            ObjectSizeLessThan: "{below}"
            ExpirationInDays: {days}
            NoncurrentVersionExpiration:
              NoncurrentDays: 1

  OnlyEncrypted:
    Type: AWS::S3::BucketPolicy
    Properties:
      Bucket: !Ref Bucket
      PolicyDocument:
        Version: "2012-10-17"
        Statement:
          - Effect: Deny
            Principal: "*"
            Action: s3:*
            Resource:
              - !GetAtt Bucket.Arn
              - !Sub ${{Bucket.Arn}}/*
            Condition:
              Bool:
                aws:SecureTransport: "false"

  # Attach this to the role of whatever runs oncebridge.
  Policy:
    Type: AWS::IAM::ManagedPolicy
    Properties:
      Description: What oncebridge does with its bucket.
      PolicyDocument:
        Version: "2012-10-17"
        Statement:
          - Effect: Allow
            Action:
{object_actions}
            Resource: !Sub ${{Bucket.Arn}}/{prefix}*
          - Effect: Allow
            Action:
{bucket_actions}
            Resource: !GetAtt Bucket.Arn

Outputs:
  Store:
    Description: What to set as the store of oncebridge.
    Value: !Sub s3://${{Bucket}}/{prefix}?region=${{AWS::Region}}
  PolicyArn:
    Value: !Ref Policy
"""

_TERRAFORM = """\
# The bucket in which oncebridge remembers what was passed on.

variable "oncebridge_bucket" {{
  type    = string
  default = "{bucket}"
}}

resource "aws_s3_bucket" "oncebridge" {{
  bucket = var.oncebridge_bucket
}}

resource "aws_s3_bucket_server_side_encryption_configuration" "oncebridge" {{
  bucket = aws_s3_bucket.oncebridge.id

  rule {{
    apply_server_side_encryption_by_default {{
      sse_algorithm = "AES256"
    }}
  }}
}}

resource "aws_s3_bucket_public_access_block" "oncebridge" {{
  bucket                  = aws_s3_bucket.oncebridge.id
  block_public_acls       = true
  block_public_policy     = true
  ignore_public_acls      = true
  restrict_public_buckets = true
}}

# Records go some days after their last write. Those that have to stay longer are larger than
# this rule goes for.
resource "aws_s3_bucket_lifecycle_configuration" "oncebridge" {{
  bucket = aws_s3_bucket.oncebridge.id

  rule {{
    id     = "{rule}"
    status = "Enabled"

    filter {{
{filter}
    }}

    expiration {{
      days = {days}
    }}

    noncurrent_version_expiration {{
      noncurrent_days = 1
    }}
  }}
}}

resource "aws_s3_bucket_policy" "oncebridge" {{
  bucket = aws_s3_bucket.oncebridge.id

  policy = jsonencode({{
    Version = "2012-10-17"
    Statement = [{{
      Effect    = "Deny"
      Principal = "*"
      Action    = "s3:*"
      Resource = [
        aws_s3_bucket.oncebridge.arn,
        "${{aws_s3_bucket.oncebridge.arn}}/*",
      ]
      Condition = {{ Bool = {{ "aws:SecureTransport" = "false" }} }}
    }}]
  }})
}}

# Attach this to the role of whatever runs oncebridge.
resource "aws_iam_policy" "oncebridge_bucket" {{
  name_prefix = "oncebridge-bucket-"

  policy = jsonencode({{
    Version = "2012-10-17"
    Statement = [
      {{
        Effect = "Allow"
        Action = [
{object_actions}
        ]
        Resource = "${{aws_s3_bucket.oncebridge.arn}}/{prefix}*"
      }},
      {{
        Effect = "Allow"
        Action = [
{bucket_actions}
        ]
        Resource = aws_s3_bucket.oncebridge.arn
      }},
    ]
  }})
}}

output "oncebridge_store" {{
  description = "What to set as the store of oncebridge."
  value       = "s3://${{aws_s3_bucket.oncebridge.id}}/{prefix}?region=${{aws_s3_bucket.oncebridge.region}}"
}}
"""

_AND = """\
      and {{
        prefix                = "{prefix}"
        object_size_less_than = {below}
      }}"""
_SIZE = "      object_size_less_than = {below}"

OBJECT_ACTIONS = ("s3:DeleteObject", "s3:GetObject", "s3:PutObject")
BUCKET_ACTIONS = ("s3:GetBucketVersioning", "s3:GetLifecycleConfiguration", "s3:ListBucket")
"""What a worker is allowed to do; `oncebridge migrate` needs to make bucket and rule besides."""


def table(
    name: str = "oncebridge",
    *,
    format: Literal["cloudformation", "terraform"] = "cloudformation",  # noqa: A002
    window: timedelta = timedelta(days=6),
) -> str:
    """
    Write the bucket and prefix *name*, with its rule, and a policy for whoever uses it.

    Nothing is removed that was written within *window* and a day.
    """
    bucket, _, given = name.partition("/")
    prefix = checked_prefix(bucket, given)
    rule = rule_for(prefix, window + timedelta(days=1))
    is_terraform = format == "terraform"
    line = '          "{}",' if is_terraform else "              - {}"
    condition = (_AND if prefix else _SIZE).format(prefix=prefix, below=rule.below)
    return (_TERRAFORM if is_terraform else _CLOUDFORMATION).format(
        bucket=bucket,
        prefix=prefix,
        rule=rule.id,
        below=rule.below,
        days=rule.days,
        filter=condition,
        object_actions="\n".join(map(line.format, OBJECT_ACTIONS)),
        bucket_actions="\n".join(map(line.format, BUCKET_ACTIONS)),
    )
