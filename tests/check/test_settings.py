"""Settings, addresses, secrets and files: each fault planted, and found as what it is."""

import os
import sqlite3
import subprocess
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from tests.check.setups import codes, found_in, only, setup_of, written

from oncebridge.check.files import check_files
from oncebridge.check.finding import CODES, Checkup, Severity
from oncebridge.check.secrets import written_out
from oncebridge.check.settings import check_settings
from oncebridge.service.config import load
from oncebridge.stores.sqlite import database as sqlite_file

GENESYS_RULE = """
[[rules]]
name = "mine"
match = {{ source = [{{ prefix = "aws.partner/genesys.com/" }}] }}
{}
"""
STREAM = "arn:aws:kinesis:eu-west-1:123456789012:stream/calls"
IGNORED = 'ignore = ["detail.timestamp", "detail.metadata"]'


async def test_a_clean_setup_has_nothing_to_find_and_says_what_was_looked_at(tmp_path):
    before = sorted(tmp_path.iterdir())
    setup = setup_of(tmp_path)
    checkup = await found_in(setup)
    assert (codes(checkup), checkup.not_checked) == ([], [])
    assert len(checkup.passed) >= 6
    assert sorted(tmp_path.iterdir()) == [*before, tmp_path / "oncebridge.toml"]


@pytest.mark.parametrize(
    ("settings", "code", "severity"),
    [
        ({"window": '"23h"'}, "window-short", "warning"),
        ({"preset": '"genesys"', "window": '"4d"'}, "window-short", "warning"),
        ({"lease": '"1h"'}, "lease-long", "note"),
        ({"max_attempts": "1"}, "attempts-one", "warning"),
        ({"max_attempts": "200", "max_backoff": '"1h"'}, "attempts-outlast", "warning"),
        ({"mode": '"shadow"'}, "shadow", "note"),
        ({"on_store_outage": '"deliver"'}, "outage-deliver", "note"),
        ({"store": '"memory:"'}, "memory-store", "error"),
        ({"dead": '"memory:"'}, "memory-dead", "error"),
        (
            {"sink": '{ url = "http://crm.example.com/", allow_http = true }'},
            "sink-plain",
            "warning",
        ),
        (
            {"sink": '{ url = "https://crm.example.com/", idempotency_key = "off" }'},
            "sink-no-key",
            "warning",
        ),
        ({"sink": '"http://localhost:18080/events"'}, "loop", "error"),
    ],
)
async def test_each_fault_is_found_and_nothing_else(tmp_path, settings, code, severity):
    finding = only(await found_in(setup_of(tmp_path, **settings)))
    assert (finding.code, finding.severity) == (code, severity)
    assert finding.seen
    assert finding.why
    assert finding.fix
    assert finding.docs == f"docs/check.md#{code}"


async def test_an_operators_trail_is_missed(tmp_path):
    finding = only(await found_in(setup_of(tmp_path, without="audit")))
    assert finding.code == "audit-missing"
    assert "the last 20 actions on each event and route, for 90 days" in finding.why


# --- windows ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "is_short"),
    [
        (f'window = "4d"\n{IGNORED}', True),
        (f'window = "5d"\n{IGNORED}', False),
        # what is published again has another id, so the other tier has to know it
        (
            f'tiers = [{{ key = "id", window = "6d" }}, {{ window = "5m", {IGNORED} }}]',
            True,
        ),
        (
            f'tiers = [{{ key = "id", window = "5m" }}, {{ window = "6d", {IGNORED} }}]',
            False,
        ),
    ],
)
async def test_a_rule_for_genesys_outlasts_five_days(tmp_path, rule, is_short):
    setup = setup_of(tmp_path, GENESYS_RULE.format(rule), preset='"genesys"')
    checkup = await found_in(setup)
    assert codes(checkup) == (["window-short"] if is_short else [])
    if is_short:
        assert only(checkup).subject == "rule mine"
        assert 'window = "6d"' in only(checkup).fix


async def test_others_outlast_a_day_by_any_of_their_tiers(tmp_path):
    tiers = '[[rules]]\nname = "o"\nmatch = { source = ["com.example"] }\n'
    tiers += 'tiers = [{ key = "id", window = "1d" }, { window = "5m" }]'
    assert codes(await found_in(setup_of(tmp_path, tiers))) == []
    short = tiers.replace('"1d"', '"23h"')
    assert codes(await found_in(setup_of(tmp_path, short))) == ["window-short"]


