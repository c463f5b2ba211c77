"""`oncebridge check` as a person and as a CI job use it."""

import json
import os
from pathlib import Path

import boto3
import pytest
from tests.servers.aws import AWS

from oncebridge.check.finding import Severity

CLEAN = """
source = "http://127.0.0.1:18080/events"
store = "sqlite:seen.db"
dead = "sqlite:dead.db"
sink = "https://crm.example.com/hooks"
audit = "audit.ndjson"
"""
NOTED = CLEAN.replace('audit = "audit.ndjson"', "")
WARNED = CLEAN + '[[rules]]\nname = "naive"\nkey = ["detail.conversationId"]\n'
FAULTY = WARNED.replace("sqlite:", "memory:").replace("memory:dead.db", "memory:")
FAULTY = FAULTY.replace("memory:seen.db", "memory:").replace('audit = "audit.ndjson"', "")

NOBODY = {"AWS_EC2_METADATA_DISABLED": "true", "AWS_CONFIG_FILE": "/dev/null"}
NOBODY |= {"AWS_SHARED_CREDENTIALS_FILE": "/dev/null"}


@pytest.fixture
def config(tmp_path):
    def write(text: str = CLEAN) -> str:
        path = tmp_path / "oncebridge.toml"
        path.write_text(text)
        path.chmod(0o600)
        return str(path)

    return write


def test_a_clean_setup_ends_with_zero_and_makes_nothing(run, config, tmp_path):
    ran = run("check", "-c", config())
    assert ran.out.startswith("no problems found; ")
    assert ran.out.endswith(" checks passed\n")
    assert [path.name for path in tmp_path.iterdir()] == ["oncebridge.toml"]


@pytest.mark.parametrize(
    ("text", "options", "code"),
    [
        (CLEAN, (), 0),
        (CLEAN, ("--strict",), 0),
        (NOTED, (), 0),
        (NOTED, ("--strict",), 1),
        (NOTED, ("--strict", "--ignore", "audit-missing"), 0),
        (WARNED, (), 1),
        (WARNED, ("--ignore", "key-coarse"), 0),
        (WARNED, ("--only", "loop"), 0),
        (WARNED, ("--only", "loop", "--only", "key-coarse"), 1),
        (FAULTY, (), 1),
        (CLEAN.replace("sqlite:seen.db", "redis://127.0.0.1:1"), (), 3),
        (CLEAN.replace("window", "windo") + 'windo = "6d"', (), 2),
    ],
)
def test_the_exit_code_is_for_a_ci_job(call, config, text, options, code):
    call("check", "-c", config(text), *options, code=code)


def test_findings_come_worst_first_each_with_what_to_do(call, config):
    ran = call("check", "-c", config(FAULTY), code=1)
    titles = [
        line for line in ran.out.splitlines() if line.split("  ")[0] in ("ERROR", "WARNING", "NOTE")
    ]
    assert titles == [
        "ERROR  memory-dead  dead letters memory:",
        "ERROR  memory-store  store memory:",
        "WARNING  key-coarse  rule naive",
        "NOTE  audit-missing  audit",
    ]
    assert ran.out.splitlines()[-1].startswith("2 errors, 1 warning, 1 note; ")
    block = ran.out.partition("ERROR  memory-store")[2].partition("\n\n")[0]
    for name in ("seen", "why", "fix", "docs"):
        assert f"\n  {name:<7}" in block
    # a snippet stands alone on its line, to be copied
    assert 'store = "sqlite:oncebridge.db"' in map(str.strip, block.splitlines())


@pytest.mark.parametrize("columns", [60, 80, 140])
def test_sentences_are_wrapped_and_snippets_are_not(run, config, columns):
    ran = run("check", "-c", config(FAULTY), code=1, COLUMNS=str(columns))
    prose = [
        line
        for line in ran.out.splitlines()
        if not line.startswith(" " * 11) and "docs/" not in line
    ]
    assert max(map(len, prose)) <= columns
    assert max(map(len, prose)) > columns / 2 or columns > 100


@pytest.mark.parametrize("columns", [60, 80])
def test_neither_long_names_nor_the_summary_run_over_the_edge(run, config, columns):
    name = "a rather long name of a route with many parts".replace(" ", "-") * 2
    text = NOTED + f'lease = "1h"\nmode = "shadow"\nroute = "{name}"\n'
    text = text.replace("sqlite:dead.db", "memory:") + "max_attempts = 1\n"
    text = text.replace('"sqlite:seen.db"', '{ url = "dynamodb://records", region = "eu-west-1" }')
    ran = run("check", "-c", config(text), code=1, COLUMNS=str(columns), **NOBODY)
    over = [line for line in ran.out.splitlines() if len(line) > columns and " " in line.strip()]
    assert over == [line for line in over if line.lstrip().startswith("route ")]
    assert f"NOTE  lease-long\n  route {name}\n" in ran.out
    summary = " ".join(ran.out.partition("\n1 error")[2].split())
    assert summary.endswith("could not be made")


def test_what_is_in_order_is_listed_on_demand(call, config):
    quiet = call("check", "-c", config()).out
    told = call("check", "-c", config(), "--verbose").out
    assert "passed\n  windows: each is longer than" not in quiet
    assert "passed\n  windows: each is longer than" in told


