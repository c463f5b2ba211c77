"""The stacks are sound as their tools see them, and say the same in both notations."""

import json
import re
import subprocess
import sys
from datetime import timedelta
from itertools import product
from pathlib import Path

import hcl2
import pytest
from tests.aws.cloudformation import Stack, with_defaults
from tests.servers.lambda_runtime import builder
from tests.servers.terraform import plugins, run, terraform, what_reads_terraform

from oncebridge.aws.templates import rendering
from oncebridge.aws.templates.access import ACTIONS
from oncebridge.aws.templates.needs import needed
from oncebridge.aws.templates.policies import policy
from oncebridge.aws.templates.rendering import render, stack
from oncebridge.engine.settings import Settings
from oncebridge.errors import ConfigError
from oncebridge.service.addresses import SinkPlace
from oncebridge.service.config import load

GENESYS = {"OrganizationId": "0f1e2d3c-0000-4000-8000-00000000abcd", "EventSourceSuffix": "prod"}
BUS = "aws.partner/genesys.com/cloud/0f1e2d3c-0000-4000-8000-00000000abcd/prod"
OTHER = {"EventBusName": "orders", "EventSource": "com.example.orders"}
KEY = "arn:aws:kms:eu-west-1:111122223333:key/0f1e2d3c-0000-4000-8000-00000000abcd"
TOPIC = "arn:aws:sns:eu-west-1:111122223333:alarms"
SECRET = "arn:aws:secretsmanager:eu-west-1:111122223333:secret:crm-token-AbCdEf"
OIDC = "arn:aws:iam::111122223333:oidc-provider/oidc.eks.eu-west-1.amazonaws.com/id/0F1E2D"
CODE = {"CodeBucket": "acme-code", "CodeKey": "oncebridge.zip"}
SINKS = {
    "events": "arn:aws:events:eu-west-1:111122223333:event-bus/crm",
    "sqs": "arn:aws:sqs:eu-west-1:111122223333:crm",
    "sns": "arn:aws:sns:eu-west-1:111122223333:crm",
    "kinesis": "arn:aws:kinesis:eu-west-1:111122223333:stream/crm",
}
EVERYTHING = {
    "kinesis and s3": {
        "source": {"url": "kinesis://genesys", "fan_out": "crm"},
        "store": "s3://acme-dedup/events",
        "sink": {
            "url": "https://crm.example.com",
            "headers": {"Authorization": "secretsmanager:crm/token#bearer"},
            "secret": "ssm:/crm/signing",
        },
    },
    "the rest": {
        "source": ["sqs://genesys", "sqs:arn:aws:sqs:eu-west-1:111122223333:orders"],
        "store": "dynamodb://dedup?region=eu-west-1",
        "routes": [{"sink": f"{kind}:{arn}"} for kind, arn in SINKS.items()],
        "dead": "sqs:https://sqs.eu-west-1.amazonaws.com/111122223333/dead",
    },
}


def lambda_variants() -> dict[str, dict]:
    basic = {**GENESYS, **CODE, "Sink": "https://crm.example.com/hooks"}
    return {
        "as it is": basic,
        "direct": {**basic, "Trigger": "direct"},
        "another bus": {**OTHER, **CODE, "Sink": "https://crm.example.com", "Preset": "none"},
        "the default bus": {**basic, "EventBusName": "default", "EventSource": "com.example"},
        "a bus made": {**basic, "CreateEventBus": "true"},
        "some topics": {**basic, "Topics": "v2.users.{id}.presence, v2.users.{id}.activity"},
        "configured elsewhere": {**GENESYS, **CODE, "ConfigParameter": "/oncebridge/config"},
        "with everything": {
            **basic,
            "SinkSecretArn": SECRET,
            "CodeVersion": "3sL4kqtJlcpXroDTDmJ+rmSpXd3dIbrH",
            "Architecture": "x86_64",
            "Timeout": "900",
            "BatchSize": 1000,
            "BatchWindow": 60,
            "ReservedConcurrency": "20",
            "KmsKeyArn": KEY,
            "AlarmTopicArn": TOPIC,
        },
        **{
            f"into {kind}": {**basic, "Sink": f"{kind}:{arn}", "SinkService": kind, "SinkArn": arn}
            for kind, arn in SINKS.items()
        },
    }


