"""
The stacks, made by CloudFormation on an AWS that looks at rights: events go through, once.

Function and workers have the rights of their template and no others, so whatever it forgets
would be denied here.
"""

import json
import os
import platform
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError
from tests.servers.aws import fresh
from tests.servers.guarded_aws import ACCOUNT, GuardedAws

from oncebridge.aws.templates.rendering import stack

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
SOURCE = "com.example.genesys"
ARCH = {"x86_64": "x86_64", "aarch64": "arm64", "arm64": "arm64"}[platform.machine()]
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
EVENTS = [
    json.loads((ROOT / "tests" / "events" / f"v2.{name}.json").read_text())
    for name in ("users.id.presence", "users.id.routingStatus", "detail.events.conversation.id.acw")
]
TWINS = {
    "sns:Publish": "sns:PublishBatch",
    "sqs:ChangeMessageVisibility": "sqs:ChangeMessageVisibilityBatch",
    "sqs:DeleteMessage": "sqs:DeleteMessageBatch",
    "sqs:SendMessage": "sqs:SendMessageBatch",
}
"""For a batch AWS asks for each thing that is in it, and the emulator for the name of the call."""
UNKNOWN = [
    "dynamodb:BatchExecuteStatement",
    "dynamodb:TransactWriteItems",
    "kinesis:GetRecords",
]
"""Of these the emulator does not know the table or stream."""


class Town:
    """A bus, a place where events come out, and a stack in between."""

    def __init__(self, aws: GuardedAws) -> None:
        self.aws = aws
        self.name = fresh("town")
        self.sqs = aws.client("sqs")
        self.out = self.sqs.create_queue(QueueName=f"{self.name}-out")["QueueUrl"]
        self.out_arn = f"arn:aws:sqs:us-east-1:{ACCOUNT}:{self.name}-out"
        aws.client("events").create_event_bus(Name=self.name)

    def deploy(self, text: str, **parameters: str) -> dict[str, str]:
        """Make a stack of the printed *text*, and give its outputs."""
        cloudformation = self.aws.client("cloudformation")
        given = {"Name": self.name, "EventBusName": self.name, "EventSource": SOURCE, **parameters}
        cloudformation.create_stack(
            StackName=self.name,
            TemplateBody=text,
            Capabilities=["CAPABILITY_IAM"],
            Parameters=[
                {"ParameterKey": name, "ParameterValue": value} for name, value in given.items()
            ],
        )
        made = until(lambda: self._stack(cloudformation))
        assert made["StackStatus"] == "CREATE_COMPLETE", made
        return {one["OutputKey"]: one["OutputValue"] for one in made["Outputs"]}

    def _stack(self, cloudformation: Any) -> Any:
        (found,) = cloudformation.describe_stacks(StackName=self.name)["Stacks"]
        return None if found["StackStatus"].endswith("IN_PROGRESS") else found

    def deploy_lambda(self, code: dict[str, str], **parameters: str) -> dict[str, str]:
        outputs = self.deploy(stack("lambda"), **code, **parameters)
        functions = self.aws.client("lambda")
        found = functions.list_event_source_mappings(FunctionName=self.name)
        (mapping,) = found["EventSourceMappings"]
        assert mapping["FunctionResponseTypes"] == ["ReportBatchItemFailures"]
        # The emulator takes a number that comes from a parameter for a text, and stumbles.
        functions.update_event_source_mapping(
            UUID=mapping["UUID"], ScalingConfig={"MaximumConcurrency": 5}
        )
        iam = self.aws.client("iam")
        policy = {"RoleName": outputs["Role"], "PolicyName": "oncebridge"}
        document = iam.get_role_policy(**policy)["PolicyDocument"]
        iam.put_role_policy(**policy, PolicyDocument=for_emulator(document))
        return outputs

    def put(self, *events: dict) -> None:
        """Publish events; EventBridge gives each an id of its own, also if it is the same again."""
        answer = self.aws.client("events").put_events(
            Entries=[
                {
                    "EventBusName": self.name,
                    "Source": SOURCE,
                    "DetailType": event["detail-type"],
                    "Detail": json.dumps(event["detail"]),
                }
                for event in events
            ]
        )
        assert answer["FailedEntryCount"] == 0

    def taken(self, url: str, least: int) -> list[str]:
        """Take all that is in a queue, and wait until there are *least*."""
        bodies: list[str] = []

        def take() -> bool:
            answer = self.sqs.receive_message(QueueUrl=url, MaxNumberOfMessages=10)
            for message in answer.get("Messages", []):
                bodies.append(message["Body"])
                self.sqs.delete_message(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])
            return len(bodies) >= least

        until(take)
        return bodies

    def settle(self, url: str) -> None:
        """Wait until nothing is in a queue, and nothing of it is in hand."""

        def is_empty() -> bool:
            names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
            found = self.sqs.get_queue_attributes(QueueUrl=url, AttributeNames=names)["Attributes"]
            return all(found[name] == "0" for name in names)

        until(is_empty)


