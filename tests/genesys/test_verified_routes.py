"""`verify = "genesys"` in a configuration: in the service, in a gateway of one's own, in Lambda."""

import asyncio
import json
import subprocess
import sys
import time

import pytest
from tests.aws.functions import Context
from tests.aws.payloads import sqs
from tests.e2e.towns import Command
from tests.servers.genesys import CLIENT_ID, CLIENT_SECRET, playing_genesys
from tests.servers.postgres import ask, schema

from oncebridge import Gateway, Verdict
from oncebridge.aws import lambda_handler
from oncebridge.aws.function import make_handler
from oncebridge.errors import ConfigErrors, HandedBack
from oncebridge.service.config import load
from oncebridge.service.routes import make_router

CALL = "7d1e2f00-0000-4000-8000-000000000001"
FAKE = "7d1e2f00-0000-4000-8000-0000000000ff"
PAYLOAD = "p4yl0ad-of-a-customer"


def event(number, conversation=CALL):
    return {
        "version": "0",
        "id": f"e-{number}",
        "detail-type": "v2.detail.events.conversation.{id}.acw",
        "source": "aws.partner/genesys.com/cloud/0a1b/invented",
        "time": "2026-03-01T12:00:00Z",
        "detail": {
            "topicName": f"v2.detail.events.conversation.{conversation}.acw",
            "eventBody": {"conversationId": conversation, "number": number, "name": PAYLOAD},
        },
    }


@pytest.fixture
def genesys():
    with playing_genesys(CALL) as found:
        yield found


@pytest.fixture
def folder(tmp_path, genesys):
    """A configuration that verifies, with its secrets in the environment."""
    (tmp_path / "oncebridge.toml").write_text(
        f"""
source = "file:in.ndjson"
store = "sqlite:seen.db"
dead = "sqlite:dead.db"
sink = "file:out.ndjson"
route = "crm"
preset = "genesys"
verify = "genesys"
log_level = "debug"
backoff = "50ms"

[genesys]
region = "{genesys.url}"
client_id = "env:GENESYS_ID"
client_secret = "env:GENESYS_SECRET"
lookups = "100/s"
"""
    )
    return tmp_path


SECRETS = {"GENESYS_ID": CLIENT_ID, "GENESYS_SECRET": CLIENT_SECRET}


def put(folder, *events):
    lines = [json.dumps(each) + "\n" for each in events]
    (folder / "in.ndjson").write_text("".join(lines))


def out(folder):
    text = (folder / "out.ndjson").read_text() if (folder / "out.ndjson").exists() else ""
    return [json.loads(line)["id"] for line in text.splitlines()]


# --- the service ----------------------------------------------------------------------------


def test_the_command_sends_what_exists_buries_the_rest_and_replays_it(folder, genesys):
    put(folder, *[event(n, FAKE if n == 3 else CALL) for n in (1, 2, 3, 4, 4)])
    with Command(folder, "run", "-c", "oncebridge.toml", **SECRETS) as command:
        assert command.ended() == 0
    said = command.said.decode() + command.printed.decode()
    assert sorted(out(folder)) == ["e-1", "e-2", "e-4"]
    assert sorted(genesys.known) == [CALL, FAKE]
    counted = [line for line in command.log if line["event"] == "oncebridge.verified"]
    total = {name: sum(line.get(name, 0) for line in counted) for name in ("known", "unknown")}
    assert total == {"known": 3, "unknown": 1}
    for secret in (CLIENT_SECRET, "t0ken-of-genesys", PAYLOAD):
        assert secret not in said

    arguments = ["dead", "list", "-c", "oncebridge.toml", "--json"]
    listed = run(folder, *arguments)
    assert f"the conversation {FAKE} is not known to Genesys" in listed.stdout
    again = run(folder, "dead", "replay", "--all", "-c", "oncebridge.toml")
    assert again.returncode == 1, "it is still not known"
    assert "dead again" in again.stdout + again.stderr
    genesys.conversations.add(FAKE)
    assert run(folder, "dead", "replay", "--all", "-c", "oncebridge.toml").returncode == 0
    assert sorted(out(folder)) == ["e-1", "e-2", "e-3", "e-4"]