def worker_variants() -> dict[str, dict]:
    hosts = {f"on {kind}": {**GENESYS, "RunsOn": kind} for kind in ("ecs", "ec2", "pod-identity")}
    return {
        **hosts,
        "on irsa": {**GENESYS, "RunsOn": "irsa", "OidcProviderArn": OIDC},
        "elsewhere": {**OTHER, "RunsOn": "elsewhere"},
        "with everything": {
            **GENESYS,
            "SinkSecretArn": SECRET,
            "SinkService": "sns",
            "SinkArn": SINKS["sns"],
            "KmsKeyArn": KEY,
            "AlarmTopicArn": TOPIC,
        },
    }


VARIANTS = [
    pytest.param(kind, parameters, id=f"{kind} {name}")
    for kind, variants in (("lambda", lambda_variants()), ("worker", worker_variants()))
    for name, parameters in variants.items()
]


# --- the tools ------------------------------------------------------------------------------


def several_at_once() -> list[tuple[str, dict]]:
    """Put together all variants that go together: each tool run takes its time."""
    of_lambda, of_worker = lambda_variants(), worker_variants()
    chosen = [
        ("direct", "another bus", "some topics", "into events"),
        ("configured elsewhere", "the default bus", "into sqs"),
        ("a bus made", "with everything", "into sns"),
        ("as it is", "into kinesis"),
    ]
    assert set(of_lambda) == {name for names in chosen for name in names}
    found = [("lambda", {k: v for n in names for k, v in of_lambda[n].items()}) for names in chosen]
    on = [of_worker.pop(f"on {host}") for host in ("ec2", "ecs")]
    return [*found, ("worker", on[0] | of_worker.pop("with everything") | {"RunsOn": "ec2"})] + [
        ("worker", parameters) for parameters in of_worker.values()
    ]


LINT = "from cfnlint.runner import main; main()"


def test_cloudformation_is_what_cfn_lint_wants(tmp_path):
    texts = {"lambda": stack("lambda"), "worker": stack("worker", "genesys-crm")}
    for kind, parameters in several_at_once():
        texts[f"{kind} {len(texts)}"] = with_defaults(stack(kind), parameters)
    texts |= {"table": rendering.table(), "bucket": rendering.bucket("acme-dedup/events")}
    for name, table in EVERYTHING.items():
        texts[name] = policy(needed(table), format="cloudformation")
    for name, text in texts.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", LINT, *sorted(map(str, tmp_path.iterdir()))],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    # CloudFormation takes no longer one, and knows no aliases.
    assert all(len(text.encode()) < 51_200 for text in texts.values())
    assert not [text for text in texts.values() if re.search(r"[ \[][&*][a-z]", text)]


ROOT = """
module "lambda" {
  source              = "./lambda"
  organization_id     = "0f1e2d3c"
  event_source_suffix = "prod"
  sink                = "https://crm.example.com"
  code_bucket         = "acme-code"
  code_key            = "oncebridge.zip"
}

module "worker" {
  source         = "./worker"
  event_bus_name = "orders"
  event_source   = "com.example.orders"
}

module "table" { source = "./table" }
module "bucket" { source = "./bucket" }
module "iam0" { source = "./iam0" }
module "iam1" { source = "./iam1" }
"""


