"""What the Redis store decides before it has spoken to any server."""

import logging
import sys
from binascii import crc_hqx
from datetime import timedelta

import pytest
from hiredis import ReplyError
from hypothesis import example, given
from hypothesis import strategies as st

from oncebridge.base.secrets import Secret
from oncebridge.errors import ConfigError, StoreError, StoreUnavailable
from oncebridge.service.addresses import StorePlace
from oncebridge.stores.api import (
    Commits,
    Extensions,
    Fate,
    Memories,
    Record,
    Releases,
    Wants,
    spread,
)
from oncebridge.stores.redis.address import RedisAddress
from oncebridge.stores.redis.connection import NotPrimary, UnusableServer, error_of
from oncebridge.stores.redis.scripts import (
    LATEST_MS,
    Batch,
    _memo_fields,
    _restore_memo,
    _shorten_memo,
    decode_record,
    encode,
    encode_record,
    read_scripts,
)
from oncebridge.stores.redis.servers import slot_of
from oncebridge.stores.redis.store import RedisOptions, RedisStore

FIT = {
    "redis_version": "7.2.4",
    "role": "master",
    "loading": "0",
    "maxmemory_policy": "noeviction",
    "aof_enabled": "1",
    "cluster_enabled": "0",
}
THERE = ("redis.example", 6379)


# --- addresses ------------------------------------------------------------------------------


def address(**parts) -> RedisAddress:
    given = {"kind": "one", "is_tls": False, "user": "", "password": None, **parts}
    given["password"] = given["password"] and Secret(given["password"])
    return RedisAddress(**given)


@pytest.mark.parametrize(
    ("url", "meant"),
    [
        ("redis://cache", address(hosts=(("cache", 6379),))),
        ("REDIS://cache:7000/3", address(hosts=(("cache", 7000),), db=3)),
        ("redis://cache?db=4", address(hosts=(("cache", 6379),), db=4)),
        ("redis://[::1]:7000", address(hosts=(("::1", 7000),))),
        ("redis://:pw@cache", address(hosts=(("cache", 6379),), password="pw")),
        (
            "rediss://us%40er:p%2Fw%3A%40@cache",
            address(is_tls=True, hosts=(("cache", 6379),), user="us@er", password="p/w:@"),
        ),
        ("redis://a:b@c@cache", address(hosts=(("cache", 6379),), user="a", password="b@c")),
        ("redis://a:/?#,@cache", address(hosts=(("cache", 6379),), user="a", password="/?#,")),
        ("redis+unix:///run/a@b", address(kind="unix", path="/run/a@b")),
        ("redis+unix:///run/redis.sock?db=2", address(kind="unix", path="/run/redis.sock", db=2)),
        (
            "redis+unix://ann:pw@/run/my%20redis",
            address(kind="unix", path="/run/my redis", user="ann", password="pw"),
        ),
        (
            "redis+sentinel://ann:pw@one,two:26380/orders/5",
            address(
                kind="sentinel",
                user="ann",
                password="pw",
                hosts=(("one", 26379), ("two", 26380)),
                service="orders",
                db=5,
            ),
        ),
        (
            "rediss+sentinel://one/orders",
            address(kind="sentinel", is_tls=True, hosts=(("one", 26379),), service="orders"),
        ),
        (
            "redis+cluster://one,two:7001,[fe80::1]:7002",
            address(kind="cluster", hosts=(("one", 6379), ("two", 7001), ("fe80::1", 7002))),
        ),
        (
            "rediss+cluster://one/",
            address(kind="cluster", is_tls=True, hosts=(("one", 6379),)),
        ),
    ],
)
def test_an_address_is_taken_apart(url: str, meant: RedisAddress) -> None:
    assert RedisAddress.parse(url) == meant


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("redis:cache", "starts with redis://"),
        ("rediss+unix:///run/redis.sock", "starts with redis://"),
        ("redis+stream://cache", "starts with redis://"),
        ("redis://", "host or port"),
        ("redis://cache:0", "host or port"),
        ("redis://cache:70000", "host or port"),
        ("redis://one,two", "takes one host"),
        ("redis://ann@cache", "no password"),
        ("redis://ann:secret#word,@cache:x", "host or port"),
        ("redis://cache/orders", "number of a database"),
        ("redis://cache?timeout=3", "'timeout'"),
        ("redis+unix://run/redis.sock", "three slashes"),
        ("redis+sentinel://one", "has no service name"),
        ("redis+cluster://one/3", "no databases"),
    ],
)
def test_an_address_that_cannot_work_is_refused(url: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RedisStore(url)
    assert told in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "scheme",
    ["redis", "rediss", "redis+cluster", "rediss+cluster", "redis+sentinel", "rediss+sentinel"],
)
def test_every_scheme_is_found(scheme: str) -> None:
    place = StorePlace.of(f"{scheme}://cache/{'orders' if 'sentinel' in scheme else ''}")
    assert isinstance(place.opened, RedisStore)
    assert isinstance(StorePlace.of("redis+unix:///run/redis.sock").opened, RedisStore)


