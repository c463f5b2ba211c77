"""What is printed can be applied: the right store, its name, its expiry."""

import json
import re
import subprocess
import sys

import pytest
from tests.cli.strangers import CANARY

from oncebridge.aws.templates.access import ACTIONS
from oncebridge.aws.templates.rendering import stack

TABLE = ("template", "table")
IAM = ("template", "iam")


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


@pytest.mark.full
def test_no_driver_of_aws_is_needed():
    code = "import sys; from oncebridge.cli.app import app; sys.modules['botocore'] = None; app()"
    for args in (
        (*TABLE, "--store", "dynamodb"),
        (*TABLE, "--store", "s3"),
        ("template", "lambda"),
        (*IAM, "--source", "sqs://genesys", "--format", "cloudformation"),
    ):
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", code, *args],
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
        (("--store", "sqlite:x.db"), "--store: a sqlite store needs no table"),
        (("--store", "memory:"), "--store: a memory store needs no table"),
        (("--store", f"rediss+cluster://:{CANARY}@x"), "a rediss+cluster store needs no table"),
        (("--store", "dynamo"), "did you mean 'dynamodb'?"),
        (("--store", f"{CANARY}://x"), "allowed: dynamodb, s3, postgres"),
        (("--format", "sql"), "--format: 'sql' is not for dynamodb; allowed: cloudformation, terr"),
        (("--store", "postgres", "--format", "terraform"), "is not for postgres; allowed: sql"),
        (("--name", "a table"), "'a table' is not the name of a DynamoDB table"),
        (("--store", "s3://Bucket"), "'Bucket' is not a valid bucket name"),
        (("--store", "s3://[bucket"), "'[bucket' is not a valid bucket name"),
        (
            ("--store", f"s3://key:{CANARY}@bucket"),
            "--store: s3://***@bucket: such an address cannot have cred",
        ),
        (("--window", "6 weeks"), "--window: '6 weeks' is not a duration"),
    ],
)
def test_a_mistake_is_told(call, args, told):
    ran = call(*TABLE, *args, code=2)
    assert told in ran.err
    assert ran.out == ""
    assert CANARY not in ran.err


# --- stacks ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["lambda", "worker"])
def test_a_stack_is_printed_in_either_notation(call, kind):
    plain = call("template", kind).out
    assert plain == stack(kind)
    assert call("template", kind, "--format", "cloudformation").out == plain
    printed = call("template", kind, "--name", "genesys-crm", "--format", "terraform").out
    assert printed == stack(kind, "genesys-crm", format="terraform")
    assert '"genesys-crm"' in printed


def test_a_stack_cannot_have_just_any_name_or_notation(call):
    told = call("template", "lambda", "--name", "a b", code=2)
    assert "a name is 3 to 48 letters" in told.err
    assert (
        "'cloudformation', 'terraform'" in call("template", "worker", "--format", "x", code=2).err
    )


# --- policies -------------------------------------------------------------------------------


def statements(printed: str) -> dict[str, tuple[list[str], list[str]]]:
    document = json.loads(printed)
    assert document["Version"] == "2012-10-17"
    assert {one["Effect"] for one in document["Statement"]} == {"Allow"}
    return {one["Sid"]: (one["Action"], one["Resource"]) for one in document["Statement"]}