def for_emulator(document: dict) -> str:
    """Allow the same, as the emulator understands it."""
    for statement in document["Statement"]:
        actions = statement["Action"]
        actions = [actions] if isinstance(actions, str) else actions
        statement["Action"] = actions + [TWINS[one] for one in actions if one in TWINS]
    document["Statement"].append({"Effect": "Allow", "Action": UNKNOWN, "Resource": "*"})
    return json.dumps(document)


def until(asked: Callable[[], Any], within_s: float = 60) -> Any:
    ends = time.monotonic() + within_s
    while not (found := asked()):
        assert time.monotonic() < ends, "it took too long"
        time.sleep(0.05)
    return found


def details(bodies: list[str]) -> list[str]:
    return sorted(json.dumps(json.loads(body)["detail"], sort_keys=True) for body in bodies)


EACH_ONCE = sorted(json.dumps(event["detail"], sort_keys=True) for event in EVENTS)


@pytest.fixture(scope="module")
def code(encrypted_aws: GuardedAws, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Give the package of the function, as it is built for Lambda, in a bucket."""
    build = runpy.run_path(str(ROOT / "deploy" / "lambda" / "build.py"))["build"]
    package = build(ARCH, tmp_path_factory.mktemp("code"), python=PYTHON)
    bucket = f"code-{os.getpid()}"
    s3 = encrypted_aws.client("s3")
    s3.create_bucket(Bucket=bucket)
    s3.put_object(Bucket=bucket, Key=package.name, Body=package.read_bytes())
    return {"CodeBucket": bucket, "CodeKey": package.name, "Architecture": ARCH}


# --- the function ---------------------------------------------------------------------------


def test_what_the_rule_puts_into_the_queue_comes_out_once(encrypted_aws, code):
    town = Town(encrypted_aws)
    into = {"SinkService": "sqs", "SinkArn": town.out_arn}
    outputs = town.deploy_lambda(code, Sink=f"sqs:{town.out_arn}", **into)
    town.put(*EVENTS)
    town.sqs.send_message(QueueUrl=outputs["Queue"], MessageBody="no event at all")
    came = town.taken(town.out, len(EVENTS))
    # A copy that meets the first one under way would come back after minutes.
    town.settle(outputs["Queue"])
    for _ in range(2):
        town.put(*EVENTS)
    town.settle(outputs["Queue"])

    assert details(came + town.taken(town.out, 0)) == EACH_ONCE
    (dead,) = town.taken(outputs["Dead"].removeprefix("sqs:"), 1)
    assert dead == "no event at all"
    assert town.taken(outputs["Failed"], 0) == town.taken(outputs["Undelivered"], 0) == []


def test_what_the_rule_hands_to_the_function_itself_comes_out_once(encrypted_aws, code):
    town = Town(encrypted_aws)
    into = {"SinkService": "sqs", "SinkArn": town.out_arn}
    town.deploy_lambda(code, Trigger="direct", Sink=f"sqs:{town.out_arn}", **into)
    town.put(EVENTS[0])
    came = town.taken(town.out, 1)
    town.put(*EVENTS)
    came += town.taken(town.out, len(EVENTS) - 1)
    until(lambda: invocations(town) == 1 + len(EVENTS))

    assert details(came + town.taken(town.out, 0)) == EACH_ONCE


def invocations(town: Town) -> int:
    """Count how often the function came to an end, by its log."""
    logs = town.aws.client("logs")
    found = logs.filter_log_events(logGroupName=f"/aws/lambda/{town.name}")["events"]
    return sum(one["message"].startswith("END RequestId") for one in found)


def test_what_the_function_cannot_pass_on_is_kept(encrypted_aws, code):
    town = Town(encrypted_aws)
    # It may not write there: nobody said that it should.
    sink = f"sqs:{town.out_arn}"
    outputs = town.deploy_lambda(code, Trigger="direct", Sink=sink, Timeout="30")
    event = {**EVENTS[0], "source": SOURCE}
    # As EventBridge calls it; the emulator's own would try once and no more.
    encrypted_aws.client("lambda").invoke(
        FunctionName=town.name, InvocationType="Event", Payload=json.dumps(event)
    )
    (kept,) = town.taken(outputs["Failed"], 1)

    assert json.loads(kept)["requestPayload"] == event
    assert town.taken(town.out, 0) == []


def test_the_function_reads_a_configuration_that_is_kept_at_aws(encrypted_aws, code):
    town = Town(encrypted_aws)
    written = f'route = "crm"\nsink = "sqs:{town.out_arn}"\n'
    name = f"/{town.name}/config"
    encrypted_aws.client("ssm").put_parameter(Name=name, Value=written, Type="String")
    into = {"SinkService": "sqs", "SinkArn": town.out_arn}
    outputs = town.deploy_lambda(code, ConfigParameter=name, **into)
    town.put(*EVENTS, *EVENTS)
    came = town.taken(town.out, len(EVENTS))
    town.settle(outputs["Queue"])

    assert details(came + town.taken(town.out, 0)) == EACH_ONCE


# --- the workers ----------------------------------------------------------------------------


def somebody(aws: GuardedAws, name: str, document: dict) -> dict[str, str]:
    """Be somebody who may do what a policy allows, and nothing else."""
    iam = aws.client("iam")
    iam.create_user(UserName=name)
    iam.put_user_policy(
        UserName=name, PolicyName="oncebridge", PolicyDocument=for_emulator(document)
    )
    key = iam.create_access_key(UserName=name)["AccessKey"]
    return {
        "AWS_ACCESS_KEY_ID": key["AccessKeyId"],
        "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"],
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": aws.endpoint,
        "AWS_CA_BUNDLE": aws.authority,
    }


def managed(aws: GuardedAws, arn: str) -> dict:
    """Read a policy of the stack's."""
    iam = aws.client("iam")
    version = iam.get_policy(PolicyArn=arn)["Policy"]["DefaultVersionId"]
    found = iam.get_policy_version(PolicyArn=arn, VersionId=version)
    return found["PolicyVersion"]["Document"]


@contextmanager
def worker(folder: Path, identity: dict[str, str], *args: str) -> Iterator[list[dict]]:
    """Run a worker, and stop it; then the counts are in the list that is given."""
    counts: list[dict] = []
    log = folder / "worker.log"
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "oncebridge", "run", "--json", *args],
            cwd=folder,
            env={**os.environ, **identity},
            stdout=subprocess.PIPE,
            stderr=errors,
        )
        try:
            yield counts
            process.send_signal(signal.SIGTERM)
            out, _ = process.communicate(timeout=60)
            assert process.returncode == 0, log.read_text()
            counts.append(json.loads(out))
        finally:
            process.kill()
            process.communicate()