# --- options --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "options", "where"),
    [
        ("redis://cache", RedisOptions(prefix=""), "prefix"),
        ("redis://cache", RedisOptions(prefix="a:b"), "prefix"),
        ("redis://cache", RedisOptions(ca_file="ca.pem"), "ca_file"),
        ("redis://cache", RedisOptions(tls_name="x"), "tls_name"),
        ("rediss://cache", RedisOptions(ca_file=""), "ca_file"),
        ("rediss://cache", RedisOptions(key_file="key.pem"), "key_file"),
        ("redis://cache", RedisOptions(sentinel_user="ann"), "sentinel_user"),
        ("redis://cache", RedisOptions(sentinel_password=Secret("x")), "sentinel_password"),
        ("redis://cache", RedisOptions(timeout=timedelta(0)), "timeout"),
        ("redis://cache", RedisOptions(iam_user="svc", iam_cache="orders"), "iam_user"),
        ("redis+cluster://cache", RedisOptions(iam_user="svc", iam_cache="orders"), "iam_user"),
        ("redis+unix:///run/s", RedisOptions(iam_user="svc", iam_cache="orders"), "iam_user"),
        ("rediss+sentinel://s/x", RedisOptions(iam_user="svc", iam_cache="orders"), "iam_user"),
        ("rediss://a:b@cache", RedisOptions(iam_user="svc", iam_cache="orders"), "iam_user"),
        ("rediss://cache", RedisOptions(iam_user="svc"), "iam_user"),
        ("rediss://cache", RedisOptions(iam_cache="orders"), "iam_cache"),
        ("rediss://cache", RedisOptions(iam_region="eu-west-1"), "iam_region"),
        ("rediss://cache", RedisOptions(iam_serverless=True), "iam_serverless"),
        (
            "rediss://cache",
            RedisOptions(iam_user="svc", iam_cache="orders.cache.example"),
            "iam_cache",
        ),
        (
            "redis://cache",
            RedisOptions(wait_replicas=1, wait_timeout=timedelta(seconds=5)),
            "wait_timeout",
        ),
    ],
)
def test_options_that_cannot_work_are_refused(url: str, options: RedisOptions, where: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RedisStore(url, options)
    assert caught.value.where == where


async def test_tls_files_that_cannot_be_used_are_named() -> None:
    for options in (RedisOptions(ca_file="/no/ca.pem"), RedisOptions(cert_file="/no/cert.pem")):
        store = RedisStore("rediss://127.0.0.1:1", options)
        with pytest.raises(ConfigError) as caught:
            await store.open()
        assert caught.value.where in ("ca_file", "cert_file")
        assert "/no/" in str(caught.value)
        with pytest.raises(StoreError, match="/no/"):  # for those who never opened it
            await store.peek([b"key"])
        await store.aclose()


# --- what a server must be ------------------------------------------------------------------


def checked(url: str = "redis://cache", **info: str | None) -> None:
    said = {name: value for name, value in {**FIT, **info}.items() if value is not None}
    RedisStore(url)._check(said, THERE)


@pytest.mark.parametrize("version", ["6.2.0", "6.2.14", "7.0.0", "8.0.1", "10.1"])
def test_new_servers_are_taken(version: str) -> None:
    checked(redis_version=version)


@pytest.mark.parametrize("version", ["6.0.16", "5.0.7", "2.8", "", None])
def test_old_servers_are_refused(version: str | None) -> None:
    with pytest.raises(UnusableServer, match=r"6\.2 or later"):
        checked(redis_version=version)


def test_a_server_of_the_other_kind_is_refused() -> None:
    checked("redis+cluster://cache", cluster_enabled="1")
    with pytest.raises(UnusableServer, match=r"is a node of a cluster; write redis\+cluster://"):
        checked(cluster_enabled="1")
    with pytest.raises(UnusableServer, match="is not a node of a cluster; write redis://"):
        checked("redis+cluster://cache")


def test_a_replica_may_become_the_primary() -> None:
    with pytest.raises(NotPrimary):
        checked(role="slave")


def test_a_server_that_loads_is_waited_for() -> None:
    with pytest.raises(StoreUnavailable, match="loading"):
        checked(loading="1")


def test_where_nothing_is_said_about_eviction_that_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        checked(maxmemory_policy=None)
    assert [record.message for record in caplog.records] == ["oncebridge.redis_eviction_unknown"]


# --- refusals -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "said",
    [
        "OOM command not allowed when used memory > 'maxmemory'.",
        "ERR Error running script (call to f_5): @user_script:12: -OOM command not allowed",
        "OOM command not allowed when used memory > 'maxmemory'. script: f5, on @user_script:1.",
        "READONLY You can't write against a read only replica.",
        "ERR Error running script (call to f_5): @user_script:12: -READONLY You can't write",
        "LOADING Redis is loading the dataset in memory",
        "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
        "CLUSTERDOWN The cluster is down",
        "BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.",
        "MISCONF Redis is configured to save RDB snapshots, but is currently not able to persist",
        "NOREPLICAS Not enough good replicas to write.",
        "TRYAGAIN Multiple keys request during rehashing of slot",
        "MOVED 3999 127.0.0.1:6381",
        "UNBLOCKED force unblock from blocking operation, instance state changed",
        "ERR max number of clients reached",
    ],
)
def test_a_passing_refusal_is_worth_trying_again(said: str) -> None:
    assert isinstance(error_of(ReplyError(said)), StoreUnavailable)


