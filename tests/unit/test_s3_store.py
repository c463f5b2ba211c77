"""What is particular to the S3 store; what it shares with all stores is in the contract."""

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from email.utils import formatdate
from itertools import count

import pytest
from msgspec.structs import replace
from tests.servers.process import free_port
from tests.servers.s3 import S3Server
from tests.servers.s3_meddler import Asked, Meddler, Told, error

from oncebridge.aws.templates.rendering import bucket as bucket_template
from oncebridge.base.clock import SystemDice
from oncebridge.engine import pauses
from oncebridge.errors import ConfigError, StoreUnavailable
from oncebridge.events.key import Part
from oncebridge.service.addresses import StorePlace
from oncebridge.stores.api import (
    Busy,
    Claim,
    Commit,
    Commits,
    Duplicate,
    Extension,
    Extensions,
    Fate,
    Memories,
    Memory,
    NoAnswer,
    Release,
    Releases,
    Reply,
    Want,
    Wants,
)
from oncebridge.stores.conditional import Records
from oncebridge.stores.record_encoding import decode_record, encode_records
from oncebridge.stores.s3.store import S3Options, S3Store, _name
from oncebridge.testing import ManualClock

_numbers = count()
_HOUR_MS = 3_600_000
_DAY_MS = 24 * _HOUR_MS


@pytest.fixture(autouse=True)
def environment(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    s3_server.show_to(monkeypatch)


@pytest.fixture
def bucket(s3_server: S3Server) -> str:
    return s3_server.bucket()


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[Meddler]:
    with Meddler(s3_server.port).started() as proxy:
        yield proxy


def made(bucket: str, at: S3Server | Meddler, **options: object) -> S3Store:
    patient = {"timeout": timedelta(seconds=20), "connect_timeout": timedelta(seconds=20)}
    asked = {"endpoint": at.endpoint, "look_first": "never", **patient, **options}
    given = S3Options(**asked)  # type: ignore[arg-type]
    return S3Store(bucket, "records", given)


async def opened(store: S3Store) -> None:
    async with store:
        pass


def want(*keys: bytes, lease_ms: int = 60_000, keep_ms: int = 60_000) -> Want:
    token, generation = SystemDice().tokens(2)
    return Want(tuple(Part(key) for key in keys), token, generation, lease_ms, keep_ms)


def done(claim: object, window_ms: int = 60_000) -> Commit:
    assert isinstance(claim, Claim), claim
    held = claim.held[0]
    return Commit(held.key, held.generation, Fate.DELIVERED, window_ms)


def refuse(
    told: Told, *methods: str, times: int = 1_000_000, when: str = ""
) -> Callable[[Asked], Told | None]:
    """Answer *told* to the next *times* requests with *methods* whose path ends with *when*."""
    left = iter(range(times))

    def before(asked: Asked) -> Told | None:
        if asked.method in methods and asked.path.endswith(when):
            return told if next(left, None) is not None else None
        return None

    return before


# --- the address ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "bucket", "prefix", "region"),
    [
        ("s3://acme-dedup", "acme-dedup", "", None),
        ("s3://acme-dedup/", "acme-dedup", "", None),
        ("s3://acme-dedup/events", "acme-dedup", "events/", None),
        ("s3://acme-dedup/a/b/?region=eu-central-1", "acme-dedup", "a/b/", "eu-central-1"),
        ("s3://acme.dedup/%21x", "acme.dedup", "!x/", None),
    ],
)
def test_an_address_names_bucket_prefix_and_region(
    url: str, bucket: str, prefix: str, region: str | None
) -> None:
    store = S3Store.from_url(url)
    account = store._client._account
    assert (store._name, store._prefix, account._region) == (bucket, prefix, region)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("s3:acme-dedup", "s3://BUCKET/PREFIX"),
        ("s3:///events", "s3://BUCKET/PREFIX"),
        ("s3://acme-dedup#x", "only ?region=REGION"),
        ("s3://user:hidden@acme-dedup", "the address has credentials"),
        ("s3://acme-dedup?regoin=x", "only ?region=REGION"),
        ("s3://ACME", "is not a valid bucket name"),
        ("s3://a", "is not a valid bucket name"),
        ("s3://acme-dedup/a b", "a prefix has letters"),
        ("s3://acme-dedup/a/../b", "a prefix has letters"),
        ("s3://acme-dedup/a//b", "a prefix has letters"),
        ("s3://acme--use1-az4--x-s3", "directory buckets"),
    ],
)
def test_an_address_that_cannot_be_is_refused(url: str, why: str) -> None:
    with pytest.raises(ConfigError) as told:
        S3Store.from_url(url)
    assert why in str(told.value)
    assert "hidden" not in str(told.value)


def test_the_region_of_the_address_and_of_the_options_are_one() -> None:
    url = "s3://acme-dedup?region=eu-west-1"
    assert S3Store.from_url(url, S3Options(region="eu-west-1"))._options.region == "eu-west-1"
    with pytest.raises(ConfigError) as told:
        S3Store.from_url(url, S3Options(region="eu-west-2"))
    assert told.value.where == "region"


