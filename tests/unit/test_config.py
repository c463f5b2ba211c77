"""One file, the environment, flags: read into one record, or told what is wrong with them."""

import json
import math
import os
import re
import string
import sys
import tempfile
import tomllib
import types
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Literal, Union, get_args, get_origin

import jsonschema_rs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import Struct
from tests.size import examples

from oncebridge import Gateway
from oncebridge.base.options import Rate, Size, schema, settings_of
from oncebridge.base.secrets import Secret
from oncebridge.errors import ConfigError, ConfigErrors
from oncebridge.events.event import Limits, parse
from oncebridge.genesys.preset import genesys_rules
from oncebridge.service.addresses import BackendAddress, SinkPlace, StorePlace
from oncebridge.service.config import Config, Setup, load, with_sink
from oncebridge.service.reference import json_schema
from oncebridge.sinks.http import HttpSink
from oncebridge.sinks.stdout import StdoutSink
from oncebridge.sources.file import FileSource
from oncebridge.sources.http.source import HttpSource
from oncebridge.stores.memory import MemoryStore
from oncebridge.stores.sqlite.store import SQLiteStore

CANARY = "c4n4ry-5hh"
MEMORY = 'store = "memory:"\ndead = "memory:"\nsink = "-"\n'


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def loading(toml=None, env=None, /, **flags):
    """Load, with `__` for the dot in a flag's name."""
    path = None
    if toml is not None:
        path = Path("some.toml")
        path.write_text(toml, encoding="utf-8")
    named = {name.replace("__", "."): text for name, text in flags.items()}
    return load(path, environment=env or {}, flags=named)


def mistakes(toml=None, env=None, /, **flags):
    """Give every mistake as a line."""
    with pytest.raises(ConfigError) as caught:
        loading(toml, env, **flags)
    error = caught.value
    found = error.problems if isinstance(error, ConfigErrors) else [error]
    assert [path.name for path in Path().iterdir()] == ["some.toml"] * (toml is not None)
    return [str(problem) for problem in found]


# --- in order -----------------------------------------------------------------------------


def test_nothing_at_all_is_a_configuration():
    setup = loading()
    assert isinstance(setup, Setup)
    assert setup.file == ""
    (source,) = setup.config.source
    assert isinstance(source.opened, HttpSource)
    assert isinstance(setup.config.store.opened, SQLiteStore)
    (route,) = setup.routes
    assert isinstance(route.sink.opened, StdoutSink)
    assert (route.name, route.match, route.rules) == ("default", None, ())
    assert route.settings == Config().settings()
    assert not list(Path().iterdir()), "nothing is made before it is opened"


# PRODUCT.md, section 3; queues and DynamoDB are not there yet, and stand in as what is.
EXAMPLE = """
source = "http://127.0.0.1:8080/genesys-events"
store  = "sqlite:genesys-dedup.db"
sink   = "https://crm.example.com/hooks/genesys"
dead   = "sqlite:genesys-dead.db"
preset = "genesys"                              # rules for the real Genesys topics

window = "6d"          # default. 4 d of Genesys re-sends + 24 h of EventBridge retries + margin
lease  = "30s"         # how long a worker may hold an event; extended while it works
mode   = "enforce"     # or "shadow": forward everything, only count what would be dropped
on_store_outage = "hold"         # or "deliver": fail open, each such event tagged and counted

[[rules]]              # first match wins; before the preset's rules
name  = "call status"
match = { source = ["genesys.cloud"], detail-type = [{ prefix = "Conversation" }] }
key    = ["detail.conversation_id", "detail.status", "detail.timestamp"]
quiet  = { entity = "detail.conversation_id", state = "detail.status", for = "500ms" }
latest = { entity = "detail.conversation_id", version = "detail.timestamp" }

[[rules]]
name = "two tiers"
match = { source = ["com.example.orders"] }
tiers = [ { key = "id", window = "5m" }, { key = "content", window = "6d", ignore = ["detail.sentAt"] } ]
"""


def test_the_example_of_the_design_is_read():
    setup = loading(EXAMPLE)
    (route,) = setup.routes
    assert route.name == "default"
    assert [rule.name for rule in route.rules] == [
        *("call status", "two tiers"),
        *(rule.name for rule in genesys_rules()),
    ]
    status, tiers, *_ = route.rules
    assert status.quiet.time == timedelta(milliseconds=500)
    assert status.latest.version == "detail.timestamp"
    assert [tier.window for tier in tiers.tiers] == [timedelta(minutes=5), timedelta(days=6)]
    assert [tier.check for tier in tiers.tiers] == [True, False]
    assert json_validator().is_valid(tomllib.loads(EXAMPLE))


