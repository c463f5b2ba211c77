"""
A small disk: a file system of so many bytes, on which no more fits.

    mounted   a tmpfs
    quota     the same, and `statvfs` knows nothing of its end, as under a quota
    limited   the kernel refuses to let files grow (`RLIMIT_FSIZE`), and `statvfs` matches that

Where mounting is not permitted, all of them are limits. All are failures of real writes.
"""

import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest


class Mounted:
    """A tmpfs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ballast = folder / "ballast"

    def fill(self) -> None:
        """Leave no room at all."""
        with self._ballast.open("wb", buffering=0) as file:
            for size in (1 << 16, 1 << 12, 1):
                while True:
                    try:
                        file.write(bytes(size))
                    except OSError:
                        break

    def free(self) -> None:
        """Give all the room back."""
        self._ballast.unlink()


def _is_mounted(folder: Path, size: int) -> bool:
    """Mount it, unless that is not permitted."""
    options = ["-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    done = subprocess.run(["mount", *options], capture_output=True, check=False)
    return done.returncode == 0


def _tell(
    monkeypatch: pytest.MonkeyPatch, folder: Path, size: int, free: Callable[[], int]
) -> None:
    """Have `statvfs` tell of *folder* that it is a disk of *size* with so much *free*."""
    true_statvfs = os.statvfs

    def statvfs(path: str | Path) -> object:
        if Path(path).absolute() != folder:
            return true_statvfs(path)
        return SimpleNamespace(f_frsize=1, f_blocks=size, f_bavail=free())

    monkeypatch.setattr(os, "statvfs", statvfs)


class Limited:
    """A folder whose files cannot grow beyond *size* bytes, each."""

    def __init__(self, folder: Path, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self._size = size
        self._hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        self._is_full = False
        _tell(monkeypatch, folder, size, self._free)
        self._limit(size)

    def _free(self) -> int:
        used = sum(file.stat().st_size for file in self.folder.iterdir())
        return 0 if self._is_full else max(self._size - used, 0)

    def _limit(self, size: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, self._hard))

    def fill(self) -> None:
        self._is_full = True
        self._limit(1)

    def free(self) -> None:
        self._is_full = False
        self._limit(self._size)


Disk = Mounted | Limited


KINDS = ("mounted", "quota", "limited")


@contextmanager
def small_disk(
    kind: str, folder: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Disk]:
    """Make a disk of *size* bytes at *folder*."""
    folder.mkdir()
    if kind != "limited" and _is_mounted(folder, size):
        if kind == "quota":
            _tell(monkeypatch, folder, size, lambda: size)
        try:
            yield Mounted(folder)
        finally:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)
        return
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        yield Limited(folder, size, monkeypatch)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
