"""The bucket of the S3 store, for CloudFormation and Terraform."""

from datetime import timedelta

from oncebridge.aws.s3_buckets import checked_prefix, rule_for
from oncebridge.aws.templates.rendering import Format, render

OBJECT_ACTIONS = ("s3:DeleteObject", "s3:GetObject", "s3:PutObject")
BUCKET_ACTIONS = ("s3:GetBucketVersioning", "s3:GetLifecycleConfiguration", "s3:ListBucket")
"""The actions of a worker; `oncebridge migrate` also needs those that create bucket and rule."""


def table(
    name: str = "oncebridge",
    *,
    format: Format = "cloudformation",  # noqa: A002
    window: timedelta = timedelta(days=6),
) -> str:
    """
    Return the bucket and prefix *name*, its rule, and a policy for the workers that use it.

    Nothing is removed that was written within *window* and a day.
    """
    bucket, _, given = name.partition("/")
    prefix = checked_prefix(bucket, given)
    rule = rule_for(prefix, window + timedelta(days=1))
    return render(
        "bucket",
        format,
        bucket=bucket,
        prefix=prefix,
        rule=rule,
        object_actions=OBJECT_ACTIONS,
        bucket_actions=BUCKET_ACTIONS,
    )
