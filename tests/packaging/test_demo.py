"""`make demo` installs the service extra from its own lock, and runs."""

import os
import re
import subprocess
import sys
import tarfile
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]


def pins(name: str) -> dict[str, str]:
    """Read a lock: the version of each package."""
    lock = (ROOT / "requirements" / name).read_text()
    assert "--index-url" not in lock
    blocks = re.split(r"(?m)^(?=[a-z])", lock)[1:]
    assert all("--hash=sha256:" in block for block in blocks)
    return dict(re.match(r"([\w.-]+)==([\w.]+)", block).groups() for block in blocks)


def needed(name: str, extra: str = "") -> set[str]:
    """Return all packages that an installation of *name* brings, as their metadata say."""
    found: set[str] = set()
    for one in map(Requirement, requires(name) or []):
        if one.marker is None or one.marker.evaluate({"extra": extra}):
            found |= {canonicalize_name(one.name)} | needed(one.name)
    return found


def test_the_lock_of_the_service_is_what_its_extra_needs() -> None:
    service, dev = pins("service.txt"), pins("dev.txt")

    assert set(service) == needed("oncebridge", "service")
    assert service.items() <= dev.items()


def test_the_lock_of_the_build_is_what_builds_the_package() -> None:
    build, dev = pins("build.txt"), pins("dev.txt")

    assert set(build) == {"editables", "hatchling"} | needed("hatchling")
    assert build.items() <= dev.items()


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Copy what git knows, as it is now."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, check=True)
    with tarfile.open(tmp_path / "clone.tar", "w") as archive:
        for name in listed.stdout.decode().splitlines():
            if (ROOT / name).exists():
                archive.add(ROOT / name, name)
    with tarfile.open(tmp_path / "clone.tar") as archive:
        archive.extractall(tmp_path / "clone", filter="data")
    return tmp_path / "clone"


def make(clone: Path, *arguments: str) -> str:
    """Run make as a person would, also below a `make test PYTHON=...`."""
    above = {"MAKEFLAGS", "MAKELEVEL", "MFLAGS", "PYTHON"}
    done = subprocess.run(
        ["make", *arguments],
        cwd=clone,
        env={name: value for name, value in os.environ.items() if name not in above},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.full
def test_the_demo_sets_up_the_service_and_nothing_more(clone: Path) -> None:
    said = make(clone, "--dry-run", "demo").splitlines()
    assert said[-1] == "build/demo/bin/oncebridge demo"
    assert not [line for line in said if ".venv" in line or "dev.txt" in line]

    make(clone, "build/demo/.ready", f"PYTHON={sys.executable}")
    python = clone / "build" / "demo" / "bin" / "python"
    listed = subprocess.run(
        [python, "-m", "pip", "--disable-pip-version-check", "freeze", "--exclude-editable"],
        capture_output=True,
        text=True,
        check=True,
    )
    installed = dict(line.split("==") for line in listed.stdout.splitlines())
    assert {canonicalize_name(name) for name in installed} == {
        *pins("service.txt"),
        *pins("build.txt"),
    }

    demo = subprocess.run(
        [python.with_name("oncebridge"), "demo", "--fast"],
        cwd=clone,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert demo.returncode == 0, demo.stdout + demo.stderr
    assert "every logical event delivered exactly once: yes" in demo.stdout


def test_an_environment_of_another_python_is_replaced(clone: Path) -> None:
    """And stays what it is when no Python is named."""
    environment = clone / "build" / "demo"
    environment.mkdir(parents=True)
    (environment / "pyvenv.cfg").write_text("version = 3.10.1\n")
    (environment / ".ready").touch()

    assert make(clone, "-n", "build/demo/.ready") == "make: 'build/demo/.ready' is up to date.\n"
    named = make(clone, "-n", "build/demo/.ready", f"PYTHON={sys.executable}")
    assert f"{sys.executable} -m venv --clear build/demo\n" in named


def test_a_python_that_does_not_exist_is_named(clone: Path) -> None:
    with pytest.raises(AssertionError, match=r"PYTHON=python2\.99 does not run"):
        make(clone, "setup", "PYTHON=python2.99")
