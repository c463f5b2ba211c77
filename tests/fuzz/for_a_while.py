"""
Properties that are tried for a while, not for a number of examples.

Each round draws its examples from a seed of its own, counted up from `FUZZ_SEED`,
until `FUZZ_SECONDS` are over. A failure names the seed of its round: with that seed
alone, and no time at all, it fails again.
"""

import os
import signal
import time
from contextlib import contextmanager
from itertools import count

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from tests.size import sized

SECONDS = float(os.environ.get("FUZZ_SECONDS", sized(1, 12)))
SEED = int(os.environ.get("FUZZ_SEED", "0"))
_ROUND = settings(
    max_examples=100,
    database=None,
    deadline=None,
    phases=[Phase.generate, Phase.target, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)


class Hangs(BaseException):
    """An example took longer than any may; not an Exception, so that nobody catches it."""


@contextmanager
def bounded(seconds=10.0):
    """End an example that would never end."""

    def ring(_signal, _frame):
        raise Hangs(f"after {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def for_a_while(holds, *strategies, share=1.0, bound=10.0):
    """Call *holds* with what *strategies* draw, for a *share* of the time there is."""

    def example(drawn):
        with bounded(bound):
            holds(*drawn)

    ends = time.monotonic() + SECONDS * share
    for number in count(SEED):
        try:
            seed(number)(_ROUND(given(st.tuples(*strategies))(example)))()
        except BaseException as error:
            error.add_note(f"again with FUZZ_SEED={number} FUZZ_SECONDS=0")
            raise
        if time.monotonic() >= ends:
            return
