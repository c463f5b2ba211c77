"""`oncebridge audit` as people run it: on files, on pipes, on a terminal."""

import gzip
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.cli.worlds import event
from tests.size import full

from oncebridge.audit import text as report_text
from oncebridge.audit.html import MARK
from oncebridge.audit.report import AuditReport
from oncebridge.engine.causes import Cause
from oncebridge.events.framing import as_line
from oncebridge.genesys.simulator import REPEATS, simulate

STREAM = list(simulate(5, 600))
TRUTHS = len({one.truth for one in STREAM})
AGAIN = sum(one.label in REPEATS for one in STREAM)


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    path = tmp_path / "events.ndjson"
    path.write_bytes(b"".join(as_line(one.raw) for one in STREAM))
    return path


def shop(count: int) -> list[dict]:
    """Make orders that each come twice, the second time with another time of sending."""
    return [
        event(
            n,
            id=f"{n}-{again}",
            detail={
                "orderId": f"o-{n}",
                "total": n % 7,
                "sentAt": f"2026-03-01T08:{again:02}:{n % 60:02}Z",
            },
            time=f"2026-03-01T08:{again:02}:{n % 60:02}Z",
        )
        for again in (0, 1)
        for n in range(count)
    ]


# --- the report ---------------------------------------------------------------------------


def test_the_answer_comes_first_and_nothing_else_is_needed(call, recording):
    out = call("audit", "events.ndjson").out
    assert f"600 arrivals contain {TRUTHS} events; {AGAIN} arrivals are duplicates" in out
    assert 'preset = "genesys"' in out
    assert "\x1b[" not in out


def test_the_whole_report_is_one_json_object(call, recording):
    (told,) = call("audit", "events.ndjson", "--json").objects()
    assert (told["events"], told["logical"]) == (600, TRUTHS)
    assert sum(cause["count"] for cause in told["causes"]) == AGAIN
    assert set(told["verdicts"]) == {"delivered", "duplicate"}
    assert told["suggestion"]["toml"].startswith("# Suggested")
    assert told["trial"] is None


def test_files_directories_and_standard_input_are_one_recording(call, tmp_path):
    raws = [as_line(one.raw) for one in STREAM]
    (tmp_path / "days" / "one").mkdir(parents=True)
    (tmp_path / "days" / "one" / "a.ndjson").write_bytes(b"".join(raws[:200]))
    (tmp_path / "days" / "b.ndjson.gz").write_bytes(gzip.compress(b"".join(raws[200:400])))
    rest = b"".join(raws[400:])
    (told,) = call("audit", "days", "-", "--json", given=rest).objects()
    assert (told["files"], told["events"], told["logical"]) == (3, 600, TRUTHS)


def test_nothing_of_a_payload_is_in_any_report(call, tmp_path, write):
    secret = "canary-7f3a"
    events = [
        event(n, id=str(n % 3), detail={"order": n % 4, "note": secret, secret: {"x": secret}})
        for n in range(30)
    ]
    write("events.ndjson", *events)
    shown = call("audit", "events.ndjson", "--html", "report.html").out
    shown += call("audit", "events.ndjson", "--json").out
    assert secret not in shown.replace(f"detail.{secret}", "")
    assert f">{secret}" not in (tmp_path / "report.html").read_text()


def test_a_page_is_written_and_written_again_but_over_nothing_else(call, recording, tmp_path):
    for _ in range(2):
        assert "wrote report.html" in call("audit", "events.ndjson", "--html", "report.html").err
    page = (tmp_path / "report.html").read_text()
    assert page.startswith(MARK)
    assert f"600 arrivals contain {TRUTHS} events" in page
    before = recording.read_bytes()
    ran = call("audit", "events.ndjson", "--html", "events.ndjson", code=2)
    assert "is not a report of oncebridge" in ran.err
    assert recording.read_bytes() == before


