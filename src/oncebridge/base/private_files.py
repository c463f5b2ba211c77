"""
Create files that may hold events: readable by their owner only, never through a symbolic link.

An existing file keeps its mode and owner: the operator may have chosen them.
"""

import errno
import os
from pathlib import Path


def create_private(path: Path, flags: int = os.O_RDWR, *, mode: int = 0o600) -> int:
    """
    Create the file at *path* and return its descriptor.

    Raise `FileExistsError` if there is one, and `OSError` if *path* is a symbolic link whose
    target does not exist.
    """
    flags |= os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, flags, mode)
    except FileExistsError:
        if path.is_symlink() and not path.exists():
            raise OSError(
                errno.ELOOP,
                "it is a symbolic link to a file that does not exist; create that file, or choose "
                "another path",
            ) from None
        raise


def open_private(path: Path, flags: int, *, mode: int = 0o600) -> tuple[int, bool]:
    """Open the file at *path*; return its descriptor, and True if it was created."""
    while True:
        try:
            return os.open(path, flags | os.O_CLOEXEC), False
        except FileNotFoundError:
            try:
                return create_private(path, flags, mode=mode), True
            except FileExistsError:
                continue  # another process was faster


def sync_directory(path: Path) -> None:
    """Flush the directory *path*, so that new and renamed files in it survive a crash."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def explain_os_error(error: OSError) -> str:
    """Return what is wrong, and how to fix it where that is known."""
    match error.errno:
        case errno.ENOENT | errno.ENOTDIR:
            return "the directory does not exist; create it, or choose another path"
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return f"is not writable ({error.strerror}); the directory must be writable too"
        case _:
            return error.strerror or type(error).__name__