async def test_one_window_for_all_is_told_once(tmp_path):
    rules = "".join(
        f'[[rules]]\nname = "r{n}"\nmatch = {{ source = ["s{n}"] }}\n' for n in range(3)
    )
    finding = only(await found_in(setup_of(tmp_path, rules, window='"1h"')))
    assert finding.subject == "window"
    assert "rule r0, rule r1, rule r2, events that no rule matches" in finding.seen


async def test_one_window_gets_one_answer_that_suits_all(tmp_path):
    rules = '[[rules]]\nname = "r"\nmatch = { source = ["com.example"] }\n'
    finding = only(await found_in(setup_of(tmp_path, rules, window='"1h"', preset='"genesys"')))
    assert finding.code == "window-short"
    assert 'window = "6d"' in finding.fix


async def test_what_comes_from_files_comes_once(tmp_path):
    setup = setup_of(
        tmp_path, without="audit", source='"file:in.ndjson"', store='"memory:"', window='"1h"'
    )
    assert codes(await found_in(setup)) == []


async def test_attempts_are_remembered_for_as_long_as_the_window(tmp_path):
    rule = '[[rules]]\nname = "r"\nmatch = { source = ["a"] }\nwindow = "25h"\n'
    setup = setup_of(tmp_path, rule, max_backoff='"26h"', backoff='"26h"', max_attempts="2")
    assert codes(await found_in(setup)) == ["attempts-outlast", "backoff-window"]
    with_spool = setup_of(
        tmp_path,
        rule,
        max_backoff='"26h"',
        backoff='"26h"',
        max_attempts="2",
        spool=f'"{tmp_path}/spool.db"',
    )
    assert codes(await found_in(with_spool)) == ["backoff-window"]


# --- the rest of the settings -------------------------------------------------------------------


async def test_bare_events_want_a_rule_that_is_for_them(tmp_path):
    rule = '[[rules]]\nname = "r"\nmatch = { source = ["a"] }\n'
    assert codes(await found_in(setup_of(tmp_path, rule, bare="true"))) == ["bare-unneeded"]
    assert codes(await found_in(setup_of(tmp_path, bare="true"))) == []
    by_detail = rule.replace('source = ["a"]', 'detail = { kind = ["x"] }')
    assert codes(await found_in(setup_of(tmp_path, by_detail, bare="true"))) == []
    preset = setup_of(tmp_path, rule, bare="true", preset='"genesys"')
    assert codes(await found_in(preset)) == []


async def test_what_no_route_is_for_had_better_be_kept(tmp_path):
    route = '[[routes]]\nname = "crm"\nsink = "https://crm.example.com/"\n'
    match = 'match = { source = ["a"] }\n'
    setup = setup_of(tmp_path, route + match, without="sink", unrouted='"discard"')
    assert codes(await found_in(setup)) == ["unrouted-discard"]
    for_all = setup_of(tmp_path, route, without="sink", unrouted='"discard"')
    assert codes(await found_in(for_all)) == []


async def test_several_routes_on_one_store_are_fine_and_shared_rules_told_once(tmp_path):
    routes = "".join(
        f'[[routes]]\nname = "r{n}"\nsink = "https://{n}.example.com/"\n' for n in range(2)
    )
    assert codes(await found_in(setup_of(tmp_path, routes, without="sink"))) == []
    rule = '[[rules]]\nname = "r"\nkey = ["detail.orderId"]\n'
    assert codes(await found_in(setup_of(tmp_path, rule + routes, without="sink"))) == [
        "key-coarse"
    ]


async def test_the_rules_of_a_route_are_looked_at_too(tmp_path):
    route = '[[routes]]\nname = "crm"\nsink = "https://crm.example.com/"\n'
    route += '[[routes.rules]]\nname = "r"\nkey = ["detail.orderId"]\n'
    setup = setup_of(tmp_path, route, without="sink", preset='"genesys"')
    assert codes(await found_in(setup)) == ["key-coarse", "rule-unreachable"]


async def test_senders_that_are_allowed_tell_that_genesys_sends(tmp_path):
    allow = '[allow]\nsources = ["aws.partner/genesys.com/*"]\n'
    assert codes(await found_in(setup_of(tmp_path, allow))) == ["content-volatile"]
    assert codes(await found_in(setup_of(tmp_path, allow, preset='"genesys"'))) == []