def test_what_cannot_be_saved_is_told_before_the_work(call, recording, write):
    write("there.toml", "")
    for flag, name, why in (
        ("--suggest", "there.toml", "is not overwritten"),
        ("--suggest", "no/where.toml", "there is no directory"),
        ("--html", "no/where.html", "there is no directory"),
        ("--differences", "x.ndjson", "needs --rules"),
    ):
        ran = call("audit", "events.ndjson", flag, name, code=2)
        assert flag in ran.err
        assert why in ran.err
        assert not ran.out


def test_what_is_no_event_is_counted_and_makes_the_exit_code_1(call, write):
    write("events.ndjson", event(1), "{cut off", event(1))
    out = call("audit", "events.ndjson", code=1).out
    assert "Unreadable: 1 record" in out
    assert "events.ndjson:2" in out
    assert "2 arrivals contain 1 event" in out


def test_no_event_at_all_is_exit_code_1(call, write):
    write("empty.ndjson", "")
    assert "No events found." in call("audit", "empty.ndjson", code=1).out


def test_mistakes_are_told_as_everywhere(call, recording, write):
    assert "nowhere.ndjson" in call("audit", "nowhere.ndjson", code=2).err
    assert "--quiet" in call("audit", "events.ndjson", "--quiet", "soon", code=2).err
    write("wrong.toml", 'windw = "2d"')
    ran = call("audit", "events.ndjson", "--rules", "wrong.toml", code=2)
    assert "did you mean 'window'?" in ran.err


def test_hostile_names_cannot_reach_the_terminal(call, write):
    write("events.ndjson", *[event(1, source="\x1b[2Jx\u202e", id="[red]i") for _ in range(3)])
    out = call("audit", "events.ndjson").out
    assert "\x1b" not in out
    assert "\\x1b[2Jx\\u202e" in out


# --- whose rules --------------------------------------------------------------------------


def logical(call, *args: str) -> int:
    (told,) = call("audit", *args, "--json").objects()
    return told["logical"]


def test_the_preset_is_for_those_who_say_nothing(call, recording, write, monkeypatch):
    assert logical(call, "events.ndjson") == TRUTHS
    plain = logical(call, "events.ndjson", "--preset", "none")
    assert plain > TRUTHS
    write("empty.toml", "")
    assert logical(call, "events.ndjson", "-c", "empty.toml") == plain
    monkeypatch.setenv("ONCEBRIDGE_PRESET", "none")
    assert logical(call, "events.ndjson") == plain


ROUTES = """
[[routes]]
name = "crm"
sink = "-"
[[routes.rules]]
name = "all one"
key = ["source"]

[[routes]]
name = "lake"
sink = "-"
"""


def test_with_several_routes_one_is_named(call, write):
    write("events.ndjson", *[event(n) for n in range(5)])
    write("routes.toml", ROUTES)
    ran = call("audit", "events.ndjson", "-c", "routes.toml", code=2)
    assert "name one of crm, lake" in ran.err
    assert logical(call, "events.ndjson", "-c", "routes.toml", "--route", "crm") == 1
    assert logical(call, "events.ndjson", "-c", "routes.toml", "--route", "lake") == 5
    ran = call("audit", "events.ndjson", "-c", "routes.toml", "--route", "lak", code=2)
    assert "did you mean 'lake'?" in ran.err


# --- candidates ---------------------------------------------------------------------------


def test_a_candidate_is_shown_event_by_event(call, recording, tmp_path):
    call("audit", "events.ndjson", "--suggest", "suggested.toml")
    args = ("audit", "events.ndjson", "--preset", "none", "--rules", "suggested.toml")
    out = call(*args, "--differences", "all.ndjson").out
    differences = [json.loads(line) for line in (tmp_path / "all.ndjson").read_text().splitlines()]
    assert {(one["before"], one["after"]) for one in differences} == {("delivered", "duplicate")}
    assert f"decide differently for {len(differences)} arrivals" in out
    assert f"and {len(differences) - 20} more" in out
    first = differences[0]
    assert f"{first['place']}  delivered → duplicate" in out
    assert first["same_as"].startswith("events.ndjson:")


