"""Logging in to Redis with credentials that change: asked for by a function, or signed for AWS."""

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from urllib.parse import parse_qsl

import pytest
from botocore.credentials import Credentials as AwsCredentials
from botocore.hooks import HierarchicalEmitter
from botocore.model import ServiceId
from botocore.signers import RequestSigner
from tests.faults.test_redis_faults import CA, HASTY, PERMISSIONS, comes_back, works
from tests.http.targets import on_both_loops, server_tls
from tests.servers.redis import (
    RedisCluster,
    RedisSentinel,
    RedisServer,
    between,
    eventually,
    running,
)

from oncebridge.aws.elasticache import IamCredentials
from oncebridge.base.clock import system_clock
from oncebridge.base.secrets import Secret
from oncebridge.check.finding import Checkup
from oncebridge.check.redis import check_redis
from oncebridge.errors import ConfigError, StoreError, StoreUnavailable
from oncebridge.service.addresses import StorePlace
from oncebridge.stores.redis.connection import Dialer
from oncebridge.stores.redis.store import RedisOptions, RedisStore

_numbers = count()
PATIENT = {"timeout": timedelta(seconds=20), "connect_timeout": timedelta(seconds=20)}
ALL = (*PERMISSIONS, "+cluster|slots", "+cluster|info", "+asking")


class User:
    """A user of *servers* whose password is changed now and then, and who tells it when asked."""

    def __init__(self, *servers: RedisServer) -> None:
        self.servers = servers
        self.name = f"user{next(_numbers)}"
        self.asked = 0
        self.tells: Callable[[], tuple[str, str]] = lambda: (self.name, self.password)
        self.password = ""
        self.rotate()

    def rotate(self) -> None:
        self.password = f"p@ss/word:{next(_numbers)}"
        for server in self.servers:
            server.ask(
                *("ACL", "SETUSER", self.name, "on", "resetpass", f">{self.password}"),
                *("~ob:*", *ALL),
            )

    def cut_off(self) -> None:
        for server in self.servers:
            server.ask("CLIENT", "KILL", "USER", self.name)
            eventually(lambda server=server: not self.connections(server))

    def connections(self, server: RedisServer) -> list[str]:
        """List the ids of the connections at a server."""
        lines = server.ask("CLIENT", "LIST").decode().splitlines()
        clients = [dict(word.partition("=")[::2] for word in line.split()) for line in lines]
        return [client["id"] for client in clients if client["user"] == self.name]

    def plain(self) -> tuple[str, str]:
        """Block, as a call to a vault would."""
        time.sleep(0.01)
        self.asked += 1
        return self.tells()

    async def waited_for(self) -> tuple[str, str]:
        await asyncio.sleep(0)
        self.asked += 1
        return self.tells()

    def in_two_steps(self) -> Awaitable[tuple[str, str]]:
        return self.waited_for()


@pytest.fixture
def user(redis_server: RedisServer) -> User:
    return User(redis_server)


FORMS = pytest.mark.parametrize("form", ["plain", "waited_for", "in_two_steps"])


# --- a function -----------------------------------------------------------------------------


@FORMS
@on_both_loops
async def test_a_password_may_be_changed_while_we_work(
    redis_server: RedisServer, user: User, form: str
) -> None:
    options = RedisOptions(connections=1, **PATIENT)
    async with RedisStore(redis_server.url, options, credentials=getattr(user, form)) as store:
        await works(store)
        before = user.connections(redis_server)
        user.rotate()
        await works(store)  # who is in stays in
        assert user.connections(redis_server) == before
        assert user.asked == 1
        user.cut_off()
        await comes_back(store)
        assert user.asked == 2
        assert len(user.connections(redis_server)) == 1


@FORMS
async def test_a_password_that_is_changed_as_we_connect_is_asked_for_again(
    redis_server: RedisServer, user: User, form: str
) -> None:
    stale = (user.name, user.password)
    user.rotate()
    user.tells = lambda: stale if user.asked == 1 else (user.name, user.password)
    url = f"{redis_server.url}/1"
    before = redis_server.ask("DBSIZE")
    async with RedisStore(url, RedisOptions(**PATIENT), credentials=getattr(user, form)) as store:
        await works(store)
        assert user.asked == 2
        assert redis_server.ask("DBSIZE") == before  # what else a connection begins with is done


async def test_a_password_that_stays_wrong_is_told_without_it(
    redis_server: RedisServer, user: User, caplog: pytest.LogCaptureFixture
) -> None:
    user.tells = lambda: (user.name, f"wr0ng{user.asked // 2}")  # another one from time to time
    store = RedisStore(redis_server.url, RedisOptions(**PATIENT), credentials=user.plain)
    with caplog.at_level(logging.DEBUG), pytest.raises(ConfigError, match="WRONGPASS") as caught:
        await store.open()
    assert user.asked == 2
    with pytest.raises(StoreError, match="WRONGPASS") as later:
        await store.peek([b"key"])
    await store.aclose()
    assert "wr0ng" not in f"{caught.value}{later.value}{caplog.text}"


