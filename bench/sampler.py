"""
Where the processor's time goes, by looking now and then.

cProfile makes every call dearer, and so those who call much look worse than they are. Here a
timer of the processor's time interrupts a thousand times a second, and what every thread has
used since the last look is put down to the function it is in. The time of C code counts for the
function that has called it.
"""

import signal
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any, Self

EVERY_S = 0.001


class Sampler:
    """Looks from `start` to `stop`, or while it is entered."""

    def __init__(self) -> None:
        self.functions: defaultdict[str, float] = defaultdict(float)
        """Seconds by the function that was running, as module:function."""
        self.modules: defaultdict[str, float] = defaultdict(float)
        """Seconds by the module of ours that was running or waited for, else by the library."""
        self._spent: dict[int, float] = {}

    def start(self) -> None:
        self._look(0, None)
        self.functions.clear()
        self.modules.clear()
        signal.signal(signal.SIGPROF, self._look)
        signal.setitimer(signal.ITIMER_PROF, EVERY_S, EVERY_S)

    def stop(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _look(self, _number: int, interrupted: FrameType | None) -> None:
        main = threading.main_thread().ident
        for thread, frame in sys._current_frames().items():
            spent = time.clock_gettime(time.pthread_getcpuclockid(thread))
            used = spent - self._spent.get(thread, 0.0)
            self._spent[thread] = spent
            running = interrupted if thread == main else frame
            if running is not None:
                self.functions[_name(running)] += used
                self.modules[_ours(running)] += used


def _name(frame: FrameType) -> str:
    return f"{_module(frame)}:{frame.f_code.co_name}"


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", Path(frame.f_code.co_filename).stem))


def _ours(frame: FrameType) -> str:
    """Find the innermost function that is ours, and give its module."""
    if _module(frame) == "asyncio.runners":
        return "(the loop)"  # uvloop, which has no functions of its own to be seen
    at: FrameType | None = frame
    while at is not None:
        module = _module(at)
        if module.startswith("oncebridge."):
            return module
        at = at.f_back
    return f"({_module(frame).partition('.')[0]})"


def told(sampler: Sampler) -> dict[str, Any]:
    return {"functions": dict(sampler.functions), "modules": dict(sampler.modules)}
