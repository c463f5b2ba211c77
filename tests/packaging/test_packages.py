"""The wheel and the sdist: what is in them, and what an installation of the core brings."""

import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def run(*command: object, cwd: Path) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(folder: Path, kind: str, *, of: Path = ROOT) -> Path:
    run(sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", folder, cwd=of)
    (made,) = folder.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return made


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return build(tmp_path_factory.mktemp("wheel"), "wheel")


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    return build(tmp_path_factory.mktemp("sdist"), "sdist")


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as file:
        return {name: file.read(name) for name in file.namelist()}


def test_the_wheel_is_the_package_and_nothing_else(wheel: Path):
    tracked = run("git", "ls-files", "src", cwd=ROOT).splitlines()
    inside = {name for name in contents(wheel) if ".dist-info/" not in name}
    assert inside >= {line.removeprefix("src/") for line in tracked if (ROOT / line).exists()}
    assert not [name for name in inside if not name.startswith("oncebridge/")]
    assert not [name for name in inside if "__pycache__" in name or name.endswith((".db", ".pyc"))]


def test_the_wheel_brings_its_types_its_licence_and_its_pages(wheel: Path):
    inside = contents(wheel)
    assert "oncebridge/py.typed" in inside
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in inside)
    assert any(name.startswith("oncebridge/dashboard/templates/") for name in inside)
    assert any(name.startswith("oncebridge/dashboard/static/") for name in inside)


def test_the_wheel_runs_anywhere_and_says_what_it_needs(wheel: Path):
    assert wheel.name == f"oncebridge-{PROJECT['version']}-py3-none-any.whl"
    (metadata,) = [text for name, text in contents(wheel).items() if name.endswith("/METADATA")]
    needs = message_from_bytes(metadata).get_all("Requires-Dist")
    assert needs is not None
    core = {re.split(r"[<>=!~ ;]", line)[0] for line in needs if "extra ==" not in line}
    assert core == {"jmespath", "msgspec"}


@pytest.mark.full
def test_the_sdist_makes_the_same_wheel(sdist: Path, wheel: Path, tmp_path: Path):
    with tarfile.open(sdist) as file:
        file.extractall(tmp_path / "in", filter="data")
    (source,) = (tmp_path / "in").iterdir()
    again = contents(build(tmp_path / "out", "wheel", of=source))
    first = contents(wheel)
    assert {name for name in again if not name.endswith("/RECORD")} == {
        name for name in first if not name.endswith("/RECORD")
    }
    assert all(first[name] == text for name, text in again.items() if not name.endswith("/RECORD"))


def test_the_sdist_has_what_its_tests_need(sdist: Path):
    with tarfile.open(sdist) as file:
        inside = {name.partition("/")[2] for name in file.getnames()}
    tracked = set(run("git", "ls-files", cwd=ROOT).splitlines())
    left_out = {line for line in tracked - inside if (ROOT / line).exists()}
    assert {line for line in left_out if not line.startswith((".ci/", ".gitignore"))} == set()
    assert not [name for name in inside if name.startswith(("build/", ".venv/", "dist/"))]


CORE = """
import asyncio, sys
from oncebridge import Gateway
from oncebridge.stores.sqlite import SQLiteStore

sent = []
async def main():
    async with Gateway(store=SQLiteStore("seen.db"), sink=lambda event: sent.append(event.id)) as gateway:
        raw = b'{"id":"%d","source":"a","detail-type":"b","detail":{"n":1}}'
        return [o.verdict.value for o in await gateway.process([raw % 1, raw % 2])]
print(asyncio.run(main()), sent)
"""


@pytest.mark.full
def test_the_core_installs_with_two_packages_and_works(wheel: Path, tmp_path: Path):
    """From the lock, with its hashes; `pip install oncebridge` would take newer ones of the same."""
    lock = (ROOT / "requirements" / "all.txt").read_text()
    blocks = re.findall(r"^(?:jmespath|msgspec)==.*?(?=^[a-z])", lock, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 2
    (tmp_path / "core.txt").write_text("".join(blocks))
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    pip = python, "-m", "pip", "--disable-pip-version-check"
    run(*pip, "install", "--require-hashes", "--no-deps", "-r", "core.txt", cwd=tmp_path)
    run(*pip, "install", "--no-deps", wheel, cwd=tmp_path)
    run(*pip, "check", cwd=tmp_path)
    listed = {
        line.partition("==")[0].partition(" @")[0]
        for line in run(*pip, "freeze", cwd=tmp_path).splitlines()
    }
    assert listed == {"jmespath", "msgspec", "oncebridge"}
    assert run(python, "-W", "error", "-c", CORE, cwd=tmp_path) == (
        "['delivered', 'duplicate'] ['1']\n"
    )
    bare = subprocess.run(
        [tmp_path / "env" / "bin" / "oncebridge", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert bare.returncode == 2
    assert "oncebridge[service]" in bare.stderr
