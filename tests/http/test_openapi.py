"""
What is served and what is said to be served are the same: schemathesis looks for a difference.

It runs as its own command, with examples that are always the same, against a live service; no check is left out but
one: what is no event is not refused here, since EventBridge would drop it then, but kept in the
dead letters. That is the point of the product, and `negative_data_rejection` cannot know it.
"""

import json
import os
import subprocess
import sys

import pytest
import schemathesis
from tests.http.live import PATH, Desk, event, live
from tests.size import sized

from oncebridge.base.secrets import Secret
from oncebridge.engine.verdict import Verdict
from oncebridge.http.auth import AuthOptions
from oncebridge.sinks.api import Closed
from oncebridge.sources.http.openapi import describe

KINDS = {
    "api_keys": ("apple-key-of-a-mill", "x-api-key: apple-key-of-a-mill"),
    "basic": ("mill:grain-in-the-sacks", "Authorization: Basic bWlsbDpncmFpbi1pbi10aGUtc2Fja3M="),
    "bearer": ("plum-token-of-a-mill", "Authorization: Bearer plum-token-of-a-mill"),
    "oauth": ("shop:chalk-on-the-board", "Authorization: Bearer {token}"),
    "hmac": ("cedar-secret-of-the-wood", None),
}


def inspect(running, folder, *more, examples=100):
    """Let schemathesis loose on *running*; it writes what it remembers to *folder*."""
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "--no-color", "run"),
        f"http://127.0.0.1:{running.port}/openapi.json",
        *("--max-examples", str(examples), "--generation-deterministic", "--warnings", "off"),
        *more,
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=folder,
        env={**os.environ, "PYTHONUTF8": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "No issues found" in done.stdout, done.stdout


ALL_CHECKS = ("--exclude-checks", "negative_data_rejection")


def test_schemathesis_finds_nothing(tmp_path):
    with live(tmp_path) as running:
        inspect(running, tmp_path, *ALL_CHECKS, examples=sized(30, 100))
        counts = running.balance()
        assert counts["delivered"] > 10
        assert counts["dead"] > 10
        assert counts["failed"] == counts["in_flight"] == 0
        assert running.passes(1)


@pytest.mark.full
def test_schemathesis_finds_nothing_behind_every_kind_of_door(tmp_path):
    flags = {f"source__{kind}": secret for kind, (secret, _) in KINDS.items()}
    with live(tmp_path, **flags) as running:
        inspect(running, tmp_path, *ALL_CHECKS, "--header", KINDS["api_keys"][1])
        assert running.balance()["delivered"] > 10


@pytest.mark.full
def test_schemathesis_finds_nothing_before_a_closed_door(tmp_path):
    with live(
        tmp_path, source__bearer="plum-token-of-a-mill", source__oauth="shop:chalk-on-the-board"
    ) as running:
        inspect(
            running,
            tmp_path,
            *ALL_CHECKS,
            "--exclude-checks",
            "positive_data_acceptance",
            examples=40,
        )
        assert running.counts["arrived"] == 0
        assert not running.store.asked["claim"]


@pytest.mark.full
def test_schemathesis_finds_nothing_in_the_answers_while_the_sink_is_down(tmp_path):
    with live(tmp_path, Desk(Closed("403"))) as running:
        assert running.post(event(1)).status == 503
        conformance = "status_code,content_type,response_headers,response_schema"
        checks = ",".join(f"{name}_conformance" for name in conformance.split(","))
        inspect(running, tmp_path, "--checks", checks, examples=40)
        counts = running.balance()
        assert counts["failed"] > 10
        assert counts["delivered"] == 0


def described(*kinds):
    options = {kind: (Secret(KINDS[kind][0]),) for kind in kinds}
    return describe(PATH, AuthOptions(**options), "1.2.3")


@pytest.mark.parametrize("kinds", [(), *[(kind,) for kind in KINDS], tuple(KINDS)])
def test_the_description_is_open_api_3_1(kinds):
    document = described(*kinds)
    assert document["openapi"].startswith("3.1.")
    schemathesis.openapi.from_dict(document).validate()
    assert json.loads(json.dumps(document)) == document


def test_the_description_says_who_may_send():
    assert "security" not in described()["paths"][PATH]["post"]
    asked = described(*KINDS)["paths"][PATH]["post"]["security"]
    assert asked == [{"apiKey": []}, {"basic": []}, {"bearer": []}, {"hmac": [], "hmacTime": []}]
    schemes = described(*KINDS)["components"]["securitySchemes"]
    assert set(schemes) == {name for one in asked for name in one}
    assert not [secret for secret, _ in KINDS.values() if secret in json.dumps(schemes)]


def test_tokens_are_described_where_they_are_issued():
    assert "/oauth/token" in described("oauth")["paths"]
    assert "/oauth/token" not in described("bearer")["paths"]


def test_every_verdict_is_described():
    result = described()["components"]["schemas"]["Result"]
    assert set(result["properties"]["verdict"]["enum"]) == {verdict.value for verdict in Verdict}


def test_what_is_served_is_what_is_described(tmp_path):
    with live(tmp_path, source__oauth="shop:chalk-on-the-board") as running:
        answer = running.get("/openapi.json")
        assert answer.headers["content-type"] == "application/json"
        for path, methods in answer.json["paths"].items():
            for method in methods:
                assert running.ask(method.upper(), path, b"").status not in (404, 405)