def test_every_route_has_its_own_name_rules_and_settings():
    setup = loading(
        """
        store = "memory:"
        dead = "memory:"
        preset = "genesys"
        order = "entity"
        window = "1h"
        max_attempts = 5

        [[rules]]
        name = "common"

        [[routes]]
        name = "crm"
        sink = { url = "https://crm.example.com/", concurrency = 3 }
        match = { detail-type = [{ prefix = "v2.detail" }] }
        mode = "shadow"
        rate = "10/s"
        sink_timeout = "5s"
        max_attempts = 2
        rules = [{ name = "own", key = "id" }]

        [[routes]]
        name = "log"
        sink = "-"
        order = "none"
        """
    )
    crm, log = setup.routes
    assert isinstance(crm.sink.opened, HttpSink)
    assert crm.sink.opened.concurrency == 3
    assert crm.match.matches({"detail-type": "v2.detail.events"})
    assert [rule.name for rule in crm.rules][:2] == ["own", "common"]
    assert crm.rules[0].tiers[0].window == timedelta(hours=1)
    assert (crm.settings.mode, crm.settings.order, crm.settings.rate) == ("shadow", "entity", 10.0)
    assert (crm.settings.sink_timeout, crm.settings.max_attempts) == (timedelta(seconds=5), 2)
    assert log.rules[0].name == "common"
    assert (log.settings.mode, log.settings.order, log.settings.rate) == ("enforce", "none", None)
    assert (log.settings.max_attempts, log.match) == (5, None)


def test_several_sources():
    setup = loading(
        MEMORY + 'source = ["file:in.ndjson", { url = "http://127.0.0.1:1/", max_body = "1MiB" }]'
    )
    assert [type(place.opened) for place in setup.config.source] == [FileSource, HttpSource]


@pytest.mark.parametrize(
    "sink",
    [
        "https://crm.example.com/hooks",
        f"https://u:{CANARY}@CRM.example.com:8443/hooks/{CANARY}",
        "-",
        "file:out.ndjson",
        "python:builtins:print",
    ],
)
def test_the_only_route_is_called_default_whatever_its_sink(sink):
    assert [route.name for route in loading(MEMORY, sink=sink).routes] == ["default"]
    assert loading(MEMORY, sink=sink, route="crm").routes[0].name == "crm"


def test_the_only_route_of_a_sink_that_is_looked_up_is_called_default(monkeypatch):
    monkeypatch.setenv("HOOK", f"https://crm.example.com/{CANARY}")
    setup = loading(MEMORY, sink="env:HOOK")
    assert (setup.routes[0].name, str(setup.routes[0].sink)) == ("default", "env:HOOK")


def test_another_sink_under_the_same_names():
    setup = loading(MEMORY, route="crm")
    other = with_sink(setup, SinkPlace.of("python:builtins:print"))
    assert (other.routes[0].name, str(other.routes[0].sink)) == ("crm", "python:builtins:print")
    assert setup.routes[0].sink.url == "-"


# --- file, environment, flags: the later wins -----------------------------------------------


def concurrency(setup):
    return setup.routes[0].sink.opened.concurrency


FILE = 'sink = { url = "https://crm.example.com/", concurrency = 1 }\n'


def test_the_environment_wins_over_the_file_and_a_flag_over_both():
    env = {"ONCEBRIDGE_SINK__CONCURRENCY": "2", "ONCEBRIDGE_LEASE": "45s"}
    assert concurrency(loading(FILE)) == 1
    assert concurrency(loading(FILE, env)) == 2
    assert concurrency(loading(FILE, env, sink__concurrency="3")) == 3
    assert loading(f'lease = "31s"\n{FILE}', env).config.lease == timedelta(seconds=45)
    assert loading(f'lease = "31s"\n{FILE}', env, lease="1m").config.lease == timedelta(minutes=1)


def test_an_option_goes_below_an_address_that_is_plain_text_in_whatever_order():
    plain = 'sink = "https://crm.example.com/"'
    assert concurrency(loading(plain, {"ONCEBRIDGE_SINK__CONCURRENCY": "3"})) == 3
    assert concurrency(loading(plain, sink__concurrency="4")) == 4
    env = {
        "ONCEBRIDGE_SINK__CONCURRENCY": "5",
        "ONCEBRIDGE_SINK": "https://crm.example.com/",
    }
    assert concurrency(loading("", env)) == 5
    assert concurrency(loading("", dict(reversed(env.items())))) == 5
    flags = {"sink.concurrency": "6", "sink": "https://crm.example.com/"}
    assert concurrency(load(environment={}, flags=flags)) == 6


def test_an_option_goes_below_a_default_address():
    setup = loading(None, {"ONCEBRIDGE_STORE__BUSY_TIMEOUT": "3s"}, source__max_body="1MiB")
    assert setup.config.store.url == "sqlite:oncebridge.db"
    assert setup.config.source[0].url == "http://127.0.0.1:8080/events"
    assert setup.config.source[0].opened._options.max_body == 1024 * 1024


def test_another_address_of_the_environment_keeps_the_options_of_the_file():
    setup = loading(FILE, {"ONCEBRIDGE_SINK": "https://other.example.com/"})
    assert (setup.routes[0].sink.url, concurrency(setup)) == ("https://other.example.com/", 1)


def test_a_header_and_a_limit_can_be_set_by_flag():
    setup = loading(FILE, sink__headers__Authorization=f"Bearer {CANARY}", limits__max_depth="20")
    assert ("Authorization", f"Bearer {CANARY}") in setup.routes[0].sink.opened._fixed
    assert setup.config.limits == Limits(max_depth=20)


def test_lists_booleans_and_numbers_are_written_as_text():
    setup = loading(
        None,
        {
            "ONCEBRIDGE_SOURCE__API_KEYS": "the-first-of-two-keys, the-other-of-two-keys",
            "ONCEBRIDGE_EXPLAIN": "False",
            "ONCEBRIDGE_BATCH": "7",
            "ONCEBRIDGE_RATE": "90/m",
            "ONCEBRIDGE_BARE": "true",
        },
    )
    assert setup.config.source[0].opened._options.api_keys == tuple(
        Secret(f"the-{which}-of-two-keys") for which in ("first", "other")
    )
    config = setup.config
    assert (config.explain, config.batch, config.rate, config.bare) == (False, 7, 1.5, True)