def test_the_same_rules_make_no_difference(call, recording):
    call("audit", "events.ndjson", "--suggest", "suggested.toml")
    out = call("audit", "events.ndjson", "--rules", "suggested.toml").out
    assert "decide the same for every arrival" in out


def test_a_suggestion_merges_no_two_events_of_the_recording(call, recording, tmp_path):
    orders = shop(200)
    with recording.open("a") as file:
        file.writelines(json.dumps(one) + "\n" for one in orders)
    call("audit", "events.ndjson", "--suggest", "suggested.toml")
    (told,) = call("audit", "events.ndjson", "--rules", "suggested.toml", "--json").objects()
    passed = told["logical"] - sum(
        n for before, _, n in told["trial"]["by_change"] if before == "delivered"
    )
    assert passed == TRUTHS + 200
    assert 'key = ["detail.orderId"]' in (tmp_path / "suggested.toml").read_text()


CONFLICTS = """
[[rules]]
name = "orders"
key = ["detail.order"]
check = true
on_conflict = "{}"
"""


def test_what_becomes_of_a_conflict_is_a_difference(call, write):
    write("events.ndjson", *[event(n, detail={"order": 1, "total": n}) for n in range(3)])
    write("a.toml", CONFLICTS.format("deliver"))
    write("b.toml", CONFLICTS.format("duplicate"))
    ran = call("audit", "events.ndjson", "-c", "a.toml", "--rules", "b.toml")
    assert "would no longer deliver 2" in ran.out
    assert "conflict → conflict, no longer delivered" in ran.out
    files = ("events.ndjson", "-c", "b.toml", "--rules", "a.toml")
    for more in ((), ("--differences", "all.ndjson")):
        (told,) = call("audit", *files, "--json", *more).objects()
        assert told["trial"]["by_change"] == [["conflict", "conflict", 2]]
        assert [told["trial"][name] for name in ("changed", "more", "fewer")] == [2, 2, 0]
    (first, _) = told["trial"]["differences"]
    assert (first["passed_before"], first["passed_after"]) == (False, True)


def test_after_a_failure_the_differences_can_be_asked_for_again(call, write, tmp_path):
    write("rules.toml", CONFLICTS.format("deliver"))
    args = ("--rules", "rules.toml", "--differences", "all.ndjson")
    for _ in range(2):
        assert "nowhere.ndjson" in call("audit", "nowhere.ndjson", *args, code=2).err
        assert not (tmp_path / "all.ndjson").exists()


def test_what_comes_again_after_the_window_is_in_the_first_sentence(call, write):
    times = ("08:00:00", "08:00:01", "09:00:00", "10:00:00")
    write("events.ndjson", *[event(1, time=f"2026-03-01T{at}Z") for at in times])
    ran = call("audit", "events.ndjson", "--window", "5m")
    assert (
        "4 arrivals contain 1 event; 1 arrival is a duplicate (25\N{NO-BREAK SPACE}%), and 2 more"
        in (ran.out.replace("(25 %)", "(25\N{NO-BREAK SPACE}%)"))
    )
    assert "arrived again after the window." in " ".join(ran.out.split())


# --- warm ---------------------------------------------------------------------------------

PIPE = """
source = "file:events.ndjson"
store = "sqlite:seen.db"
sink = "file:sent.ndjson"
dead = "sqlite:dead.db"
preset = "genesys"
"""


def test_a_service_on_a_warmed_store_sends_nothing(call, run, recording, write, tmp_path):
    write("pipe.toml", PIPE)
    ran = call("audit", "events.ndjson", "-c", "pipe.toml", "--warm", "sqlite:seen.db")
    assert ran.out.split() == ["new", str(TRUTHS), "known", str(AGAIN)]
    assert "windows begin now" in ran.err
    assert "6d" in ran.err
    run("run", "-c", "pipe.toml")
    sent = tmp_path / "sent.ndjson"
    assert not sent.exists() or not sent.read_bytes()
    again = call("audit", "events.ndjson", "-c", "pipe.toml", "--warm", "pipe.toml", "--json")
    assert again.objects() == [{"new": 0, "known": 600, "not_remembered": 0, "unreadable": 0}]


