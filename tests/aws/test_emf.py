import io
import json
import sys

import pytest
from tests.aws.functions import OK, Context, failing, function
from tests.aws.payloads import event, sqs

from oncebridge import Books, ConfigError, Verdict
from oncebridge.aws.emf import EmfMetrics

NOW = 1_765_552_508_101


def lines(text):
    assert not text or text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def check(line, namespace="oncebridge"):
    """Hold a line against the specification of the embedded metric format."""
    about = line["_aws"]
    assert isinstance(about["Timestamp"], int)
    (directive,) = about["CloudWatchMetrics"]
    assert directive["Namespace"] == namespace
    assert directive["Dimensions"] == [["route"]]
    assert 1 <= len(directive["Metrics"]) <= 100
    for metric in directive["Metrics"]:
        assert metric.keys() == {"Name", "Unit"}
        assert metric["Unit"] == "Count"
        assert isinstance(line[metric["Name"]], int)
    named = {metric["Name"] for metric in directive["Metrics"]}
    assert line.keys() == {"_aws", "route"} | named
    assert 1 <= len(line["route"]) <= 1024
    assert line["route"].isascii()
    return {name: line[name] for name in named}


def test_each_call_writes_what_has_changed(capsys):
    with function(failing(3), metrics="crm/events", clock=lambda: NOW) as (handler, _):
        handler(sqs(event(1), event(2), event(1)), Context())
        (line,) = lines(capsys.readouterr().out)
        counts = check(line, "crm/events")
        assert counts == {"arrived": 3, "delivered": 2, "duplicate": 1, "forwarded": 2}
        assert line["route"] == "default"
        assert line["_aws"]["Timestamp"] == NOW

        handler(sqs(event(1), event(3)), Context())
        (line,) = lines(capsys.readouterr().out)
        counts = check(line, "crm/events")
        assert counts == {"arrived": 2, "duplicate": 1, "failed": 1, "ambiguous": 1}


def test_a_call_that_fails_is_counted_too(capsys):
    with function(failing(1), metrics="oncebridge") as (handler, _):
        with pytest.raises(Exception, match="have to be retried"):
            handler(event(1), Context())
        (line,) = lines(capsys.readouterr().out)
        assert check(line)["failed"] == 1


def test_a_call_without_events_writes_nothing(capsys):
    with function(metrics="oncebridge") as (handler, _):
        handler({"Records": [], "window": {}}, Context())
    assert capsys.readouterr().out == ""


def test_none_means_none(capsys):
    with function(metrics=None) as (handler, _):
        handler(event(1), Context())
    assert capsys.readouterr().out == ""


def test_no_payload_is_in_it(capsys):
    with function(metrics="oncebridge") as (handler, _):
        handler(sqs(event(4711), "hello"), Context())
    out = capsys.readouterr().out
    assert "dead" in out
    for word in ("4711", "hello", "shop", "Order"):
        assert word not in out


class Counted(io.StringIO):
    writes = 0

    def write(self, text):
        self.writes += 1
        return super().write(text)


def filled(**counts):
    books = Books()
    books.arrive(sum(counts.values()))
    for verdict, count in counts.items():
        books.settle(Verdict(verdict), count)
    return books


def test_a_line_for_each_route_and_all_in_one_write(monkeypatch):
    out = Counted()
    monkeypatch.setattr(sys, "stdout", out)
    metrics = EmfMetrics("oncebridge", lambda: NOW)
    routes = {"crm": filled(delivered=2), "wall": filled(duplicate=1), "idle": Books()}
    metrics.write_changes(routes)
    metrics.write_changes(routes)
    assert out.writes == 1
    first, second = lines(out.getvalue())
    assert check(first) == {"arrived": 2, "delivered": 2}
    assert check(second) == {"arrived": 1, "duplicate": 1}
    assert (first["route"], second["route"]) == ("crm", "wall")


def test_all_counts_at_once_are_still_valid(capsys):
    books = filled(**{verdict.value: 1 for verdict in Verdict})
    for name, value in vars(books).items():
        if isinstance(value, int):
            setattr(books, name, value + 1)
    EmfMetrics("oncebridge", lambda: NOW).write_changes({"crm": books})
    (line,) = lines(capsys.readouterr().out)
    assert check(line).keys() == books.counts().keys() - {"in_flight"}


@pytest.mark.parametrize("route", ["", " ", "ü" * 2000, "a\nb", "https://crm.example.com/?a=b"])
def test_any_name_of_a_route_makes_a_dimension(route, capsys):
    EmfMetrics("oncebridge", lambda: NOW).write_changes({route: filled(delivered=1)})
    (line,) = lines(capsys.readouterr().out)
    check(line)


@pytest.mark.parametrize("namespace", ["", "AWS/Lambda", "a b", "x" * 256, "é", "a\n"])
def test_a_namespace_that_cloudwatch_refuses_is_refused_at_once(namespace):
    with pytest.raises(ConfigError, match="metrics"):
        EmfMetrics(namespace, lambda: NOW)


@pytest.mark.parametrize("error", [BrokenPipeError(), ValueError("I/O operation on closed file")])
def test_metrics_that_cannot_be_written_cost_no_event(error, monkeypatch, caplog):
    class Broken(io.StringIO):
        def write(self, text):
            raise error

    with function(metrics="oncebridge") as (handler, _), monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", Broken())
        assert handler(sqs(event(1)), Context()) == OK
    assert [r.message for r in caplog.records] == ["oncebridge.metrics_lost"]