def test_a_source_may_have_a_comma_in_it():
    setup = loading(None, {"ONCEBRIDGE_SOURCE": "file:a,b.ndjson"})
    assert [place.url for place in setup.config.source] == ["file:a,b.ndjson"]


def test_the_environment_can_name_the_file():
    Path("other.toml").write_text('lease = "1h"')
    setup = load(environment={"ONCEBRIDGE_CONFIG": "other.toml"})
    assert (setup.config.lease, setup.file) == (timedelta(hours=1), "other.toml")
    Path("some.toml").write_text('lease = "2h"')
    setup = load("some.toml", environment={"ONCEBRIDGE_CONFIG": "other.toml"})
    assert (setup.config.lease, setup.file) == (timedelta(hours=2), "some.toml")
    assert load(environment={"ONCEBRIDGE_CONFIG": ""}).file == ""


def test_a_file_that_lies_there_and_is_not_named_is_not_read():
    Path("oncebridge.toml").write_text("nonsense = true")
    assert load(environment={}).file == ""


def test_by_default_the_environment_is_that_of_the_process(monkeypatch):
    monkeypatch.setenv("ONCEBRIDGE_LEASE", "77s")
    assert load().config.lease == timedelta(seconds=77)


def test_what_is_not_ours_in_the_environment_is_left_alone():
    assert loading(None, {"ONCEBRIDGES": "x", "oncebridge_lease": "x", "HOME": "/"})


# A Service named "oncebridge" puts these into every container of its namespace.
def test_what_kubernetes_says_about_a_service_of_our_name_is_no_setting():
    env = {
        "ONCEBRIDGE_SERVICE_HOST": "10.0.0.7",
        "ONCEBRIDGE_SERVICE_PORT": "8080",
        "ONCEBRIDGE_SERVICE_PORT_HTTP": "8080",
        "ONCEBRIDGE_PORT": "tcp://10.0.0.7:8080",
        "ONCEBRIDGE_PORT_8080_TCP": "tcp://10.0.0.7:8080",
        "ONCEBRIDGE_PORT_8080_TCP_PROTO": "tcp",
        "ONCEBRIDGE_PORT_8080_TCP_PORT": "8080",
        "ONCEBRIDGE_PORT_8080_TCP_ADDR": "10.0.0.7",
    }
    assert loading(None, env).config.lease == Config().lease
    (line,) = mistakes(None, {**env, "ONCEBRIDGE_PORTS": "1"})
    assert line.startswith("ONCEBRIDGE_PORTS: no such setting")


# --- the file itself ----------------------------------------------------------------------


def test_a_file_that_is_not_there_says_how_to_get_one():
    with pytest.raises(ConfigErrors, match=r"^missing\.toml: no such file; `oncebridge init`"):
        load("missing.toml", environment={})


def test_a_file_that_cannot_be_read_says_why():
    Path("folder").mkdir()
    Path("latin").write_bytes(b'lease = "\xff"')
    for name, why in (
        ("folder", "IsADirectoryError"),
        ("latin", "UnicodeDecodeError"),
        ("a\0b", "ValueError"),
        ("x" * 5000, "OSError"),
    ):
        with pytest.raises(ConfigErrors, match=f"cannot be read: {why}"):
            load(name, environment={})


def test_an_editor_of_windows_may_have_written_it():
    Path("some.toml").write_bytes(b'\xef\xbb\xbflease = "45s"\r\n')
    assert load("some.toml", environment={}).config.lease == timedelta(seconds=45)


@pytest.mark.parametrize(
    "toml",
    [
        *("lease", "lease = ", 'lease = "30s', "[[rules]", "a = 1\na = 2", "\0", "= 1", "a.b.c"),
        *(f'sink = "{CANARY}', f"sink = {CANARY}", f'a = "{CANARY}"\na = "{CANARY}"'),
    ],
)
def test_what_is_not_toml_says_in_which_line_and_quotes_no_value(toml):
    (line,) = mistakes(toml)
    assert re.match(r"is not TOML: .*\(at (line \d+, column \d+|end of document)\)", line)
    assert CANARY not in line


TOO_LONG = "has a whole number of more than 64 bits, or an exponent of more than 18 digits"


@pytest.mark.parametrize(
    "number", ["1E-325", "1.000000000000000001", "9007199254740993.0", "-1_0.0000000000000000001"]
)
def test_a_pattern_refuses_a_threshold_that_would_be_rounded(number):
    rule = '[[rules]]\nname = "a"\nmatch = { n = [%s] }'
    (line,) = mistakes(rule % f'{{ numeric = [">", {number}] }}')
    assert line.startswith("rules[0].match.n[0].numeric[1]: expected a number that a 64-bit float")
    (line,) = mistakes(rule % f"{{ anything-but = {number} }}")
    assert line.startswith("rules[0].match.n[0].anything-but: expected a number that a 64-bit")
    assert loading(MEMORY + rule % number).routes[0].rules  # equality needs no rounding


