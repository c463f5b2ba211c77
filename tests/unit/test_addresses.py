"""From an address to the thing itself, ours or a third party's."""

import sys
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Annotated, ClassVar

import pytest
from msgspec import Struct

from oncebridge.base import secrets
from oncebridge.base.options import Doc, Problems, Text
from oncebridge.base.secrets import Address, Secret
from oncebridge.errors import ConfigError, ConfigErrors
from oncebridge.service import addresses as backends
from oncebridge.service.addresses import (
    DeadPlace,
    SinkPlace,
    SourcePlace,
    StorePlace,
    as_table,
    scheme_of,
)
from oncebridge.sinks.http import HttpSink
from oncebridge.stores.memory import MemoryStore
from oncebridge.stores.sqlite.store import SQLiteStore

CANARY = "c4n4ry-5hh"


class AcmeOptions(Struct, frozen=True, kw_only=True):
    region: Annotated[str, Doc("Where.")] = "eu"
    password: Annotated[Secret | None, Doc("Who.")] = None


class AcmeStore:
    """What a third party would bring."""

    Options: ClassVar = AcmeOptions

    def __init__(self, url, options):
        self.url, self.options = url, options

    @classmethod
    def from_url(cls, url, options=None):
        if "bad" in url:
            raise ConfigError("", f"{url!r}: is bad")
        if options.region == "mars":
            raise ConfigError("region", "'mars': must be on this planet")
        return cls(url, options)


class PlainStore:
    """The least that is needed."""

    @classmethod
    def from_url(cls, url):
        return cls()


@pytest.fixture
def third_party(monkeypatch):
    """Install schemes of a third party's."""
    module = ModuleType("acme_store")
    module.AcmeStore, module.PlainStore = AcmeStore, PlainStore
    monkeypatch.setitem(sys.modules, "acme_store", module)
    values = {
        "acme": "acme_store:AcmeStore",
        "plain": "acme_store:PlainStore",
        "lacking": "acme_missing_driver:Store",
        "extra": "acme_missing_driver:Store [redis]",
    }
    points = {n: EntryPoint(n, value, StorePlace.group) for n, value in values.items()}
    monkeypatch.setattr(backends, "_schemes", lambda group: points)


def mistake(place, value, where="store"):
    problems = Problems()
    with problems.caught():
        assert place.read_option(value, where, problems) is None
    (problem,) = problems.found
    return str(problem)


# --- in order -----------------------------------------------------------------------------


def test_an_address_opens_what_it_names():
    assert isinstance(StorePlace.of("memory:").opened, MemoryStore)
    assert isinstance(StorePlace.of("sqlite:seen.db", busy_timeout="1s").opened, SQLiteStore)
    assert isinstance(SinkPlace.of("https://crm.example.com/").opened, HttpSink)
    assert isinstance(SinkPlace.of("HTTPS://crm.example.com/").opened, HttpSink)


def test_opening_an_address_makes_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    StorePlace.of("sqlite:seen.db")
    DeadPlace.of("sqlite:dead.db")
    DeadPlace.of("file:dead.ndjson")
    SinkPlace.of("file:out.ndjson")
    SourcePlace.of("file:in.ndjson")
    assert not list(tmp_path.iterdir())


def test_a_table_holds_the_address_and_its_options():
    problems = Problems()
    place = SinkPlace.read_option(
        {"url": "https://crm.example.com/", "concurrency": 3}, "sink", problems
    )
    assert not problems.found
    assert place.opened.concurrency == 3


def test_a_third_party_brings_a_scheme(third_party, monkeypatch):
    monkeypatch.setenv("ACME_PASSWORD", CANARY)
    place = StorePlace.of("acme://host/x", region="us", password="env:ACME_PASSWORD")
    assert isinstance(place.opened, AcmeStore)
    assert place.opened.options == AcmeOptions(region="us", password=Secret(CANARY))
    assert CANARY not in repr(place) + str(place) + repr(place.opened.options)
    assert isinstance(StorePlace.of("plain:").opened, PlainStore)
    assert StorePlace.option_kinds() == {"acme": AcmeOptions}


def test_an_address_may_stand_in_the_environment(monkeypatch):
    monkeypatch.setenv("CRM_URL", f"https://user:{CANARY}@crm.example.com/?token={CANARY}")
    place = SinkPlace.of("env:CRM_URL")
    assert place.url.startswith("https://user:")
    assert CANARY not in f"{place} {place!r} {[place]}"


def test_a_place_prints_without_its_password():
    place = SinkPlace.of(f"https://user:{CANARY}@crm.example.com/hook")
    assert str(place) == "https://***@crm.example.com/***93c24104"
    assert CANARY not in repr(place)
    assert isinstance(place.url, Address)


def test_the_scheme_of_an_address():
    assert scheme_of("-") == "-"
    assert scheme_of("HTTPS://x") == "https"
    assert scheme_of("memory:") == "memory"
    assert scheme_of("redis+sentinel://x") == "redis+sentinel"
    assert scheme_of("") == ""
    assert as_table("memory:") == {"url": "memory:"}
    assert as_table({"url": "memory:"}) == {"url": "memory:"}
    assert as_table(5) == 5


# --- mistakes -----------------------------------------------------------------------------


@pytest.mark.parametrize("value", [5, None, [], ["memory:"], {}, {"url": 5}, {"max_keys": 3}])
def test_what_is_no_address_is_refused(value):
    assert mistake(StorePlace, value) == (
        "store: must be an address, or a table with url and options"
    )