def run(folder, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "oncebridge", *arguments],
        cwd=folder,
        env={**SECRETS, "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_the_command_waits_for_an_api_that_is_away_and_loses_nothing(folder, genesys):
    genesys.hangs_up = True
    put(folder, *[event(n) for n in range(5)])
    with Command(folder, "run", "-c", "oncebridge.toml", **SECRETS) as command:
        command.until(lambda: b"genesys_is_away" in command.said)
        time.sleep(0.3)
        assert not out(folder)
        genesys.hangs_up = False
        assert command.ended(40) == 0
    assert sorted(out(folder)) == [f"e-{n}" for n in range(5)]


def test_the_command_does_not_start_with_a_client_that_is_refused(folder):
    put(folder, event(1))
    wrong = {**SECRETS, "GENESYS_SECRET": "wr0ng-s3cret"}
    with Command(folder, "run", "-c", "oncebridge.toml", **wrong) as command:
        assert command.ended() == 3
    assert b"genesys.client_secret: the OAuth client is refused" in command.said
    assert b"wr0ng" not in command.said
    assert not out(folder)


def test_the_command_tells_in_shadow_mode_what_it_would_have_done(folder, genesys):
    genesys.delay = 0.3
    put(folder, event(1), event(2, FAKE))
    shadow = {**SECRETS, "ONCEBRIDGE_MODE": "shadow"}
    with Command(folder, "run", "-c", "oncebridge.toml", **shadow) as command:
        assert command.ended() == 0
    assert sorted(out(folder)) == ["e-1", "e-2"]
    counted = [line for line in command.log if line["event"] == "oncebridge.verified"]
    total = {name: sum(line.get(name, 0) for line in counted) for name in ("known", "unknown")}
    assert total == {"known": 1, "unknown": 1}


async def test_all_routes_share_one_verifier(tmp_path, genesys):
    file = tmp_path / "oncebridge.toml"
    file.write_text(
        f"""
store = "memory:"
dead = "memory:"
verify = "genesys"
genesys = {{ region = "{genesys.url}", client_id = "{CLIENT_ID}", client_secret = "{CLIENT_SECRET}" }}
[[routes]]
name = "a"
sink = "file:{tmp_path}/a"
[[routes]]
name = "b"
sink = "file:{tmp_path}/b"
"""
    )
    setup = load(file, environment={}, with_source=False)
    router = make_router(setup)
    await router.open()
    (answer,) = await router.process([json.dumps(event(1)).encode()])
    assert answer.verdict is Verdict.DELIVERED
    await router.aclose()
    assert (len(genesys.asked), genesys.logins) == (1, 1)
    assert setup.verifier.counts["known"] == 2


# --- gateways and handlers ------------------------------------------------------------------


@pytest.fixture
def configured(folder, monkeypatch):
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(folder)
    return folder / "oncebridge.toml"


async def test_a_gateway_of_the_configuration_verifies_for_its_sink_and_any_other(
    configured, genesys
):
    taken = []
    for sink in (None, lambda one: taken.append(one.id)):
        gateway = Gateway.from_config(configured, sink=sink)
        async with gateway:
            number = 1 if sink is None else 3
            events = [event(number), event(number + 1, FAKE)]
            outcomes = await gateway.process([json.dumps(one).encode() for one in events])
        assert [one.verdict for one in outcomes] == [Verdict.DELIVERED, Verdict.DEAD]
        assert gateway.verified == {"lookups": 2, "known": 1, "unknown": 1}
    assert out(configured.parent) == ["e-1"]
    assert taken == ["e-3"]


def test_a_function_of_ones_own_in_lambda_gets_verified_events_only(configured, genesys):
    taken = []
    handler = lambda_handler(
        Gateway.from_config(configured), deliver=lambda one: taken.append(one.id), metrics=None
    )
    try:
        answer = handler(sqs(event(1), event(2, FAKE), event(3)), Context(20))
        assert answer == {"batchItemFailures": []}
        assert sorted(taken) == ["e-1", "e-3"]
        genesys.status = 503
        answer = handler(sqs(event(4), event(5, FAKE[:-1] + "0")), Context(20))
        assert answer == {"batchItemFailures": [{"itemIdentifier": "m1"}]}
        genesys.status = 0
        assert handler(sqs(event(5, CALL)), Context(20)) == {"batchItemFailures": []}
    finally:
        handler.close()
    assert sorted(taken) == ["e-1", "e-3", "e-4", "e-5"]


def test_in_lambda_what_was_verified_is_a_metric_of_its_own(configured, capsys):
    handler = lambda_handler(Gateway.from_config(configured), deliver=lambda one: None)
    try:
        handler(sqs(event(1), event(2, FAKE), event(3)), Context(20))
        first = metrics(capsys)
        handler(sqs(event(4)), Context(20))
        second = metrics(capsys)
    finally:
        handler.close()
    assert first == {"lookups": 2, "known": 2, "unknown": 1}
    assert second == {"known": 1}


def metrics(capsys):
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    (found,) = [line for line in lines if line["route"] == "verification"]
    return {name: n for name, n in found.items() if name not in ("_aws", "route")}


def test_in_lambda_a_hanging_api_kills_no_event(configured, genesys):
    text = configured.read_text()
    text = text.replace('backoff = "50ms"', 'backoff = "50ms"\nmax_attempts = 1')
    configured.write_text(f'{text}timeout = "1s"\n')
    taken = []
    handler = lambda_handler(
        Gateway.from_config(configured), deliver=lambda one: taken.append(one.id), metrics=None
    )
    try:
        genesys.delay = 5
        with pytest.raises(HandedBack):
            handler(event(1), Context(2.2))
        genesys.delay = 0
        for _ in range(20):
            try:
                handler(event(1), Context(20))
                break
            except HandedBack:
                time.sleep(0.2)
    finally:
        handler.close()
    assert taken == ["e-1"]


def test_the_handler_that_needs_no_code_verifies_too(configured, genesys):
    environment = {
        "ONCEBRIDGE_CONFIG": str(configured),
        "ONCEBRIDGE_STORE": "memory:",
        "ONCEBRIDGE_DEAD": "memory:",
        "ONCEBRIDGE_LOG_LEVEL": "info",
    }
    handler = make_handler(environment)
    try:
        answer = handler(sqs(event(1), event(2, FAKE)), Context(20))
        assert answer == {"batchItemFailures": []}
    finally:
        handler.close()
    assert out(configured.parent) == ["e-1"]


# --- exactly once ---------------------------------------------------------------------------


async def test_a_sink_in_the_stores_database_stays_exactly_once(tmp_path, genesys, postgres):
    place = schema()
    file = tmp_path / "oncebridge.toml"
    file.write_text(
        f"""
dead = "memory:"
verify = "genesys"
backoff = "20ms"
[store]
url = "{postgres.url}"
schema = "{place}"
auto_migrate = true
[sink]
url = "{postgres.url}"
schema = "{place}"
auto_migrate = true
exactly_once = true
[genesys]
region = "{genesys.url}"
client_id = "{CLIENT_ID}"
client_secret = "{CLIENT_SECRET}"
lookups = "200/s"
"""
    )
    setup = load(file, environment={}, with_source=False)
    workers = [make_router(setup) for _ in range(2)]
    real = [event(n, f"{CALL[:-2]}{n:02d}") for n in range(30)]
    genesys.conversations.update(one["detail"]["eventBody"]["conversationId"] for one in real)
    fakes = [event(100 + n, f"{FAKE[:-1]}{n}") for n in range(5)]
    left = [json.dumps(one).encode() for one in (*real, *fakes)]

    async def bring(router, bodies):
        for _ in range(60):
            answers = await router.process(bodies)
            bodies = [b for b, a in zip(bodies, answers, strict=True) if not a.acknowledge]
            if not bodies:
                return
            await asyncio.sleep(0.1)
        raise AssertionError(len(bodies))

    async def come_back():
        await asyncio.sleep(0.3)
        genesys.status = 0

    genesys.status = 503
    for router in workers:
        await router.open()
        assert router.gateways[0]._joint is router.gateways[0]._sink
    await asyncio.gather(
        come_back(), *[bring(router, order) for router in workers for order in (left, left[::-1])]
    )
    assert setup.verifier.counts["held"]
    rows = await ask(postgres.url, f"SELECT event_id FROM {place}.oncebridge_events")
    assert sorted(row["event_id"] for row in rows) == sorted(one["id"] for one in real)
    letters = await setup.config.dead.opened.list(limit=100)
    assert {json.loads(letter.raw)["id"] for letter in letters} == {one["id"] for one in fakes}
    for router in workers:
        await router.drain(setup.config.grace)
        await router.aclose()


# --- settings -------------------------------------------------------------------------------


def refused(tmp_path, text, environment=()):
    file = tmp_path / "oncebridge.toml"
    file.write_text(f'store = "memory:"\ndead = "memory:"\nverify = "genesys"\n{text}')
    with pytest.raises(ConfigErrors) as caught:
        load(file, environment=dict(environment), with_source=False)
    return {problem.where: problem.message for problem in caught.value.problems}


def test_each_setting_that_is_missing_is_named(tmp_path):
    found = refused(tmp_path, "")
    assert list(found) == ["genesys.region", "genesys.client_id", "genesys.client_secret"]
    assert set(found.values()) == {'is missing, and verify = "genesys" needs it'}


def test_wrong_settings_are_named_where_they_stand(tmp_path):
    text = 'sink_timeout = "4s"\n[genesys]\nclient_id = "a"\nclient_secret = "b"\n'
    found = refused(tmp_path, text, {"ONCEBRIDGE_GENESYS__REGION": "eu-centrl-1"}.items())
    assert list(found) == ["genesys.timeout"]
    assert "more than half of sink_timeout (4s)" in found["genesys.timeout"]
    text = '[genesys]\nclient_id = "a"\nclient_secret = "b"\nconversation = "a.["\n'
    found = refused(tmp_path, text, {"ONCEBRIDGE_GENESYS__REGION": "eu-centrl-1"}.items())
    assert "did you mean 'eu-central-1'?" in found["ONCEBRIDGE_GENESYS__REGION"]
    assert "is not JMESPath" in found["genesys.conversation"]


def test_without_verify_nothing_of_it_is_asked_for(tmp_path):
    file = tmp_path / "oncebridge.toml"
    file.write_text('store = "memory:"\ndead = "memory:"\n[genesys]\nregion = "nowhere"\n')
    setup = load(file, environment={}, with_source=False)
    assert setup.verifier is None
    assert setup.sink_of(setup.routes[0]) is setup.routes[0].sink.opened