def test_a_pattern_compares_with_the_exact_value_that_was_written():
    match = "match = { n = [1.000000000000000001] }"
    (rule,) = loading(f'{MEMORY}[[rules]]\nname = "a"\n{match}').routes[0].rules
    for text, fits in [
        ("1.000000000000000001", True),
        ("1.000000000000000002", False),
        ("1", False),
    ]:
        assert rule.match.matches(parse(f'{{"n":{text},"detail":{{}}}}'.encode()).envelope) is fits


@pytest.mark.parametrize(
    ("toml", "expected"),
    [
        (f"batch = {'9' * 5000}", TOO_LONG),
        (f"batch = 0x{'f' * 5000}", TOO_LONG),
        (f"lease = 0x{'f' * 17}", TOO_LONG),
        (f"a = {'[' * 5000}{']' * 5000}", "is nested more than 100 deep"),
        (f"a = {'[' * 200}{']' * 200}", "is nested more than 100 deep"),
        (f"rules = [{{ match.{'.'.join('a' * 2000)} = ['x'] }}]", "is nested more than 100 deep"),
        (f"[{'.'.join('a' * 5000)}]", "is nested more than 100 deep"),
        (f"batch = 1e-{'9' * 19}", TOO_LONG),
    ],
)
def test_what_toml_has_and_nobody_needs_is_refused(toml, expected):
    assert mistakes(toml) == [expected]


# --- every mistake at once ----------------------------------------------------------------


def test_ten_mistakes_are_ten_lines_and_nothing_is_made():
    toml = f"""
        sink = "https://crm.example.com/"
        store = "memroy:"
        lease = "1s"
        batch = 0
        mode = "shaddow"
        windw = "6d"
        rate = "100"

        [source]
        url = "http://127.0.0.1:8080/"
        max_body = "2 megabytes"
        api_keys = "{CANARY}"

        [limits]
        max_dept = 5

        [[rules]]
        name = "a"
        match = {{ source = "shop" }}
        key = ["detail.["]

        [[rules]]
        name = "a"
        window = "soon"
        match = {{ source = [{{ prefx = "x" }}] }}

        [[routes]]
        sink = "-"

        [[routes]]
        name = "crm"
        sink = {{ url = "https://crm.example.com/", concurency = 3 }}

        [[routes]]
        name = "crm"
        sink = "-"
        order = "entity"
        """
    env = {"ONCEBRIDGE_GRACE": "1 minute", "ONCEBRIDGE_LAESE": "30s"}
    found = mistakes(toml, env, max_attempts="none", log__level="x", routes__name="x")
    expected = [
        "ONCEBRIDGE_GRACE: '1 minute' is not a duration; write a number and a unit: 500ms, 30s, 5m, 36h, 6d",
        "ONCEBRIDGE_LAESE: no such setting; did you mean 'ONCEBRIDGE_LEASE'?",
        "--max-attempts: 'none': must be a whole number",
        "--set log.level: no such setting; allowed: ",
        "--set routes.name: 'routes' has no options",
        "store: 'memroy' is not supported here; did you mean 'memory'?",
        "batch: 0: must be at least 1",
        "mode: 'shaddow': must be one of enforce, shadow; did you mean 'shadow'?",
        "windw: no such setting; did you mean 'window'?",
        "rate: '100': is not a rate; write 100/s, 3000/m or 5000/h",
        "source.max_body: '2 megabytes': is not a size; write a number and a unit: 64KiB, 1MiB, 2GiB",
        'source.api_keys: must be a list of secret: env:NAME, file:PATH, ssm:NAME or secretsmanager:NAME, such as ["env:KEY", "env:OLD_KEY"]',
        "limits.max_dept: no such setting; did you mean 'max_depth'?",
        "rules[0].match.source: expected an array of values",
        "rules[0].key[0]: 'detail.[' is not JMESPath",
        "rules[1].window: 'soon' is not a duration; write a number and a unit: 500ms, 30s, 5m, 36h, 6d",
        "rules[1].match.source[0]: 'prefx' is not one of",
        "rules[1].name: two rules are named 'a'",
        "routes[0].name: is missing",
        "routes[1].sink.concurency: no such setting; did you mean 'concurrency'?",
        "routes[2].name: two routes are named 'crm'",
        "sink: cannot be used with routes, which have a sink each; remove it",
    ]
    unexpected = list(found)
    for line in expected:
        matching = [one for one in found if one.startswith(line)]
        assert len(matching) == 1, (line, found)
        unexpected.remove(matching[0])
    assert not unexpected
    assert CANARY not in str(found)


def test_mistakes_that_need_all_settings_are_told_beside_those_that_do_not():
    found = mistakes(
        """
        batch = "many"
        lease = "1s"
        order = "entity"
        [[rules]]
        name = "a"
        [[rules]]
        name = "a"
        """
    )
    assert [line.partition(":")[0] for line in found] == [
        *("batch", "rules[1].name", "lease", "order")
    ]


def test_what_several_routes_share_is_told_once():
    routes = '[[routes]]\nname = "a"\nsink = "-"\n[[routes]]\nname = "b"\nsink = "-"\n'
    rules = '[[rules]]\nname = "x"\n[[rules]]\nname = "x"\n'
    found = mistakes(f'lease = "1s"\norder = "entity"\n{rules}{routes}')
    assert [line.partition(":")[0] for line in found] == ["rules[1].name", "lease", "order"]