STORES = ", ".join(sorted(point.name for point in entry_points(group="oncebridge.stores")))


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("memroy:", "store: 'memroy' is not supported here; did you mean 'memory'?"),
        ("etcd://t", f"store: 'etcd' is not supported here; allowed: {STORES}"),
        ("sqlite", "store: 'sqlite': the address of a SQLite store is sqlite:PATH"),
        ("", f"store: is not an address; an address starts with one of {STORES}"),
        ("crm.example.com/x", f"store: is not an address; an address starts with one of {STORES}"),
        ("mem\0ry:", "store: an address cannot have the character NUL"),
        ("sqlite:a\0b", "store: an address cannot have the character NUL"),
    ],
)
def test_an_address_of_an_unknown_kind_says_which_there_are(url, expected):
    assert mistake(StorePlace, url) == expected


def test_an_older_installation_is_told_to_reinstall(monkeypatch):
    with pytest.raises(ConfigError, match="preset: 'genesis' is not registered; reinstall"):
        backends.extension("oncebridge.presets", "genesis", "preset")
    monkeypatch.setattr(secrets, "entry_points", lambda **asked: ())
    with pytest.raises(ConfigError, match="token: 'ssm' is not registered; reinstall"):
        secrets.resolve("ssm:/crm/token", "token")


def test_every_option_that_is_wrong_is_told():
    problems = Problems()
    table = {"url": "https://x.example.com", "concurency": 3, "method": "GET", "keep_alive": 5}
    assert SinkPlace.read_option(table, "routes[1].sink", problems) is None
    assert {problem.where for problem in problems.found} == {
        *("routes[1].sink.concurency", "routes[1].sink.method", "routes[1].sink.keep_alive")
    }
    with pytest.raises(ConfigErrors):
        SinkPlace.of("https://x.example.com", concurency=3, method="GET")


def test_a_mistake_quotes_an_address_as_it_was_written(third_party, monkeypatch):
    monkeypatch.setenv("ACME", f"acme://bad/{CANARY}")
    assert mistake(StorePlace, "env:ACME") == "store: 'env:ACME': is bad"
    assert mistake(StorePlace, f"acme://u:{CANARY}@bad") == "store: 'acme://***@bad': is bad"


def test_a_mistake_names_where_the_text_came_from(third_party):
    bad = Text.of("acme://bad", "ONCEBRIDGE_STORE")
    assert mistake(StorePlace, bad) == "ONCEBRIDGE_STORE: 'acme://bad': is bad"
    assert mistake(StorePlace, {"url": bad}) == "ONCEBRIDGE_STORE: 'acme://bad': is bad"
    mars = {"url": "acme:", "region": Text.of("mars", "--set store.region")}
    assert mistake(StorePlace, mars) == "--set store.region: 'mars': must be on this planet"
    mars = {"url": "acme:", "region": "mars"}
    assert mistake(StorePlace, mars) == "store.region: 'mars': must be on this planet"
    assert mistake(StorePlace, mars, "") == "region: 'mars': must be on this planet"
    assert mistake(StorePlace, {"url": "plain:", "a": 1}) == (
        "store.a: no such setting; there are no settings here"
    )


def test_a_driver_that_is_not_installed_is_named_with_what_to_do(third_party):
    told = "needs a package that is not installed (acme_missing_driver)"
    assert mistake(StorePlace, "lacking:") == (
        f"store: lacking: {told}; pip install 'oncebridge[service]'"
    )
    assert mistake(StorePlace, "extra:") == (
        f"store: extra: {told}; pip install 'oncebridge[redis]'"
    )
    assert "lacking" not in StorePlace.option_kinds()


@pytest.mark.parametrize(
    "found",
    [
        f"crm.example.com/hook?token={CANARY}",
        CANARY,
        f"{CANARY}:x@crm.example.com",
        f"ftp://user:{CANARY}@crm.example.com",
        f"http://user:{CANARY}@crm.example.com/",
        f"https://user:{CANARY}@/",
        f"https://user:{CANARY}@crm.example.com:port/",
        f"https://user:1{CANARY}/x@crm.example.com/",
        f"https://crm.example.com/{CANARY}#fragment",
        f"https://user:{CANARY} @crm.example.com/",
        f"python:{CANARY}",
    ],
)
@pytest.mark.parametrize("place", [SinkPlace, StorePlace, SourcePlace, DeadPlace])
def test_an_address_that_was_looked_up_is_never_quoted_in_a_mistake(monkeypatch, place, found):
    monkeypatch.setenv("SOME_URL", found)
    problems = Problems()
    with problems.caught():
        place.read_option("env:SOME_URL", "sink", problems)
    if place is SinkPlace and found.startswith("python:"):
        return  # a sink is a function there, and its name is no secret
    for problem in problems.found:
        assert CANARY not in str(problem)
    assert problems.found


@pytest.mark.parametrize(
    "url",
    [
        f"http://user:{CANARY}@127.0.0.1/",
        f"http://user:{CANARY}@127.0.0.1:8080/healthz",
        f"http://user:{CANARY}@0.0.0.0:8080/",
        f"http://user:{CANARY}@127.0.0.1:8080/?a=b",
        f"http://user:1{CANARY}/x@127.0.0.1:8080/",
        f"http://user:{CANARY}\u2100@127.0.0.1:8080/",
        f"https://user:{CANARY}@127.0.0.1:8080/",
    ],
)
def test_a_password_in_the_address_of_a_source_is_never_quoted_in_a_mistake(url):
    assert CANARY not in mistake(SourcePlace, url)


# --- describing ---------------------------------------------------------------------------


def test_the_schema_knows_the_options_of_all_that_is_installed():
    bare, table = SinkPlace.option_schema()["anyOf"]
    assert bare["type"] == "string"
    assert {"url", "concurrency", "headers", "sign"} <= table["properties"].keys()
    assert table["required"] == ["url"]
    assert SinkPlace.option_form() == "address, or table with url and options"