def test_terraform_is_what_terraform_wants(tmp_path):
    texts = {
        "lambda": stack("lambda", format="terraform"),
        "worker": stack("worker", "genesys-crm", format="terraform"),
        "table": rendering.table(format="terraform"),
        "bucket": rendering.bucket("acme-dedup/events", format="terraform"),
    }
    for number, table in enumerate(EVERYTHING.values()):
        texts[f"iam{number}"] = policy(needed(table), format="terraform")
    for name, text in texts.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "main.tf").write_text(text)
        found = hcl2.loads(text)
        assert found["resource"]
        assert found["output"]
    (tmp_path / "main.tf").write_text(ROOT)
    print(what_reads_terraform())
    if terraform() is not None:
        run(tmp_path, "fmt", "-check", "-diff", *sorted(texts))
        if plugins() is not None:
            run(tmp_path, "init", "-input=false", "-no-color", f"-plugin-dir={plugins()}")
            told = json.loads(run(tmp_path, "validate", "-json"))
            assert (told["valid"], told["diagnostics"]) == (True, [])


# --- what is in the stacks ------------------------------------------------------------------


def made(kind: str, parameters: dict, **more: object) -> Stack:
    found = Stack(stack(kind), **parameters, **more)
    assert found.objections() == []
    return found


def of_type(found: Stack, kind: str) -> dict[str, dict]:
    return {
        name: found.resources[name]
        for name, resource in found.template["Resources"].items()
        if resource["Type"] == kind and name in found.resources
    }


def statements(found: Stack) -> dict[str, dict]:
    """Give what the function or the workers are allowed, by its name."""
    if "Policy" in found.resources:
        document = found.resources["Policy"]["PolicyDocument"]
    else:
        (inline,) = found.resources["Role"]["Policies"]
        document = inline["PolicyDocument"]
    return {one["Sid"]: one for one in document["Statement"]}


@pytest.mark.parametrize(("kind", "parameters"), VARIANTS)
def test_events_of_the_right_source_go_to_one_target_and_none_is_dropped(kind, parameters):
    rule = made(kind, parameters).resources["Rule"]
    pattern = rule["EventPattern"]
    assert pattern["source"] == [parameters.get("EventSource", BUS)]
    topics = [{"prefix": "v2."}]
    if "Topics" in parameters:
        topics = ["v2.users.{id}.presence", "v2.users.{id}.activity"]
    assert pattern["detail-type"] == topics
    expected = "<EventBus>" if "CreateEventBus" in parameters else BUS
    assert rule["EventBusName"] == parameters.get("EventBusName", expected)
    (target,) = rule["Targets"]
    is_direct = parameters.get("Trigger") == "direct"
    assert target["Arn"] == ("<Function.Arn>" if is_direct else "<Queue.Arn>")
    assert target["DeadLetterConfig"] == {"Arn": "<Undelivered.Arn>"}
    assert target["RetryPolicy"]["MaximumEventAgeInSeconds"] == 24 * 3600


@pytest.mark.parametrize(("kind", "parameters"), VARIANTS)
def test_only_the_rule_may_send_to_the_queues(kind, parameters):
    found = made(kind, parameters)
    path = {"orders": "orders/", "default": ""}.get(parameters.get("EventBusName"), f"{BUS}/")
    rule = f"arn:aws:events:eu-west-1:111122223333:rule/{path}oncebridge"
    for name, queue in (("SendToQueue", "Queue"), ("SendToUndelivered", "Undelivered")):
        allowed, _ = found.resources[name]["PolicyDocument"]["Statement"]
        assert allowed["Principal"] == {"Service": "events.amazonaws.com"}
        assert allowed["Action"] == "sqs:SendMessage"
        assert allowed["Resource"] == f"<{queue}.Arn>"
        assert allowed["Condition"] == {"ArnEquals": {"aws:SourceArn": rule}}
        assert name in found.template["Resources"]["Rule"]["DependsOn"]
    if "Invoke" in found.resources:
        assert found.resources["Invoke"]["SourceArn"] == rule


DENIED = {
    "Sid": "OnlyByTls",
    "Effect": "Deny",
    "Principal": "*",
    "Action": "sqs:*",
    "Condition": {"Bool": {"aws:SecureTransport": "false"}},
}


