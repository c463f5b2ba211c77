"""
The command `oncebridge`.

Thin: it reads the configuration, calls the library and prints. Exit codes:

    0    done
    1    something needs you: events were left, a test failed, nothing was found
    2    wrong usage or configuration; nothing was started
    3    the store, a sink or a source could not be opened
    130  left at once by a second Ctrl-C
"""

import sys


def main() -> None:
    """Run the command line, or say what is missing for it."""
    try:
        from oncebridge.cli.app import app  # noqa: PLC0415 - its packages are an extra
    except ModuleNotFoundError as error:
        if error.name and error.name.partition(".")[0] == "oncebridge":
            raise
        print(  # noqa: T201 - click is what is missing
            f"oncebridge: the command line needs {error.name}: pip install 'oncebridge[service]'",
            file=sys.stderr,
        )
        sys.exit(2)
    app()
