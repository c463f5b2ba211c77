"""
The command `oncebridge`: reads the configuration, calls the library and prints.

Exit codes:

    0    success
    1    needs attention: events are left, a test failed, or nothing was found
    2    invalid usage or configuration; nothing was started
    3    the store, a sink or a source could not be opened
    130  stopped at once by a second Ctrl-C
"""

import os
import sys
from importlib import import_module
from typing import Any


def main() -> None:
    """Run the command line."""
    app = load("app", "app")
    _hold_standard_files()
    if any(name.lower().endswith("_proxy") for name in os.environ):
        from oncebridge.http.proxy import keep_metadata_direct  # noqa: PLC0415 - slow to import

        keep_metadata_direct()
    app()


def load(module: str, name: str) -> Any:
    """Return *name* of a module of this folder, or print which package is missing and exit."""
    try:
        return getattr(import_module(f"{__name__}.{module}"), name)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package == "oncebridge":
            raise
        print(  # noqa: T201 - click itself may be missing
            f"oncebridge: the command line needs {package}: pip install 'oncebridge[service]'",
            file=sys.stderr,
        )
        sys.exit(2)


def _hold_standard_files() -> None:
    """Reserve the descriptors of closed standard files, so that no other file or socket gets them."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= _LAST_STANDARD:
        pass
    os.close(number)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115 - for as long as the process runs


_LAST_STANDARD = 2