async def test_a_fixed_password_that_is_wrong_is_tried_once(redis_server: RedisServer) -> None:
    async with between(redis_server.port) as middle:
        store = RedisStore(f"redis://nobody:wr0ng@127.0.0.1:{middle.port}")
        with pytest.raises(ConfigError, match="WRONGPASS"):
            await store.open()
        await store.aclose()
        assert middle.heard.count(b"AUTH") == 1


def _fail() -> tuple[str, str]:
    raise RuntimeError("s3cret")


def _time_out() -> tuple[str, str]:
    raise TimeoutError("s3cret")


def _refuse() -> tuple[str, str]:
    raise ConfigError("vault", "set VAULT_ADDR")


@pytest.mark.parametrize(
    ("credentials", "kind", "told"),
    [
        (_fail, StoreUnavailable, "no credentials for Redis: RuntimeError"),
        (_time_out, StoreUnavailable, "no credentials for Redis: TimeoutError"),
        (_refuse, ConfigError, "set VAULT_ADDR"),
        (lambda: "s3cret", ConfigError, "must return \\(user, password\\)"),
        (lambda: ("ann", b"s3cret"), ConfigError, "must return \\(user, password\\)"),
        (lambda: ("ann", ""), ConfigError, "must return \\(user, password\\)"),
        (lambda: ("ann", "s3cret", 1), ConfigError, "must return \\(user, password\\)"),
        (lambda: None, ConfigError, "must return \\(user, password\\)"),
        (lambda: ("ann", "s3cret\ud800"), StoreUnavailable, "UnicodeEncodeError"),
    ],
)
async def test_a_function_that_gives_no_credentials_is_told(
    redis_server: RedisServer,
    caplog: pytest.LogCaptureFixture,
    credentials: Callable[[], tuple[str, str]],
    kind: type[Exception],
    told: str,
) -> None:
    store = RedisStore(redis_server.url, RedisOptions(**PATIENT), credentials=credentials)
    with caplog.at_level(logging.DEBUG), pytest.raises(kind, match=told) as caught:
        await store.open()
    await store.aclose()
    assert "s3cret" not in f"{caught.value}{caplog.text}"


async def test_a_function_that_hangs_is_given_up_in_time(redis_server: RedisServer) -> None:
    async def hang() -> tuple[str, str]:
        await asyncio.Event().wait()
        raise AssertionError

    store = RedisStore(redis_server.url, RedisOptions(**HASTY), credentials=hang)
    with pytest.raises(StoreUnavailable, match="within 1 s"):
        await store.open()
    await store.aclose()


def test_credentials_and_a_password_in_the_address_are_refused() -> None:
    for url in ("redis://ann:pw@cache", "redis://:pw@cache"):
        with pytest.raises(ConfigError, match="replace a password"):
            RedisStore(url, credentials=lambda: ("ann", "pw"))
    iam = RedisOptions(iam_user="ann", iam_cache="orders")
    with pytest.raises(ConfigError, match="replace a password"):
        RedisStore("rediss://cache", iam, credentials=lambda: ("ann", "pw"))
    with pytest.raises(ConfigError, match="login_every"):
        RedisStore("redis://cache", credentials=lambda: ("a", "b"), login_every=timedelta(0))


async def test_the_default_user_has_no_name(tmp_path: Path) -> None:
    server = RedisServer(tmp_path, requirepass="s3cret/word")
    with running(server):
        async with RedisStore(server.url, credentials=lambda: ("", "s3cret/word")) as store:
            await works(store)


# --- more than one server -------------------------------------------------------------------


async def test_every_server_of_a_cluster_is_logged_in_to(redis_cluster: RedisCluster) -> None:
    user = User(*redis_cluster.servers)
    options = RedisOptions(connections=1, **PATIENT)
    async with RedisStore(redis_cluster.url, options, credentials=user.plain) as store:
        await asyncio.gather(*[works(store) for _ in range(30)])
        assert all(map(user.connections, redis_cluster.servers))
        user.rotate()
        user.cut_off()
        await comes_back(store)
        await asyncio.gather(*[works(store) for _ in range(30)])
        checkup = Checkup()
        await check_redis(store, "store", checkup, clock=system_clock)
        assert any("the cluster, 3 primaries" in str(one) for one in checkup.passed)