@pytest.mark.parametrize("scheme", ["sqs", "kinesis"])
async def test_a_worker_wants_a_health_address_and_a_store_that_others_share(tmp_path, scheme):
    source = f'"{scheme}://orders"'
    found = await found_in(setup_of(tmp_path, source=source))
    assert codes(found) == ["health-missing", "sqlite-one-host"]
    assert {one.severity for one in found.findings} == {Severity.NOTE}
    healthy = setup_of(tmp_path, source=source, health='"http://127.0.0.1:8081"')
    assert codes(await found_in(healthy)) == ["sqlite-one-host"]


# --- in circles ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "sink", "is_loop"),
    [
        ("http://127.0.0.1:9000/events", "http://localhost:9000/events", True),
        ("http://127.0.0.1:9000/events", "http://127.0.0.1:9000/other", False),
        ("http://127.0.0.1:9000/events", "http://127.0.0.1:9001/events", False),
        ("http://127.0.0.1:80/", "http://127.0.0.1", True),
        ("sqs://orders", "sqs:arn:aws:sqs:eu-west-1:123456789012:orders", True),
        (
            "sqs:https://sqs.eu-west-1.amazonaws.com/123456789012/orders",
            "sqs:arn:aws:sqs:eu-west-1:123456789013:orders",
            False,
        ),
        ("sqs://orders", "sqs://orders-done", False),
        ("kinesis://calls", "kinesis://calls", True),
        ("kinesis://calls", f"kinesis:{STREAM}", True),
        (f"kinesis:{STREAM}", "kinesis://calls?region=eu-west-1", True),
        ("kinesis://calls?region=us-east-1", f"kinesis:{STREAM}", False),
        # where the address says no Region, the environment does
        ("kinesis://calls", f"kinesis:{STREAM.replace('eu-west-1', 'us-east-1')}", False),
        ("sqs://orders", "sqs:arn:aws:sqs:us-east-1:123456789012:orders", False),
        (f"kinesis:{STREAM}", f"kinesis:{STREAM.replace('9012', '9013')}", False),
        ("kinesis://calls", "kinesis://calls-done", False),
        ("file:./a.ndjson", "file:a.ndjson", True),
        ("file:a.ndjson", "file:b.ndjson", False),
        ("-", "-", False),
    ],
)
async def test_a_sink_that_leads_back_is_an_error(tmp_path, monkeypatch, source, sink, is_loop):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    health = '"http://127.0.0.1:8081"'
    setup = setup_of(tmp_path, source=f'"{source}"', sink=f'"{sink}"', health=health)
    found = [one for one in (await found_in(setup)).findings if one.code == "loop"]
    assert bool(found) == is_loop


@pytest.mark.parametrize(
    ("source", "sink", "is_loop"),
    [
        ('region = "eu-west-1"', 'region = "eu-west-1"', True),
        ('region = "eu-west-1"', 'region = "us-east-1"', False),
        ('profile = "one"', 'profile = "one"', True),
        ('profile = "one"', 'profile = "two"', False),  # the account may be another
        ('endpoint = "http://127.0.0.1:1"', 'endpoint = "http://127.0.0.1:2"', False),
    ],
)
@pytest.mark.parametrize("url", ["sqs://calls", "kinesis://calls"])
async def test_options_tell_apart_what_has_the_same_name(tmp_path, url, source, sink, is_loop):
    setup = setup_of(
        tmp_path,
        source=f'{{ url = "{url}", {source} }}',
        sink=f'{{ url = "{url}", {sink} }}',
    )
    assert ("loop" in codes(await found_in(setup))) == is_loop