def test_no_queue_is_spoken_to_without_tls(encrypted_aws):
    town = Town(encrypted_aws)
    town.deploy(stack("worker"))
    plain = encrypted_aws.client("sqs")

    def by_http(request: Any, **_: Any) -> None:
        request.headers["X-Forwarded-Proto"] = "http"  # as a proxy says that it was asked

    plain.meta.events.register("before-send", by_http)
    for end in ("", "-failed", "-undelivered", "-dead"):
        url = town.sqs.get_queue_url(QueueName=f"{town.name}{end}")["QueueUrl"]
        town.sqs.send_message(QueueUrl=url, MessageBody="{}")
        for ask in (plain.receive_message, plain.purge_queue):
            with pytest.raises(ClientError, match="AccessDenied"):
                ask(QueueUrl=url)
        assert town.taken(url, 1) == ["{}"]


def test_workers_may_do_what_they_have_to(encrypted_aws, tmp_path):
    town = Town(encrypted_aws)
    outputs = town.deploy(stack("worker"), SinkService="sqs", SinkArn=town.out_arn)
    places = [f"--{name.lower()}={outputs[name]}" for name in ("Source", "Store", "Dead")]
    places.append(f"--sink=sqs:{town.out_arn}")
    town.put(*EVENTS, *EVENTS)
    town.sqs.send_message(QueueUrl=outputs["Queue"], MessageBody="no event at all")
    identity = somebody(encrypted_aws, town.name, managed(encrypted_aws, outputs["PolicyArn"]))
    with worker(tmp_path, identity, *places) as counts:
        came = town.taken(town.out, len(EVENTS))
        town.settle(outputs["Queue"])

    assert details(came) == EACH_ONCE
    assert counts[0]["delivered"] == counts[0]["duplicate"] == len(EVENTS)
    assert town.taken(outputs["Dead"].removeprefix("sqs:"), 1) == ["no event at all"]