async def test_sentinels_keep_their_own_password(tmp_path: Path) -> None:
    for name in ("redis", "sentinel"):
        (tmp_path / name).mkdir()
    server = RedisServer(tmp_path / "redis")
    with running(server):
        user = User(server)
        sentinel = RedisSentinel(tmp_path / "sentinel", server.port, "wat/ch")
        with running(sentinel):
            url = f"redis+sentinel://{sentinel.host}/orders"
            options = RedisOptions(sentinel_password=Secret("wat/ch"), **PATIENT)
            async with RedisStore(url, options, credentials=user.plain) as store:
                await works(store)
                user.rotate()
                user.cut_off()
                await comes_back(store)


# --- connections that stay open -------------------------------------------------------------


async def test_a_connection_that_stays_open_logs_in_again(
    redis_server: RedisServer, user: User
) -> None:
    other = User(redis_server)
    user.tells = lambda: (
        (user.name, user.password) if user.asked == 1 else (other.name, other.password)
    )
    options = RedisOptions(connections=1, **PATIENT)
    every = timedelta(milliseconds=50)
    async with RedisStore(
        redis_server.url, options, credentials=user.plain, login_every=every
    ) as store:
        before = user.connections(redis_server) + other.connections(redis_server)
        while not other.connections(redis_server):  # the server knows us by another name now
            await works(store)
            await asyncio.sleep(0.01)
        assert other.connections(redis_server) == before
        asked = user.asked
        while user.asked < asked + 2:
            await works(store)
            await asyncio.sleep(0.01)
        assert other.connections(redis_server) == before
    asked = user.asked
    await asyncio.sleep(0.2)
    assert user.asked <= asked + 1  # one may have been under way


async def test_a_login_that_fails_leaves_the_connection_as_it_was(
    redis_server: RedisServer, user: User, caplog: pytest.LogCaptureFixture
) -> None:
    user.tells = lambda: (user.name, user.password if user.asked == 1 else "wr0ng")
    options = RedisOptions(connections=1, **PATIENT)
    every = timedelta(milliseconds=50)
    async with RedisStore(
        redis_server.url, options, credentials=user.plain, login_every=every
    ) as store:
        before = user.connections(redis_server)
        while len(caplog.records) < 2:
            await works(store)
            await asyncio.sleep(0.01)
        assert user.connections(redis_server) == before
    told = caplog.records[0]
    assert (told.message, told.server) == ("oncebridge.redis_login_failed", redis_server.host)
    assert "WRONGPASS" in told.why
    assert "wr0ng" not in told.why


async def test_a_connection_that_counts_as_logged_out_is_replaced(
    redis_server: RedisServer, user: User
) -> None:
    async with between(redis_server.port) as middle:
        url = f"redis://127.0.0.1:{middle.port}"
        options = RedisOptions(connections=1, **PATIENT)
        async with RedisStore(url, options, credentials=user.plain) as store:
            await works(store)
            middle.says = b"-NOAUTH Authentication required.\r\n"
            with pytest.raises(StoreError, match="NOAUTH"):
                await store.peek([b"key"])
            middle.says = b""
            await works(store)
            assert (middle.connections, user.asked) == (2, 2)


# --- ElastiCache ----------------------------------------------------------------------------

_emitter = HierarchicalEmitter()  # the signer does not keep it alive
ACCESS, SECRET, SESSION = "AKIAINVENTEDEXAMPLE", "invented/secret/of/nobody", "a/session+token=="