async def test_dead_letters_lead_neither_back_nor_to_the_sink(tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    back = setup_of(tmp_path, source='"sqs://orders"', dead='"sqs://orders"')
    assert "loop" in codes(await found_in(back))
    monkeypatch.chdir(tmp_path)
    mixed = setup_of(tmp_path, sink='"file:out.ndjson"', dead='"file:out.ndjson"')
    assert codes(await found_in(mixed)) == ["dead-is-sink"]


async def test_a_spool_is_for_http_and_has_a_file_of_its_own(tmp_path):
    spool = f'"{tmp_path}/spool.db"'
    assert codes(await found_in(setup_of(tmp_path, spool=spool))) == []
    shared = setup_of(tmp_path, spool=f'"{tmp_path}/seen.db"')
    assert codes(await found_in(shared)) == ["spool-shared"]
    unused = setup_of(tmp_path, source='"file:in.ndjson"', spool=spool)
    assert codes(await found_in(unused)) == ["spool-unused"]


# --- secrets ------------------------------------------------------------------------------------

CANARY = "canary-3f6c"


async def test_secrets_in_the_file_are_named_by_their_place_and_never_shown(tmp_path):
    sink = f'{{ url = "https://crm.example.com/?token={CANARY}", '
    sink += f'headers = {{ Authorization = "{CANARY}", X-Env = "prod" }} }}'
    store = f'"redis://:{CANARY}@127.0.0.1:1"'
    setup = setup_of(tmp_path, sink=sink, store=store)
    checkup = await found_in(setup)
    (finding,) = [one for one in checkup.findings if one.code == "secret-written"]
    assert finding.seen == "secrets in plain text: store, sink.url, sink.headers.Authorization"
    assert codes(checkup) == ["secret-written", "store-unreachable"]
    assert CANARY not in repr(checkup.findings) + repr(checkup.not_checked) + repr(checkup.passed)


async def test_a_file_with_secrets_that_others_may_read_is_found(tmp_path):
    path = written(tmp_path, sink=f'"https://user:{CANARY}@crm.example.com/"')
    path.chmod(0o640)
    found = await found_in(load(path, environment={}))
    assert codes(found) == ["config-readable", "secret-written"]
    assert f"chmod 600 {path}" in found.worst_first()[0].fix


async def test_a_file_without_secrets_may_be_read_by_anybody(tmp_path):
    path = written(tmp_path)
    path.chmod(0o644)
    assert codes(await found_in(load(path, environment={}))) == []


def test_every_kind_of_secret_is_found_and_references_are_none():
    table = {
        "source": [
            {"url": "http://127.0.0.1:1/a", "api_keys": ["env:KEY", "abc"], "basic": ["u:p"]},
            "http://127.0.0.1:2/b",
        ],
        "store": "redis://127.0.0.1",
        "sink": {
            "url": "https://example.com",
            "headers": {"X-Api-Key": "abc", "Cookie": "file:/x", "X-Trace": "on"},
            "sign": ["whsec_abc", "ssm:/a", "secretsmanager:b"],
        },
        "genesys": {"client_id": "abc", "client_secret": "def"},
        "routes": [{"name": "a", "sink": {"url": "https://a:b@example.com/", "concurrency": 3}}],
        "dead": "sqlite:dead.db",
        "unknown": "abc",
    }
    assert list(written_out(table)) == [
        "source[0].api_keys[1]",
        "source[0].basic[0]",
        "sink.headers.X-Api-Key",
        "sink.sign[0]",
        "genesys.client_secret",
        "routes[0].sink.url",
    ]


def test_a_user_without_a_password_is_no_secret():
    assert not list(written_out({"store": "postgresql://oncebridge@db.example.com/events"}))
    assert list(written_out({"store": "postgresql://oncebridge:x@db.example.com/events"}))


# --- files --------------------------------------------------------------------------------------


async def test_a_directory_that_is_not_there_is_found_and_not_made(tmp_path):
    setup = setup_of(tmp_path, store='"sqlite:deep/seen.db"')
    finding = only(await found_in(setup))
    assert (finding.code, finding.severity) == ("directory-missing", Severity.ERROR)
    assert not (tmp_path / "deep").exists()


def ran(fix: str) -> None:
    """Run what a fix says to run."""
    _, *lines = fix.splitlines()
    subprocess.run(["bash", "-euo", "pipefail", "-c", "\n".join(lines)], check=True)


async def test_commands_name_odd_files_as_a_shell_reads_them(tmp_path):
    odd = tmp_path / "a b;touch x'y"
    finding = only(await found_in(setup_of(tmp_path, dead=f'"file:{odd}/dead.ndjson"')))
    ran(finding.fix)
    assert odd.is_dir()
    assert codes(await found_in(setup_of(tmp_path, dead=f'"file:{odd}/dead.ndjson"'))) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == [odd.name, "oncebridge.toml"]


async def test_the_mode_of_an_odd_file_is_put_right_by_its_command(tmp_path, monkeypatch):
    odd = tmp_path / "a b"
    odd.mkdir()
    path = written(odd, sink=f'"https://user:{CANARY}@crm.example.com/"').rename(odd / "-x.toml")
    path.chmod(0o644)
    monkeypatch.chdir(odd)
    setup = load("-x.toml", environment={})
    (finding,) = [one for one in (await found_in(setup)).findings if one.code != "secret-written"]
    ran(finding.fix)
    assert path.stat().st_mode & 0o777 == 0o600


@contextmanager
def as_nobody() -> Iterator[Path]:
    """Go on as somebody who owns nothing, in a directory of somebody else."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        if os.geteuid() == 0:
            place.chmod(0o755)
            os.seteuid(65534)
            try:
                yield place
            finally:
                os.seteuid(0)
        else:
            place.chmod(0o555)
            try:
                yield place
            finally:
                place.chmod(0o755)


def test_what_cannot_be_written_to_is_found(tmp_path):
    with as_nobody() as place:
        flags = {"store": f"sqlite:{place}/seen.db", "dead": f"sqlite:{place}/seen.db"}
        setup = load(environment={}, flags=flags | {"sink": "https://crm.example.com/"})
        checkup = Checkup()
        check_files(setup, checkup)
    assert codes(checkup) == ["not-writable", "not-writable"]


def test_files_of_events_are_not_for_everybody(tmp_path):
    def found() -> list[str]:
        checkup = Checkup()
        check_files(setup_of(tmp_path, dead=f'"file:{letters}"'), checkup)
        return codes(checkup)

    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        place.chmod(0o755)
        letters = place / "dead.ndjson"
        letters.touch()
        letters.chmod(0o644)
        assert found() == ["file-readable"]
        letters.chmod(0o640)
        assert found() == []
        letters.chmod(0o644)
        place.chmod(0o700)  # nobody else gets there
        assert found() == []


def test_the_log_of_a_sqlite_file_holds_events_too():
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        place.chmod(0o755)
        for end, mode in (("", 0o600), ("-wal", 0o644)):
            (place / f"dead.db{end}").touch()
            (place / f"dead.db{end}").chmod(mode)
        checkup = Checkup()
        check_files(setup_of(place), checkup)
        found = only(checkup)
        assert found.code == "file-readable"
        assert "dead.db-wal (mode 0644)" in found.seen
        assert found.fix.endswith(f"chmod 600 {place / 'dead.db-wal'}")


@pytest.mark.parametrize(
    ("left", "severity"), [(2 << 30, None), (1 << 29, Severity.WARNING), (50 << 20, Severity.ERROR)]
)
def test_a_disk_that_is_nearly_full_is_told_once(tmp_path, left, severity):
    checkup = Checkup()
    check_files(setup_of(tmp_path), checkup, free=lambda _: left)
    assert [(one.code, one.severity) for one in checkup.findings] == (
        [("disk-space", severity)] if severity else []
    )


async def test_a_network_file_system_is_an_error(tmp_path, monkeypatch):
    fake = tmp_path / "mounts"
    fake.write_text(f"36 35 98:0 / {tmp_path} rw - nfs4 server:/x rw\n")
    found = partial(sqlite_file.file_system, mounts=fake)
    monkeypatch.setattr(sqlite_file, "file_system", found)
    checkup = await found_in(setup_of(tmp_path))
    assert codes(checkup) == ["sqlite-network", "sqlite-network"]  # store and dead letters
    assert "nfs4" in checkup.findings[0].seen


async def test_a_file_in_use_is_looked_at_and_left_as_it_is(tmp_path):
    setup = setup_of(tmp_path)
    store = setup.config.store.opened
    await store.open()
    try:
        before = {path.name: path.read_bytes() for path in tmp_path.glob("seen.db*")}
        assert len(before) == 3
        assert codes(await found_in(setup_of(tmp_path))) == []
        assert set(before) == {path.name for path in tmp_path.glob("seen.db*")}
        assert (tmp_path / "seen.db").read_bytes() == before["seen.db"]
    finally:
        await store.aclose()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert codes(await found_in(setup_of(tmp_path))) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def made(path: Path, *statements: str) -> None:
    with sqlite3.connect(path) as db:
        for statement in statements:
            db.execute(statement)
    db.close()


async def test_a_file_of_another_layout_is_an_error(tmp_path):
    table = "CREATE TABLE oncebridge_schema (name TEXT PRIMARY KEY, version INTEGER NOT NULL)"
    fill = "INSERT INTO oncebridge_schema VALUES ('records', 7)"
    made(tmp_path / "seen.db", "PRAGMA journal_mode = WAL", table, fill)
    finding = only(await found_in(setup_of(tmp_path)))
    assert finding.code == "sqlite-layout"
    assert "layout 7" in finding.seen
    assert "copy" not in finding.fix  # it would refuse the file as well
    (line,) = finding.fix.splitlines()[1:]
    new = tomllib.loads(line)["store"]
    assert codes(await found_in(setup_of(tmp_path, store=f'"{new}"'))) == []


async def test_what_was_acknowledged_is_not_left_behind_in_a_spool(tmp_path):
    table = "CREATE TABLE oncebridge_schema (name TEXT PRIMARY KEY, version INTEGER NOT NULL)"
    spool = tmp_path / "spool.db"
    fill = "INSERT INTO oncebridge_schema VALUES ('spool', 99)"
    made(spool, "PRAGMA journal_mode = WAL", table, fill)
    finding = only(await found_in(setup_of(tmp_path, spool=f'"{spool}"')))
    assert finding.code == "sqlite-layout"
    assert "start a new file" not in finding.seen + finding.fix
    assert "until the spool is empty" in finding.fix


async def test_a_file_without_its_write_ahead_log_is_noted(tmp_path):
    setup = setup_of(tmp_path)
    await setup.config.store.opened.open()
    await setup.config.store.opened.aclose()
    made(tmp_path / "seen.db", "PRAGMA journal_mode = DELETE")
    finding = only(await found_in(setup_of(tmp_path)))
    assert (finding.code, finding.severity) == ("sqlite-journal", Severity.NOTE)
    ran(finding.fix)
    assert codes(await found_in(setup_of(tmp_path))) == []


@pytest.mark.parametrize("how", ["text", "torn"])
async def test_a_file_that_is_damaged_is_an_error(tmp_path, how):
    path = tmp_path / "seen.db"
    if how == "text":
        path.write_text("this is no database\n" * 100)
    else:
        rows = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n WHERE x < 5000)"
        made(path, "CREATE TABLE t (x, y)", f"INSERT INTO t {rows} SELECT x, hex(x) FROM n")
        content = bytearray(path.read_bytes())
        content[8192:16384] = bytes(range(256)) * 32
        path.write_bytes(content)
    finding = only(await found_in(setup_of(tmp_path)))
    assert finding.code == "sqlite-damaged"
    assert (".dump" in finding.fix) == (how == "torn")  # of a text there is nothing to save
    ran(finding.fix)
    if how == "torn":
        with sqlite3.connect(f"{path}.new") as db:
            ((rows,),) = db.execute("SELECT count(*) FROM t")
        db.close()
        assert 0 < rows < 5000


# --- proxies ------------------------------------------------------------------------------------


async def test_the_proxy_of_a_sink_is_named(tmp_path, proxies_of):
    proxies_of(HTTPS_PROXY="http://worker:hush@proxy.example:3128")
    checkup = await found_in(setup_of(tmp_path))
    (passed,) = [one for one in checkup.passed if "proxy" in one.what]
    assert passed.subject == "target crm.example.com"
    assert passed.what == "uses the proxy proxy.example:3128"
    proxies_of(NO_PROXY="example.com")
    checkup = await found_in(setup_of(tmp_path))
    assert [one for one in checkup.passed if "proxy" in one.what] == []


async def test_a_proxy_that_cannot_be_used_is_an_error(tmp_path, proxies_of):
    proxies_of(ALL_PROXY="socks5://worker:hush@proxy.example:1080")
    finding = only(await found_in(setup_of(tmp_path)))
    assert (finding.code, finding.subject) == ("proxy-unusable", "target crm.example.com")
    assert "ALL_PROXY in the environment is a SOCKS proxy" in finding.seen
    assert finding.fix.endswith("\nNO_PROXY=crm.example.com")
    assert "hush" not in str(finding)


# --- all of them --------------------------------------------------------------------------------


def test_every_code_is_explained_in_the_docs_and_in_its_table():
    page = (Path(__file__).parents[2] / "docs" / "check.md").read_text()
    headings = {line.removeprefix("### ") for line in page.splitlines() if line.startswith("### ")}
    assert headings == CODES  # a finding of another code could not be ignored
    assert {code for code in CODES if f"| [`{code}`](#{code}) |" not in page} == set()


def test_settings_alone_ask_nobody(tmp_path):
    checkup = Checkup()
    check_settings(setup_of(tmp_path, store='"redis://store.invalid"'), checkup)
    assert (codes(checkup), checkup.not_checked) == ([], [])
