"""On what it was measured: the machine, and the versions of everything that matters."""

import os
import platform
import re
import sqlite3
import subprocess
import sys
import time
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

QUIET = 0.2
"""A machine is quiet while other work uses no more processors than this."""
PACKAGES = {
    "oncebridge": "oncebridge",
    "msgspec": "msgspec",
    "uvloop": "uvloop",
    "hiredis": "hiredis",
    "redis-py": "redis",
    "asyncpg": "asyncpg",
    "aiohttp": "aiohttp",
    "uvicorn": "uvicorn",
    "boto3": "boto3",
    "Powertools": "aws-lambda-powertools",
    "mq-bridge-connect": "mq-bridge-connect",
    "ministack": "ministack",
}


def heading() -> dict[str, Any]:
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "cores": os.cpu_count(),
        "cpu": _cpu(),
        "memory GiB": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "load": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "versions": _versions(),
    }


def others(seconds: float = 0.5) -> float:
    """Return how many processors are in use, while this process waits for some seconds."""
    share = psutil.cpu_percent(interval=seconds) / 100
    return round(share * (os.cpu_count() or 1), 2)


def await_quiet(patience_s: float) -> float:
    """Wait until no other work uses the machine, or for so long; return what is in use."""
    ends = time.monotonic() + patience_s
    while (used := others()) > QUIET and time.monotonic() < ends:
        time.sleep(1)
    return used


def _cpu() -> str:
    """Return the name of the processor, if the system knows it."""
    told = Path("/proc/cpuinfo").read_text()
    found = re.search(r"(?m)^model name\s*:\s*(.+)$", told)
    return found[1].strip() if found else platform.processor() or platform.machine()


def _versions() -> dict[str, str]:
    found = {"Python": platform.python_version(), "SQLite": sqlite3.sqlite_version}
    found |= {name: told for name, told in _servers() if told}
    for name, package in PACKAGES.items():
        with suppress(PackageNotFoundError):
            found[name] = version(package)
    return found


def _servers() -> list[tuple[str, str]]:
    from tests.servers import aws, postgres, redis

    with postgres.folder() as place:
        programs = postgres.Postgres(place).programs
        postgres_told = _told([str(programs / "postgres"), "--version"])
    dynoxide = aws._dynoxide()
    return [
        ("Redis", _told([redis.program(), "--version"])),
        ("PostgreSQL", postgres_told),
        ("Redpanda Connect", _connect()),
        ("dynoxide", _told([str(dynoxide), "--version"]) if dynoxide else ""),
    ]


def _told(command: list[str]) -> str:
    """Ask a program for its version; none, if it does not say."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    found = re.search(r"\d+(\.\d+)+", done.stdout)
    return found[0] if found else ""


def _connect() -> str:
    """Find the version of Redpanda Connect in what Go wrote into the library that holds it."""
    spec = find_spec("mq_bridge_connect")
    for library in Path(spec.origin).parent.glob("*.so") if spec and spec.origin else ():
        with library.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as content:
            found = re.search(rb"dep\tgithub.com/redpanda-data/connect/v4\tv([\d.]+)", content)
            if found:
                return found[1].decode()
    return ""


def in_words(heading: dict[str, Any]) -> list[str]:
    """Return the machine and the versions as two lines."""
    where = (
        f"{heading['cores']} cores of {heading['cpu']}, {heading['memory GiB']} GiB, "
        f"{heading['system']}, load {heading['load']} at the start, {heading['date']}"
    )
    return [where, ", ".join(f"{name} {told}" for name, told in heading["versions"].items())]