def test_a_check_that_would_need_what_is_wrong_is_left_for_later():
    assert mistakes('lease = "1s"\nmargin = "x"')[0].startswith("margin:")
    assert mistakes('order = "entity"\npreset = "genesis"')[0].startswith("preset:")
    assert mistakes('order = "entity"\n[[rules]]\nname = "a"\nkey = 5')[0].startswith("rules[0]")
    assert mistakes('order = "entity"\nrules = 5')[0].startswith("rules:")
    assert mistakes('sink = "-"\nroutes = 5')[0].startswith("routes:")


@pytest.mark.parametrize(
    ("toml", "expected"),
    [
        (
            'lease = "15s"',
            "lease: 15s is too short: a delivery (10s), its commit (5s) and a margin (1s)",
        ),
        ("max_attempts = 0", "max_attempts: "),
        ("breaker = 0", "breaker: "),
        ('order = "entity"', 'order: "entity" needs a rule with an entity'),
        ('route = "a"\n[[routes]]\nname = "b"\nsink = "-"', "route: cannot be used with routes"),
        ('[[routes]]\nname = "b"\nsink = "-"\nmax_attempts = 0', "routes[0].max_attempts: "),
        ('[[routes]]\nname = "b"\nsink = "-"\norder = "entity"', "routes[0].order: "),
        ('[[routes]]\nname = "b"\nsink = "-"\nmatch = { a = 5 }', "routes[0].match.a: "),
        ('[[routes]]\nsink = "-"\nmatch = { a = 5 }', "routes[0].name: is missing"),
        ('[[routes]]\nname = "b"', "routes[0].sink: is missing"),
        ("routes = [5]", "routes[0]: must be a table with name, sink, "),
        ('[[rules]]\nkey = "id"', "rules[0].name: is missing"),
        ('[[rules]]\nname = "a"\nkey = "contnet"', "rules[0].key: "),
        ('[[rules]]\nname = "a"\nignore = ["["]', "rules[0].ignore[0]: "),
        ('[[rules]]\nname = "a"\nlatest = { version = "a" }', "rules[0].latest.entity: is missing"),
        ('[[rules]]\nname = "a"\nquiet = { entity = "a" }', "rules[0].quiet.state: is missing"),
        ('[[rules]]\nname = "a"\ntiers = []', "rules[0].tiers: must be a list of at least one"),
        ('preset = "genesys"\n[[rules]]\nname = "genesys"', "rules[0].name: two rules are named"),
        ("sink = 5", "sink: must be an address, or a table with url and options"),
        ("sink = { concurrency = 5 }", "sink: must be an address, or a table with url and options"),
        ('source = ["-", "bogus:"]', "source[1]: 'bogus' is not supported here; allowed: "),
        (
            'source = "http://0.0.0.0:80/"',
            "source: other machines can reach 0.0.0.0, and no auth is configured",
        ),
        ('source = "http://127.0.0.1/"', "source: 'http://127.0.0.1/': the port is missing"),
        ('sink = "http://crm.example.com/"', "sink: http:// sends events unencrypted"),
        ('sink = "python:nowhere:x"', "sink: 'python:nowhere:x': ModuleNotFoundError"),
    ],
)
def test_a_single_mistake_names_its_place(toml, expected):
    found = mistakes(toml)
    assert found[0].startswith(expected), found
    is_two = '[[routes]]\nsink = "-"\nmatch' in toml or "quiet = " in toml
    assert len(found) == 1 + is_two, found


def test_different_entities_in_one_rule_are_told_with_its_place():
    rule = """
        [[rules]]
        name = "a"
        entity = "detail.a"
        latest = { entity = "detail.b", version = "detail.v" }
        quiet = { entity = "detail.%s", state = "detail.s", for = "1s" }
        """
    (line,) = mistakes(rule % "c")
    assert line.startswith("rules[0]: has different entities")
    assert loading(rule % "b")
    (line,) = mistakes('order = "entity"\n' + rule % "b")
    assert line.startswith("rules[0]: has different entities")


