"""The built package, in AWS's own runtime: called over HTTP as Lambda calls a function."""

import json
import os
import re
import time
from itertools import count
from pathlib import Path

import boto3
import pytest
from tests.aws.payloads import event, sample, sqs

pytestmark = pytest.mark.full

READY_MADE = "oncebridge.aws.function.handler"
SECRET = "c4n4ry-5ecret-of-the-function"
_numbers = count()

APP = """
import asyncio, os, time
from pathlib import Path
from oncebridge import Gateway
from oncebridge.aws import lambda_handler

taken = Path(os.environ["TAKEN"])

def note(event):
    with taken.open("a") as file:
        print(event.detail["n"], file=file)

def process(event):
    if event.detail.get("slow"):
        time.sleep(event.detail["slow"])
    if event.detail.get("bad") and not Path(os.environ["TAKEN"] + ".mended").exists():
        raise ValueError("not now")
    note(event)

async def process_async(event):
    await asyncio.sleep(event.detail.get("slow", 0))
    note(event)

gateway = Gateway.from_config()
deliver = process_async if os.environ.get("ASYNC") else process
handler = lambda_handler(gateway, deliver=deliver)

def with_pid(event, context):
    return {"pid": os.getpid(), "answer": handler(event, context)}
"""


def failures(*names):
    return {"batchItemFailures": [{"itemIdentifier": name} for name in names]}


@pytest.fixture
def place(tmp_path):
    """Say where a function keeps its things: on disk, as in `/tmp` of a container."""
    return {
        "ONCEBRIDGE_STORE": f"sqlite:{tmp_path / 'seen.db'}",
        "ONCEBRIDGE_DEAD": f"sqlite:{tmp_path / 'dead.db'}",
        "ONCEBRIDGE_SINK": f"file:{tmp_path / 'out.ndjson'}",
        "ONCEBRIDGE_BACKOFF": "1ms",
        "ONCEBRIDGE_MAX_BACKOFF": "5ms",
        "TAKEN": str(tmp_path / "taken"),
    }


@pytest.fixture
def on_aws(ministack, place):
    """Keep claims in DynamoDB, and find all of AWS on loopback."""
    table = ministack.table()
    yield {
        **place,
        "ONCEBRIDGE_STORE": f"dynamodb://{table}",
        "AWS_ENDPOINT_URL": ministack.endpoint,
    }
    ministack.drop(table)


def taken(place):
    """List what the function was called with, by number."""
    path = Path(place["TAKEN"])
    return [int(line) for line in path.read_text().splitlines()] if path.exists() else []


def written(place):
    """List what the file sink has, by number."""
    path = Path(place["ONCEBRIDGE_SINK"].removeprefix("file:"))
    return [json.loads(line)["detail"]["n"] for line in path.read_text().splitlines()]


def counted(function):
    """Add up the metrics of all calls."""
    total = {}
    for line in function.metrics:
        (metrics,) = line["_aws"]["CloudWatchMetrics"]
        for metric in metrics["Metrics"]:
            total[metric["Name"]] = total.get(metric["Name"], 0) + line[metric["Name"]]
    return total


# --- the ready-made handler, on DynamoDB ---------------------------------------------------


def test_of_copies_in_a_batch_and_between_batches_the_first_is_delivered(start_function, on_aws):
    function = start_function(READY_MADE, env=on_aws)
    batch = sqs(event(1), event(2), event(1), event(3), event(2))
    assert function.call(batch).answer == failures()
    assert sorted(written(on_aws)) == [1, 2, 3]
    assert function.call(batch).answer == failures()
    assert function.call(event(3)).answer is None
    assert sorted(written(on_aws)) == [1, 2, 3]
    assert function.containers == 1
    counts = counted(function)
    assert (counts["arrived"], counts["delivered"], counts["duplicate"]) == (11, 3, 8)
    assert {line["_aws"]["CloudWatchMetrics"][0]["Namespace"] for line in function.metrics} == {
        "oncebridge"
    }


