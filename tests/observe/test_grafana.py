"""The alerts and the dashboard that we give away name only what a worker really tells."""

import json
import re
from pathlib import Path

import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from oncebridge.observe.metric_families import families
from oncebridge.observe.prometheus import exposition, name_of
from oncebridge.observe.report import StoreHealth
from oncebridge.service.config import load
from oncebridge.service.service import Service

DEPLOY = Path(__file__).parents[2] / "deploy"
ALERTS = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text(encoding="utf-8"))
TESTS = yaml.safe_load((DEPLOY / "prometheus" / "alerts.test.yml").read_text(encoding="utf-8"))
BOARD = json.loads((DEPLOY / "grafana" / "oncebridge.json").read_text(encoding="utf-8"))
RULES = [rule for group in ALERTS["groups"] for rule in group["rules"]]
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
TARGETS = [(panel["title"], target) for panel in PANELS for target in panel["targets"]]
DOCS = DEPLOY.parent / "docs"


def expression(text):
    """Write what Grafana fills in as it would be."""
    return text.replace("$__rate_interval", "5m").replace("$__range", "6h")


def selectors(node):
    """Give the name and labels of every series that is asked for."""
    if isinstance(node, promql_parser.VectorSelector):
        yield node.name, {matcher.name for matcher in node.matchers.matchers}
    for name in dir(node):
        if name.startswith("_") or name in ("matchers", "name"):
            continue
        value = getattr(node, name)
        for inner in value if isinstance(value, list) else [value]:
            if type(inner).__module__.startswith(("builtins", "promql_parser")) and hasattr(
                inner, "prettify"
            ):
                yield from selectors(inner)


@pytest.fixture
async def told(tmp_path):
    """Give the labels of every sample that a real service tells, by its name."""
    flags = {
        "source": "http://127.0.0.1:0/events",
        "store": "memory:",
        "dead": "memory:",
        "sink": "python:builtins:repr",
        "spool": str(tmp_path / "spool.db"),
    }
    service = Service(load(environment={}, flags=flags))
    service.monitor.store_health = StoreHealth(records=1, bytes=1, evicted=1, clock_offset_ms=1)
    text = exposition(service.monitor.report()).decode()
    return {
        sample.name: sample.labels.keys()
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def check(text, told):
    parsed = promql_parser.parse(expression(text))
    asked = list(selectors(parsed))
    assert asked
    for name, labels in asked:
        assert name in told
        assert labels <= {*told[name], "instance", "job"}


def test_the_search_for_series_finds_all():
    text = "sum by (a) (rate(x_total{r='1'}[5m])) / on (b) (y unless max(z{q='2'}) > 0) + abs(-w)"
    found = dict(selectors(promql_parser.parse(text)))
    assert found == {"x_total": {"r"}, "y": set(), "z": {"q"}, "w": set()}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
async def test_an_alert_looks_at_what_there_is(rule, told):
    check(rule["expr"], told)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_says_what_to_do(rule):
    assert rule["labels"]["severity"] in ("critical", "warning")
    summary, description = rule["annotations"]["summary"], rule["annotations"]["description"]
    assert 20 < len(summary) < 100
    assert len(description) > 100
    for page, heading in re.findall(r"(docs/[\w/-]+\.md)(?:, \"([^\"]+)\")?", description):
        text = (DEPLOY.parent / page).read_text(encoding="utf-8")
        assert f"## {heading}" in text


def test_every_alert_has_a_name_of_its_own_and_a_test():
    names = [rule["alert"] for rule in RULES]
    assert len(set(names)) == len(names)
    tested = set(re.findall(r"Oncebridge\w+", json.dumps(TESTS)))
    assert tested == set(names)


def test_the_optional_alert_can_be_put_in():
    text = (DEPLOY / "prometheus" / "alerts.yml").read_text(encoding="utf-8")
    tail = text[text.index("# - alert: OncebridgeNoArrivals") :]
    lines = [line.strip().removeprefix("# ").removeprefix("#") for line in tail.splitlines()]
    (rule,) = yaml.safe_load("\n".join(lines))
    assert promql_parser.parse(rule["expr"])
    assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}


def _commands(text):
    return re.findall(r"`oncebridge ([a-z]+)(?: ([a-z]+))?", text)


def test_every_command_that_is_named_is_one():
    from oncebridge.cli.app import app

    for name, second in {
        pair for rule in RULES for pair in _commands(rule["annotations"]["description"])
    }:
        command = app.commands[name].load()
        if second:
            assert second in command.commands


@pytest.mark.parametrize(("title", "target"), TARGETS)
async def test_a_panel_looks_at_what_there_is(title, target, told):
    assert title
    check(target["expr"], told)
    labels = re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])
    assert all(label in target["expr"] or label == "instance" for label in labels)


def test_the_dashboard_is_bound_to_no_installation():
    text = json.dumps(BOARD)
    assert {one["uid"] for one in _values(BOARD, "datasource") if isinstance(one, dict)} == {
        "${datasource}"
    }
    assert not re.findall(r"https?://", text)
    assert "__inputs" not in BOARD
    names = [variable["name"] for variable in BOARD["templating"]["list"]]
    assert names == ["datasource", "instance", "route"]
    assert "id" not in BOARD


def _values(node, name):
    if isinstance(node, dict):
        if name in node:
            yield node[name]
        for inner in node.values():
            yield from _values(inner, name)
    elif isinstance(node, list):
        for inner in node:
            yield from _values(inner, name)


def test_panels_have_their_own_ids_and_places():
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(ids)) == len(ids)
    taken = set()
    for panel in BOARD["panels"]:
        grid = panel["gridPos"]
        assert grid["x"] + grid["w"] <= 24
        cells = {
            (x, y)
            for x in range(grid["x"], grid["x"] + grid["w"])
            for y in range(grid["y"], grid["y"] + grid["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
    for panel in PANELS:
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs)


def test_every_verdict_has_a_colour():
    from oncebridge.engine.verdict import Verdict

    (panel,) = [panel for panel in PANELS if panel["title"] == "Arrivals by verdict"]
    coloured = [one["matcher"]["options"] for one in panel["fieldConfig"]["overrides"]]
    assert coloured == [verdict.value for verdict in Verdict]


async def test_the_page_about_metrics_names_each_of_them(tmp_path):
    flags = {"source": "-", "store": "memory:", "dead": "memory:", "sink": "python:builtins:repr"}
    service = Service(load(environment={}, flags={**flags, "spool": str(tmp_path / "spool.db")}))
    service.monitor.store_health = StoreHealth(records=1, bytes=1, evicted=1, clock_offset_ms=1)
    page = (DOCS / "metrics.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(oncebridge_\w+)`", page))
    found = families(service.monitor.report())
    assert named == {
        f"{name_of(one)}_total" if one.kind == "counter" else name_of(one) for one in found
    }
    for one in found:
        assert one.help in page