@pytest.mark.parametrize(
    "said",
    [
        "NOAUTH Authentication required.",
        "WRONGPASS invalid username-password pair or user is disabled.",
        "NOPERM this user has no permissions to run the 'evalsha' command",
        "ERR unknown command 'EVALSHA', with args beginning with: 'secret'",
        "BUSYGROUP Consumer Group name already exists",
        "WRONGTYPE Operation against a key holding the wrong kind of value",
    ],
)
def test_a_lasting_refusal_is_not(said: str) -> None:
    problem = error_of(ReplyError(said))
    assert not isinstance(problem, StoreUnavailable)
    assert "secret" not in str(problem)


# --- records as bytes -----------------------------------------------------------------------

UUID = b"3f1c8a52-1c2b-4d3e-8f9a-0123456789ab"
_hashes = st.one_of(st.just(b""), st.binary(min_size=32, max_size=32), st.binary(max_size=99))
_memos = st.one_of(
    st.binary(max_size=99),
    st.builds(lambda rest: b'["' + UUID + b'",' + rest + b"]", st.binary(max_size=40)),
)
_times = st.integers(0, LATEST_MS)


@given(memo=_memos)
@example(memo=b"")
@example(memo=b'["' + UUID + b'",1763200000000]')
@example(memo=b'["' + UUID + b'",]')
@example(memo=b'["' + UUID + b'",')
@example(memo=b'["' + UUID + b'"]')
@example(memo=b'["' + UUID.upper() + b'",1]')
@example(memo=b'["' + UUID.replace(b"a", b"h") + b'",1]')
@example(memo=b'["' + UUID.replace(b"-", b"0") + b'",1]')
@example(memo=b'["' + UUID[::-1] + b'",1]')
def test_a_memo_comes_back_as_it_was(memo: bytes) -> None:
    is_short, kept = _shorten_memo(memo)
    assert (_restore_memo(kept) if is_short else kept) == memo


@given(st.lists(_memos, max_size=6))
@example([b'["' + UUID + b'",1]', b'["' + UUID + b'",2]'])
@example([b'["' + UUID + b'",1]', b'["' + UUID + b'",22]'])
@example([b'["' + UUID + b'",1]', b'["' + UUID + b'",x]'])
@example([b'["' + UUID + b'",1]', b'["' + UUID + b'",1}'])
@example([b'["' + UUID + b'",[]', b'["' + UUID + b'",[]'])
@example([b'["' + UUID + b'",1][', b'"' + UUID + b'",1]'])
@example([b'["' + UUID + b'",h]', b'["' + UUID.upper() + b'",h]'])
def test_memos_are_shortened_together_as_one_by_one(memos: list[bytes]) -> None:
    forms, texts = _memo_fields(memos, len(memos))
    each = [_shorten_memo(memo) for memo in memos]
    assert list(zip(spread(forms, len(memos)), texts, strict=True)) == each


def test_the_usual_memo_takes_half_its_length() -> None:
    memo = b'["' + UUID + b'",1763200000000]'
    is_short, kept = _shorten_memo(memo)
    assert (is_short, len(memo), len(kept)) == (1, 54, 29)


@given(
    until=_times,
    attempts=st.integers(0, 15),
    content=_hashes,
    fate=st.sampled_from(Fate),
    memo=_memos,
    hard=_times,
)
def test_a_done_record_comes_back_as_it_was(
    *, until: int, attempts: int, content: bytes, fate: Fate, memo: bytes, hard: int
) -> None:
    record = Record(b"k", b"", b"g" * 8, until, attempts, content, fate, memo, hard, until)
    assert decode_record(b"k", encode_record(record)) == record