@pytest.fixture
def identity(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("AWS_PROFILE", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    given = {
        "AWS_ACCESS_KEY_ID": ACCESS,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_SESSION_TOKEN": SESSION,
        "AWS_REGION": "eu-central-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def _signed_by_botocore(url: str, region: str, when: str, session: str) -> str:
    """Sign as the example in the documentation of ElastiCache does."""
    signer = RequestSigner(
        ServiceId("ElastiCache"),
        region,
        "elasticache",
        "v4",
        AwsCredentials(ACCESS, SECRET, session or None),
        _emitter,
    )
    asked = {"method": "GET", "url": url, "body": {}, "headers": {}, "context": {}}
    then = datetime.strptime(when, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC).replace(tzinfo=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("botocore.auth.get_current_datetime", lambda *_: then)
        return signer.generate_presigned_url(
            asked, operation_name="connect", expires_in=900, region_name=region
        )


def _check_token(token: str, url: str, region: str, session: str) -> None:
    cache, _, query = token.partition("/?")
    told = dict(parse_qsl(query, strict_parsing=True))
    theirs = _signed_by_botocore(url, region, told["X-Amz-Date"], session)
    assert cache == theirs.removeprefix("http://").partition("/?")[0]
    assert told == dict(parse_qsl(theirs.partition("/?")[2], strict_parsing=True))


@pytest.mark.parametrize("session", ["", SESSION])
@pytest.mark.parametrize("region", [None, "us-east-1"])
@pytest.mark.parametrize("serverless", [False, True])
async def test_a_token_is_the_one_that_botocore_would_sign(
    identity: pytest.MonkeyPatch, *, serverless: bool, region: str | None, session: str
) -> None:
    identity.setenv("AWS_SESSION_TOKEN", session)
    login = IamCredentials("svc-user", "Orders-Prod", region=region, serverless=serverless).login
    user, token = await login()
    assert user == "svc-user"
    more = "&ResourceType=ServerlessCache" if serverless else ""
    url = f"http://orders-prod/?Action=connect&User=svc-user{more}"
    _check_token(token, url, region or "eu-central-1", session)


async def test_a_token_is_signed_anew_for_each_connection(identity: pytest.MonkeyPatch) -> None:
    times = iter([1_767_225_599_000, 1_767_225_599_900, 1_767_225_600_000])
    login = IamCredentials("ann", "orders", clock=lambda: next(times)).login
    one, same, next_day = [(await login())[1] for _ in range(3)]
    assert one == same
    assert "X-Amz-Date=20251231T235959Z" in one
    assert "X-Amz-Date=20260101T000000Z" in next_day
    assert "20260101%2Feu-central-1" in next_day


@on_both_loops
async def test_aws_credentials_open_a_cache(
    redis_server: RedisServer, identity: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The server at hand knows no AWS and takes any password; what it was sent is looked at."""
    redis_server.ask("ACL", "SETUSER", "svc", "on", "nopass", "~ob:*", *PERMISSIONS)
    async with between(redis_server.port, server_tls()) as middle:
        url = f"rediss://localhost:{middle.port}"
        options = {"iam_user": "svc", "iam_cache": "Orders", "ca_file": CA}
        with caplog.at_level(logging.DEBUG):
            async with StorePlace.of(url, **options).opened as store:
                await works(store)
                await check_redis(store, "store", Checkup(), clock=system_clock)
        logins = re.findall(rb"AUTH\r\n\$3\r\nsvc\r\n\$\d+\r\n([^\r]+)\r\n", middle.heard)
    assert len(logins) >= 2
    for token in logins:
        asked = "http://orders/?Action=connect&User=svc"
        _check_token(token.decode(), asked, "eu-central-1", SESSION)
    assert "Signature" not in caplog.text
    assert SECRET not in caplog.text


async def test_aws_credentials_that_are_refused_are_looked_for_again(
    redis_server: RedisServer, identity: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As when the keys in a file were replaced, which nobody tells us."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        identity.delenv(name)
    file = tmp_path / "credentials"
    identity.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))

    def write(key: str) -> None:
        text = f"[default]\naws_access_key_id = {key}\naws_secret_access_key = {SECRET}\n"
        file.write_text(text)

    write("AKIAFIRST")
    redis_server.ask("ACL", "SETUSER", "svc", "on", "nopass", "~ob:*", *PERMISSIONS)
    async with between(redis_server.port, server_tls()) as middle:
        options = RedisOptions(iam_user="svc", iam_cache="orders", ca_file=CA, **PATIENT)
        async with RedisStore(f"rediss://localhost:{middle.port}", options) as store:
            await works(store)
            write("AKIASECOND")
            redis_server.ask("ACL", "SETUSER", "svc", "resetpass", ">another")
            redis_server.ask("CLIENT", "KILL", "USER", "svc")
            store._servers.drop_connections()
            with pytest.raises(StoreError, match="WRONGPASS"):
                await store.peek([b"key"])
            keys = re.findall(rb"X-Amz-Credential=(\w+)%2F", middle.heard)
            assert keys[0] == b"AKIAFIRST"
            assert keys[-2:] == [b"AKIAFIRST", b"AKIASECOND"]


@pytest.mark.parametrize(
    ("gone", "told"),
    [
        (("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "no AWS credentials were found"),
        (("AWS_REGION",), "no AWS Region is set; .*iam_region"),
    ],
)
async def test_what_is_missing_at_aws_is_told_at_the_start(
    redis_server: RedisServer, identity: pytest.MonkeyPatch, gone: tuple[str, ...], told: str
) -> None:
    for name in gone:
        identity.delenv(name)
    async with between(redis_server.port, server_tls()) as middle:
        options = RedisOptions(iam_user="svc", iam_cache="orders", ca_file=CA, **PATIENT)
        store = RedisStore(f"rediss://localhost:{middle.port}", options)
        with pytest.raises(ConfigError, match=told):
            await store.open()
        await store.aclose()


# --- asking for nothing ---------------------------------------------------------------------


@on_both_loops
async def test_asking_for_nothing_is_answered_at_once(redis_server: RedisServer) -> None:
    dialer = Dialer(timeout_s=2, connect_timeout_s=20)
    connection = await dialer.connect(("127.0.0.1", redis_server.port))
    assert await connection.ask([]) == []
    assert connection.load == 0
    assert await connection.ask([(b"PING",)]) == [b"PONG"]
    connection.abort()
    await connection.closed
    assert await connection.ask([]) == []