def test_the_options_are_read_as_in_a_file() -> None:
    store = StorePlace.of("s3://acme-dedup/x", timeout="3s", expire_after="15d", expiry="sweep")
    assert isinstance(store.opened, S3Store)
    assert store.opened._options.expire_after == timedelta(days=15)


def test_the_names_of_objects_fit_and_are_never_alike() -> None:
    long = b"k" * 257
    named_so = _name(long).encode()
    keys = [b"", b"\0", b"\0\0", b"a", b"A", b"k" * 256, long, b"k" * 258, named_so]
    names = [_name(key) for key in keys]
    assert len(set(names)) == len(keys)
    assert max(map(len, names)) <= 512
    assert _name(b"\x01" + bytes(range(32))) == "01" + bytes(range(32)).hex()


# --- the start --------------------------------------------------------------------------


async def test_the_start_leaves_nothing_behind_but_the_form_of_the_records(
    s3_server: S3Server, bucket: str
) -> None:
    stores = [made(bucket, s3_server) for _ in range(3)]
    await asyncio.gather(*[store.open() for store in stores])
    _, listed = s3_server.ask("GET", f"/{bucket}?list-type=2")
    assert b"<KeyCount>1</KeyCount>" in listed
    status, form = s3_server.ask("GET", f"/{bucket}/records/form")
    assert (status, form[:1]) == (200, b"\x01")
    assert len(form) == 64 * 1024  # too large for the lifecycle rule
    for store in stores:
        assert await store.scan() == ([], b"")
        await store.aclose()


async def test_a_worker_does_not_start_on_records_of_a_newer_form(
    s3_server: S3Server, bucket: str
) -> None:
    s3_server.ask("PUT", f"/{bucket}/records/form", b"\x02".ljust(64 * 1024, b"\0"))
    with pytest.raises(ConfigError, match=rf"s3://{bucket}.*of form 02.*upgrade this worker"):
        await opened(made(bucket, s3_server))
    await opened(S3Store(bucket, "others", S3Options(endpoint=s3_server.endpoint)))


@pytest.mark.parametrize("condition", ["if-none-match", "if-match"])
async def test_a_server_that_heeds_no_conditions_is_refused(
    proxy: Meddler, bucket: str, condition: str
) -> None:
    def before(asked: Asked) -> None:
        asked.headers.pop(condition, None)

    proxy.before = before
    with pytest.raises(ConfigError, match="(?i)" + condition):
        await opened(made(bucket, proxy))


async def test_a_server_that_replaces_what_is_not_there_is_refused(
    proxy: Meddler, bucket: str
) -> None:
    def before(asked: Asked) -> None:
        if asked.method == "PUT" and proxy.pass_on(Asked("GET", asked.path)).status == 404:
            asked.headers.pop("if-match", None)

    proxy.before = before
    with pytest.raises(ConfigError, match="If-Match"):
        await opened(made(bucket, proxy))


async def test_a_server_that_knows_no_conditions_is_refused(proxy: Meddler, bucket: str) -> None:
    proxy.before = refuse(error(501, "NotImplemented"), "PUT")
    with pytest.raises(ConfigError, match="not support conditional writes"):
        await opened(made(bucket, proxy))


def _heeds_nothing(asked: Asked) -> Told | None:
    if asked.method == "DELETE":
        asked.headers.pop("if-match", None)
    return None


def _knows_nothing(asked: Asked) -> Told | None:
    if asked.method == "DELETE" and "if-match" in asked.headers:
        return error(501, "NotImplemented")
    return None


@pytest.mark.parametrize("before", [_heeds_nothing, _knows_nothing])
async def test_where_removal_has_no_conditions_nothing_is_removed_without(
    proxy: Meddler, bucket: str, before: Callable[[Asked], Told | None]
) -> None:
    proxy.before = before
    async with made(bucket, proxy) as store:
        proxy.methods()
        (claim,) = await store.claim(Wants.of([want(b"k")]))
        await store.commit(Commits.of([done(claim)]))
        assert await store.forget([b"k"]) == [True]
        assert await store.peek([b"k"]) == [None]
        assert (await store.scan())[0] == []
        (again,) = await store.claim(Wants.of([want(b"k")]))
        assert isinstance(again, Claim)
        assert again.held[0].attempts == 1
        assert "DELETE" not in proxy.methods()


@pytest.mark.parametrize(
    ("told", "why"),
    [
        (error(404, "NoSuchBucket"), "there is no such bucket; create it with: oncebridge migrate"),
        (error(403, "AccessDenied"), "s3:ListBucket"),
        (error(403, "SignatureDoesNotMatch"), "SignatureDoesNotMatch"),
        (error(403, "RequestTimeTooSkewed"), "clock is off by minutes"),
        (
            Told(
                400,
                {},
                b"<Error><Code>AuthorizationHeaderMalformed</Code><Region>eu-west-1</Region></Error>",
            ),
            r"another Region \(eu-west-1\); add \?region=",
        ),
        (error(301, "PermanentRedirect"), "another Region"),
    ],
)
async def test_what_a_human_must_change_is_said(
    proxy: Meddler, bucket: str, told: Told, why: str
) -> None:
    proxy.before = refuse(told, "GET", "PUT")
    with pytest.raises(ConfigError, match=why) as raised:
        await opened(made(bucket, proxy))
    assert S3Server.secret_key not in str(raised.value)
    assert f"s3://{bucket}" in str(raised.value)


