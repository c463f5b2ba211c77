import asyncio
import contextlib
import json
import os
import threading
from datetime import UTC, datetime, timedelta
from email.utils import formatdate
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from botocore.auth import S3SigV4Auth, SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from hypothesis import given
from hypothesis import strategies as st
from tests.http.targets import OK, TLS, refusing_port, server_tls, serving

from oncebridge.aws.account import Account
from oncebridge.aws.client import AwsClient, AwsError, NotSent, SampleCall, Unclear
from oncebridge.aws.options import AwsOptions
from oncebridge.aws.signing import AwsCredentials, AwsRequest, Signer, encoded_path, encoded_query
from oncebridge.base.clock import system_clock
from oncebridge.errors import ConfigError

TABLE = SampleCall("dynamodb", "describe_table", {"TableName": "records"})
BUCKET = SampleCall("s3", "head_bucket", {"Bucket": "records"})
NOW_MS = 1_767_225_599_000  # a second before 2026 begins


@pytest.fixture(autouse=True)
def nobody(monkeypatch, tmp_path):
    """Nothing of this machine's own configuration counts here."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return monkeypatch


@pytest.fixture
def somebody(nobody):
    nobody.setenv("AWS_ACCESS_KEY_ID", "AKIAINVENTEDEXAMPLE")
    nobody.setenv("AWS_SECRET_ACCESS_KEY", "invented/secret/of/nobody")
    nobody.setenv("AWS_REGION", "us-east-1")
    return nobody


# --- signatures -------------------------------------------------------------------------------

_text = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), max_size=20)
_values = st.from_regex(r"[!-~]([ !-~]{0,20}[!-~])?", fullmatch=True).filter(
    lambda value: "  " not in value
)
_names = st.from_regex(r"x-amz-meta-[a-z0-9-]{1,9}", fullmatch=True)


def _theirs(auth, identity, host, request, now_ms):
    """Sign as botocore does."""
    told = datetime.fromtimestamp(now_ms // 1000, UTC).replace(tzinfo=None)
    url = f"https://{host}{request.path}" + (f"?{request.query}" if request.query else "")
    asked = AWSRequest(request.method, url, dict(request.headers), request.body)
    if auth is SigV4Auth:
        asked.headers["X-Amz-Content-SHA256"] = sha256(request.body).hexdigest()
    credentials = Credentials(identity.access_key, identity.secret_key, identity.token or None)
    name = "s3" if auth is S3SigV4Auth else "dynamodb"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("botocore.auth.get_current_datetime", lambda *_: told)
        auth(credentials, name, "eu-west-1").add_auth(asked)
    return asked.headers["Authorization"]


@given(
    method=st.sampled_from(["GET", "PUT", "DELETE", "HEAD"]),
    path=_text,
    query=st.dictionaries(_text.filter(bool), _text, max_size=4),
    headers=st.dictionaries(_names, _values, max_size=3),
    body=st.binary(max_size=100),
    token=st.sampled_from(["", "a/session+token=="]),
    later_s=st.integers(0, 100_000),
)
def test_a_request_to_s3_is_signed_as_botocore_signs_it(
    *, method, path, query, headers, body, token, later_s
):
    identity = AwsCredentials("AKIA", "secret/+", token)
    now_ms = NOW_MS + later_s * 1000
    request = AwsRequest(
        method,
        encoded_path(f"/bucket/{path}"),
        encoded_query(query.items()),
        list(headers.items()),
        body,
    )
    host = "s3.eu-west-1.amazonaws.com"
    theirs = _theirs(S3SigV4Auth, identity, host, request, now_ms)
    ours = Signer("s3", "eu-west-1").sign(request, host, identity, now_ms)
    assert dict(ours)["authorization"] == theirs
    assert dict(ours).get("x-amz-security-token", "") == token


@given(body=st.binary(max_size=1000), token=st.sampled_from(["", "a/session+token=="]))
def test_a_call_is_signed_as_botocore_signs_it(body, token):
    identity = AwsCredentials("AKIA", "secret/+", token)
    headers = [
        ("content-type", "application/x-amz-json-1.0"),
        ("x-amz-target", "DynamoDB_20120810.DescribeTable"),
    ]
    request = AwsRequest("POST", "/", "", headers, body)
    host = "localhost:8000"
    theirs = _theirs(SigV4Auth, identity, host, request, NOW_MS)
    ours = Signer("dynamodb", "eu-west-1").sign(request, host, identity, NOW_MS)
    assert dict(ours)["authorization"] == theirs


def test_one_signer_goes_on_into_another_day_and_with_anrenewed_credentials():
    signer = Signer("s3", "eu-west-1")
    request = AwsRequest("GET", "/", "", (), b"")
    one, two = AwsCredentials("A1", "s1"), AwsCredentials("A2", "s2")
    for identity, now_ms in ((one, NOW_MS), (one, NOW_MS + 1000), (two, NOW_MS + 1000)):
        fresh = Signer("s3", "eu-west-1").sign(request, "h", identity, now_ms)
        assert signer.sign(request, "h", identity, now_ms) == fresh
        assert signer.sign(request, "h", identity, now_ms + 999) == fresh
    days = [
        dict(signer.sign(request, "h", one, at))["x-amz-date"] for at in (NOW_MS, NOW_MS + 1000)
    ]
    assert days == ["20251231T235959Z", "20260101T000000Z"]


def test_an_identity_does_not_print_its_secrets():
    shown = repr(AwsCredentials("AKIAINVENTED", "the-secret", "the-token"))
    assert shown == "<AwsCredentials AKIA…>"


# --- where calls go ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "example", "url", "region"),
    [
        ({}, TABLE, "https://dynamodb.eu-west-1.amazonaws.com/", "eu-west-1"),
        ({}, BUCKET, "https://records.s3.eu-west-1.amazonaws.com/", "eu-west-1"),
        (
            {"AWS_REGION": "us-east-1"},
            BUCKET,
            "https://records.s3.us-east-1.amazonaws.com/",
            "us-east-1",
        ),
        (
            {"AWS_DEFAULT_REGION": "us-gov-west-1"},
            TABLE,
            "https://dynamodb.us-gov-west-1.amazonaws.com/",
            "us-gov-west-1",
        ),
        (
            {"AWS_REGION": "cn-north-1"},
            TABLE,
            "https://dynamodb.cn-north-1.amazonaws.com.cn/",
            "cn-north-1",
        ),
        (
            {"AWS_USE_FIPS_ENDPOINT": "true"},
            BUCKET,
            "https://records.s3-fips.eu-west-1.amazonaws.com/",
            "eu-west-1",
        ),
        (
            {"AWS_USE_DUALSTACK_ENDPOINT": "true"},
            TABLE,
            "https://dynamodb.eu-west-1.api.aws/",
            "eu-west-1",
        ),
        ({"AWS_ENDPOINT_URL": "http://localhost:1"}, TABLE, "http://localhost:1/", "eu-west-1"),
        (
            {"AWS_ENDPOINT_URL": "http://localhost:1", "AWS_ENDPOINT_URL_S3": "http://localhost:2"},
            BUCKET,
            "http://localhost:2/records",
            "eu-west-1",
        ),
        (
            {"AWS_ENDPOINT_URL_DYNAMODB": "http://localhost:1/base"},
            TABLE,
            "http://localhost:1/base",
            "eu-west-1",
        ),
        (
            {"AWS_ENDPOINT_URL": "http://localhost:1", "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "1"},
            TABLE,
            "http://localhost:1/",
            "eu-west-1",
        ),
        ({"AWS_PROFILE": "vpc"}, TABLE, "https://vpce-1.example.com/", "eu-central-1"),
        ({"AWS_PROFILE": "vpc"}, BUCKET, "https://everything.example.com/records", "eu-central-1"),
    ],
)
async def test_calls_go_where_the_sdk_would_send_them(
    somebody, tmp_path, *, env, example, url, region
):
    somebody.setenv("AWS_REGION", "eu-west-1")
    (tmp_path / "config").write_text(
        "[profile vpc]\nregion = eu-central-1\nservices = near\n"
        "endpoint_url = https://everything.example.com\n"
        "[services near]\ndynamodb =\n  endpoint_url = https://vpce-1.example.com\n"
    )
    for name, value in env.items():
        somebody.setenv(name, value)
    place = await Account(example).service_endpoint()
    assert (place.url, place.region, place.signing_region) == (url, region, region)
    assert place.signing_name == example.service


async def test_what_is_given_stands_above_the_environment(somebody):
    somebody.setenv("AWS_ENDPOINT_URL", "http://localhost:1")
    account = Account(TABLE, region="eu-north-1", endpoint="http://localhost:2")
    place = await account.service_endpoint()
    assert (place.url, place.region) == ("http://localhost:2/", "eu-north-1")
    assert (place.target_prefix, place.json_version) == ("DynamoDB_20120810", "1.0")


async def test_certificates_are_checked_by_what_the_configuration_names(somebody):
    somebody.setenv("AWS_CA_BUNDLE", str(TLS / "ca.pem"))
    async with serving(_saying(b"{}"), tls=server_tls()) as seen:
        url = seen.url.removesuffix("/hook")
        async with opened(TABLE, endpoint=url) as client:
            assert await client.call("DescribeTable", b"{}") == b"{}"
        somebody.delenv("AWS_CA_BUNDLE")
        async with opened(TABLE, endpoint=url) as client:
            with pytest.raises(NotSent, match="certificate verify failed"):
                await client.call("DescribeTable", b"{}")


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"AWS_REGION": None}, "no AWS Region is set; set AWS_REGION"),
        ({"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None}, "no AWS credentials"),
        ({"AWS_SECRET_ACCESS_KEY": None}, "cannot be used: Partial credentials"),
        ({"AWS_PROFILE": "elsewhere"}, "profile.*elsewhere"),
    ],
)
async def test_what_is_missing_is_said_to_a_human(somebody, env, message):
    for name, value in env.items():
        if value is None:
            somebody.delenv(name)
        else:
            somebody.setenv(name, value)
    client = AwsClient(TABLE, AwsOptions())
    with pytest.raises(ConfigError, match=message):
        await client.open()
    await client.aclose()


async def test_a_bucket_that_is_signed_for_in_another_way_is_refused(somebody):
    bucket = SampleCall("s3", "head_bucket", {"Bucket": "records--use1-az4--x-s3"})
    with pytest.raises(ConfigError, match="v4-s3express are not supported"):
        await Account(bucket).service_endpoint()


# --- credentials ------------------------------------------------------------------------------


class Container:
    """The metadata service of a container: it hands out credentials that end."""

    def __init__(self):
        self.asked = 0
        self.lasts = timedelta(hours=1)
        self.status = 200
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                outer.asked += 1
                ends = datetime.now(UTC) + outer.lasts
                body = {
                    "AccessKeyId": f"AKIA{outer.asked}",
                    "SecretAccessKey": "secret",
                    "Token": f"token{outer.asked}",
                    "Expiration": ends.strftime("%Y-%m-%dT%H:%M:%SZ"),
                }
                told = json.dumps(body).encode()
                self.send_response(outer.status)
                self.send_header("Content-Length", str(len(told)))
                self.end_headers()
                self.wfile.write(told)

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/credentials"

    def __enter__(self):
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def container(nobody):
    nobody.setattr("botocore.utils.ContainerMetadataFetcher.SLEEP_TIME", 0)
    with Container() as found:
        nobody.setenv("AWS_REGION", "us-east-1")
        nobody.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", found.url)
        yield found


async def test_a_web_identity_becomes_a_role(nobody, tmp_path, ministack):
    (tmp_path / "jwt").write_text("an.invented.token")
    nobody.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "jwt"))
    nobody.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/invented")
    nobody.setenv("AWS_REGION", "us-east-1")
    nobody.setenv("AWS_ENDPOINT_URL_STS", ministack.endpoint)
    identity = await Account(TABLE).credentials()
    assert identity.access_key.startswith("ASIA")
    assert identity.token


async def test_a_profile_assumes_its_role(somebody, tmp_path, ministack):
    (tmp_path / "config").write_text(
        "[profile worker]\nregion = us-east-1\ncredential_source = Environment\n"
        "role_arn = arn:aws:iam::123456789012:role/invented\n"
    )
    somebody.setenv("AWS_ENDPOINT_URL_STS", ministack.endpoint)
    identity = await Account(TABLE, profile="worker").credentials()
    assert identity.access_key.startswith("ASIA")
    assert identity.token


async def test_credentials_that_last_are_asked_for_once(container):
    account = Account(TABLE)
    found = await asyncio.gather(*[account.credentials() for _ in range(20)])
    assert {identity.token for identity in found} == {"token1"}
    account._checked_at = -1e9
    assert await account.credentials() is found[0]
    assert container.asked == 1


async def test_credentials_that_end_soon_are_used_while_new_ones_are_fetched(container):
    container.lasts = timedelta(minutes=5)
    account = Account(TABLE)
    first = await account.credentials()
    container.lasts = timedelta(hours=1)
    account._checked_at = -1e9
    assert await account.credentials() is first
    await asyncio.wait([account._fetching])
    assert (await account.credentials()).token == f"token{container.asked}" != first.token


async def test_credentials_that_have_ended_are_not_used(container):
    container.lasts = timedelta(seconds=5)
    account = Account(TABLE)
    ended = await account.credentials()
    container.lasts = timedelta(hours=1)
    account._checked_at = -1e9
    found = await asyncio.gather(*[account.credentials() for _ in range(5)])
    assert {identity.token for identity in found} == {f"token{container.asked}"}
    assert ended not in found


async def test_where_no_new_credentials_come_the_old_ones_serve_as_long_as_they_last(container):
    container.lasts = timedelta(minutes=5)
    account = Account(TABLE)
    first = await account.credentials()
    container.status = 500
    account._checked_at = -1e9
    assert await account.credentials() is first
    await asyncio.wait([account._fetching])
    account._checked_at = -1e9
    assert await account.credentials() is first
    await asyncio.wait([account._fetching])


async def test_credentials_that_cannot_be_fetched_now_are_no_mistake_of_a_human(container):
    container.status = 500
    with pytest.raises(NotSent, match="no AWS credentials at the moment"):
        await Account(TABLE).credentials()


async def test_one_who_gives_up_waiting_for_credentials_leaves_the_others_waiting(container):
    account = Account(TABLE)
    one, two = (asyncio.ensure_future(account.credentials()) for _ in range(2))
    await asyncio.sleep(0)
    one.cancel()
    assert (await two).token == "token1"
    assert container.asked == 1


async def test_the_place_and_the_identity_ask_for_credentials_once(container):
    account = Account(TABLE)
    await account.service_endpoint()
    await account.credentials()
    assert container.asked == 1


async def test_refused_credentials_are_looked_for_again_and_the_request_sent_once_more(container):
    async with serving(_refusing("token1")) as seen, opened(TABLE, seen) as client:
        assert await client.call("DescribeTable", b"{}") == b"ok"
        assert await client.call("DescribeTable", b"{}") == b"ok"
    tokens = [request.headers["x-amz-security-token"] for request in seen.requests]
    assert tokens == ["token1", "token2", "token2"]


async def test_credentials_that_are_refused_again_are_an_error(container):
    async with serving(_refusing("token1", "token2")) as seen, opened(TABLE, seen) as client:
        with pytest.raises(AwsError) as caught:
            await client.call("DescribeTable", b"{}")
    assert (caught.value.code, caught.value.retryable) == ("ExpiredTokenException", False)
    assert len(seen.requests) == 2


async def test_refused_credentials_that_are_all_there_are_cost_one_request(somebody):
    somebody.setenv("AWS_SESSION_TOKEN", "token1")
    async with serving(_refusing("token1")) as seen, opened(TABLE, seen) as client:
        with pytest.raises(AwsError, match="ExpiredTokenException"):
            await client.call("DescribeTable", b"{}")
    assert len(seen.requests) == 1


# --- calls ------------------------------------------------------------------------------------


class Asked:
    def __init__(self, head, body):
        self.line, *lines = head.decode().removesuffix("\r\n\r\n").split("\r\n")
        self.headers = {}
        for line in lines:
            name, _, value = line.partition(": ")
            self.headers[name.lower()] = value
        self.body = body


async def _next(seen, reader):
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    asked = Asked(head, b"")
    asked.body = await reader.readexactly(int(asked.headers.get("content-length", 0)))
    seen.requests.append(asked)
    return asked


def _answer(status, body, *headers):
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers)
    return f"HTTP/1.1 {status} X\r\n{lines}Content-Length: {len(body)}\r\n\r\n".encode() + body


def _saying(body, status=200, *headers):
    async def script(seen, reader, writer):
        while await _next(seen, reader):
            writer.write(_answer(status, body, *headers))
            await writer.drain()

    return script


def _refusing(*tokens):
    async def script(seen, reader, writer):
        while asked := await _next(seen, reader):
            error = b'{"__type":"com.amazon.coral.service#ExpiredTokenException"}'
            if asked.headers["x-amz-security-token"] in tokens:
                writer.write(_answer(400, error))
            else:
                writer.write(OK)
            await writer.drain()

    return script


async def _silent(seen, reader, writer):
    while await _next(seen, reader):
        pass


@contextlib.asynccontextmanager
async def opened(example, seen=None, *, connections=32, clock=None, **settings):
    if seen is not None:
        settings["endpoint"] = f"http://127.0.0.1:{seen.port}"
    client = AwsClient(example, AwsOptions(**settings), connections=connections, clock=clock)
    try:
        async with asyncio.timeout(20):
            await client.open()
            yield client
    finally:
        await client.aclose()


async def test_a_call_carries_what_the_service_looks_at(somebody):
    async with serving(_saying(b'{"a":1}')) as seen, opened(TABLE, seen) as client:
        assert await client.call("PutItem", b'{"b":2}') == b'{"a":1}'
    (asked,) = seen.requests
    assert asked.line == "POST / HTTP/1.1"
    assert asked.body == b'{"b":2}'
    assert asked.headers["x-amz-target"] == "DynamoDB_20120810.PutItem"
    assert asked.headers["content-type"] == "application/x-amz-json-1.0"
    scope = f"AKIAINVENTEDEXAMPLE/{asked.headers['x-amz-date'][:8]}/us-east-1/dynamodb/aws4_request"
    assert f"Credential={scope}, SignedHeaders=content-type;host;" in asked.headers["authorization"]
    assert "x-amz-security-token" not in asked.headers


async def test_a_rest_request_goes_below_the_bucket(somebody):
    script = _saying(b"body", 200, ("ETag", '"1"'))
    async with serving(script) as seen, opened(BUCKET, seen) as client:
        answer = await client.request("PUT", "/a b/ä+~", query=[("b", "2 3"), ("a", "")], body=b"x")
        await client.request("GET", query=[("list-type", "2")])
        await client.request("HEAD", "/a")
        await client.request("DELETE", "//a")
    assert (answer.status, answer.headers[b"etag"], answer.body) == (200, b'"1"', b"body")
    assert [asked.line for asked in seen.requests] == [
        "PUT /records/a%20b/%C3%A4%2B~?a=&b=2%203 HTTP/1.1",
        "GET /records?list-type=2 HTTP/1.1",
        "HEAD /records/a HTTP/1.1",
        "DELETE /records//a HTTP/1.1",
    ]
    assert seen.requests[0].body == b"x"
    digest = "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"
    assert seen.requests[0].headers["x-amz-content-sha256"] == digest
    assert "content-length" not in seen.requests[1].headers


@pytest.mark.parametrize(
    ("status", "headers", "body", "code", "message", "retryable", "throttling"),
    [
        (
            400,
            [],
            b'{"__type":"com.amazonaws.dynamodb.v20120810#ResourceNotFoundException","message":"m"}',
            "ResourceNotFoundException",
            "m",
            False,
            False,
        ),
        (
            400,
            [],
            b'{"__type":"ProvisionedThroughputExceededException","Message":"M"}',
            "ProvisionedThroughputExceededException",
            "M",
            True,
            True,
        ),
        (
            400,
            [("x-amzn-ErrorType", "ThrottlingException:http://internal.amazon.com/")],
            b"{}",
            "ThrottlingException",
            "",
            True,
            True,
        ),
        (500, [], b'{"__type":"x#InternalServerError"}', "InternalServerError", "", True, False),
        (
            412,
            [],
            b'<?xml version="1.0"?>\n<Error><Code>PreconditionFailed</Code><Message>a &amp; b</Message></Error>',
            "PreconditionFailed",
            "a & b",
            False,
            False,
        ),
        (503, [], b"<Error><Code>SlowDown</Code></Error>", "SlowDown", "", True, True),
        (
            409,
            [],
            b"<Error><Code>ConditionalRequestConflict</Code></Error>",
            "ConditionalRequestConflict",
            "",
            True,
            False,
        ),
        (
            503,
            [],
            (
                b'<e:ErrorResponse xmlns:e="urn:x"><e:Error><e:Code><![CDATA[SlowDown]]></e:Code>'
                b"<e:Message>\n a &lt; b\n</e:Message></e:Error></e:ErrorResponse>"
            ),
            "SlowDown",
            "a < b",
            True,
            True,
        ),
        (403, [], b"<html><h1>Log in", "HTTP 403", "", False, False),
        (
            403,
            [],
            b'<!DOCTYPE Error [<!ENTITY c "SlowDown">]><Error><Code>&c;</Code></Error>',
            "HTTP 403",
            "",
            False,
            False,
        ),
        (404, [], b"", "HTTP 404", "", False, False),
        (429, [], b"too many", "HTTP 429", "", True, True),
        (502, [], b"\xff\xfe{", "HTTP 502", "", True, False),
        (
            301,
            [],
            b"<Error><Code>PermanentRedirect</Code></Error>",
            "PermanentRedirect",
            "",
            False,
            False,
        ),
    ],
)
async def test_what_the_service_says_no_with_is_understood(
    somebody, *, status, headers, body, code, message, retryable, throttling
):
    async with serving(_saying(body, status, *headers)) as seen, opened(BUCKET, seen) as client:
        with pytest.raises(AwsError) as caught:
            await client.request("GET", "/a")
    error = caught.value
    assert (error.status, error.code, error.message) == (status, code, message)
    assert (error.retryable, error.is_throttling) == (retryable, throttling)
    assert error.body == body


async def test_an_answer_that_does_not_come_in_time_is_unclear(somebody):
    async with serving(_silent) as seen:
        async with opened(TABLE, seen, timeout=timedelta(seconds=0.2)) as client:
            with pytest.raises(Unclear, match=r"no answer within 0\.2 s"):
                await client.call("PutItem", b"{}")
        assert len(seen.requests) == 1


async def test_nothing_was_sent_where_nobody_listens(somebody):
    with refusing_port() as port:
        async with opened(TABLE, endpoint=f"http://127.0.0.1:{port}") as client:
            with pytest.raises(NotSent, match="connection refused"):
                await client.call("PutItem", b"{}")


async def test_no_more_requests_are_under_way_than_there_are_connections(somebody):
    async with serving(_silent) as seen:
        settings = {"connections": 2, "timeout": timedelta(seconds=0.3)}
        async with opened(TABLE, seen, **settings) as client:
            async with client._free, client._free:
                with pytest.raises(NotSent, match="no free connection"):
                    await client.call("PutItem", b"{}")
            assert seen.requests == []
            with pytest.raises(Unclear):
                await client.call("PutItem", b"{}")
    assert len(seen.requests) == 1


async def test_the_date_of_an_answer_tells_the_time_there(somebody):
    async def script(seen, reader, writer):
        while await _next(seen, reader):
            date = formatdate(system_clock() / 1000 + 3600, usegmt=True)
            writer.write(_answer(400, b"{}", ("Date", date)))
            await writer.drain()

    async with serving(script) as seen, opened(TABLE, seen) as client:
        with pytest.raises(AwsError):
            await client.call("PutItem", b"{}")
        assert abs(client.clock.offset_ms - 3_600_000) < 1000
        with pytest.raises(AwsError):
            await client.call("PutItem", b"{}")
    first, second = (
        datetime.strptime(asked.headers["x-amz-date"], "%Y%m%dT%H%M%S%z") for asked in seen.requests
    )
    assert timedelta(minutes=59) < second - first < timedelta(minutes=61)


async def test_what_comes_after_closing_is_not_sent(somebody):
    async with serving(_saying(b"{}")) as seen:
        async with opened(TABLE, seen) as client:
            await client.call("PutItem", b"{}")
        with pytest.raises(NotSent, match="closed"):
            await client.call("PutItem", b"{}")
        await client.aclose()
    assert len(seen.requests) == 1