def test_without_a_configuration_the_route_is_named(call, recording):
    ran = call("audit", "events.ndjson", "--warm", "sqlite:seen.db", "--set", "route=crm")
    assert "for the route 'crm'" in ran.err


def test_one_of_several_routes_can_be_warmed_alone(call, write):
    write("events.ndjson", *[event(n) for n in range(5)])
    write("routes.toml", ROUTES)
    lake = ("audit", "events.ndjson", "-c", "routes.toml", "--warm", "sqlite:seen.db", "--json")
    (first,) = call(*lake, "--route", "lake").objects()
    assert first["new"] == 5
    (both,) = call(*lake).objects()
    assert (both["new"], both["known"]) == (1, 4)


def test_what_is_out_of_reach_or_makes_no_sense_is_refused(call, recording):
    ran = call("audit", "events.ndjson", "--warm", "memory:", code=2)
    assert "--warm" in ran.err
    ran = call("audit", "events.ndjson", "--warm", "sqlite:s.db", "--html", "x.html", code=2)
    assert "--warm, which writes no report" in ran.err
    ran = call("audit", "nowhere.ndjson", "--warm", "sqlite:s.db", code=2)
    assert "nowhere.ndjson" in ran.err


def test_unreadable_records_are_counted_when_warming(call, write, tmp_path):
    write("events.ndjson", event(1), "{cut off")
    ran = call("audit", "events.ndjson", "--warm", "sqlite:s.db", "--json", code=1)
    assert ran.objects()[0]["unreadable"] == 1
    assert not (tmp_path / "oncebridge-dead.db").exists()


# --- people -------------------------------------------------------------------------------


def on_a_terminal(tmp_path: Path, *args: str, columns: int) -> str:
    """Run it on a terminal of that width, and give what it painted."""
    leader, follower = pty.openpty()
    os.set_blocking(leader, False)
    done = subprocess.Popen(
        [sys.executable, "-m", "oncebridge", *args],
        cwd=tmp_path,
        env=os.environ | {"COLUMNS": str(columns), "LINES": "50", "TERM": "xterm-256color"},
        stdin=subprocess.DEVNULL,
        stdout=follower,
        stderr=follower,
    )
    os.close(follower)
    painted = b""
    ends = time.monotonic() + 60
    while time.monotonic() < ends:
        is_over = done.poll() is not None
        try:
            painted += os.read(leader, 65536)
        except BlockingIOError:
            time.sleep(0.02)
        except OSError:
            break
        else:
            continue
        if is_over:
            break
    os.close(leader)
    assert done.wait(10) == 0
    return painted.decode()