@pytest.mark.parametrize(("kind", "parameters"), VARIANTS)
def test_no_queue_is_spoken_to_without_tls(kind, parameters):
    found = made(kind, parameters)
    policies = of_type(found, "AWS::SQS::QueuePolicy").values()
    closed = [queue.strip("<>") for one in policies for queue in one["Queues"]]
    assert sorted(closed) == sorted(of_type(found, "AWS::SQS::Queue"))
    for one in policies:
        denied = one["PolicyDocument"]["Statement"][-1]
        # Of several queues, each is meant by its own copy of the policy.
        whole = "*" if len(one["Queues"]) > 1 else one["Queues"][0].replace(">", ".Arn>")
        assert denied == {**DENIED, "Resource": whole}


@pytest.mark.parametrize(("kind", "parameters"), VARIANTS)
def test_queues_keep_what_they_have_and_are_encrypted(kind, parameters):
    found = made(kind, parameters)
    queues = of_type(found, "AWS::SQS::Queue")
    assert {queue["QueueName"] for queue in queues.values()} == {
        "oncebridge",
        "oncebridge-failed",
        "oncebridge-undelivered",
        "oncebridge-dead",
    }
    for name, queue in queues.items():
        encryption = ("KmsMasterKeyId", KEY) if "KmsKeyArn" in parameters else None
        assert (encryption or ("SqsManagedSseEnabled", True)) in queue.items()
        assert ("SqsManagedSseEnabled" in queue) is (encryption is None)
        longest = timedelta(days=4 if name == "Queue" else 14)
        assert timedelta(seconds=queue["MessageRetentionPeriod"]) == longest
    redrive = queues["Queue"]["RedrivePolicy"]
    assert redrive["deadLetterTargetArn"] == "<Failed.Arn>"
    assert redrive["maxReceiveCount"] >= Settings().max_attempts + 5
    allowed = queues["Failed"]["RedriveAllowPolicy"]
    assert allowed["sourceQueueArns"] == ["arn:aws:sqs:eu-west-1:111122223333:oncebridge"]


def test_the_least_that_may_be_set_leaves_room_for_every_attempt():
    least = Settings().max_attempts + 5
    for kind in ("lambda", "worker"):
        parameters = Stack(stack(kind), **GENESYS).template["Parameters"]
        assert parameters["MaxReceiveCount"]["MinValue"] == least
        assert f"var.max_receive_count >= {least}" in stack(kind, format="terraform")
    visibility = Stack(stack("worker")).template["Parameters"]["VisibilityTimeout"]
    assert timedelta(seconds=visibility["MinValue"]) > Settings().lease


def test_the_queue_hides_a_message_for_six_times_the_timeout_and_the_window():
    declared = Stack(stack("lambda")).template["Parameters"]
    for timeout in declared["Timeout"]["AllowedValues"]:
        found = made("lambda", lambda_variants()["as it is"], Timeout=timeout)
        hidden = found.resources["Queue"]["VisibilityTimeout"]
        assert hidden >= 6 * int(timeout) + declared["BatchWindow"]["MaxValue"]
        assert timedelta(seconds=int(timeout)) >= Settings().lease


@pytest.mark.parametrize(("kind", "parameters"), VARIANTS)
def test_what_holds_data_outlives_the_stack(kind, parameters):
    found = made(kind, parameters)
    for name, resource in found.template["Resources"].items():
        is_kept = resource["Type"] in (
            "AWS::DynamoDB::Table",
            "AWS::Events::EventBus",
            "AWS::SQS::Queue",
        )
        # One that failed to be made leaves nothing behind that would be in the way.
        policies = ("RetainExceptOnCreate", "Retain") if is_kept else (None, None)
        told = (resource.get("DeletionPolicy"), resource.get("UpdateReplacePolicy"))
        assert told == policies, name
    table = found.resources["Table"]
    assert table["TimeToLiveSpecification"] == {"AttributeName": "x", "Enabled": True}
    assert table["PointInTimeRecoverySpecification"] == {"PointInTimeRecoveryEnabled": True}
    assert table["KeySchema"] == [{"AttributeName": "k", "KeyType": "HASH"}]


