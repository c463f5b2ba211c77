"""What is printed can be applied: the right store, its name, its expiry."""

import subprocess
import sys

import pytest
from tests.cli.strangers import CANARY

TABLE = ("template", "table")


@pytest.mark.parametrize(
    ("form", "resource"),
    [("cloudformation", "AWS::DynamoDB::Table"), ("terraform", '"aws_dynamodb_table"')],
)
def test_a_table_in_dynamodb(call, form, resource):
    told = call(*TABLE, "--store", "dynamodb://genesys-dedup?region=eu-west-1", "--format", form)
    assert resource in told.out
    assert "genesys-dedup" in told.out
    assert "eu-west-1" not in told.out
    assert told.out.endswith("\n")
    assert not told.out.endswith("\n\n")
    arn = "dynamodb:arn:aws:dynamodb:eu-west-1:111122223333:table/genesys-dedup"
    assert call(*TABLE, "--store", arn, "--format", form).out == told.out
    assert call(*TABLE, "--name", "genesys-dedup", "--format", form).out == told.out


def test_the_first_format_is_printed_unless_another_is_asked_for(call):
    for store in ("dynamodb", "s3"):
        plain = call(*TABLE, "--store", store).out
        assert plain == call(*TABLE, "--store", store, "--format", "cloudformation").out
        assert plain != call(*TABLE, "--store", store, "--format", "terraform").out


@pytest.mark.parametrize(
    ("form", "resource"), [("cloudformation", "AWS::S3::Bucket"), ("terraform", '"aws_s3_bucket')]
)
def test_a_bucket_with_its_expiry(call, form, resource):
    asked = (*TABLE, "--store", "s3://acme-dedup/events/", "--format", form)
    told = call(*asked)
    assert resource in told.out
    assert "acme-dedup" in told.out
    assert "events" in told.out
    assert call(*asked, "--window", "30d").out != told.out
    assert call(*asked, "--window", "144h").out == told.out  # six days


def test_a_table_in_postgres(call):
    told = call(*TABLE, "--store", "postgres")
    assert "create table" in told.out.lower()
    url = f"postgresql://user:{CANARY}@db.example.com/events"
    assert call(*TABLE, "--store", url, "--format", "sql").out == told.out
    assert CANARY not in told.out


def test_no_driver_of_aws_is_needed():
    code = "import sys; from oncebridge.cli.app import app; sys.modules['botocore'] = None; app()"
    for store in ("dynamodb", "s3"):
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", code, *TABLE, "--store", store],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert "AWS::" in done.stdout


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("--store", "sqlite:x.db"), "--store: a store of the kind sqlite needs nothing made"),
        (("--store", "memory:"), "--store: a store of the kind memory needs nothing made"),
        (("--store", f"rediss+cluster://:{CANARY}@x"), "kind rediss+cluster needs nothing made"),
        (("--store", "dynamo"), "did you mean 'dynamodb'?"),
        (("--store", f"{CANARY}://x"), "allowed: dynamodb, s3, postgres"),
        (("--format", "sql"), "--format: 'sql' is not for dynamodb; allowed: cloudformation, terr"),
        (("--store", "postgres", "--format", "terraform"), "is not for postgres; allowed: sql"),
        (("--name", "a table"), "'a table' is not the name of a DynamoDB table"),
        (("--store", "s3://Bucket"), "'Bucket' is not the name of a bucket"),
        (("--store", "s3://[bucket"), "'[bucket' is not the name of a bucket"),
        (
            ("--store", f"s3://key:{CANARY}@bucket"),
            "--store: s3://***@bucket: such an address has no cred",
        ),
        (("--window", "6 weeks"), "--window: '6 weeks' is not a duration"),
    ],
)
def test_a_mistake_is_told(call, args, told):
    ran = call(*TABLE, *args, code=2)
    assert told in ran.err
    assert ran.out == ""
    assert CANARY not in ran.err
