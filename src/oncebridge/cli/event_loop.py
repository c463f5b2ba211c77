"""The event loop of the commands, and the signals that end it."""

import asyncio
import errno
import gc
import logging
import os
import signal
import termios
import traceback
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

_log = logging.getLogger("oncebridge")
_T = TypeVar("_T")


def run_loop(work: Coroutine[Any, Any, _T]) -> _T:
    """Run *work* on uvloop if it is installed, else on the loop of asyncio."""
    try:
        import uvloop  # noqa: PLC0415 - not on every platform
    except ImportError:
        factory = None
    else:
        factory = uvloop.new_event_loop
    # Objects made so far live on, and events leave few reference cycles: collect less often.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.get_loop().set_exception_handler(_log_unhandled)
        return runner.run(work)


def on_signals(stop: Callable[[str], None]) -> None:
    """
    Call *stop* with the name of each signal that asks this process to end.

    SIGHUP stays ignored if the process was started with it ignored, as `nohup` does.
    """

    def hang_up() -> None:
        _leave_closed_terminal()
        stop(signal.SIGHUP.name)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number.name)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        loop.add_signal_handler(signal.SIGHUP, hang_up)


def _leave_closed_terminal() -> None:
    """Discard all output if the terminal was closed: every write would fail."""
    for fd in (1, 2):
        try:
            termios.tcgetattr(fd)
        except termios.error as error:
            if error.args[0] == errno.EIO:
                os.dup2(os.open(os.devnull, os.O_WRONLY), fd)


def remove_signal_handlers() -> None:
    """Undo `on_signals`."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.remove_signal_handler(number)


def _log_unhandled(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an unhandled error by its type: the loop would print its text."""
    error = context.get("exception")
    frames = traceback.extract_tb(error.__traceback__) if error is not None else []
    at = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    _log.error("oncebridge.unforeseen", extra={"error": type(error).__name__, "at": at})