def test_another_container_knows_what_the_first_has_done(start_function, on_aws):
    first = start_function(READY_MADE, env=on_aws)
    assert first.call(sqs(event(1), event(2))).answer == failures()
    second = start_function(READY_MADE, env=on_aws)
    assert second.call(sqs(event(2), event(3))).answer == failures()
    assert written(on_aws) == [1, 2, 3]
    assert "Traceback" not in first.log + second.log


@pytest.mark.parametrize("name", ["lambda_sqs_standard", "lambda_sns", "lambda_kinesis"])
def test_what_aws_sends_is_taken_as_it_comes(start_function, on_aws, name):
    function = start_function(READY_MADE, env=on_aws)
    for _ in range(2):
        said = function.call(sample(name))
        assert said.answer in (None, failures())
    counts = counted(function)
    assert counts["delivered"] > 0
    assert counts["duplicate"] >= counts["delivered"]


def test_what_nobody_can_answer_for_is_a_function_error(start_function, place):
    function = start_function(READY_MADE, env=place)
    kind, message = function.call({"hello": SECRET}).error
    assert kind == "NotRecognised"
    assert SECRET not in message
    assert SECRET not in function.log
    assert function.call(sqs(event(1))).answer == failures()
    assert function.containers == 1


# --- where the configuration comes from -----------------------------------------------------


def test_configuration_and_secrets_come_from_ssm_and_secrets_manager(
    start_function, on_aws, ministack, tmp_path
):
    number = f"{os.getpid()}-{next(_numbers)}"
    names = ("ONCEBRIDGE_STORE", "ONCEBRIDGE_DEAD", "ONCEBRIDGE_SINK")
    store, dead, sink = (on_aws.pop(name) for name in names)
    text = (
        f'store = "ssm:/once/{number}/store"\ndead = "{dead}"\nlog_level = "debug"\n'
        f'[[routes]]\nname = "file"\nsink = "secretsmanager:once/{number}#out"\n'
    )
    ssm = boto3.client("ssm", endpoint_url=ministack.endpoint, region_name="us-east-1")
    secrets = boto3.client(
        "secretsmanager", endpoint_url=ministack.endpoint, region_name="us-east-1"
    )
    ssm.put_parameter(Name=f"/once/{number}/config", Value=text, Type="String")
    ssm.put_parameter(Name=f"/once/{number}/store", Value=store, Type="SecureString")
    secrets.create_secret(
        Name=f"once/{number}", SecretString=json.dumps({"out": sink, "other": SECRET})
    )
    ssm.close()
    secrets.close()
    env = {
        **on_aws,
        "ONCEBRIDGE_CONFIG": f"ssm:/once/{number}/config",
        "AWS_LAMBDA_LOG_LEVEL": "DEBUG",
        "AWS_LAMBDA_LOG_FORMAT": "JSON",
    }
    function = start_function(READY_MADE, env=env)
    assert function.call(sqs(event(1), event(1))).answer == failures()
    assert written({"ONCEBRIDGE_SINK": sink}) == [1]
    assert "botocore" in function.log  # all was logged that there is,
    assert SECRET not in function.log  # and this was not


def test_a_configuration_that_cannot_work_fails_the_start_with_every_mistake(
    start_function, on_aws
):
    env = {
        **on_aws,
        "ONCEBRIDGE_STORE": f"ssm:/no/such/parameter/{os.getpid()}",
        "ONCEBRIDGE_LEASE": "soon",
    }
    function = start_function(READY_MADE, env=env)
    said = function.call(sqs(event(1)))
    assert said.failed
    kind, message = said.error
    assert kind == "ConfigErrors"
    assert "ONCEBRIDGE_STORE: 'ssm:/no/such/parameter/" in message
    assert "there is no such parameter in us-east-1" in message
    assert "ONCEBRIDGE_LEASE" in message


# --- a function of one's own, on top of the layer -------------------------------------------


def test_one_container_serves_call_after_call(start_function, on_aws):
    function = start_function("app.with_pid", code=APP, env=on_aws)
    first = function.call(sqs(event(1), event(2))).answer
    second = function.call(sqs(event(1), event(2), event(3))).answer
    assert first == {"pid": first["pid"], "answer": failures()}
    assert second == first
    assert taken(on_aws) == [1, 2, 3]
    assert function.containers == 1


