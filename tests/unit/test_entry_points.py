"""Backends are found by the scheme of their address, ours as well as a third party's."""

from importlib.metadata import entry_points, version
from pathlib import Path

import pytest

import oncebridge
from oncebridge import ConfigError

ADDRESSES = {
    "oncebridge.stores": {"memory": "memory:", "sqlite": "sqlite:seen.db"},
    "oncebridge.sinks": {"python": "python:builtins:print"},
    "oncebridge.dead_letters": {"memory": "memory:", "sqlite": "sqlite:dead.db"},
}


@pytest.mark.parametrize("group", ADDRESSES)
def test_every_declared_backend_opens_its_address(group):
    declared = {point.name: point.load() for point in entry_points(group=group)}
    assert declared.keys() == ADDRESSES[group].keys()
    for scheme, opens in declared.items():
        assert opens(ADDRESSES[group][scheme]) is not None


@pytest.mark.parametrize("group", ADDRESSES)
def test_an_address_of_another_kind_is_refused(group):
    for point in entry_points(group=group):
        with pytest.raises(ConfigError):
            point.load()("ftp://example.com/x")


def test_the_version_is_the_same_everywhere_and_has_a_place_in_the_changelog():
    assert version("oncebridge") == oncebridge.__version__
    changelog = (Path(__file__).parents[2] / "CHANGELOG.md").read_text()
    assert f"## [{oncebridge.__version__}]" in changelog or "## [Unreleased]" in changelog