@pytest.mark.parametrize(
    ("flag", "address", "backend", "arn"),
    [
        ("source", "sqs://in", "source.sqs", "arn:aws:sqs:*:*:in"),
        (
            "source",
            "sqs://in.fifo?region=eu-west-1",
            "source.sqs",
            "arn:aws:sqs:eu-west-1:*:in.fifo",
        ),
        (
            "source",
            "sqs:https://sqs.eu-west-1.amazonaws.com/111122223333/in",
            "source.sqs",
            "arn:aws:sqs:eu-west-1:111122223333:in",
        ),
        (
            "source",
            "sqs:https://vpce-0f1e.sqs.eu-west-1.vpce.amazonaws.com/111122223333/in",
            "source.sqs",
            "arn:aws:sqs:eu-west-1:111122223333:in",
        ),
        (
            "dead",
            "sqs:http://localhost:4566/111122223333/dead",
            "dead.sqs",
            "arn:aws:sqs:*:111122223333:dead",
        ),
        (
            "sink",
            "sqs:arn:aws-cn:sqs:cn-north-1:111122223333:out",
            "sink.sqs",
            "arn:aws-cn:sqs:cn-north-1:111122223333:out",
        ),
        ("sink", "events://crm", "sink.events", "arn:aws:events:*:*:event-bus/crm"),
        ("sink", "kinesis://crm", "sink.kinesis", "arn:aws:kinesis:*:*:stream/crm"),
        (
            "sink",
            "sns:arn:aws:sns:eu-west-1:111122223333:crm",
            "sink.sns",
            "arn:aws:sns:eu-west-1:111122223333:crm",
        ),
        ("source", "kinesis://in", "source.kinesis", "arn:aws:kinesis:*:*:stream/in"),
        (
            "store",
            "dynamodb://dedup?region=us-gov-west-1",
            "store.dynamodb",
            "arn:aws-us-gov:dynamodb:us-gov-west-1:*:table/dedup",
        ),
    ],
)
def test_a_policy_for_an_address(call, flag, address, backend, arn):
    ((actions, resources),) = statements(call(*IAM, f"--{flag}", address).out).values()
    assert actions == list(ACTIONS[backend])
    assert resources == [arn]


def test_a_policy_for_a_bucket_is_for_what_is_below_the_prefix(call):
    printed = statements(call(*IAM, "--store", "s3://acme-dedup/events").out)
    assert printed["StoreS3"][1] == ["arn:aws:s3:::acme-dedup"]
    assert printed["StoreS3Objects"][1] == ["arn:aws:s3:::acme-dedup/events/*"]


@pytest.mark.parametrize(
    ("more", "cache"),
    [
        ({}, "arn:aws:elasticache:*:*:replicationgroup:orders"),
        (
            {
                "ONCEBRIDGE_STORE__IAM_SERVERLESS": "true",
                "ONCEBRIDGE_STORE__IAM_REGION": "eu-west-1",
            },
            "arn:aws:elasticache:eu-west-1:*:serverlesscache:orders",
        ),
    ],
)
def test_a_policy_for_a_cache_is_for_its_user_too(call, more, cache):
    given = {"ONCEBRIDGE_STORE__IAM_USER": "svc", "ONCEBRIDGE_STORE__IAM_CACHE": "Orders", **more}
    told = call(*IAM, "--store", "rediss+cluster://cache.example.com", **given)
    actions, resources = statements(told.out)["StoreRedis"]
    assert actions == ["elasticache:Connect"]
    assert resources == [cache, re.sub(r"[a-z]+:orders$", "user:svc", cache)]


CONFIG = f"""
source = {{ url = "kinesis://genesys", fan_out = "crm", region = "eu-west-1" }}
store = "dynamodb://dedup"
dead = "env:DEAD"
[[routes]]
name = "crm"
sink.url = "https://user:{CANARY}@crm.example.com"
sink.headers = {{ Authorization = "secretsmanager:crm/token#bearer", Cookie = "ssm:/crm/cookie" }}
[[routes]]
name = "lake"
sink = "events:arn:aws:events:eu-west-1:444455556666:event-bus/lake"
[[routes]]
name = "also"
sink = "events://also"
[[routes]]
name = "hidden"
sink = "secretsmanager:arn:aws:secretsmanager:eu-west-1:111122223333:secret:sink-AbCdEf"
"""


def test_a_policy_for_a_configuration(call, tmp_path):
    (tmp_path / "oncebridge.toml").write_text(CONFIG)
    known = ("--region", "eu-central-1", "--account", "111122223333")
    key = "arn:aws:kms:eu-west-1:111122223333:key/0f1e2d3c"
    told = call(*IAM, "-c", "oncebridge.toml", *known, "--kms-key", key, DEAD="sqs://dead")
    assert CANARY not in told.out
    found = {name: resources for name, (_, resources) in statements(told.out).items()}
    here = "eu-central-1:111122223333"
    assert found == {
        "SourceKinesis": ["arn:aws:kinesis:eu-west-1:111122223333:stream/genesys"],
        "SourceKinesisFanOut": ["arn:aws:kinesis:eu-west-1:111122223333:stream/genesys"],
        "SourceKinesisConsumer": [
            "arn:aws:kinesis:eu-west-1:111122223333:stream/genesys/consumer/crm:*"
        ],
        "StoreDynamodb": [f"arn:aws:dynamodb:{here}:table/dedup"],
        "DeadSqs": [f"arn:aws:sqs:{here}:dead"],
        "SinkEvents": [
            "arn:aws:events:eu-west-1:444455556666:event-bus/lake",
            f"arn:aws:events:{here}:event-bus/also",
        ],
        "SecretSecretsmanager": [
            f"arn:aws:secretsmanager:{here}:secret:crm/token-??????",
            "arn:aws:secretsmanager:eu-west-1:111122223333:secret:sink-AbCdEf",
        ],
        "SecretSsm": [f"arn:aws:ssm:{here}:parameter/crm/cookie"],
        "KeyKms": [key],
    }