async def test_a_server_that_is_away_may_be_there_later() -> None:
    options = S3Options(endpoint=f"http://127.0.0.1:{free_port()}")
    with pytest.raises(StoreUnavailable):
        await opened(S3Store("acme-dedup", options=options))


async def test_a_start_that_is_slowed_down_may_be_repeated(proxy: Meddler, bucket: str) -> None:
    store = made(bucket, proxy)
    proxy.before = refuse(error(503, "SlowDown"), "PUT", times=1)
    with pytest.raises(StoreUnavailable, match="SlowDown"):
        await store.open()
    async with store:
        assert await store.peek([b"k"]) == [None]


async def test_versions_and_a_bucket_without_a_rule_are_told(
    s3_server: S3Server, bucket: str, caplog: pytest.LogCaptureFixture
) -> None:
    enabled = b"<VersioningConfiguration><Status>Enabled</Status></VersioningConfiguration>"
    s3_server.ask("PUT", f"/{bucket}?versioning", enabled)
    with caplog.at_level(logging.WARNING, "oncebridge"):
        async with made(bucket, s3_server):
            pass
    assert [record.message for record in caplog.records] == [
        "oncebridge.s3_keeps_versions",
        "oncebridge.s3_without_expiry",
    ]


async def test_a_bucket_that_keeps_versions_serves_as_well(
    s3_server: S3Server, bucket: str
) -> None:
    enabled = b"<VersioningConfiguration><Status>Enabled</Status></VersioningConfiguration>"
    s3_server.ask("PUT", f"/{bucket}?versioning", enabled)
    async with made(bucket, s3_server) as store:
        (claim,) = await store.claim(Wants.of([want(b"k")]))
        assert await store.commit(Commits.of([done(claim)])) == [Reply.COMMITTED]
        assert await store.forget([b"k"]) == [True]
        (again,) = await store.claim(Wants.of([want(b"k")]))
        assert isinstance(again, Claim)


async def test_who_may_not_look_at_the_bucket_itself_can_still_use_it(
    proxy: Meddler, bucket: str, caplog: pytest.LogCaptureFixture
) -> None:
    def before(asked: Asked) -> Told | None:
        hidden = asked.path.partition("?")[2].rstrip("=") in ("versioning", "lifecycle")
        return error(403, "AccessDenied") if hidden else None

    proxy.before = before
    with caplog.at_level(logging.WARNING, "oncebridge"):
        async with made(bucket, proxy) as store:
            assert isinstance((await store.claim(Wants.of([want(b"k")])))[0], Claim)
    assert [record.message for record in caplog.records] == ["oncebridge.s3_expiry_unknown"]


# --- time -------------------------------------------------------------------------------


def _dated(off_s: float) -> Callable[[Asked, Told], Told]:
    def after(asked: Asked, told: Told) -> Told:
        told.headers["date"] = formatdate(time.time() + off_s, usegmt=True)
        return told

    return after


async def test_a_host_whose_clock_is_far_off_does_not_start(proxy: Meddler, bucket: str) -> None:
    proxy.after = _dated(-60)
    with pytest.raises(ConfigError, match=r"clock is [56]\d\.\d s ahead of AWS's"):
        await opened(made(bucket, proxy))
    async with made(bucket, proxy, max_skew=timedelta(minutes=2)) as store:
        assert abs(await store.now_ms() - (time.time() - 60) * 1000) < 2000