def test_a_mistake_of_the_environment_or_a_flag_is_named_by_it():
    assert mistakes(None, {"ONCEBRIDGE_LEASE": "1s"})[0].startswith("ONCEBRIDGE_LEASE: 1s is too")
    assert mistakes(None, lease="1s")[0].startswith("--lease: 1s is too short")
    assert mistakes(None, order="entity")[0].startswith('--order: "entity" needs a rule')
    assert mistakes(None, {"ONCEBRIDGE_SINK": "x:y"})[0].startswith("ONCEBRIDGE_SINK: 'x' is no")
    assert mistakes(FILE, sink="x:y")[0].startswith("--sink: 'x' is not supported here")
    assert mistakes(FILE, sink="http://x.example.com")[0].startswith("--sink: http:// sends")
    assert mistakes(FILE, sink__concurrency="x")[0].startswith("--set sink.concurrency: 'x'")
    assert mistakes(FILE, sink__headers__A="a\nb")[0].startswith("sink.headers.A: ")
    routes = '[[routes]]\nname = "a"\nsink = "-"'
    assert mistakes(routes, sink="-")[0].startswith("--sink: cannot be used with routes")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ONCEBRIDGE_", "ONCEBRIDGE_: no such setting; "),
        ("ONCEBRIDGE___", "ONCEBRIDGE___: no such setting; "),
        ("ONCEBRIDGE_SNIK", "ONCEBRIDGE_SNIK: no such setting; did you mean 'ONCEBRIDGE_SINK'?"),
        ("ONCEBRIDGE_SNIK__RATE", "ONCEBRIDGE_SNIK__RATE: no such setting; "),
        ("ONCEBRIDGE_SINK__", "ONCEBRIDGE_SINK__: no such setting; "),
        ("ONCEBRIDGE_SINK__A__B", "sink.a: no such setting; "),
        ("ONCEBRIDGE_LEASE__X", "ONCEBRIDGE_LEASE__X: 'lease' has no options"),
        ("ONCEBRIDGE_RULES__0__NAME", "ONCEBRIDGE_RULES__0__NAME: 'rules' has no options"),
        ("ONCEBRIDGE_RULES", "ONCEBRIDGE_RULES: must be a table with name, match, "),
        ("ONCEBRIDGE_LIMITS", "ONCEBRIDGE_LIMITS: must be a table with max_bytes, max_"),
        ("ONCEBRIDGE_LIMITS__MAX_DEPHT", "ONCEBRIDGE_LIMITS__MAX_DEPHT: no such setting; did you"),
        ("ONCEBRIDGE_SOURCE__MAX_BODY", "ONCEBRIDGE_SOURCE__MAX_BODY: 'x': is not a size"),
        ("ONCEBRIDGE_CONFIG__X", "ONCEBRIDGE_CONFIG__X: no such setting"),
    ],
)
def test_a_variable_that_is_no_setting_is_told(name, expected):
    toml = 'sink = "https://crm.example.com/"'
    (line,) = mistakes(toml, {name: "x"})
    assert line.startswith(expected)


def test_a_variable_below_what_is_not_there_is_named():
    (line,) = mistakes(None, {"ONCEBRIDGE_SINK__CONCURRENCY": "3"})
    assert line.startswith("ONCEBRIDGE_SINK__CONCURRENCY: must be an address, or a table with url")
    (line,) = mistakes(None, {"ONCEBRIDGE_ROUTES": "x"})
    assert line.startswith("ONCEBRIDGE_ROUTES: must be a table with name, sink, ")


def test_one_of_several_sources_cannot_be_changed_from_outside():
    toml = 'source = ["file:a", "file:b"]'
    assert mistakes(toml, {"ONCEBRIDGE_SOURCE__RESUME": "false"}) == [
        "ONCEBRIDGE_SOURCE__RESUME: 'source' is a list in the file; set it there"
    ]
    assert len(loading(toml, source="file:c").config.source) == 1


def test_the_words_name_the_file_and_every_line_is_a_mistake():
    Path("some.toml").write_text("batch = 0\nmode = 5")
    with pytest.raises(ConfigErrors) as caught:
        load("some.toml", environment={})
    assert str(caught.value).splitlines() == [
        "some.toml: batch: 0: must be at least 1",
        "some.toml: mode: 5: must be one of enforce, shadow",
    ]
    assert caught.value.file == "some.toml"


# --- secrets --------------------------------------------------------------------------------


def test_secrets_and_addresses_come_from_the_environment_and_from_files(monkeypatch):
    monkeypatch.setenv("SINK_URL", f"https://u:{CANARY}@crm.example.com/hook?token={CANARY}")
    monkeypatch.setenv("SOME_KEY", f"{CANARY}-variable")
    Path("secret").write_text(f"{CANARY}-in-a-file\n")
    setup = loading(
        """
        store = "memory:"
        source = { url = "http://0.0.0.0:8080/", api_keys = ["env:SOME_KEY", "file:secret"] }
        sink = { url = "env:SINK_URL", headers = { X-Key = "file:secret" } }
        """
    )
    keys = setup.config.source[0].opened._options.api_keys
    assert [key.reveal() for key in keys] == [f"{CANARY}-variable", f"{CANARY}-in-a-file"]
    # After the reference: what it leads to may be secret as a whole, and change with a rotation.
    assert setup.routes[0].name == "default"
    assert CANARY not in repr(setup) + str(setup.routes[0].sink) + repr(setup.config)


@pytest.mark.parametrize(
    "setting",
    [
        f'sink = "https://u:{CANARY}@x.example.com:nan/"',
        f'sink = {{ url = "https://x.example.com", headers = "{CANARY}" }}',
        f'sink = {{ url = "https://x.example.com", headers = {{ A = "{CANARY}\\n" }} }}',
        f'sink = {{ url = "https://x.example.com", headers = {{ Host = "{CANARY}" }} }}',
        f'sink = {{ url = "https://x.example.com", headers = {{ A = ["{CANARY}"] }} }}',
        f'sink = {{ url = "https://x.example.com", sign = "{CANARY}" }}',
        f'sink = {{ url = "https://x.example.com", sign = ["{CANARY}"] }}',
        f'sink = {{ url = "https://u:{CANARY}@x.example.com", headers = {{ Authorization = "x" }} }}',
        f'sink = {{ url = "https://u:{CANARY}@x.example.com", nonsense = 1 }}',
        f'sink = {{ url = "http://u:{CANARY}@x.example.com" }}',
        f'source = {{ url = "http://u:{CANARY}@127.0.0.1:1/", basic = ["{CANARY}"] }}',
        f'source = {{ url = "http://127.0.0.1:1/", oauth = ["{CANARY}"] }}',
        f'source = {{ url = "http://127.0.0.1:1/", bearer = {{ a = "{CANARY}" }} }}',
        f'source = {{ url = "http://127.0.0.1:1/", hmac = "{CANARY}" }}',
        f'source = {{ url = "http://u:{CANARY}@127.0.0.1:1/healthz" }}',
        f'store = "etcd://:{CANARY}@127.0.0.1/0"',
        f'store = "redis://:{CANARY}@127.0.0.1/zero"',
        f'store = "memory:?token={CANARY}"',
        f'dead = "sqs://u:{CANARY}@x"',
        f'dead = "memory://u:{CANARY}@x"',
    ],
)
def test_a_mistake_beside_a_secret_does_not_show_it(setting):
    (line,) = mistakes(setting)
    assert CANARY not in line


