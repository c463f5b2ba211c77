"""Backends are found by the scheme of their address, ours as well as a third party's."""

from importlib.metadata import entry_points, version
from pathlib import Path

import pytest
from msgspec import Struct

import oncebridge
from oncebridge import ConfigError
from oncebridge.base.options import settings_of

ADDRESSES = {
    "oncebridge.sources": {
        "-": "-",
        "file": "file:events.ndjson",
        "http": "http://127.0.0.1:8080/events",
        "https": "https://127.0.0.1:8443/events",
        "kinesis": "kinesis://events",
        "sqs": "sqs://events",
    },
    "oncebridge.stores": {
        "dynamodb": "dynamodb://seen",
        "memory": "memory:",
        "postgresql": "postgresql://db.example.com/events",
        "redis": "redis://redis.example.com",
        "redis+cluster": "redis+cluster://a.example.com,b.example.com:6380",
        "redis+sentinel": "redis+sentinel://a.example.com,b.example.com/main",
        "redis+unix": "redis+unix:///run/redis.sock",
        "rediss": "rediss://redis.example.com",
        "rediss+cluster": "rediss+cluster://a.example.com",
        "rediss+sentinel": "rediss+sentinel://a.example.com/main",
        "s3": "s3://bucket/seen",
        "sqlite": "sqlite:seen.db",
    },
    "oncebridge.sinks": {
        "-": "-",
        "events": "events://default",
        "file": "file:out.ndjson",
        "http": "http://127.0.0.1:9/hook",
        "https": "https://crm.example.com/hook",
        "kinesis": "kinesis://events",
        "postgresql": "postgresql://db.example.com/events",
        "python": "python:builtins:print",
        "sns": "sns:arn:aws:sns:eu-west-1:123456789012:events",
        "sqs": "sqs://events",
    },
    "oncebridge.dead_letters": {
        "file": "file:dead.ndjson",
        "memory": "memory:",
        "sqlite": "sqlite:dead.db",
        "sqs": "sqs://dead",
    },
}
NEEDED = {("oncebridge.sources", "https"): {"tls_cert": "cert.pem"}}
"""Options without which an address cannot be opened."""


def backends(group):
    return {point.name: point.load() for point in entry_points(group=group)}


def test_the_schemes_are_those_that_are_announced():
    for group, addresses in ADDRESSES.items():
        assert {point.name for point in entry_points(group=group)} == addresses.keys()


@pytest.mark.parametrize("group", ADDRESSES)
def test_every_declared_backend_opens_its_address(group, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for scheme, backend in backends(group).items():
        url = ADDRESSES[group][scheme]
        options = getattr(backend, "Options", None)
        needed = NEEDED.get((group, scheme), {})
        if not needed:
            assert isinstance(backend.from_url(url), backend)
        if options is not None:
            assert isinstance(backend.from_url(url, options(**needed)), backend)
    assert not list(tmp_path.iterdir()), "an address that is only named makes no file"


@pytest.mark.parametrize("group", ADDRESSES)
def test_an_address_of_another_kind_is_refused(group):
    for backend in backends(group).values():
        for url in ("ftp://example.com/x", "", "x", ":"):
            with pytest.raises(ConfigError) as caught:
                backend.from_url(url)
            assert caught.value.where == ""


@pytest.mark.parametrize("group", ADDRESSES)
def test_options_are_one_frozen_record_of_declared_settings(group):
    for backend in backends(group).values():
        options = getattr(backend, "Options", None)
        if options is not None:
            assert issubclass(options, Struct)
            assert options.__struct_config__.frozen
            assert not any(setting.required for setting in settings_of(options))
            assert all(setting.doc.text for setting in settings_of(options))


def test_the_version_is_the_same_everywhere_and_has_a_place_in_the_changelog():
    assert version("oncebridge") == oncebridge.__version__
    changelog = (Path(__file__).parents[2] / "CHANGELOG.md").read_text()
    assert f"## [{oncebridge.__version__}]" in changelog or "## [Unreleased]" in changelog
