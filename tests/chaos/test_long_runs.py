"""The long runs judge as they should, keep what they find, and tell how to run it again."""

import json
from collections import Counter
from math import inf
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
from tests.stores.operations import OPERATIONS, UPKEEP
from tests.stores.proxy import Fault

from . import network, page, soak, suite
from . import run as chaos
from .growth import trend
from .leaky import LEAK_BYTES
from .network import NetworkReport
from .steady import SteadyReport, SteadyRun
from .table import Row, Rows, joined, read, shown

MINUTES = 30
WARM_S = soak.warm_up_s(MINUTES * 60, 180)


def noisy(level: float, per_hour: float, *, noise: float = 0.3, seconds: int = MINUTES * 60):
    """Make a series up, with a sample every five seconds and a jump now and then."""
    dice = Random(7)
    return [
        (at, level + per_hour * at / 3600 + dice.gauss(0, noise) + 5 * (dice.random() < 0.02))
        for at in range(0, seconds, 5)
    ]


# --- growth ------------------------------------------------------------------------------


@pytest.mark.parametrize("per_hour", [-20.0, 0.0, 0.9, 3.0, 40.0])
def test_a_slope_is_found_among_noise(per_hour):
    found = trend(noisy(50, per_hour))
    assert found.low <= per_hour <= found.high
    assert found.high - found.low < 2
    assert found.low < found.slope < found.high


def test_what_does_not_change_has_no_slope():
    assert trend([(at, 7.0) for at in range(0, 1800, 5)])[:3] == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("minutes", [1, 2, 3])
def test_of_too_few_points_nobody_is_sure(minutes):
    found = trend([(at, float(at)) for at in range(0, minutes * 60, 5)])
    assert (found.low, found.high) == (-inf, inf)


# --- the judge of the soak ---------------------------------------------------------------


def healthy(store: str = "sqlite") -> SteadyReport:
    plan = SteadyRun(seed=1, store=store, seconds=MINUTES * 60)
    report = SteadyReport(plan, events=252_000, brought=plan.copies, kills=14, extra=3, minutes=30)
    report.excuses["killed"] = 3
    report.series = {
        "rss": noisy(55, 0.2),
        "fds": noisy(90, 0, noise=4),
        "threads": [(at, 8.0) for at in range(0, 1800, 5)],
        "keys": noisy(26_000, 0, noise=300),
        "file": noisy(6, 0, noise=0.01),
    }
    return report


def wrong(report: SteadyReport) -> list[str]:
    return [found.what for found in soak.findings(report, WARM_S) if not found.is_right]


def test_a_steady_service_is_right():
    assert wrong(healthy()) == []