@pytest.mark.parametrize("store", ["sqlite", "dynamodb"])
def test_a_record_that_fails_is_named_with_its_copies_and_comes_again(
    start_function, on_aws, place, store
):
    env = on_aws if store == "dynamodb" else place
    function = start_function("app.handler", code=APP, env=env)
    bad = event(2, detail={"n": 2, "bad": True})
    batch = sqs(event(1), bad, event(3), bad, event(1))
    assert function.call(batch).answer == failures("m1", "m3")
    assert sorted(taken(env)) == [1, 3]
    Path(env["TAKEN"] + ".mended").touch()
    deadline = time.monotonic() + 20
    while (answer := function.call(sqs(bad, event(3))).answer) != failures():
        assert answer == failures("m0")
        assert time.monotonic() < deadline
    assert sorted(taken(env)) == [1, 2, 3]


def test_a_direct_event_that_fails_is_a_function_error(start_function, place):
    function = start_function("app.handler", code=APP, env=place, timeout_s=3)
    said = function.call(event(7, detail={"n": 7, "bad": True}))
    assert said.failed
    kind, message = said.error
    assert kind == "HandedBack"
    assert "have to be retried" in message
    assert function.call(event(8)).answer is None
    assert taken(place) == [8]
    assert function.containers == 1


@pytest.mark.parametrize("way", ["async", "thread"])
def test_what_is_too_slow_is_named_before_the_function_times_out(start_function, place, way):
    env = {**place, "ONCEBRIDGE_SINK_TIMEOUT": "20s", "ONCEBRIDGE_LEASE": "60s"}
    env |= {"ASYNC": "1"} if way == "async" else {}
    function = start_function("app.handler", code=APP, env=env, timeout_s=3)
    quick, slow = [event(n) for n in range(1, 4)], event(9, detail={"n": 9, "slow": 30})
    started = time.monotonic()
    said = function.call(sqs(*quick, slow))
    took = time.monotonic() - started
    assert not said.timed_out
    assert said.answer == failures("m3")
    assert taken(place) == [1, 2, 3]
    assert 1 < took < 10
    assert "Task timed out" not in function.log
    if way == "async":
        assert function.call(sqs(event(4), event(1))).answer == failures()
        assert taken(place) == [1, 2, 3, 4]
    assert function.containers == 1


def test_a_crash_in_the_middle_loses_nothing(start_function, place):
    code = APP + "handler = lambda_handler(Gateway.from_config(), deliver=lambda _: os._exit(3))\n"
    env = {**place, "ONCEBRIDGE_LEASE": "2s", "ONCEBRIDGE_SINK_TIMEOUT": "500ms"}
    env |= {"ONCEBRIDGE_COMMIT_BUDGET": "500ms", "ONCEBRIDGE_MARGIN": "100ms"}
    crashing = start_function("app.handler", code=code, env=env)
    said = crashing.call(sqs(event(1)))
    assert said.failed
    assert "exit status 3" in said.error[1]
    mended = start_function("app.handler", code=APP, env=env)
    deadline = time.monotonic() + 20
    while mended.call(sqs(event(1))).answer != failures():
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert taken(place) == [1]


def test_the_runtime_holds_nothing_of_this_environment(start_function, place, lambda_runtime):
    code = (
        "import sys, importlib.metadata as m, oncebridge, msgspec, botocore\n"
        "def handler(event, context):\n"
        "    points = m.entry_points(group='oncebridge.stores')\n"
        "    return {'path': sys.path, 'from': [oncebridge.__file__, msgspec.__file__],\n"
        "            'stores': sorted(p.name for p in points), 'version': m.version('oncebridge')}\n"
    )
    function = start_function("app.handler", code=code, env=place)
    found = function.call({}).answer
    layer = str(lambda_runtime.layer)
    assert all(path.startswith(layer) for path in found["from"])
    assert not any("site-packages" in path for path in found["path"])
    assert {"dynamodb", "sqlite", "memory"} <= set(found["stores"])
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", found["version"])