async def test_a_clock_that_is_set_meanwhile_is_told_and_put_right(
    proxy: Meddler, bucket: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with made(bucket, proxy, expiry="sweep") as store:
        assert abs(await store.now_ms() - time.time() * 1000) < 2000
        proxy.after = _dated(-60)
        with caplog.at_level(logging.WARNING, "oncebridge"):
            for _ in range(5):  # a few answers have to agree
                await asyncio.sleep(0.25)
                await store.peek([b"k"])
            assert abs(await store.now_ms() - (time.time() - 60) * 1000) < 2000
    assert [record.message for record in caplog.records] == ["oncebridge.s3_clock_is_off"]


async def test_a_hold_is_taken_over_only_after_the_margin(s3_server: S3Server, bucket: str) -> None:
    async with made(bucket, s3_server, max_skew=timedelta(seconds=4)) as store:
        await store.claim(Wants.of([want(b"k", lease_ms=1)]))
        await asyncio.sleep(0.05)
        (busy,) = await store.claim(Wants.of([want(b"k")]))
        assert isinstance(busy, Busy)
        assert 0 < busy.left_ms <= 4001


# --- faults -----------------------------------------------------------------------------


async def test_what_is_slowed_down_has_no_answer_and_the_rest_has(
    proxy: Meddler, bucket: str
) -> None:
    slow = b"\x07slow"
    async with made(bucket, proxy) as store:
        proxy.before = refuse(error(503, "SlowDown"), "PUT", when=slow.hex())
        one, two, three = await store.claim(Wants.of([want(b"a"), want(slow), want(b"b")]))
        assert (type(one), type(three)) == (Claim, Claim)
        assert isinstance(two, NoAnswer)
        assert "SlowDown" in two.reason
        assert await store.peek([slow]) == [None]


async def test_a_conflict_just_now_is_looked_at_again(proxy: Meddler, bucket: str) -> None:
    async with made(bucket, proxy) as store:
        proxy.methods()
        proxy.before = refuse(error(409, "ConditionalRequestConflict"), "PUT", times=1)
        (claim,) = await store.claim(Wants.of([want(b"k")]))
        assert isinstance(claim, Claim)
        assert proxy.methods() == ["PUT", "GET", "PUT"]
        proxy.before = refuse(error(409, "ConditionalRequestConflict"), "PUT", times=1)
        assert await store.commit(Commits.of([done(claim)])) == [Reply.COMMITTED]
        assert proxy.methods() == ["PUT", "GET", "PUT"]
        proxy.before = refuse(error(409, "ConditionalRequestConflict"), "DELETE", times=1)
        assert await store.forget([b"k"]) == [True]


async def test_another_conflict_is_no_answer(proxy: Meddler, bucket: str) -> None:
    async with made(bucket, proxy) as store:
        proxy.before = refuse(error(409, "OperationAborted"), "PUT")
        (answer,) = await store.claim(Wants.of([want(b"k")]))
        assert isinstance(answer, NoAnswer)


def _swallow(method: str) -> Callable[[Asked, Told], Told | None]:
    left = iter(range(1))

    def after(asked: Asked, told: Told) -> Told | None:
        is_it = asked.method == method and next(left, None) is not None
        return None if is_it else told

    return after


async def test_a_claim_whose_answer_was_lost_is_known_as_our_own(
    proxy: Meddler, bucket: str
) -> None:
    async with made(bucket, proxy) as store:
        proxy.after = _swallow("PUT")
        asked = want(b"k")
        (lost,) = await store.claim(Wants.of([asked]))
        assert isinstance(lost, NoAnswer)
        (claim,) = await store.claim(Wants.of([asked]))
        assert isinstance(claim, Claim)
        assert (claim.token, claim.held[0].attempts) == (asked.token, 1)


async def test_a_claim_of_parts_whose_answer_was_lost_is_known_as_our_own(
    proxy: Meddler, bucket: str
) -> None:
    async with made(bucket, proxy) as store:
        for lost in range(2):
            asked = want(b"a%d" % lost, b"b%d" % lost)
            puts = count()

            def after(
                asked: Asked, told: Told, puts: "Iterator[int]" = puts, lost: int = lost
            ) -> Told | None:
                return None if asked.method == "PUT" and next(puts) == lost else told

            proxy.after = after
            (answer,) = await store.claim(Wants.of([asked]))
            assert isinstance(answer, NoAnswer)
            (claim,) = await store.claim(Wants.of([asked]))
            assert isinstance(claim, Claim)
            assert [held.attempts for held in claim.held] == [1, 1]


async def test_what_else_was_done_and_not_answered_is_done(proxy: Meddler, bucket: str) -> None:
    async with made(bucket, proxy) as store:
        (claim,) = await store.claim(Wants.of([want(b"k")]))
        assert isinstance(claim, Claim)
        proxy.after = _swallow("PUT")
        extension = Extension(b"k", claim.token, 60_000)
        assert type((await store.extend(Extensions.of([extension])))[0]) is NoAnswer
        assert await store.extend(Extensions.of([extension])) == [Reply.EXTENDED]
        proxy.after = _swallow("PUT")
        assert type((await store.commit(Commits.of([done(claim)])))[0]) is NoAnswer
        assert await store.commit(Commits.of([done(claim)])) == [Reply.ALREADY]
        (other,) = await store.claim(Wants.of([want(b"l")]))
        assert isinstance(other, Claim)
        proxy.after = _swallow("PUT")
        assert type((await store.release(Releases.of([Release(b"l", other.token)])))[0]) is NoAnswer
        assert await store.release(Releases.of([Release(b"l", other.token)])) == [Reply.FENCED]
        proxy.after = _swallow("PUT")
        memory = Memory(b"m", b"g" * 16, Fate.DELIVERED, 60_000)
        assert type((await store.remember(Memories.of([memory])))[0]) is NoAnswer
        assert await store.remember(Memories.of([memory])) == [Reply.KNOWN]
        proxy.after = _swallow("DELETE")
        await store.forget([b"m"])
        assert await store.peek([b"m"]) == [None]


async def test_every_call_ends_in_time_and_later_ones_work(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    server = S3Server(tmp_path_factory.mktemp("frozen"))
    server.process.start()
    try:
        async with made(server.bucket(), server) as store:
            (claim,) = await store.claim(Wants.of([want(b"k")]))
            store._client._timeout_s = 1.0
            server.process.freeze()
            start = time.monotonic()
            answers = await store.claim(Wants.of([want(b"a%d" % number) for number in range(200)]))
            assert {type(answer) for answer in answers} == {NoAnswer}
            assert type((await store.commit(Commits.of([done(claim)])))[0]) is NoAnswer
            with pytest.raises(StoreUnavailable):
                await store.peek([b"k"])
            with pytest.raises(StoreUnavailable):
                await store.scan()
            assert time.monotonic() - start < 4 * (1 + 1)
            server.process.thaw()
            store._client._timeout_s = 5.0
            (answer,) = await store.commit(Commits.of([done(claim)]))
            while isinstance(answer, NoAnswer):  # it still has a heap of requests to look at
                (answer,) = await store.commit(Commits.of([done(claim)]))
            assert answer in (Reply.COMMITTED, Reply.ALREADY)
    finally:
        server.process.kill()


async def test_a_server_that_was_away_is_found_again(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    server = S3Server(tmp_path_factory.mktemp("restarted"))
    server.process.start()
    try:
        bucket = server.bucket()
        async with made(bucket, server) as store:
            await store.claim(Wants.of([want(b"k")]))
            server.process.kill()
            assert type((await store.claim(Wants.of([want(b"l")])))[0]) is NoAnswer
            server.process.start()
            server.ask("PUT", f"/{bucket}")
            assert type((await store.claim(Wants.of([want(b"m")])))[0]) is Claim
    finally:
        server.process.kill()


async def test_an_object_that_is_no_record_stops_only_its_own_key(
    s3_server: S3Server, bucket: str
) -> None:
    async with made(bucket, s3_server) as store:
        for key, body in ((b"new", b"\xff later"), (b"torn", b"\x01\x9a\x00"), (b"none", b"")):
            s3_server.ask("PUT", f"/{bucket}/records/{key.hex()}", body)
            bad, good = await store.claim(Wants.of([want(key), want(b"good " + key)]))
            assert isinstance(bad, NoAnswer)
            assert isinstance(good, Claim)
            with pytest.raises(StoreUnavailable):
                await store.peek([key])


async def test_objects_of_others_under_the_prefix_are_left_alone(
    s3_server: S3Server, bucket: str
) -> None:
    for name in ("notes.txt", "probe-00", "records/zz", "0g", "sha256-00", "ABCD"):
        s3_server.ask("PUT", f"/{bucket}/records/{name}", b"theirs")
    clock = ManualClock()
    options = S3Options(endpoint=s3_server.endpoint, expiry="sweep")
    async with S3Store(bucket, "records", options=options, clock=clock) as store:
        await store.remember(Memories.of([Memory(b"k", b"g" * 16, Fate.DELIVERED, 1000)]))
        assert [record.key for record in (await store.scan())[0]] == [b"k"]
        clock.advance(2000)
        assert await store.purge() == 1
        assert s3_server.ask("GET", f"/{bucket}/records/notes.txt") == (200, b"theirs")


# --- answers in XML ---------------------------------------------------------------------


def _prefixed(body: bytes) -> bytes:
    """Write the namespace of S3 as a prefix."""
    body = body[body.index(b"<ListBucketResult") :].replace(b"</", b"<!").replace(b"<", b"<s:")
    return body.replace(b"<s:!", b"</s:").replace(b" xmlns=", b" xmlns:s=", 1)


@pytest.mark.parametrize(
    "rewrite",
    [
        lambda body: body.replace(b"<Key>", b"<Key><![CDATA[").replace(b"</Key>", b"]]></Key>"),
        lambda body: body.replace(b"<Key>", b"<Key >").replace(b"<IsTruncated>", b"<IsTruncated >"),
        lambda body: body.replace(b"/</", b"&#47;</").replace(b"records/", b"records&#x2f;"),
        lambda body: body.replace(b"records/", b"records%2F"),
        lambda body: body.replace(b"true</IsT", b" true\n</IsT"),
        _prefixed,
    ],
)
async def test_a_list_is_understood_in_every_way_xml_can_write_it(
    proxy: Meddler, bucket: str, rewrite: Callable[[bytes], bytes]
) -> None:
    def after(asked: Asked, told: Told) -> Told:
        is_list = "list-type=2" in asked.path
        return Told(told.status, told.headers, rewrite(told.body)) if is_list else told

    keys = [b"one", b"two", b"three"]
    async with made(bucket, proxy) as store:
        await store.remember(
            Memories.of([Memory(key, b"g" * 16, Fate.DELIVERED, 60_000) for key in keys])
        )
        proxy.after = after
        found, place = await store.scan(limit=2)
        while place:
            more, place = await store.scan(place, 2)
            found += more
        assert sorted(record.key for record in found) == sorted(keys)


async def test_a_scan_passes_names_that_xml_cannot_hold(s3_server: S3Server, bucket: str) -> None:
    for name in ("a%01b", "a%20+%26%3C", "a%2Bb%25", "%C3%A4"):
        assert s3_server.ask("PUT", f"/{bucket}/records/{name}", b"theirs")[0] == 200
    async with made(bucket, s3_server) as store:
        await store.remember(Memories.of([Memory(b"\xff", b"g" * 16, Fate.DELIVERED, 60_000)]))
        found, place = await store.scan(limit=1)
        looks = 1
        while place:
            more, place = await store.scan(place, 1)
            found += more
            looks += 1
        assert [record.key for record in found] == [b"\xff"]
        assert looks == 6  # one is the form


_NOT_WHAT_WAS_ASKED_FOR = [
    b"",
    b"what",
    b"\xff\xfe\x00",
    b"<html><body>Log in first</body></html>",
    b"<!DOCTYPE html><html><body>Log in first<br></body></html>",
    b"<Error><Code>SlowDown</Code></Error>",
    b"<ListBucketResult><IsTruncated>false</IsTruncated><Contents><Key>records/6b",
    b"<ListBucketResult><IsTruncated>false</IsTruncated><Contents/></ListBucketResult>",
    b"<ListBucketResult><IsTruncated>true</IsTruncated></ListBucketResult>",
    b"<ListBucketResult/>",
    b"<VersioningConfiguration><Status>Ena",
    b"<LifecycleConfiguration><Rule>",
    b'<?xml version="1.0" encoding="x-none"?><ListBucketResult/>',
    b"<ListBucketResult>&nothing;</ListBucketResult>",
    *(
        b'<!DOCTYPE x [<!ENTITY a "a"><!ENTITY b "&a;&a;">]><' + name + b">&b;</" + name + b">"
        for name in (b"ListBucketResult", b"VersioningConfiguration", b"LifecycleConfiguration")
    ),
    *(
        b"<" + name + b">" + b" " * (8 << 20) + b"</" + name + b">"
        for name in (b"ListBucketResult", b"VersioningConfiguration", b"LifecycleConfiguration")
    ),
]


@pytest.mark.parametrize("body", _NOT_WHAT_WAS_ASKED_FOR, ids=lambda body: repr(body[:70]))
@pytest.mark.full
async def test_an_answer_that_is_something_else_is_no_answer(
    proxy: Meddler, bucket: str, body: bytes
) -> None:
    """Whatever it is, nothing is taken from it, and nothing written because of it."""
    page = Told(200, {"content-type": "text/html"}, body)
    async with made(bucket, proxy) as store:
        await store.remember(Memories.of([Memory(b"k", b"g" * 16, Fate.DELIVERED, 60_000)]))
        proxy.before = lambda asked: page if "list-type=2" in asked.path else None
        with pytest.raises(StoreUnavailable, match="the response"):
            await store.scan()
    for asked_for in ("versioning", "lifecycle"):
        proxy.before = lambda asked, it=asked_for: (
            page if asked.path.endswith(f"?{it}=") and asked.method == "GET" else None
        )
        with pytest.raises(StoreUnavailable, match="the response"):
            await opened(made(bucket, proxy))
    proxy.asked.clear()
    store = made(bucket, proxy)
    with pytest.raises(StoreUnavailable, match="the response"):
        await store.migrate()
    await store.aclose()
    assert "PUT" not in proxy.methods()


async def test_stores_under_other_prefixes_do_not_meet(s3_server: S3Server, bucket: str) -> None:
    options = S3Options(endpoint=s3_server.endpoint)
    async with (
        S3Store(bucket, "a", options=options) as one,
        S3Store(bucket, "a/b", options=options) as two,
        S3Store(bucket, options=options) as three,
    ):
        for store in (one, two, three):
            assert isinstance((await store.claim(Wants.of([want(b"k")])))[0], Claim)
            assert [record.key for record in (await store.scan())[0]] == [b"k"]


async def test_no_more_requests_are_under_way_than_allowed(proxy: Meddler, bucket: str) -> None:
    under_way, most = 0, 0
    lock = threading.Lock()

    def before(asked: Asked) -> None:
        nonlocal under_way, most
        with lock:
            under_way += 1
            most = max(most, under_way)
        time.sleep(0.01)

    def after(asked: Asked, told: Told) -> Told:
        nonlocal under_way
        with lock:
            under_way -= 1
        return told

    async with made(bucket, proxy, connections=5) as store:
        proxy.before, proxy.after = before, after
        answers = await store.claim(Wants.of([want(b"a%d" % number) for number in range(40)]))
    assert {type(answer) for answer in answers} == {Claim}
    assert most == 5


# --- what it costs ----------------------------------------------------------------------


@asynccontextmanager
async def counting(
    proxy: Meddler, bucket: str, **options: object
) -> AsyncIterator[tuple[S3Store, Callable[[], Counter[str]]]]:
    async with made(bucket, proxy, **options) as store:
        proxy.methods()
        yield store, lambda: Counter(proxy.methods())


@pytest.mark.parametrize(
    ("look_first", "new", "repeat"),
    [
        ("never", {"PUT": 2}, {"PUT": 1, "GET": 1}),
        ("always", {"GET": 1, "PUT": 2}, {"GET": 1}),
    ],
)
async def test_how_many_requests_an_event_takes(
    proxy: Meddler, bucket: str, look_first: str, new: dict[str, int], repeat: dict[str, int]
) -> None:
    async with counting(proxy, bucket, look_first=look_first) as (store, requests):
        (claim,) = await store.claim(Wants.of([want(b"k")]))
        await store.commit(Commits.of([done(claim)]))
        assert requests() == new
        (again,) = await store.claim(Wants.of([want(b"k")]))
        assert isinstance(again, Duplicate)
        assert requests() == repeat


async def test_a_claim_looks_first_as_long_as_there_are_many_repeats(
    proxy: Meddler, bucket: str
) -> None:
    async with counting(proxy, bucket, look_first="auto", connections=4) as (store, requests):
        for number in range(3):
            await store.claim(Wants.of([want(b"%d new %d" % (number, at)) for at in range(60)]))
        requests()
        await store.claim(Wants.of([want(b"one more")]))
        assert requests() == {"PUT": 1}
        for _ in range(2):
            await store.claim(Wants.of([want(b"%d new %d" % (0, at)) for at in range(60)]))
        requests()
        (busy,) = await store.claim(Wants.of([want(b"0 new 0")]))
        assert isinstance(busy, Busy)
        assert requests() == {"GET": 1}


@pytest.mark.parametrize("look_first", ["never", "always"])
async def test_what_could_not_be_read_first_has_no_answer(
    proxy: Meddler, bucket: str, look_first: str
) -> None:
    async with made(bucket, proxy, look_first=look_first) as store:
        await store.claim(Wants.of([want(b"a"), want(b"b")]))
        proxy.before = refuse(error(503, "SlowDown"), "GET", when=b"b".hex())
        one, two, three = await store.claim(Wants.of([want(b"a"), want(b"b"), want(b"c")]))
        assert (type(one), type(two), type(three)) == (Busy, NoAnswer, Claim)


async def test_where_a_rule_removes_records_purging_asks_nothing(
    proxy: Meddler, bucket: str
) -> None:
    async with counting(proxy, bucket, expiry="lifecycle") as (store, requests):
        assert await store.purge(100) == 0
        assert requests() == {}


async def test_sweeping_removes_nothing_that_was_changed_meanwhile(
    proxy: Meddler, bucket: str
) -> None:
    clock = ManualClock()
    options = S3Options(endpoint=proxy.endpoint, expiry="sweep", look_first="never")
    async with S3Store(bucket, options=options, clock=clock) as store:
        keys = [b"%d" % number for number in range(10)]
        await store.claim(Wants.of([want(key, lease_ms=10, keep_ms=10) for key in keys]))
        clock.advance(1000)
        path = f"/{bucket}/{keys[3].hex()}"

        def before(asked: Asked) -> None:
            if (asked.method, asked.path) == ("DELETE", path):
                record = decode_record(proxy.pass_on(Asked("GET", path)).body)
                touched = Records.of([replace(record, memo=b"touched")])
                (body,) = encode_records(touched, touched.keys)
                proxy.pass_on(Asked("PUT", path, body=body))

        proxy.before = before
        assert await store.purge(1000) == 9
        assert [record.memo for record in (await store.scan())[0]] == [b"touched"]


# --- expiry -----------------------------------------------------------------------------


async def test_migrating_makes_the_bucket_and_the_rule_once(
    s3_server: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    bucket = f"made-{next(_numbers)}"
    for expected in (
        [
            f"created the bucket {bucket} in us-east-1",
            "created the rule oncebridge-records: removes records after 7 days",
        ],
        [],
    ):
        store = made(bucket, s3_server)
        assert await store.migrate() == expected
        await store.aclose()
    longer = made(bucket, s3_server, expire_after=timedelta(days=14, hours=1))
    assert await longer.migrate() == [
        "created the rule oncebridge-records: removes records after 15 days"
    ]
    await longer.aclose()
    with caplog.at_level(logging.WARNING, "oncebridge"):
        async with made(bucket, s3_server) as store:
            assert await store.peek([b"k"]) == [None]
    assert caplog.records == []


async def test_migrating_leaves_the_rules_of_others_as_they_are(
    s3_server: S3Server, bucket: str
) -> None:
    theirs = (
        b'<LifecycleConfiguration xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Rule>'
        b"<ID>reports</ID><Filter><Prefix>reports/</Prefix></Filter><Status>Enabled</Status>"
        b"<Expiration><Days>3</Days></Expiration></Rule></LifecycleConfiguration>"
    )
    s3_server.ask("PUT", f"/{bucket}?lifecycle", theirs)
    store = made(bucket, s3_server)
    await store.migrate()
    await store.aclose()
    _, rules = s3_server.ask("GET", f"/{bucket}?lifecycle")
    assert b"<ID>reports</ID>" in rules
    assert b"<Prefix>reports/</Prefix>" in rules
    assert b"<ObjectSizeLessThan>65536</ObjectSizeLessThan>" in rules


@pytest.mark.parametrize("setting", ["varies_by_storage_class", "all_storage_classes_128K", ""])
async def test_migrating_leaves_the_least_size_of_transitions_as_it_is(
    proxy: Meddler, bucket: str, setting: str
) -> None:
    """S3 resets it to its default where the header is left out."""
    name = "x-amz-transition-default-minimum-object-size"

    def after(asked: Asked, told: Told) -> Told:
        if "lifecycle" in asked.path and asked.method == "GET":
            told.headers.pop(name, None)  # the server at hand knows the default only
            told.headers |= {name: setting} if setting else {}
        return told

    proxy.pass_on(Asked("PUT", f"/{bucket}?lifecycle", body=_rule(30, prefix="reports/")))
    proxy.after = after
    store = made(bucket, proxy)
    assert await store.migrate() != []
    await store.aclose()
    (written,) = [one for one in proxy.asked if one.method == "PUT"]
    assert written.headers.get(name, "") == setting
    signed = written.headers["authorization"].partition("SignedHeaders=")[2].partition(",")[0]
    assert (name in signed.split(";")) == bool(setting)
    assert b"<ID>old</ID>" in written.body
    assert b"ns0" not in written.body


def _rule(days: int, *, prefix: str = "records/", size: str = "", status: str = "Enabled") -> bytes:
    where = f"<Prefix>{prefix}</Prefix>"
    where = f"<And>{where}{size}</And>" if size else where
    return (
        f"<LifecycleConfiguration><Rule><ID>old</ID><Filter>{where}</Filter>"
        f"<Status>{status}</Status><Expiration><Days>{days}</Days></Expiration></Rule>"
        "</LifecycleConfiguration>"
    ).encode()


async def test_a_rule_that_forgets_too_soon_is_refused(s3_server: S3Server, bucket: str) -> None:
    s3_server.ask("PUT", f"/{bucket}?lifecycle", _rule(3))
    with pytest.raises(ConfigError, match="'old' removes records after 3 days"):
        await opened(made(bucket, s3_server))
    s3_server.ask("PUT", f"/{bucket}?lifecycle", _rule(3, prefix="records/01"))
    with pytest.raises(ConfigError, match="'old' removes records after 3 days"):
        await opened(made(bucket, s3_server))


@pytest.mark.parametrize(
    ("rule", "warnings"),
    [
        (_rule(30), ["oncebridge.s3_rule_removes_all"]),
        (_rule(3, prefix="reports/"), ["oncebridge.s3_without_expiry"]),
        (_rule(3, status="Disabled"), ["oncebridge.s3_without_expiry"]),
        (_rule(30, size="<ObjectSizeLessThan>65536</ObjectSizeLessThan>"), []),
        (_rule(30, prefix="", size="<ObjectSizeLessThan>1000</ObjectSizeLessThan>"), []),
        (
            _rule(3, size="<Tag><Key>tier</Key><Value>low</Value></Tag>"),
            ["oncebridge.s3_without_expiry"],
        ),
    ],
)
async def test_what_a_rule_means_for_us_is_told(
    s3_server: S3Server,
    bucket: str,
    caplog: pytest.LogCaptureFixture,
    rule: bytes,
    warnings: list[str],
) -> None:
    status, _ = s3_server.ask("PUT", f"/{bucket}?lifecycle", rule)
    assert status == 200
    with caplog.at_level(logging.WARNING, "oncebridge"):
        async with made(bucket, s3_server):
            pass
    assert [record.message for record in caplog.records] == warnings


async def test_what_must_stay_longer_than_the_rule_is_too_large_for_it(
    s3_server: S3Server, bucket: str
) -> None:
    store = made(bucket, s3_server)
    await store.migrate()
    async with store:
        await pauses.pause(store, ["orders"], SystemDice())
        assert await pauses.paused(store, ["orders"]) == [True]
        await store.remember(
            Memories.of([Memory(b"short", b"g" * 16, Fate.DELIVERED, 6 * _DAY_MS)])
        )
        (paused,) = [r for r in (await store.scan())[0] if r.key != b"short"]
        sizes = {
            key: len(s3_server.ask("GET", f"/{bucket}/records/{key.hex()}")[1])
            for key in (b"short", paused.key)
        }
        assert sizes[b"short"] < 100
        assert sizes[paused.key] == 64 * 1024
        assert await store.peek([paused.key]) == [paused]
        assert await pauses.resume(store, ["orders"]) == [True]
        assert await pauses.paused(store, ["orders"]) == [False]


async def test_a_window_that_is_longer_than_the_rule_is_told_once(
    s3_server: S3Server, bucket: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = made(bucket, s3_server)
    await store.migrate()
    async with store:
        with caplog.at_level(logging.WARNING, "oncebridge"):
            for number in range(3):
                memory = Memory(b"%d" % number, b"g" * 16, Fate.DELIVERED, 14 * _DAY_MS)
                assert await store.remember(Memories.of([memory])) == [Reply.REMEMBERED]
    assert [record.message for record in caplog.records] == ["oncebridge.s3_window_outlives_rule"]


# --- templates --------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["cloudformation", "terraform"])
def test_a_template_has_the_rule_that_migrating_makes(form: str) -> None:
    text = bucket_template("acme-dedup/events", format=form, window=timedelta(days=14))  # type: ignore[arg-type]
    for part in ("acme-dedup", "oncebridge-events", "events/", "65536", " 15\n", "AES256"):
        assert part in text, part
    for action in ("s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:ListBucket"):
        assert action in text
    assert "{{" not in text
    assert text.count("{") == text.count("}")


def test_a_template_for_a_whole_bucket_has_no_prefix() -> None:
    assert "      object_size_less_than = 65536" in bucket_template(
        "acme-dedup", format="terraform"
    )
    assert 'Prefix: ""' in bucket_template("acme-dedup")


@pytest.mark.parametrize("name", ["ACME", "acme-dedup/a b", "acme-dedup/..", "x--use1-az4--x-s3"])
def test_a_template_for_what_cannot_be_is_refused(name: str) -> None:
    with pytest.raises(ConfigError):
        bucket_template(name)