@pytest.mark.parametrize(
    ("name", "series", "what"),
    [
        ("rss", noisy(55, 5), ["RSS, MB"]),
        ("rss", noisy(250, 0), ["RSS at most, MB"]),
        ("fds", noisy(90, 60, noise=4), ["open files"]),
        ("threads", [(at, 8.0 + at // 120) for at in range(0, 1800, 5)], ["threads"]),
        ("file", noisy(6, 3, noise=0.01), ["file, MB"]),
        ("keys", noisy(26_000, 40_000), ["keys at most"]),
    ],
    ids=["memory", "much-memory", "files", "threads", "store", "keys"],
)
def test_what_grows_is_convicted(name, series, what):
    report = healthy()
    report.series[name] = series
    assert wrong(report) == what


@pytest.mark.parametrize(
    ("spoilt", "what"),
    [
        ({"lost": 1}, "lost"),
        ({"unexplained": 1}, "repeated, 14 kills"),
        ({"faults": ["3 arrivals, 2 verdicts, 0 in flight"]}, "counts compared"),
        ({"brought": 100_000}, "arrivals/s"),
    ],
)
def test_what_befell_events_is_judged_too(spoilt, what):
    report = healthy()
    for name, value in spoilt.items():
        setattr(report, name, value)
    assert wrong(report) == [what]


def test_a_cap_that_is_passed_or_never_reached_is_noticed():
    plan = SteadyRun(seed=1, store="memory", seconds=MINUTES * 60, kill_every_s=0, max_keys=30_000)
    report = healthy("memory")
    report.run = plan
    for kept, refused, what in (
        (30_000, 10, []),
        (30_001, 10, ["keys at the cap"]),
        (30_000, 0, ["refused at the cap"]),
    ):
        report.kept_at_cap, report.refused_at_cap = kept, refused
        assert wrong(report) == what


async def test_a_service_that_leaks_is_convicted():
    """Really run, for a few seconds: its slopes are those of its leak, or more."""
    plan = SteadyRun(
        seed=3,
        store="sqlite",
        seconds=6,
        rate=60,
        kill_every_s=0,
        sample_s=0.05,
        program="tests.chaos.leaky",
    )
    report = await soak.run(plan)
    assert (report.lost, report.extra, report.faults) == (0, 0, [])
    found = list(soak.findings(report, 1.0))
    assert {"RSS, MB", "open files"} <= {one.what for one in found if not one.is_right}
    sent_per_h = report.events / plan.seconds * 3600
    files = trend([sample for sample in report.series["fds"] if sample[0] >= 1], 0.2)
    assert files.high > 0.5 * sent_per_h
    memory = trend([sample for sample in report.series["rss"] if sample[0] >= 1], 0.2)
    assert memory.high > 0.5 * sent_per_h * LEAK_BYTES / 2**20


# --- the table ---------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[], ["--quick"], ["--events", "700", "--kills", "9"]])
def test_every_row_tells_how_to_run_it_again(sizes):
    asked = chaos._arguments(["--seed", "12345", *sizes])
    again = chaos._Again(asked)
    for job in chaos._jobs(asked):
        words = again.sized(job.name).split()
        assert words[:3] == ["python", "-m", "tests.chaos.run"]
        repeated = chaos._arguments(words[3:])
        assert (repeated.seed, repeated.events, repeated.kills) == (
            12345,
            asked.events,
            asked.kills,
        )
        jobs = chaos._jobs(repeated)
        wanted = [one.name for one in jobs if chaos._is_wanted(one.name, repeated.only)]
        assert wanted == [job.name]


def test_a_violation_of_the_simulation_is_told_by_its_own_seed():
    seen = chaos.Simulated(1000, Counter(seeds=50, awaits=1), [(1017, "trace")], 2.0)
    row = chaos._of_simulation("simulation:1", seen)
    assert not row.is_right
    assert "python -m tests.sim.run --from 1017 --seeds 1" in shown([row])
    assert "trace" in shown([row])


def test_a_row_that_breaks_off_is_kept_and_the_next_is_run(tmp_path: Path, monkeypatch, capsys):
    def breaks() -> Row:
        raise OSError("no room")

    def goes() -> Row:
        return chaos._of_network("redis", NetworkReport(trials=2), chaos._Again(asked))

    asked = chaos._arguments(["--seed", "5"])
    jobs = [chaos.Job("kill:redis", breaks), chaos.Job("network:redis", goes)]
    monkeypatch.setattr(chaos, "_jobs", lambda _: iter(jobs))
    monkeypatch.setattr(chaos.signal, "signal", lambda *_: None)  # this process keeps its own
    out = tmp_path / "deep" / "chaos.json"
    assert chaos.main(["--seed", "5", "--out", str(out)]) == 1
    assert [(row.name, row.is_right) for row in read(out)] == [
        ("kill:redis", False),
        ("network:redis", True),
    ]
    told = capsys.readouterr().out
    assert "no room" in told
    assert "again: python -m tests.chaos.run --only kill:redis --seed 5\n" in told


@pytest.fixture
def small(tmp_path: Path, monkeypatch):
    """Return a run of three rows that are over at once, and the names of those that were run."""
    ran: list[str] = []

    def job(name: str) -> chaos.Job:
        def run() -> Row:
            if name in broken:
                raise KeyboardInterrupt
            ran.append(name)
            return a_row(name, "VIOLATED" if name == "b" else "right")

        return chaos.Job(name, run)

    def main(*more: str) -> int:
        ran.clear()
        return chaos.main(["--out", str(tmp_path / "chaos.json"), *more])

    broken: set[str] = set()
    monkeypatch.setattr(chaos, "_jobs", lambda _: iter([job(name) for name in "abc"]))
    monkeypatch.setattr(chaos.signal, "signal", lambda *_: None)  # this process keeps its own
    monkeypatch.setattr(chaos, "commit", lambda: "one")
    return SimpleNamespace(main=main, ran=ran, broken=broken, path=tmp_path / "chaos.json")


def test_some_rows_leave_the_others_as_they_were(small):
    assert small.main() == 1
    assert small.ran == ["a", "b", "c"]
    assert small.main("--only", "c") == 0
    assert small.ran == ["c"]
    assert small.main("--only", "b") == 1
    assert {row.name for row in read(small.path)} == {"a", "b", "c"}


def test_a_run_that_was_interrupted_goes_on(small):
    small.broken.add("c")
    with pytest.raises(KeyboardInterrupt):
        small.main("--seed", "77", "--events", "9")
    assert small.ran == ["a", "b"]
    small.broken.clear()
    # The row that failed is kept: it does not get better by asking again.
    assert small.main("--resume") == 1
    assert small.ran == ["c"]
    run = chaos._resumed(chaos._arguments(["--resume"]), Rows(small.path, "one").run)
    assert (run.seed, run.events, run.resume) == (77, 9, True)


@pytest.mark.parametrize("commit", ["another", ""])
def test_rows_of_another_commit_are_run_again(small, monkeypatch, commit):
    small.main()
    monkeypatch.setattr(chaos, "commit", lambda: commit)
    assert small.main("--resume") == 1
    assert small.ran == ["a", "b", "c"]


def test_without_a_run_there_is_nothing_to_resume(small, capsys):
    assert small.main("--resume") == 2
    assert "no run to resume" in capsys.readouterr().out


def test_the_parts_of_the_simulation_are_shown_as_one():
    seen = [Counter(seeds=50, awaits=2_000_000, excuses=3) for _ in range(3)]
    broken = [[], [(1017, "trace")], []]
    rows = [
        chaos._of_simulation(f"simulation:{part}", chaos.Simulated(1000, *found, 2.0))
        for part, found in enumerate(zip(seen, broken, strict=True))
    ]
    first, last, whole = joined([a_row("a", "right"), *rows, a_row("b", "right")])
    assert (first.name, last.name) == ("a", "b")
    assert (whole.size, whole.struck) == ("150 seeds", "faults at 6 million awaits")
    assert (whole.seconds, whole.unexplained, whole.is_right) == (6.0, 1, False)
    assert "--from 1017" in whole.again
    assert joined([rows[0], rows[2]])[0].is_right


def test_what_is_beside_is_named_by_what_can_be_asked_for():
    jobs = list(chaos._jobs(chaos._arguments([])))
    wanted = chaos._BESIDE.split(",")
    assert [job.name for job in jobs if job.is_beside] == [
        job.name for job in jobs if chaos._is_wanted(job.name, wanted)
    ]


@pytest.mark.parametrize(
    ("found", "code", "passed"),
    [
        ('tests="3" failures="0" errors="0" skipped="0"', 0, 3),
        ('tests="3" failures="0" errors="0" skipped="1"', 0, 2),
        ('tests="3" failures="1" errors="1" skipped="0"', 1, 1),
        # Interrupted, and all so far had passed.
        ('tests="3" failures="0" errors="0" skipped="0"', 2, 2),
    ],
)
def test_a_suite_is_right_if_all_of_it_passed(tmp_path: Path, found, code, passed):
    results = tmp_path / "results.xml"
    results.write_text(f"<testsuites><testsuite {found}/></testsuites>")
    report = suite.report_of(results, 1.0, code, "")
    assert (report.tests, report.passed, report.is_right) == (3, passed, passed == 3)


def test_a_suite_without_results_is_wrong(tmp_path: Path):
    assert not suite.report_of(tmp_path / "none.xml", 1.0, 0, "").is_right


def a_row(name: str, verdict: str) -> Row:
    return Row(
        name=name,
        what=name,
        store="redis",
        size="9 events",
        seconds=1.0,
        verdict=verdict,
        is_right=verdict == "right",
        again="",
    )


# --- network faults ----------------------------------------------------------------------


@pytest.mark.parametrize("store", network.KINDS)
def test_every_fault_meets_every_operation(store):
    trials = network.trials_of(network.KINDS[store])
    met = {(type(trial.operation), trial.fault) for trial in trials}
    assert {(operation, fault) for operation in OPERATIONS for fault in Fault} <= met
    in_time = set(Fault) - {Fault.CRUMBS}
    assert {(operation, fault) for operation in UPKEEP for fault in in_time} <= met


@pytest.mark.parametrize(
    ("complaint", "is_forgiven"),
    [
        ("swallow, claim: took 2.6 s", True),
        ("cut, commit: after the fault: still no answer", True),
        ("reset after, claim: after the fault: answered Busy", False),
        ("reset before, commit: applied, although the request never arrived", False),
        ("garbage, peek: raised ValueError: no", False),
    ],
)
def test_only_lateness_is_tried_again(complaint, is_forgiven):
    assert network._is_of_time(complaint) is is_forgiven


def test_one_trial_that_ends_otherwise_is_a_violation():
    again = chaos._Again(chaos._arguments([]))
    report = NetworkReport(trials=9, wrong=1, complaints=["cut, claim: raised ValueError: no"])
    row = chaos._of_network("s3", report, again)
    assert not row.is_right
    assert "8 of 9" in row.verdict
    assert row.again == "python -m tests.chaos.run --only network:s3"


# --- the page ----------------------------------------------------------------------------


def test_results_get_their_places_on_the_page(tmp_path: Path):
    text = page._PAGE.read_text()
    path = tmp_path / "chaos.json"
    rows = Rows(path, "one")
    rows.add(a_row("kill:redis", "right"))
    rows.add(a_row("mutant:mark-before", "convicted at seed 0"))
    made = page.of_chaos(json.loads(path.read_text()), read(path))
    placed = page.placed(text, "chaos", made)
    assert "| kill:redis | redis | 9 events |" in placed
    assert page.placed(placed, "chaos", made) == placed
    found = soak.Finding("RSS, MB", "55.0", "< 200", is_right=True)
    told = {
        "minutes": 30.0,
        "rate": 200.0,
        "window_s": 180.0,
        "warm_up_s": 600.0,
        "machine": "some",
        "when": "2026-11-16T03:00:00+00:00",
        "stores": {"sqlite": {"findings": [found._asdict()]}},
    }
    assert "| sqlite | RSS, MB | 55.0 | < 200 | right |" in page.placed(
        text, "soak", page.of_soak(told)
    )