@given(
    token=st.one_of(st.just(b""), st.just(b"t" * 16)),
    until=_times,
    attempts=st.integers(0, 2**32 - 1),
    content=_hashes,
    memo=_memos,
    keep=st.integers(0, 2**48 - 1),
)
def test_an_open_record_comes_back_as_it_was(
    *, token: bytes, until: int, attempts: int, content: bytes, memo: bytes, keep: int
) -> None:
    record = Record(b"k", token, b"g" * 16, until, attempts, content, None, memo, 0, keep)
    assert decode_record(b"k", encode_record(record)) == record


def test_what_is_too_large_is_cut() -> None:
    record = Record(b"k", b"", b"g" * 16, 2**60, 99, b"", Fate.DEAD, b"", 2**60, 2**60)
    read = decode_record(b"k", encode_record(record))
    assert (read.until_ms, read.hard_until_ms) == (LATEST_MS, LATEST_MS)
    assert (read.attempts, read.generation) == (15, b"g" * 8)


@pytest.mark.parametrize("value", [b"", b"\x20", b"\x00" * 40, b"\x20" * 9, b"\xff" * 60])
def test_what_is_no_record_is_not_read_as_one(value: bytes) -> None:
    with pytest.raises(StoreError, match="cannot be read"):
        decode_record(b"k", value)


# --- batches as arguments -------------------------------------------------------------------


def plain_batches(count: int) -> list[Batch]:
    keys = [b"%d" % at for at in range(count)]
    memos = [b'["3f1c8a52-1c2b-4d3e-8f9a-%012x",1763200000000]' % at for at in range(count)]
    token, generation = b"t" * 16, b"g" * 16
    hashes = [bytes(32)] * count
    return [
        Wants(keys, token, generation, 1000, 2000, memos, hashes),
        Commits(keys, generation, Fate.DELIVERED, 1000),
        Releases(keys, token, 1000),
        Extensions(keys, token, 1000),
        Memories(keys, generation, Fate.DELIVERED, 1000, hashes, memos),
    ]


def test_what_the_items_of_a_batch_share_is_sent_once() -> None:
    for one, many in zip(plain_batches(1), plain_batches(100), strict=True):
        assert encode(many)[0] == encode(one)[0]
        assert len(encode(many)[1]) == 100 * len(encode(one)[1])


def test_what_turns_out_to_be_shared_is_sent_once_too() -> None:
    keys, tokens = [b"a", b"b"], (b"t" * 16, b"g" * 16)
    odd = Wants(keys, *tokens, 1, 2, [b"m", b"n"], [b"short", b"hash"])
    assert encode(odd) == (encode(odd.select([0]))[0], [b"\0\5shortm", b"\0\4hashn"])


def test_what_differs_is_sent_for_each_name() -> None:
    wants = Wants([b"a", b"b", b"c"], b"t" * 16, b"g" * 16, [1, 2], 3, b"m", b"", 4, [2, 1])
    terms, own = encode(wants)
    rows = [terms[at : at + 59] for at in range(0, len(terms), 59)]
    assert [row[7] for row in rows] == [1, 1, 2]  # leases
    assert [row[48] for row in rows] == [2, 2, 1]  # names of the event
    assert own == [b"m"] * 3


def test_a_large_batch_takes_as_many_calls_as_a_small_one() -> None:
    def calls(batch: Batch) -> int:
        made = 0

        def count(_frame: object, event: str, _arg: object) -> None:
            nonlocal made
            made += event == "call"

        sys.setprofile(count)
        try:
            encode(batch)
        finally:
            sys.setprofile(None)
        return made

    for few, many in zip(plain_batches(2), plain_batches(200), strict=True):
        assert calls(many) == calls(few)


@pytest.mark.parametrize(("token", "generation"), [(b"t" * 15, b"g" * 16), (b"", b""), (b"", b"g")])
def test_a_claim_needs_names_of_16_bytes(token: bytes, generation: bytes) -> None:
    for wants in (
        Wants([b"k"], token, generation, 1, 1),
        Wants([b"k", b"l"], [b"t" * 16, token], [b"g" * 16, generation], 1, 1),
    ):
        with pytest.raises(StoreError, match="16 bytes"):
            encode(wants)


def test_each_operation_has_a_script() -> None:
    known = read_scripts()
    assert {"claim", "commit", "release", "extend", "remember", "load", "forget"} < known.keys()
    for script in known.values():
        assert b"call('MGET', unpack(KEYS))" in script.source


@pytest.mark.parametrize(
    ("name", "slot"),
    [(b"foo", 12182), (b"bar", 5061), (b"{foo}bar", 12182), (b"x{foo}{bar}", 12182)],
)
def test_slots_are_those_of_redis(name: bytes, slot: int) -> None:
    assert slot_of(name) == slot


@pytest.mark.parametrize("name", [b"{}foo", b"{foo", b"foo}{", b"{}{foo}"])
def test_braces_that_hold_nothing_are_part_of_the_name(name: bytes) -> None:
    assert slot_of(name) == crc_hqx(name, 0) % 16384