def test_the_environment_wins_over_the_file_and_flags_win_over_both(call, tmp_path):
    (tmp_path / "oncebridge.toml").write_text('source = "sqs://file"\nstore = "dynamodb://file"\n')
    variables = {
        "ONCEBRIDGE_CONFIG": "oncebridge.toml",
        "ONCEBRIDGE_SOURCE": "sqs://variable",
        "ONCEBRIDGE_SOURCE__REGION": "eu-west-1",
        "ONCEBRIDGE_STORE": "dynamodb://variable",
    }
    printed = statements(call(*IAM, "--source", "sqs://flag", **variables).out)
    assert printed["SourceSqs"][1] == ["arn:aws:sqs:eu-west-1:*:flag"]
    assert printed["StoreDynamodb"][1] == ["arn:aws:dynamodb:*:*:table/variable"]


def test_a_configuration_that_is_kept_at_aws_has_to_be_read(call):
    told = call(*IAM, "-c", "ssm:/oncebridge/config")
    assert statements(told.out)["SecretSsm"][1] == ["arn:aws:ssm:*:*:parameter/oncebridge/config"]
    assert "the content of ssm:/oncebridge/config is not read" in told.err


def test_a_policy_for_a_stack_takes_its_region_and_account(call):
    printed = call(*IAM, "--source", "sqs://in", "--format", "cloudformation").out
    assert '!Sub "arn:${AWS::Partition}:sqs:${AWS::Region}:${AWS::AccountId}:in"' in printed
    printed = call(*IAM, "--source", "sqs://in", "--format", "terraform").out
    assert ":${data.aws_region.current.name}:${data.aws_caller_identity.current.acc" in printed
    given = ("--region", "eu-west-1", "--account", "111122223333")
    for form in ("cloudformation", "terraform"):
        printed = call(*IAM, "--source", "sqs://in", *given, "--format", form).out
        assert '"arn:aws:sqs:eu-west-1:111122223333:in"' in printed
        assert "data " not in printed
        assert "!Sub" not in printed


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ((), "nothing of this configuration is on AWS"),
        (("--store", "sqlite:x.db", "--sink", f"https://{CANARY}.example.com"), "nothing of this"),
        (("-c", "nowhere.toml"), "nowhere.toml: cannot be read: FileNotFoundError"),
        (("-c", "bad.toml"), "bad.toml: is not TOML"),
        (("-c", "odd.toml"), "source: must be an address, or a table with url and options"),
        (("--source", "sqs://a b"), "source: 'a b' is not a name in sqs"),
        (("--source", f"sqs://key:{CANARY}@in"), "is not a name in sqs"),
        (("--source", "sqs:arn:aws:sns:eu-west-1:111122223333:in"), "is not an ARN of sqs"),
        (("--sink", "events:"), "sink: '' is not a name in events"),
        (("--store", "dynamodb://dedup?region=${x}"), "store: '${x}' is not a Region"),
        (("--store", "s3://Bucket"), "store: 'Bucket' is not a valid bucket name"),
        (("--sink", "env:NOWHERE"), "the environment variable NOWHERE is not set"),
        (("--source", "sqs://in", "--region", "x y"), "--region: 'x y' is not a Region"),
        (("--source", "sqs://in", "--account", "1"), "--account: '1': an account has 12 digits"),
        (("--kms-key", "alias/mine"), "--kms-key: 'alias/mine' is not the ARN of a key"),
    ],
)
def test_a_mistake_in_what_is_to_be_allowed_is_told(call, tmp_path, args, told):
    (tmp_path / "bad.toml").write_text("source = ")
    (tmp_path / "odd.toml").write_text("source = 5")
    ran = call(*IAM, *args, code=2)
    assert told in ran.err
    assert ran.out == ""
    assert CANARY not in ran.err
