"""The real command behind a real proxy, which is killed and comes again."""

import json
import os

import pytest
from tests.e2e.towns import Command, event, receiving, send
from tests.http.targets import TLS, server_tls
from tests.servers.forward_proxy import PASSWORD, USER
from tests.servers.redis import eventually

from oncebridge.http.proxy import keep_metadata_direct

pytestmark = pytest.mark.usefixtures("proxies_of")


@pytest.fixture
def receiver():
    """A receiver that only the proxy can find."""
    with receiving(server_tls("elsewhere")) as there:
        yield there


def run(folder, receiver, source, *more, **environment):
    return Command(
        folder,
        *("run", "--source", source, "--store", "sqlite:seen.db", "--dead", "sqlite:dead.db"),
        *("--sink", receiver.url, "--set", f"sink.ca_file={TLS / 'ca.pem'}"),
        *("--backoff", "50ms", "--max-backoff", "200ms", "--json", *more),
        **environment,
    )


@pytest.mark.full
def test_while_the_proxy_is_away_nothing_is_sent_and_nothing_lost(tmp_path, receiver, start_proxy):
    proxy = start_proxy(is_guarded=True)
    with run(tmp_path, receiver, "http://127.0.0.1:0/events", HTTPS_PROXY=proxy.url) as command:
        url = command.ready()
        assert send(url, event(1))[1]["verdict"] == "delivered"
        proxy.process.kill()
        # The connection that was kept is gone with the proxy, which is noticed before it is used.
        status, said = send(url, event(2))
        assert (status, said["verdict"]) == (503, "failed")
        assert said["reason"] == f"proxy 127.0.0.1:{proxy.port}: connection refused"
        assert receiver.bodies == [event(1)]
        proxy.process.start()
        eventually(lambda: send(url, event(2))[0] == 200)
        assert send(url, event(2))[1]["verdict"] == "duplicate"
        command.signal()
        assert command.ended() == 0
    assert receiver.bodies == [event(1), event(2)]
    counts = json.loads(command.printed)
    assert (counts["delivered"], counts["ambiguous"], counts["dead"]) == (2, 0, 0)
    (told,) = [line for line in command.log if line["event"] == "oncebridge.proxy"]
    assert told["target"] == receiver.url.split("/")[2]
    assert told["proxy"] == f"127.0.0.1:{proxy.port}"
    assert len(proxy.asked) == 2  # a tunnel before, and one after
    for secret in (USER, PASSWORD, proxy.url):
        assert secret.encode() not in command.said


@pytest.mark.full
def test_a_proxy_that_is_killed_in_the_middle_of_a_file_loses_nothing(
    tmp_path, receiver, start_proxy
):
    proxy = start_proxy()
    events = [event(number) for number in range(400)]
    (tmp_path / "in.ndjson").write_bytes(b"\n".join(events))
    receiver.delay = 0.01
    more = ("--set", "sink.concurrency=4")
    with run(tmp_path, receiver, "file:in.ndjson", *more, HTTPS_PROXY=proxy.url) as command:
        for reached in (50, 150):
            eventually(lambda: len(receiver.bodies) >= reached)  # noqa: B023 - called at once
            proxy.process.kill()
            proxy.process.start()
        assert command.ended(120) == 0
    counts = json.loads(command.printed)
    assert sorted(set(receiver.bodies)) == sorted(events)
    assert counts["delivered"] == len(events)
    # Sent again is only what was under way when the proxy died, and it is counted.
    assert len(receiver.bodies) - len(events) <= counts["ambiguous"] <= 8


def test_a_socks_proxy_ends_the_start(tmp_path, receiver):
    address = "socks5://worker:hush@127.0.0.1:1080"
    with run(tmp_path, receiver, "http://127.0.0.1:0/events", HTTPS_PROXY=address) as command:
        assert command.ended() == 3
    assert b"HTTPS_PROXY in the environment is a SOCKS proxy" in command.said
    assert b"hush" not in command.said


def test_credentials_of_the_machine_are_not_asked_for_through_the_proxy(
    tmp_path, start_proxy, monkeypatch
):
    proxy = start_proxy()
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name in ("config", "credentials"):
        (tmp_path / name).touch()
    nobody = {
        "AWS_CONFIG_FILE": str(tmp_path / "config"),
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "credentials"),
        "AWS_EC2_METADATA_DISABLED": "false",
        "AWS_REGION": "us-east-1",
    }
    with Command(
        tmp_path,
        *("run", "--source", "file:in.ndjson", "--sink", "sqs://of-nobody"),
        **nobody,
        HTTP_PROXY=proxy.url,
    ) as command:
        assert command.ended(60) == 3
    assert b"no AWS credentials" in command.said
    assert proxy.asked == []


def test_what_the_operator_exempts_stays_exempt(proxies_of, monkeypatch):
    monkeypatch.setenv("no_proxy", "")  # so that it is as it was afterwards
    for given, expected in (("", ""), ("crm.example,10.0.0.0/8", "crm.example,10.0.0.0/8,")):
        proxies_of(HTTP_PROXY="http://proxy.example", no_proxy=given)
        keep_metadata_direct()
        assert os.environ["no_proxy"] == f"{expected}169.254.169.254,169.254.170.2,[fd00:ec2::254]"
    proxies_of(no_proxy="*")
    keep_metadata_direct()
    assert os.environ["no_proxy"] == "*"