# --- fuzz -----------------------------------------------------------------------------------

NAMES = [setting.name for setting in settings_of(Config)]
INNER = ["url", "name", "sink", "match", "rules", "key", "tiers", "window", "quiet", "for", "state"]
INNER += ["entity", "latest", "version", "headers", "api_keys", "max_depth", "concurrency", "zzz"]
TEXTS = ["", "x", "30s", "1ms", "1MiB", "5/s", "true", "7", "-", "memory:", "sqlite:x.db", "file:x"]
TEXTS += ["https://x.example.com", "http://127.0.0.1:1/", "http://[", "python:builtins:print"]
TEXTS += ["python:..:x", "env:HOME", "env:NO_SUCH", "content", "id", "none", "entity", "genesys"]
TEXTS += ["detail.a", "detail.[", "@", "shadow", "https://u:p@h:x/", "a\0b", "\u2100://x", "file:"]
SCALARS = st.one_of(
    st.sampled_from(TEXTS),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=5),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(INNER) | st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=12,
)
TABLES = st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=3), VALUES, max_size=6)
FUZZ = settings(
    max_examples=examples(250), suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def as_toml(value):
    """Write a value as TOML, in line."""
    match value:
        case bool():
            return str(value).lower()
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case float() if math.isnan(value):
            return "nan"
        case float() if math.isinf(value):
            return "inf" if value > 0 else "-inf"
        case list():
            return f"[{', '.join(map(as_toml, value))}]"
        case dict():
            members = [f"{as_toml(name)} = {as_toml(item)}" for name, item in value.items()]
            return f"{{ {', '.join(members)} }}"
    return repr(value)


def file_of(table):
    return "\n".join(f"{as_toml(name)} = {as_toml(value)}" for name, value in table.items())


def try_to_load(data, **more):
    """Load, or raise ConfigError; anything else that comes out is a bug."""
    path = Path(tempfile.gettempdir()) / f"oncebridge-fuzz-{os.getpid()}.toml"
    path.write_bytes(data.encode("utf-8", "replace") if isinstance(data, str) else data)
    try:
        return load(path, **{"environment": {}, **more})
    except ConfigError:
        return None
    finally:
        path.unlink()


@FUZZ
@given(TABLES)
def test_whatever_a_file_holds_only_a_mistake_comes_out(table):
    toml = file_of(table)
    assert tomllib.loads(toml).keys() == table.keys()
    try_to_load(toml)


@FUZZ
@given(st.text(max_size=80) | st.binary(max_size=80))
def test_whatever_text_stands_there_only_a_mistake_comes_out(data):
    try_to_load(data)


@FUZZ
@given(st.integers(0, len(EXAMPLE)), st.integers(0, 12), st.text(string.printable, max_size=6))
def test_whatever_is_scribbled_over_an_example_only_a_mistake_comes_out(at, length, text):
    try_to_load(EXAMPLE[:at] + text + EXAMPLE[at + length :])


PATHS = st.lists(st.sampled_from([*NAMES, *INNER, "", "_", "\0"]), min_size=1, max_size=4)


@FUZZ
@given(
    st.dictionaries(PATHS.map(tuple), SCALARS.map(str), max_size=4),
    st.dictionaries(PATHS.map(tuple), SCALARS.map(str), max_size=4),
    TABLES,
)
def test_whatever_comes_from_outside_only_a_mistake_comes_out(env, flags, table):
    try_to_load(
        file_of(table),
        environment={f"ONCEBRIDGE_{'__'.join(path).upper()}": text for path, text in env.items()},
        flags={".".join(path): text for path, text in flags.items()},
    )


# --- the schema -----------------------------------------------------------------------------


def json_validator():
    return jsonschema_rs.Draft202012Validator(json_schema())


def test_the_schema_is_one():
    for described in (schema(Config), json_schema()):
        jsonschema_rs.meta.validate(
            {"$schema": "https://json-schema.org/draft/2020-12/schema", **described}
        )
        assert json.loads(json.dumps(described)) == described


def test_every_default_is_in_order_by_the_schema():
    described = schema(Config)["properties"]
    table = {n: about["default"] for n, about in described.items() if "default" in about}
    assert {"source", "store", "dead", "lease", "batch", "mode", "explain"} <= table.keys()
    assert json_validator().is_valid(table)
    assert loading(file_of(table)).config.settings() == Config().settings()


WRONG = [5, -1, True, "", "zzz", "bogus:x", [], [5], {}, {"zzz": 1}, 1.5, "1MB", "5/s", "1s"]


def good(kind, doc):
    """Make values that are in order for a declaration."""
    outer = get_origin(kind)
    if outer is Annotated:
        return good(get_args(kind)[0], doc)
    if outer in (Union, types.UnionType):
        return st.one_of([good(k, doc) for k in get_args(kind) if k is not type(None)])
    if outer is Literal:
        return st.sampled_from(get_args(kind))
    if outer in (list, tuple):
        return st.lists(good(get_args(kind)[0], doc), max_size=2)
    if outer is dict:
        return st.dictionaries(st.sampled_from(["a", "b"]), st.just(["x"]), max_size=0)
    if issubclass(kind, BackendAddress):
        return st.sampled_from(ADDRESSES[kind.group])
    if issubclass(kind, Struct):
        return record(kind)
    return {
        str: st.sampled_from(["detail.a", "detail.b"]),
        bool: st.booleans(),
        int: st.integers(int(doc.at_least or 1), int(min(doc.at_most or 1000, 1000))),
        float: st.floats(0, 10),
        Size: st.sampled_from(["1MiB", "64 KiB", "2000000B"]),
        Rate: st.sampled_from(["5/s", "0.5 / m"]),
        timedelta: st.sampled_from(["1s", "2s", "1.5s"]),
        Secret: st.just("x"),
    }[kind]


ADDRESSES = {
    "oncebridge.sources": ["-", "file:in.ndjson", {"url": "-", "resume": False}],
    "oncebridge.stores": ["memory:", "sqlite:x.db", {"url": "memory:", "max_keys": 5}],
    "oncebridge.sinks": ["-", "file:x", {"url": "https://x.example.com", "concurrency": 2}],
    "oncebridge.dead_letters": ["memory:", "sqlite:dead.db", "file:dead.ndjson"],
}


def record(kind, left_out=()):
    values = {
        setting.name: good(setting.kind, setting.doc)
        for setting in settings_of(kind)
        if setting.name not in left_out
    }
    required = {setting.name for setting in settings_of(kind) if setting.required}
    return st.fixed_dictionaries(
        {name: value for name, value in values.items() if name in required},
        optional={name: value for name, value in values.items() if name not in required},
    )


# What only shows when settings are seen together is left out, or made to fit.
SEEN_TOGETHER = (
    *("lease", "order", "rules", "routes", "route", "limits", "genesys", "verify"),
    *("dashboard", "dashboard_token", "dashboard_user_header", "dashboard_proxies"),
    "dashboard_hosts",
)
CONFIGS = record(Config, left_out=SEEN_TOGETHER)
COMPARE = settings(
    max_examples=examples(150), suppress_health_check=[HealthCheck.function_scoped_fixture]
)
PLAIN, FULL = jsonschema_rs.Draft202012Validator(schema(Config)), json_validator()


@COMPARE
@given(CONFIGS)
def test_what_is_in_order_loads_and_suits_the_schema(table):
    assert try_to_load(file_of(table)) is not None, table
    assert PLAIN.is_valid(table)
    assert FULL.is_valid(table)


@COMPARE
@given(CONFIGS, st.sampled_from([*NAMES, "zzz"]), st.sampled_from(WRONG))
def test_one_thing_is_wrong_for_the_schema_and_for_the_loader(table, name, value):
    table = {**table, name: value}
    if name in ("lease", "order", "routes", "route") and value in ("1s", [], "zzz"):
        return  # in order by itself; whether it fits the rest is not the schema's to know
    if name.startswith("dashboard") and isinstance(value, str):
        return  # a text, which the loader looks at more closely
    assert FULL.is_valid(table) == (try_to_load(file_of(table)) is not None), table


RULES = st.fixed_dictionaries(
    {"name": st.sampled_from(["a", "b"])},
    optional={
        "key": st.sampled_from(["content", "id", ["detail.a"], "contnet", [], [5]]),
        "window": st.sampled_from(["1h", "soon", 5]),
        "match": st.sampled_from([{"source": ["x"]}, 5]),
        "on_missing": st.sampled_from(["content", "dead", "drop"]),
        "latest": st.sampled_from([{"entity": "detail.a", "version": "detail.v"}, {}, 5]),
        "scope": st.sampled_from(["source", "organisation", ""]),
        "zzz": st.just(1),
    },
)


@COMPARE
@given(RULES)
def test_a_rule_is_in_order_for_both_or_for_neither(rule):
    table = {"rules": [rule]}
    if rule.get("key") == []:
        return  # only the loader counts
    assert FULL.is_valid(table) == (try_to_load(file_of(table)) is not None)


def test_places_of_the_file_are_those_of_the_record():
    setup = loading(MEMORY)
    assert isinstance(setup.config.store, StorePlace)
    assert isinstance(setup.config.store.opened, MemoryStore)


def test_whoever_brings_the_events_needs_no_source(monkeypatch, tmp_path):
    path = tmp_path / "oncebridge.toml"
    path.write_text(
        'store = "memory:"\ndead = "memory:"\n[source]\nurl = "gopher://x"\nlines = 9\n'
    )
    assert load(path, environment={}, with_source=False).config.source == []
    with pytest.raises(ConfigErrors, match="gopher"):
        load(path, environment={})
    monkeypatch.setitem(sys.modules, "httptools", None)  # it is not installed
    assert Gateway.from_config(path, sink=print).route == "default"
