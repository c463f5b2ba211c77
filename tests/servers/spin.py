"""
Spin, and a C compiler: what checks the model in `spec/`.

`python -m tests.servers.spin` gets them ready, and so does the first test that needs them. A
`spin` on the PATH is taken as it is. Where there is none, root installs Debian's by apt-get, and
anybody else gets the same package unpacked into `build/`. `ready` raises `NoSpin` where nothing
of this works, which says what to do: no row of the model is left out in silence.
"""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from tests.servers.browser import run

_ROOT = Path(__file__).parents[2] / "build"
_UNPACKED = _ROOT / "spin"
_COMPILERS = ("gcc", "clang", "cc")
_HELLO = "byte x; active proctype once() { x = 1; assert(x == 1) }\n"


class NoSpin(Exception):
    """There is no Spin or no C compiler, and none could be had."""


class Tools(NamedTuple):
    """Spin translates a model into C, and the compiler makes the checker of that."""

    spin: Path
    compiler: Path


def find() -> Tools | None:
    """Find a Spin and a compiler that work together."""
    named = [Path(found) for name in ("spin",) if (found := shutil.which(name))]
    compilers = [Path(found) for name in _COMPILERS if (found := shutil.which(name))]
    for spin in [*named, _UNPACKED / "usr" / "bin" / "spin"]:
        for compiler in compilers:
            tools = Tools(spin, compiler)
            if _work(tools):
                return tools
    return None


def ready() -> Tools:
    """Find them, or get them; one process at a time does, and the others find them."""
    _ROOT.mkdir(exist_ok=True)
    with (_ROOT / "spin.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if found := find():
            return found
        told = []
        for get in (_installed, _unpacked):
            told.append(get())
            if found := find():
                return found
    raise NoSpin(
        "The model of the protocol needs Spin (https://spinroot.com) and a C compiler: install the "
        "packages `spin` and `gcc`, by root on Debian or Ubuntu: apt-get install spin gcc\n"
        f"What was tried: {'; '.join(told)}"
    )


def translate(tools: Tools) -> list[str]:
    """Give what Spin is started with; it hands the model to a preprocessor first."""
    return [str(tools.spin), f"-P{tools.compiler} -E -x c"]


def _work(tools: Tools) -> bool:
    """Tell whether they can check the smallest of models."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "hello.pml").write_text(_HELLO)
        try:
            for argv in (
                [*translate(tools), "-a", "hello.pml"],
                [str(tools.compiler), "-w", "-o", "pan", "pan.c"],
                ["./pan"],
            ):
                done = subprocess.run(
                    argv, cwd=folder, capture_output=True, timeout=60, check=False
                )
                if done.returncode != 0:
                    return False
        except (OSError, subprocess.SubprocessError):
            return False
    return b"errors: 0" in done.stdout


def _installed() -> str:
    """Install Debian's, and say how it went."""
    apt = shutil.which("apt-get")
    if apt is None or os.geteuid() != 0:
        return "apt-get install: it is not there, or this is not root"
    wait = ("-o", "DPkg::Lock::Timeout=120")
    # Lists of a place that is of no use here may be missing: the installation will tell.
    run([apt, *wait, "update", "-q"], within_s=180)
    wanted = ["spin", *([] if _has_compiler() else ["gcc", "libc6-dev"])]
    what = [apt, *wait, "install", "-q", "-y", "--no-install-recommends", *wanted]
    return f"apt-get install: {run(what, within_s=600)}"


def _unpacked() -> str:
    """Fetch Debian's package and unpack it, and say how it went; it needs nothing else."""
    apt, dpkg = shutil.which("apt-get"), shutil.which("dpkg")
    if apt is None or dpkg is None:
        return "apt-get download: it is not there"
    with tempfile.TemporaryDirectory(dir=_ROOT) as name:
        folder = Path(name)
        went = run([apt, "download", "-q", "spin"], within_s=180, cwd=folder)
        packages = [*folder.glob("spin_*.deb")]
        if not packages:
            return f"apt-get download: {went}"
        went = run([dpkg, "-x", str(packages[0]), "made"], within_s=60, cwd=folder)
        if not (folder / "made" / "usr" / "bin" / "spin").exists():
            return f"dpkg: {went}"
        shutil.rmtree(_UNPACKED, ignore_errors=True)
        (folder / "made").rename(_UNPACKED)
    if not _has_compiler():
        return f"apt-get download: Spin is there, but none of {', '.join(_COMPILERS)}"
    return "apt-get download: what it brought does not work"


def _has_compiler() -> bool:
    return any(shutil.which(name) for name in _COMPILERS)


def main() -> None:
    try:
        print(f"The model is checked by {ready().spin}")
    except NoSpin as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
