"""
Build what Lambda runs: a function's package and a layer, for both processors.

    python deploy/lambda/build.py dist/lambda [--python 3.13] [--arch arm64] [--compile]

A package holds oncebridge and what it needs for DynamoDB and HTTP, as `requirements/lambda.txt`
pins it by hash. botocore is left out, because Lambda's runtimes for Python bring it;
`--with-botocore` takes the pinned one along. Whatever machine this runs on, wheels of the
target's platform and Python are taken. `--compile` adds bytecode, which Lambda would otherwise
make anew at every cold start, because it cannot keep it; run this with the target's Python then.

The same sources give the same bytes: names are sorted, times and modes fixed, and nothing is
kept that an installer would have written. Wheels are fetched once, into `build/`.
"""
# ruff: noqa: INP001, T201 - a script, which prints a table

import argparse
import hashlib
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, get_args

Arch = Literal["x86_64", "arm64"]

ROOT: Final = Path(__file__).parents[2]
PYTHON: Final = "3.13"
_THIS: Final = f"{sys.version_info.major}.{sys.version_info.minor}"
_LOCK: Final = ROOT / "requirements" / "lambda.txt"
_WHEELS: Final = ROOT / "build" / "lambda"
_PLATFORMS: Final = {"x86_64": "x86_64", "arm64": "aarch64"}
_BOTOCORE: Final = frozenset({"botocore", "python-dateutil", "six", "urllib3"})
"""What Lambda brings: botocore, and what only botocore needs."""
_LEFT_OUT: Final = re.compile(r"[^/]+\.data/|[^/]+\.dist-info/RECORD$|.*\.(c|h|pxd|pyc|pyi|pyx)$")
"""Scripts and sources that nobody needs there, and lists of what was once in a wheel."""
_LEAST_GLIBC: Final = "manylinux2014"  # 2.17; Lambda has 2.26 for Python 3.11, later ones 2.34
_EPOCH: Final = (1980, 1, 1, 0, 0, 0)  # the oldest that a ZIP file can tell
_MODE: Final = 0o100644  # Lambda runs as somebody else, who must be able to read it


def build(
    arch: Arch,
    folder: Path,
    *,
    layer: bool = False,
    python: str = PYTHON,
    with_botocore: bool = False,
    compiled: bool = False,
) -> Path:
    """Build the package for *arch* into *folder*, or the *layer*, and give its path."""
    if compiled and python != _THIS:
        raise SystemExit(f"bytecode for Python {python} is made by it, and this is {_THIS}")
    wheels = _fetched(arch, python, with_botocore=with_botocore)
    with tempfile.TemporaryDirectory() as made:
        files = _unpacked([_own_wheel(Path(made)), *wheels])
    if compiled:
        files |= _bytecode(files)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"oncebridge-{'layer' if layer else 'lambda'}-{arch}.zip"
    _zip(path, {f"python/{name}": data for name, data in files.items()} if layer else files)
    return path


# --- wheels -------------------------------------------------------------------------------