def test_on_a_terminal_there_are_colours_and_a_bar(recording, tmp_path):
    painted = on_a_terminal(tmp_path, "audit", "events.ndjson", columns=80)
    assert "\x1b[1m" in painted
    assert "━" in painted
    assert "Duplicates by cause" in painted


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, *full(signal.SIGTERM)])
@pytest.mark.parametrize(
    "args",
    [(), pytest.param(("--warm", "sqlite:seen.db"), marks=pytest.mark.full)],
    ids=["report", "warm"],
)
def test_a_signal_ends_it_at_once_and_leaves_nothing_behind(tmp_path, args, number):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    done = subprocess.Popen(
        [sys.executable, "-m", "oncebridge", "audit", "-", *args],
        cwd=tmp_path,
        env=os.environ | {"TMPDIR": str(temporary)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert done.stdin is not None
    done.stdin.write(b"".join(as_line(one.raw) for one in STREAM))
    done.stdin.flush()
    begun = tmp_path / "seen.db" if args else temporary
    ends = time.monotonic() + 30
    while not (begun.exists() and (begun.is_file() or any(begun.iterdir()))):
        assert time.monotonic() < ends
        time.sleep(0.05)
    time.sleep(0.3)
    done.send_signal(number)
    assert done.wait(30) == 128 + number
    assert done.stderr is not None
    told = done.stderr.read().decode()
    assert "interrupted; " in told
    assert "Traceback" not in told
    assert not list(temporary.iterdir())
    for pipe in (done.stdin, done.stdout, done.stderr):
        assert pipe is not None
        pipe.close()


_IN_A_HOOK = """
import os, signal, sys
from oncebridge.cli import main

def raise_it():
    os.kill(os.getpid(), int(os.environ["NUMBER"]))
    "Python calls the handler here, inside the hook."

os.register_at_fork(**{os.environ["HOOK"]: raise_it})
sys.argv = ["oncebridge", "audit", "-"]
main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, *full(signal.SIGTERM, signal.SIGHUP)])
@pytest.mark.parametrize("hook", ["before", "after_in_parent"])
def test_a_signal_inside_a_hook_of_the_fork_is_not_lost(tmp_path, number, hook):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", _IN_A_HOOK],
        cwd=tmp_path,
        env=os.environ | {"TMPDIR": str(temporary), "NUMBER": str(int(number)), "HOOK": hook},
        input=b"".join(as_line(one.raw) for one in STREAM),
        capture_output=True,
        timeout=60,
        check=False,
    )
    told = done.stderr.decode()
    assert done.returncode == 128 + number, told
    assert "interrupted; " in told
    assert "Exception ignored" not in told
    assert not list(temporary.iterdir())


_DROPPED = """
import signal, sys
from oncebridge.cli import audit

class Hook:
    def __del__(self):
        signal.raise_signal(signal.SIGTERM)

sys.unraisablehook = lambda dropped: print("dropped")
try:
    with audit._signals_raise():
        Hook()
        print("goes on", flush=True)
        try:
            signal.raise_signal(signal.SIGTERM)
            print("ignored", flush=True)
        finally:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.raise_signal(number)
            print("cleaned up", flush=True)
except KeyboardInterrupt as left:
    sys.exit(left.code)
"""


def test_a_signal_that_python_dropped_is_heard_when_it_is_repeated_but_not_while_it_ends():
    done = subprocess.run(
        [sys.executable, "-c", _DROPPED], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.splitlines() == ["dropped", "goes on", "cleaned up"], done.stderr
    assert done.returncode == 128 + signal.SIGTERM


def in_a_shell(tmp_path: Path, line: str, code: int) -> str:
    """Run a line of sh in which `$ob` is the command, and give what it complains about."""
    done = subprocess.run(
        ["sh", "-c", line],
        cwd=tmp_path,
        env=os.environ | {"ob": f"{sys.executable} -m oncebridge"},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code, done
    told = done.stderr.decode()
    for surprise in ("Traceback", "please report these lines", "Exception ignored"):
        assert surprise not in told
    return told


@pytest.mark.parametrize("args", ["", "--json", "--warm sqlite:seen.db"])
def test_a_full_disk_behind_standard_output_is_told(recording, tmp_path, args):
    told = in_a_shell(tmp_path, f"$ob audit events.ndjson {args} > /dev/full", 1)
    assert "standard output: No space left on device" in told


@pytest.mark.parametrize("args", ["", "--warm sqlite:seen.db"])
def test_a_closed_standard_input_is_told(tmp_path, args):
    assert "-: standard input is closed" in in_a_shell(tmp_path, f"$ob audit - {args} <&-", 2)


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-"])
def test_a_closed_standard_file_harms_no_other(recording, tmp_path, closed):
    in_a_shell(tmp_path, f"$ob audit events.ndjson --warm sqlite:seen.db {closed}", 0)
    in_a_shell(tmp_path, f"$ob audit events.ndjson --html report.html {closed}", 0)
    assert (tmp_path / "report.html").read_text().startswith(MARK)


def test_a_hang_up_that_is_ignored_stays_so(recording, tmp_path):
    told = in_a_shell(
        tmp_path,
        """
        trap "" HUP
        mkfifo events
        $ob audit events > out & job=$!
        exec 3> events
        cat events.ndjson >&3
        sleep 1
        kill -HUP $job
        exec 3>&-
        wait $job && grep -q "600 arrivals contain" out
        """,
        0,
    )
    assert "left" not in told


# --- names of files -----------------------------------------------------------------------


@pytest.mark.parametrize("count", [3, 9000], ids=["alone", "with workers"])
def test_a_file_may_have_any_name(run, tmp_path, count):
    folder = tmp_path / "days"
    folder.mkdir()
    line = json.dumps(event(1, note="x" * 1000)).encode() + b"\n"
    (folder / os.fsdecode(b"\xff\x1b[31m.ndjson")).write_bytes(line * count + b"{cut off\n")
    for args in (("--json",), ("--html", "report.html"), ("--warm", "sqlite:seen.db")):
        ran = run("audit", "days", *args, code=1)
        assert "\x1b" not in ran.out + ran.err
        if args == ("--json",):
            (told,) = ran.objects()
            place = f"days/\\udcff\\x1b[31m.ndjson:{count + 1}"
            assert (told["events"], told["unreadable_places"]) == (count, [place])


def test_a_file_that_cannot_be_read_is_spelt_out_as_well(run, tmp_path):
    (tmp_path / "days").mkdir()
    (tmp_path / "days" / "\x1b[31m").symlink_to("/proc/self/mem")
    ran = run("audit", "days/\x1b[31m", code=2)
    assert "days/\\x1b[31m: input/output error" in ran.err


@pytest.mark.parametrize("args", [(), ("--warm", "sqlite:seen.db")], ids=["report", "warm"])
def test_a_file_that_is_there_twice_is_read_once(call, recording, tmp_path, args):
    (tmp_path / "days").mkdir()
    (tmp_path / "days" / "link").symlink_to(recording)
    (tmp_path / "days" / "name").hardlink_to(recording)
    (tmp_path / "days" / "up").symlink_to(tmp_path, target_is_directory=True)
    paths = ("events.ndjson", "./events.ndjson", "days")
    ran = call("audit", *paths, "--json", *args)
    (told,) = ran.objects()
    assert "events.ndjson, days/link, days/name: named more than once" in ran.err
    assert (told["new"] + told["known"] if args else told["events"]) == 600


def test_standard_input_is_read_once(call):
    line = json.dumps(event(1)).encode() + b"\n"
    ran = call("audit", "-", "-", "--json", given=line * 2)
    (told,) = ran.objects()
    assert "-: named more than once" in ran.err
    assert (told["files"], told["events"]) == (1, 2)


# --- the documentation --------------------------------------------------------------------

DOCS = (Path(__file__).parents[2] / "docs" / "audit.md").read_text()


def test_the_documentation_names_every_member_cause_and_suspicion():
    _, _, members = DOCS.partition("## JSON output")
    rows = [line.split("|")[1] for line in members.splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert named == {*AuditReport.__struct_fields__, "suggestion"}
    for cause in Cause:
        assert f"| `{cause.value}` |" in DOCS
    for title, _ in report_text.SUSPICIONS.values():
        assert f"| {title} |" in DOCS


def test_a_queue_is_only_taken_for_empty_after_a_while():
    (line,) = [line for line in DOCS.splitlines() if "aws sqs receive-message" in line]
    assert "--wait-time-seconds 20" in line


def test_the_documentation_names_options_that_there_are(call):
    shown = call("audit", "--help").out
    ours = [
        line for line in DOCS.splitlines() if "aws " not in line and not line.startswith("    --")
    ]
    lines = [
        line for line in ours if "oncebridge simulate" not in line and "--attribute" not in line
    ]
    for flag in set(re.findall(r"(?<![\w-])--[a-z]+", "\n".join(lines))):
        assert f"{flag} " in shown or f"{flag}\n" in shown, flag