def test_table_and_stack_make_the_same_table():
    alone = Stack(rendering.table()).resources["Table"]
    for kind in ("lambda", "worker"):
        table = Stack(stack(kind)).resources["Table"]
        for name in ("AttributeDefinitions", "KeySchema", "TimeToLiveSpecification"):
            assert table[name] == alone[name]


@pytest.mark.parametrize(("kind", "parameters"), VARIANTS)
def test_whatever_needs_somebody_raises_an_alarm(kind, parameters):
    found = made(kind, parameters)
    alarms = of_type(found, "AWS::CloudWatch::Alarm").values()
    watched = {(one["MetricName"], one["Dimensions"][0]["Value"]) for one in alarms}
    expected = {
        ("ApproximateNumberOfMessagesVisible", "<Failed.QueueName>"),
        ("ApproximateNumberOfMessagesVisible", "<Undelivered.QueueName>"),
        ("ApproximateNumberOfMessagesVisible", "<DeadLetters.QueueName>"),
        ("ApproximateAgeOfOldestMessage", "<Queue.QueueName>"),
    }
    if kind == "lambda":
        expected |= {("Errors", "<Function>"), ("Throttles", "<Function>")}
    if parameters.get("Trigger") == "direct":
        expected |= {("DestinationDeliveryFailures", "<Function>")}
    assert watched == expected
    topic = parameters.get("AlarmTopicArn")
    for alarm in alarms:
        assert alarm.get("AlarmActions") == alarm.get("OKActions") == ([topic] if topic else None)
        assert alarm["TreatMissingData"] == "notBreaching"


@pytest.mark.parametrize(("kind", "parameters"), VARIANTS)
def test_nobody_may_do_more_than_is_done(kind, parameters):
    found = made(kind, parameters)
    is_lambda = kind == "lambda"
    expected = {
        "Queue": (ACTIONS["function.sqs" if is_lambda else "source.sqs"], "<Queue.Arn>"),
        "Remember": (ACTIONS["store.dynamodb"], "<Table.Arn>"),
        "DeadLetters": (ACTIONS["function.dead" if is_lambda else "dead.sqs"], "<DeadLetters.Arn>"),
    }
    if is_lambda:
        group = "arn:aws:logs:eu-west-1:111122223333:log-group:/aws/lambda/oncebridge:*"
        expected["Log"] = (ACTIONS["function.logs"], group)
    if parameters.get("Trigger") == "direct":
        expected["Failed"] = (("sqs:SendMessage",), "<Failed.Arn>")
    if "SinkArn" in parameters:
        expected["Sink"] = (ACTIONS[f"sink.{parameters['SinkService']}"], parameters["SinkArn"])
    if "SinkSecretArn" in parameters:
        expected["Secret"] = (("secretsmanager:GetSecretValue",), SECRET)
    if "ConfigParameter" in parameters:
        arn = "arn:aws:ssm:eu-west-1:111122223333:parameter/oncebridge/config"
        expected["Config"] = (("ssm:GetParameter",), arn)
    if "KmsKeyArn" in parameters:
        expected["Key"] = (ACTIONS["key.kms"], KEY)
    allowed = {
        name: (
            tuple(one["Action"]) if isinstance(one["Action"], list) else (one["Action"],),
            one["Resource"],
        )
        for name, one in statements(found).items()
    }
    assert allowed == expected


# --- the function ---------------------------------------------------------------------------