# --- a policy for a configuration -----------------------------------------------------------

ROUTES = """
source = "sqs://NAME-in"
store = "dynamodb://NAME"
dead = "sqs:arn:aws:sqs:us-east-1:ACCOUNT:NAME-dead"
[[routes]]
name = "bus"
sink = { url = "events://NAME", source = "com.example.once" }
[[routes]]
name = "queue"
sink = "sqs://NAME-out"
[[routes]]
name = "topic"
sink = "sns:arn:aws:sns:us-east-1:ACCOUNT:NAME"
[[routes]]
name = "stream"
sink = "kinesis://NAME"
[[routes]]
name = "told elsewhere"
sink = "ssm:/NAME/sink"
"""
STREAM = """
source = "kinesis://NAME"
store = "s3://NAME/records"
sink = "secretsmanager:NAME/sink"
dead = "sqs://NAME-dead"
"""


def prepared(town: Town, text: str, folder: Path) -> dict[str, str]:
    """Make what *text* names, and be somebody with the policy that is printed for it."""
    aws, name = town.aws, town.name
    for end in ("in", "dead"):
        town.sqs.create_queue(QueueName=f"{name}-{end}")
    aws.client("sns").create_topic(Name=name)
    aws.client("kinesis").create_stream(StreamName=name, ShardCount=1)
    aws.client("s3").create_bucket(Bucket=name)
    aws.client("dynamodb").create_table(
        TableName=name,
        AttributeDefinitions=[{"AttributeName": "k", "AttributeType": "B"}],
        KeySchema=[{"AttributeName": "k", "KeyType": "HASH"}],
        BillingMode="PAY_PER_REQUEST",
    )
    sink = f"sqs:{town.out_arn}"
    aws.client("ssm").put_parameter(Name=f"/{name}/sink", Value=sink, Type="SecureString")
    aws.client("secretsmanager").create_secret(Name=f"{name}/sink", SecretString=sink)
    (folder / "oncebridge.toml").write_text(text.replace("NAME", name).replace("ACCOUNT", ACCOUNT))
    asked = ["-c", "oncebridge.toml", "--region", "us-east-1", "--account", ACCOUNT]
    printed = subprocess.run(
        [sys.executable, "-m", "oncebridge", "template", "iam", *asked],
        cwd=folder,
        check=True,
        capture_output=True,
        timeout=60,
    ).stdout
    return somebody(aws, name, json.loads(printed))


def test_a_printed_policy_is_enough_for_every_kind_of_sink(encrypted_aws, tmp_path):
    town = Town(encrypted_aws)
    identity = prepared(town, ROUTES, tmp_path)
    queue = town.sqs.get_queue_url(QueueName=f"{town.name}-in")["QueueUrl"]
    for _ in range(2):
        for event in EVENTS:
            town.sqs.send_message(QueueUrl=queue, MessageBody=json.dumps(event))
    with worker(tmp_path, identity, "-c", "oncebridge.toml") as counts:
        town.taken(town.out, 2 * len(EVENTS))
        town.settle(queue)

    assert counts[0]["delivered"] == counts[0]["duplicate"] == 5 * len(EVENTS)


def test_a_printed_policy_is_enough_for_a_stream_and_a_bucket(encrypted_aws, tmp_path):
    town = Town(encrypted_aws)
    # Nobody can tell from here where a secret leads, so what is behind it is named besides.
    identity = prepared(town, STREAM + f'#\n[[routes]]\nsink = "sqs:{town.out_arn}"\n', tmp_path)
    stream = encrypted_aws.client("kinesis")
    for event in EVENTS + EVENTS:
        data = json.dumps(event).encode()
        stream.put_record(StreamName=town.name, Data=data, PartitionKey="one")
    (tmp_path / "oncebridge.toml").write_text(STREAM.replace("NAME", town.name))
    with worker(tmp_path, identity, "-c", "oncebridge.toml") as counts:
        came = town.taken(town.out, len(EVENTS))

    assert details(came) == EACH_ONCE
    assert counts[0]["delivered"] == len(EVENTS)