def test_json_is_one_object_per_line(call, config):
    objects = call("check", "-c", config(FAULTY), "--json", "--verbose", code=1).objects()
    kinds = [one["kind"] for one in objects]
    assert kinds[:4] == ["finding"] * 4
    assert kinds[-1] == "summary"
    assert set(kinds[4:-1]) == {"in-order"}
    names = {"kind", "code", "severity", "subject", "seen", "why", "fix", "docs"}
    assert set(objects[0]) == names
    assert [Severity(one["severity"]) for one in objects[:4]] == [
        "error",
        "error",
        "warning",
        "note",
    ]
    summary = objects[-1]
    assert (summary["errors"], summary["warnings"], summary["notes"]) == (2, 1, 1)
    assert (summary["could_not_look"], summary["in_order"]) == (0, len(kinds) - 5)


def test_what_could_not_be_looked_at_is_told_and_fails_only_a_strict_job(
    call, config, redis_server
):
    user = "looker"
    redis_server.ask("ACL", "SETUSER", user, "on", ">pw", "+info", "+time")
    text = CLEAN.replace('"sqlite:seen.db"', '"env:STORE"')
    url = redis_server.url.replace("://", f"://{user}:pw@")
    ran = call("check", "-c", config(text), STORE=url)
    assert "\ncould not be checked\n" in f"\n{ran.out}"
    assert "\n  needs the command CONFIG GET" in ran.out
    assert ran.out.splitlines()[-1].endswith(", 1 could not be made")
    assert "pw" not in ran.out
    call("check", "-c", config(text), "--strict", code=1, STORE=url)
    (blind,) = [
        one
        for one in call("check", "-c", config(text), "--json", STORE=url).objects()
        if one["kind"] == "could-not-look"
    ]
    assert set(blind) == {"kind", "subject", "what", "needs"}


def test_a_code_that_nobody_has_is_refused(call, config):
    ran = call("check", "-c", config(), "--ignore", "key-corse", code=2)
    assert "did you mean 'key-coarse'?" in ran.err
    assert ran.out == ""


def test_secrets_are_never_printed(call, config):
    text = CLEAN.replace(
        '"https://crm.example.com/hooks"',
        '{ url = "https://u:canary-1@crm.example.com/?sig=canary-2", '
        'headers = { X-Api-Key = "canary-3" } }',
    ).replace("sqlite:seen.db", "redis://:canary-4@127.0.0.1:1")
    for options in ((), ("--json",), ("--verbose",)):
        ran = call("check", "-c", config(text), *options, code=3)
        assert "secret-written" in ran.out
        assert "canary" not in ran.out + ran.err


def test_names_from_the_file_cannot_play_with_the_terminal(call, config):
    text = CLEAN + '[[rules]]\nname = "a\\u001b[31mb"\nkey = ["detail.orderId"]\n'
    ran = call("check", "-c", config(text), code=1)
    assert "\x1b" not in ran.out
    assert "rule a\\x1b[31mb" in ran.out
    (finding, *_) = call("check", "-c", config(text), "--json", code=1).objects()
    assert finding["subject"] == "rule a\x1b[31mb"


def test_what_is_on_aws_is_looked_at_and_nothing_told_twice(run, config, ministack):
    source = f"orders-{os.getpid()}"
    environment = AWS | {"AWS_ENDPOINT_URL": ministack.endpoint}
    text = CLEAN.replace("http://127.0.0.1:18080/events", f"sqs://{source}")
    alone = run("check", "-c", config(text), "--json", code=1, **environment)
    codes = [one["code"] for one in alone.objects() if one["kind"] == "finding"]
    assert "source-missing" in codes
    told = run("check", "-c", config(text), "--only", "source-missing", code=1, **environment)
    assert told.out.startswith("ERROR  source-missing  ")
    client = boto3.client(
        "sqs",
        endpoint_url=ministack.endpoint,
        region_name=AWS["AWS_REGION"],
        aws_access_key_id="invented",
        aws_secret_access_key="invented",
    )
    client.create_queue(QueueName=source)
    text = text.replace('"https://crm.example.com/hooks"', f'"sqs://{source}"')
    text += '\nwindow = "1h"\n'
    ran = run("check", "-c", config(text), "--json", code=1, **environment)
    codes = [one["code"] for one in ran.objects() if one["kind"] == "finding"]
    assert [codes.count(code) for code in ("loop", "sink-is-source")] == [1, 0]
    assert [codes.count(code) for code in ("window-horizon", "window-short")] == [1, 0]


@pytest.mark.parametrize("option", ["--function", "--destination"])
def test_what_no_address_names_is_named_by_an_option(call, config, ministack, option):
    environment = AWS | {"AWS_ENDPOINT_URL": ministack.endpoint}
    ran = call("check", "-c", config(), option, "nobody-has-it", code=1, **environment)
    assert "nobody-has-it" in ran.out
    assert f"{option.removeprefix('--')}-missing" in ran.out


def test_the_page_shows_what_is_printed(run, config, tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "check.md").read_text()
    (tmp_path / "other.toml").write_text(
        NOTED + '[[rules]]\nname = "crm"\nkey = ["detail.conversationId"]\n'
    )
    shown = run("check", "-c", "other.toml", code=1, COLUMNS="80").out
    assert shown.strip() in page
    assert json.loads(run("check", "-c", "other.toml", "--json", code=1).out.splitlines()[0])
