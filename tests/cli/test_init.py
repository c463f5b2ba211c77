"""A starter configuration is worth what it says: it is loaded here, every line of it."""

import re
import tomllib

import pytest

from oncebridge.cli.init import KINDS, starter
from oncebridge.service.config import load


def loaded(text: str, tmp_path):
    path = tmp_path / "starter.toml"
    path.write_text(text)
    return load(path, environment={})


def test_the_http_starter_works_as_it_stands(tmp_path):
    setup = loaded(starter("http"), tmp_path)
    assert [str(place) for place in setup.config.source] == ["http://127.0.0.1:8080/events"]
    assert [str(route.sink) for route in setup.routes] == ["-"]


@pytest.mark.parametrize("kind", ["worker", "lambda"])
def test_a_starter_for_aws_is_right_as_it_stands(kind, tmp_path):
    setup = loaded(starter(kind), tmp_path)
    assert setup.config.preset == "genesys"
    assert str(setup.config.store) == "dynamodb://genesys-dedup"
    assert str(setup.config.dead) == "sqs://genesys-dead"
    if kind == "worker":
        assert [str(place) for place in setup.config.source] == ["sqs://genesys-events"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_setting_that_a_starter_offers_can_be_switched_on(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("EVENTS_API_KEY", "k" * 32)
    monkeypatch.setenv("CRM_TOKEN", "t" * 32)
    lines = starter(kind).splitlines()
    offered = [n for n, line in enumerate(lines) if re.match(r"#[a-z_]+ = ", line)]
    rule = lines.index("#[[rules]]")
    assert len(offered) >= 4
    for n in offered:
        name = lines[n][1:].split(" = ")[0]
        changed = [
            line for line in lines[:rule] if not line.startswith(f"{name} = ") or line is lines[n]
        ]
        if n < rule:
            changed[changed.index(lines[n])] = lines[n][1:]
        text = "\n".join(changed)
        assert name in tomllib.loads(text) or n > rule
        loaded(text, tmp_path)
    with_rule = [line.removeprefix("#") if n >= rule else line for n, line in enumerate(lines)]
    setup = loaded("\n".join(with_rule), tmp_path)
    assert setup.routes[0].rules[0].name == "orders"


def test_init_writes_a_file_once_and_run_takes_it(run, call, write, tmp_path):
    assert "oncebridge run -c oncebridge.toml" in run("init").err
    assert (tmp_path / "oncebridge.toml").read_text() == starter("http")
    write("oncebridge.toml", 'window = "2d"')
    assert "--force" in call("init", code=2).err
    assert (tmp_path / "oncebridge.toml").read_text() == 'window = "2d"\n'
    call("init", "--force")
    write("events.ndjson", {"source": "shop", "detail": {"n": 1}}, {"detail": {"n": 1}})
    ran = run("run", "-c", "oncebridge.toml", "--source", "file:events.ndjson")
    assert len(ran.out.splitlines()) == 2


def test_a_starter_goes_to_standard_output(call, tmp_path):
    assert call("init", "worker", "--output", "-").out == starter("worker")
    assert not list(tmp_path.iterdir())
    assert "No such file" in call("init", "--output", "nowhere/x.toml", code=2).err


def test_a_file_that_lies_unused_is_pointed_out_and_not_read(call, write):
    write("oncebridge.toml", "this is not even TOML")
    write("event.json", {"detail": {"n": 1}})
    hint = "oncebridge.toml found, but not used; to use it: -c oncebridge.toml"
    assert hint in call("explain", "event.json").err
    assert "is not TOML" in call("explain", "event.json", "-c", "oncebridge.toml", code=2).err
    named = call("explain", "event.json", code=2, ONCEBRIDGE_CONFIG="oncebridge.toml")
    assert "is not TOML" in named.err
    assert "found, but not used" not in named.err
