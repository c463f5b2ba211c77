"""Configurations to look at: a clean one on files, and whatever a test changes about it."""

from pathlib import Path

from oncebridge.base.clock import Clock, system_clock
from oncebridge.check.finding import Checkup, Finding
from oncebridge.check.run import checks as all_checks
from oncebridge.check.run import run_all
from oncebridge.service.config import Setup, load

CLEAN = {
    "source": '"http://127.0.0.1:18080/events"',
    "store": '"sqlite:seen.db"',
    "dead": '"sqlite:dead.db"',
    "sink": '"https://crm.example.com/hooks"',
    "audit": '"audit.ndjson"',
}


def written(tmp_path: Path, text: str = "", *, without: str = "", **settings: str) -> Path:
    """Write a clean configuration with other *settings*, each as TOML, and *text* below them."""
    lines = []
    for name, value in (CLEAN | settings).items():
        if name not in without.split():
            value = value.replace('"sqlite:', f'"sqlite:{tmp_path}/')  # noqa: PLW2901
            lines.append(f"{name} = {value}")
    path = tmp_path / "oncebridge.toml"
    path.write_text("\n".join([*lines, text]) + "\n")
    path.chmod(0o600)
    return path


def setup_of(tmp_path: Path, text: str = "", *, without: str = "", **settings: str) -> Setup:
    return load(written(tmp_path, text, without=without, **settings), environment={})


async def found_in(setup: Setup, *, clock: Clock = system_clock) -> Checkup:
    """Make all checks but those on AWS."""
    here = [one for one in all_checks(setup, clock=clock) if one.what != "AWS"]
    return await run_all(here)


def codes(checkup: Checkup) -> list[str]:
    return sorted(finding.code for finding in checkup.findings)


def only(checkup: Checkup) -> Finding:
    """Give the one finding that there is."""
    assert len(checkup.findings) == 1, codes(checkup)
    return checkup.findings[0]