@pytest.mark.parametrize("parameters", lambda_variants().values(), ids=lambda_variants())
def test_the_function_is_told_what_to_do(parameters, monkeypatch):
    found = made("lambda", parameters)
    function = found.resources["Function"]
    assert function["Handler"] == "oncebridge.aws.function.handler"
    assert function["Runtime"] == "python3.13" == f"python{builder().PYTHON}"
    assert function["LoggingConfig"] == {"LogGroup": "<LogGroup>"}
    told = function["Environment"]["Variables"]
    assert told["ONCEBRIDGE_STORE"] == "dynamodb://<Table>?region=eu-west-1"
    assert told["ONCEBRIDGE_DEAD"] == "sqs:<DeadLetters>"
    assert told.get("ONCEBRIDGE_SINK") == parameters.get("Sink")
    assert ("ONCEBRIDGE_ROUTE" in told) is ("Sink" in parameters)
    if "ConfigParameter" in parameters:
        assert told["ONCEBRIDGE_CONFIG"] == "ssm:/oncebridge/config"
    if "SinkSecretArn" in parameters:
        assert told["ONCEBRIDGE_SINK__HEADERS__AUTHORIZATION"] == f"secretsmanager:{SECRET}"
    mapping = found.resources["Mapping"]
    assert mapping["EventSourceArn"] == "<Queue.Arn>"
    assert mapping["FunctionResponseTypes"] == ["ReportBatchItemFailures"]
    assert mapping["ScalingConfig"]["MaximumConcurrency"] >= 2


def test_the_names_in_the_environment_of_the_function_exist():
    everything = lambda_variants()["with everything"]
    function = made("lambda", everything).resources["Function"]
    told = function["Environment"]["Variables"]
    places = {
        "ONCEBRIDGE_STORE": "memory:",
        "ONCEBRIDGE_DEAD": "memory:",
        "ONCEBRIDGE_SINK__HEADERS__AUTHORIZATION": "Bearer invented",
    }
    setup = load(environment={**told, **places})
    assert setup.config.preset == "genesys"
    (route,) = setup.routes
    assert route.name == "events"
    assert isinstance(route.sink, SinkPlace)
    in_terraform = set(re.findall(r"\bONCEBRIDGE_\w+", stack("lambda", format="terraform")))
    assert in_terraform == set(told) | {"ONCEBRIDGE_CONFIG"}


def test_a_function_that_is_called_directly_keeps_what_fails():
    found = made("lambda", lambda_variants()["direct"])
    retries = found.resources["Retries"]
    assert retries["DestinationConfig"] == {"OnFailure": {"Destination": "<Failed.Arn>"}}
    assert retries["MaximumRetryAttempts"] == 2
    assert found.resources["Invoke"]["Principal"] == "events.amazonaws.com"
    queued = made("lambda", lambda_variants()["as it is"]).resources
    assert not {"Invoke", "Retries", "LostAlarm"} & set(queued)


# --- the workers ----------------------------------------------------------------------------


HERE = {"StringEquals": {"aws:SourceAccount": "111122223333"}}
CONDITIONS = {
    "ecs": {**HERE, "ArnLike": {"aws:SourceArn": "arn:aws:ecs:*:111122223333:*"}},
    "ec2": None,
    "pod-identity": HERE,
}


@pytest.mark.parametrize(
    ("runs_on", "service"),
    [
        ("ecs", "ecs-tasks.amazonaws.com"),
        ("ec2", "ec2.amazonaws.com"),
        ("pod-identity", "pods.eks.amazonaws.com"),
    ],
)
def test_the_role_is_for_whoever_runs_the_workers(runs_on, service):
    found = made("worker", GENESYS, RunsOn=runs_on)
    (trust,) = found.resources["Role"]["AssumeRolePolicyDocument"]["Statement"]
    assert trust["Principal"] == {"Service": service}
    tags = ["sts:TagSession"] if runs_on == "pod-identity" else []
    assert trust["Action"] == ["sts:AssumeRole", *tags]
    assert trust.get("Condition") == CONDITIONS[runs_on]
    assert ("Profile" in found.resources) is (runs_on == "ec2")