def _own_wheel(folder: Path) -> Path:
    """Build the wheel of this project."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel"]
    _run([*command, "--directory", str(folder)])
    (wheel,) = folder.glob("*.whl")
    return wheel


def _fetched(arch: Arch, python: str, *, with_botocore: bool) -> list[Path]:
    """Give the wheels of everything that is pinned, fetched only if they are not there."""
    folder = _WHEELS / f"{arch}-{python}"
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as taken:
        wanted = Path(taken) / "requirements.txt"
        wanted.write_text(_pinned(_LOCK.read_text(), set() if with_botocore else _BOTOCORE))
        command = [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"),
            *("--require-hashes", "--no-deps", "--only-binary=:all:", "--implementation", "cp"),
            *("--platform", f"{_LEAST_GLIBC}_{_PLATFORMS[arch]}", "--python-version", python),
            *("--requirement", str(wanted), "--dest", taken, "--find-links", str(folder)),
        ]
        if not _runs([*command, "--no-index"]):
            _run(command)
        # Each moves in whole: others may be building the same.
        return sorted(wheel.rename(folder / wheel.name) for wheel in Path(taken).glob("*.whl"))


def _pinned(lock: str, without: set[str] | frozenset[str]) -> str:
    """Give the lock, less some packages."""
    blocks = re.split(r"(?m)^(?=[A-Za-z0-9])", lock)
    return "".join(block for block in blocks if _name(block) not in without)


def _name(requirement: str) -> str:
    return requirement.partition("==")[0].strip().lower()


def _runs(command: Sequence[str]) -> bool:
    return _done(command).returncode == 0


def _run(command: Sequence[str]) -> None:
    done = _done(command)
    if done.returncode:
        raise SystemExit(f"{' '.join(command[1:4])} failed:\n{done.stderr}")


def _done(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)  # noqa: S603


# --- the archive --------------------------------------------------------------------------


def _unpacked(wheels: Sequence[Path]) -> dict[str, bytes]:
    """Read what the wheels hold, as it would lie beside each other."""
    files: dict[str, bytes] = {}
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name.endswith("/") or _LEFT_OUT.match(name):
                    continue
                if name in files:
                    raise ValueError(f"{name} is in more than one wheel")
                files[name] = archive.read(name)
    return files


def _bytecode(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """
    Compile all modules, in a process of its own.

    What comes out depends a little on what the process did before. The bytecode is not checked
    against its source: in Lambda neither can change.
    """
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for name in files:
            if name.endswith(".py"):
                path = folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(files[name])
        options = ["-q", "--invalidation-mode", "unchecked-hash", "-s", made, "-p", "/var/task"]
        _run([sys.executable, "-I", "-m", "compileall", *options, made])
        return {
            path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.pyc")
        }


def _zip(path: Path, files: Mapping[str, bytes]) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name in sorted(files):
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.create_system = 3  # Unix, whatever this is
            entry.external_attr = _MODE << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, files[name])


# --- what is said -------------------------------------------------------------------------


def packages(path: Path) -> dict[str, tuple[str, int]]:
    """List what a package or layer holds: by name, the version and the unpacked size."""
    with zipfile.ZipFile(path) as archive:
        infos = [
            (entry.filename.removeprefix("python/"), entry.file_size)
            for entry in archive.infolist()
        ]
    sizes: dict[str, int] = {}
    versions: dict[str, str] = {}
    for name, size in infos:
        top = name.partition("/")[0].removesuffix(".py")
        if top.endswith(".dist-info"):
            top, _, version = top.removesuffix(".dist-info").partition("-")
            versions[top] = version
        sizes[top] = sizes.get(top, 0) + size
    sizes["python_dateutil"] = sizes.get("python_dateutil", 0) + sizes.pop("dateutil", 0)
    return {name: (versions[name], sizes[name]) for name in sorted(versions)}


def _table(paths: Sequence[Path]) -> Iterator[str]:
    yield f"{'file':<30} {'size':>10}  sha256"
    for path in paths:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        yield f"{path.name:<30} {_kb(path.stat().st_size):>10}  {digest}"
    for path in paths:
        yield f"\n{path.name}, unpacked"
        for name, (version, size) in packages(path).items():
            yield f"  {name:<16} {version:<12} {_kb(size):>10}"


def _kb(size: int) -> str:
    return f"{size / 1000:,.0f} kB"


def main(arguments: Sequence[str] | None = None) -> None:
    """Build everything that is asked for, and say what it is."""
    parser = argparse.ArgumentParser(description="Build packages and layers for AWS Lambda.")
    parser.add_argument("folder", type=Path, help="where they go")
    parser.add_argument("--python", default=PYTHON, help=f"of the runtime [{PYTHON}]")
    parser.add_argument("--arch", choices=get_args(Arch), help="one processor; otherwise both")
    parser.add_argument(
        "--with-botocore", action="store_true", help="take the pinned botocore along"
    )
    parser.add_argument("--compile", action="store_true", help="add bytecode")
    chosen = parser.parse_args(arguments)
    paths = [
        build(
            arch,
            chosen.folder,
            layer=layer,
            python=chosen.python,
            with_botocore=chosen.with_botocore,
            compiled=chosen.compile,
        )
        for layer in (False, True)
        for arch in ([chosen.arch] if chosen.arch else get_args(Arch))
    ]
    print(f"for Python {chosen.python}, in {chosen.folder}\n")
    for line in _table(paths):
        print(line)


if __name__ == "__main__":
    main()
