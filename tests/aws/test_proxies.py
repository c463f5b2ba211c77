"""AWS behind a proxy: an emulator that only the proxy can find, and a script with TLS."""

import json

import pytest
from tests.check.aws_account import AwsAccount
from tests.http.targets import TLS, answering, refusing_port, server_tls, serving
from tests.servers.aws import AWS

from oncebridge import Gateway
from oncebridge.aws.client import AwsClient, AwsError, NotSent, SampleCall
from oncebridge.aws.options import AwsOptions
from oncebridge.errors import ConfigError
from oncebridge.stores.dynamodb.store import DynamoDBOptions, DynamoDBStore

TABLE = SampleCall("dynamodb", "describe_table", {"TableName": "records"})
EVENT = b'{"source":"com.example.post","detail-type":"Parcel Sent","detail":{"parcel":1}}'
ANSWER = b'HTTP/1.1 200 OK\r\nContent-Length: 16\r\n\r\n{"said":"hello"}'


@pytest.fixture(autouse=True)
def identity(monkeypatch):
    for name, value in AWS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_CA_BUNDLE", str(TLS / "ca.pem"))


@pytest.mark.parametrize("is_guarded", [False, True], ids=["open", "guarded"])
async def test_a_store_works_through_the_proxy(ministack, start_proxy, proxies_of, is_guarded):
    proxy = start_proxy(is_guarded=is_guarded)
    proxies_of(HTTP_PROXY=proxy.url)
    where = f"dynamodb.us-east-1.example:{ministack.port}"
    options = DynamoDBOptions(endpoint=f"http://{where}")
    table = ministack.table()
    sent = []
    async with DynamoDBStore.from_url(f"dynamodb://{table}", options) as store:
        gateway = Gateway(store=store, sink=sent.append)
        for expected in ("delivered", "duplicate"):
            (outcome,) = await gateway.process([EVENT])
            assert outcome.verdict == expected
    assert [event.raw for event in sent] == [EVENT]
    assert {asked["host"] for asked in proxy.asked} == {where}
    assert len(proxy.asked) >= 3


@pytest.mark.parametrize("is_guarded", [False, True], ids=["open", "guarded"])
async def test_signed_calls_go_through_a_tunnel(start_proxy, proxies_of, is_guarded):
    proxy = start_proxy(is_guarded=is_guarded)
    proxies_of(HTTPS_PROXY=proxy.url)
    async with serving(answering(ANSWER), tls=server_tls("elsewhere")) as seen:
        client = AwsClient(TABLE, AwsOptions(endpoint=f"https://elsewhere.example:{seen.port}"))
        for _ in range(2):
            assert json.loads(await client.call("ListTables", b"{}")) == {"said": "hello"}
        await client.aclose()
        assert seen.connections == 1
        assert all("Authorization" in request for request in seen.requests)
        assert not any("Proxy-Authorization" in request for request in seen.requests)
    (asked,) = proxy.asked
    assert (asked["method"], asked["host"]) == ("CONNECT", f"elsewhere.example:{seen.port}")
    assert "Authorization" not in asked["headers"]


async def test_without_the_proxy_nothing_is_sent(start_proxy, proxies_of):
    client = AwsClient(TABLE, AwsOptions(endpoint="https://elsewhere.example:1"))
    with refusing_port() as port:
        proxies_of(HTTPS_PROXY=f"http://127.0.0.1:{port}")
        with pytest.raises(NotSent, match=f"^proxy 127.0.0.1:{port}: connection refused$"):
            await client.call("ListTables", b"{}")
    await client.aclose()
    proxy = start_proxy(is_guarded=True)
    wrong = proxy.url_for("wrong")
    proxies_of(HTTPS_PROXY=wrong, HTTP_PROXY=wrong)
    client = AwsClient(TABLE, AwsOptions(endpoint="https://elsewhere.example:1"))
    with pytest.raises(NotSent, match="HTTP 407"):
        await client.call("ListTables", b"{}")
    await client.aclose()
    client = AwsClient(TABLE, AwsOptions(endpoint="http://elsewhere.example:1"))
    with pytest.raises(AwsError, match="HTTP 407"):
        await client.call("ListTables", b"{}")
    await client.aclose()


async def test_a_proxy_that_cannot_be_used_ends_the_start(proxies_of):
    proxies_of(HTTPS_PROXY="socks5://worker:hush@proxy.example:1080")
    client = AwsClient(TABLE, AwsOptions())
    with pytest.raises(
        ConfigError, match="HTTPS_PROXY in the environment is a SOCKS proxy"
    ) as told:
        await client.open()
    assert "hush" not in str(told.value)
    await client.aclose()
    proxies_of(NO_PROXY=".amazonaws.com")
    assert (await client.open()).url == "https://dynamodb.us-east-1.amazonaws.com/"
    await client.aclose()


async def test_check_asks_through_the_proxy_and_names_it(
    guarded_aws, start_proxy, proxies_of, monkeypatch
):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    proxy = start_proxy()
    where = guarded_aws.endpoint.replace("http://127.0.0.1", "aws.example")
    with AwsAccount(guarded_aws) as town:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{where}")
        proxies_of(HTTP_PROXY=proxy.url)
        checkup = await town.check()
        found = {(one.subject, one.what) for one in checkup.passed}
        assert (f"target {where}", f"uses the proxy 127.0.0.1:{proxy.port}") in found
        assert checkup.findings == []
        assert {asked["host"] for asked in proxy.asked} == {where}
        proxies_of(HTTP_PROXY="socks5://worker:hush@proxy.example:1080")
        checkup = await town.check()
        (finding,) = [one for one in checkup.findings if one.code == "proxy-unusable"]
        assert finding.subject == f"target {where}"
        assert "is a SOCKS proxy" in finding.seen
        assert "hush" not in str(finding)