def test_a_service_account_takes_the_role_by_the_issuer_of_its_cluster():
    found = made("worker", GENESYS, RunsOn="irsa", OidcProviderArn=OIDC)
    (trust,) = json.loads(found.resources["Role"]["AssumeRolePolicyDocument"])["Statement"]
    assert trust["Principal"] == {"Federated": OIDC}
    issuer = "oidc.eks.eu-west-1.amazonaws.com/id/0F1E2D"
    assert trust["Condition"] == {
        "StringEquals": {
            f"{issuer}:aud": "sts.amazonaws.com",
            f"{issuer}:sub": "system:serviceaccount:oncebridge:oncebridge",
        }
    }


def test_elsewhere_there_is_a_policy_and_no_role():
    found = made("worker", OTHER, RunsOn="elsewhere")
    assert "Role" not in found.resources
    assert "RoleArn" not in found.outputs
    assert found.outputs["PolicyArn"] == "<Policy>"


def test_the_outputs_are_what_to_set():
    found = made("worker", GENESYS)
    assert found.outputs["Source"] == "sqs:<Queue>"
    assert found.outputs["Store"] == "dynamodb://<Table>?region=eu-west-1"
    assert found.outputs["Dead"] == "sqs:<DeadLetters>"


# --- mistakes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "parameters", "told"),
    [
        ("worker", {}, "Give OrganizationId and EventSourceSuffix of Genesys Cloud"),
        ("worker", {"OrganizationId": "0f1e"}, "Give OrganizationId and EventSourceSuffix"),
        ("worker", {"EventBusName": "orders"}, "give the EventSource"),
        ("worker", {**OTHER, "CreateEventBus": "true"}, "leave out EventBusName"),
        ("worker", {**GENESYS, "SinkArn": SINKS["sns"]}, "belong together"),
        ("worker", {**GENESYS, "SinkService": "sns"}, "belong together"),
        ("worker", {**GENESYS, "RunsOn": "irsa"}, "give the OidcProviderArn"),
        ("lambda", {**GENESYS, **CODE}, "Give the Sink"),
    ],
)
def test_parameters_that_do_not_go_together_are_refused(kind, parameters, told):
    (objection,) = Stack(stack(kind), **parameters).objections()
    assert told in objection


@pytest.mark.parametrize("name", ["", "ab", "-ab", "a b", "a" * 49, "a\nb", 'a"b', "a.b"])
def test_a_name_that_cannot_be_is_refused(name):
    for kind, form in product(("lambda", "worker"), ("cloudformation", "terraform")):
        with pytest.raises(ConfigError, match="a name is 3 to 48 letters"):
            stack(kind, name, format=form)


PAGE = (Path(__file__).parents[2] / "docs" / "deploy.md").read_text()


def test_the_parameters_that_the_page_names_exist_and_it_names_all():
    declared = {
        kind: set(Stack(stack(kind)).template["Parameters"]) for kind in ("lambda", "worker")
    }
    first, _, rest = PAGE.partition("\n## Workers\n")
    named = {
        name
        for line in re.findall(r"^\| (`.*?) \|", first, re.MULTILINE)
        for name in re.findall(r"`([A-Z]\w+)`", line)
    }
    assert named == declared["lambda"]
    given = re.findall(r"\b([A-Z]\w+)=", re.sub(r"`[^`]*`", "", PAGE))
    assert set(given) <= declared["lambda"] | declared["worker"]
    own = declared["worker"] - declared["lambda"]
    assert all(f"`{name}`" in rest for name in own)


def test_the_defaults_that_the_page_names_are_those_of_the_stack():
    parameters = Stack(stack("lambda")).template["Parameters"]
    rows = re.findall(r"^\| (`[A-Z].*?`) \| (`.*?`) \|", PAGE, re.MULTILINE)
    assert len(rows) > 5
    for names, defaults in rows:
        for name, default in zip(names.split(", "), defaults.split(", "), strict=True):
            assert str(parameters[name.strip("`")]["Default"]) == default.strip("`"), name


# --- both notations -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["lambda", "worker"])
def test_both_notations_have_the_same_parameters(kind):
    def snake(name: str) -> str:
        return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()

    declared = {snake(name) for name in Stack(stack(kind)).template["Parameters"]}
    found = hcl2.loads(stack(kind, format="terraform"))
    variables = {name.strip('"') for one in found["variable"] for name in one}
    # A service is found in its ARN there; and a table can be made to refuse its deletion.
    assert variables == declared - {"sink_service"} | {"deletion_protection"}


@pytest.mark.parametrize("kind", ["lambda", "worker"])
def test_both_notations_allow_the_same(kind):
    text = stack(kind, format="terraform")
    recorded = _Recorded()
    render("stack", "terraform", kind=kind, name="x", receives=1, actions=recorded)
    assert recorded.asked
    for name, one in ACTIONS.items():
        is_there = '"' + '",\n'.join(one[:1]) in text
        if name in recorded.asked:
            assert is_there, name
            assert all(f'"{action}"' in text for action in one)
    assert not re.search(r"#%|%#|\{\{|\{%", text + stack(kind))


MOCKED = """
mock_provider "aws" {
  mock_data "aws_caller_identity" { defaults = { account_id = "111122223333" } }
  mock_data "aws_partition" { defaults = { partition = "aws" } }
  mock_data "aws_region" { defaults = { name = "eu-west-1" } }
  mock_resource "aws_sqs_queue" { defaults = { arn = "arn:aws:sqs:eu-west-1:111122223333:q" } }
  mock_resource "aws_iam_policy" { defaults = { arn = "arn:aws:iam::111122223333:policy/p" } }
  mock_resource "aws_dynamodb_table" {
    defaults = { arn = "arn:aws:dynamodb:eu-west-1:111122223333:table/t" }
  }
}

variables {
  event_bus_name = "orders"
  event_source   = "com.example.orders"
}
"""
RUN = """
run "%s" {
  variables {
    runs_on           = "%s"
    oidc_provider_arn = "%s"
  }
  assert {
    condition     = jsondecode(aws_iam_role.oncebridge[0].assume_role_policy) == jsondecode(%s)
    error_message = aws_iam_role.oncebridge[0].assume_role_policy
  }
}
"""
QUEUES = """
run "queues" {
  assert {
    condition = alltrue([for policy in concat(
      [aws_sqs_queue_policy.queue, aws_sqs_queue_policy.undelivered],
      values(aws_sqs_queue_policy.by_tls),
    ) : reverse(jsondecode(policy.policy).Statement)[0] == jsondecode(%s)])
    error_message = "a queue can be spoken to without TLS"
  }
  assert {
    condition     = join(" ", keys(aws_sqs_queue_policy.by_tls)) == "dead failed"
    error_message = "a queue has no policy"
  }
}
"""


@pytest.mark.skipif(plugins() is None, reason="needs Terraform and its provider for AWS")
def test_both_notations_trust_and_deny_the_same(tmp_path):
    tests = [MOCKED]
    for runs_on in ("ecs", "ec2", "pod-identity", "irsa"):
        found = made("worker", OTHER, RunsOn=runs_on, OidcProviderArn=OIDC)
        trust = found.resources["Role"]["AssumeRolePolicyDocument"]
        text = trust if isinstance(trust, str) else json.dumps(trust)
        text = json.dumps(json.dumps(json.loads(text)))
        tests.append(RUN % (runs_on, runs_on, OIDC, text))
    denied = {**DENIED, "Resource": "arn:aws:sqs:eu-west-1:111122223333:q"}
    tests.append(QUEUES % json.dumps(json.dumps(denied)))
    (tmp_path / "main.tf").write_text(stack("worker", format="terraform"))
    (tmp_path / "main.tftest.hcl").write_text("".join(tests))
    run(tmp_path, "init", "-input=false", "-no-color", f"-plugin-dir={plugins()}")
    assert "5 passed, 0 failed" in run(tmp_path, "test", "-no-color")


class _Recorded(dict):
    """The actions by backend, and which backends a template asked for."""

    def __init__(self):
        super().__init__(ACTIONS)
        self.asked = set()

    def __getitem__(self, name):
        self.asked.add(name)
        return super().__getitem__(name)
