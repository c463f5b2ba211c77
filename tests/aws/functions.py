"""A function on Lambda, with doubles around it, called in real time."""

import time
from contextlib import contextmanager
from datetime import timedelta

from tests.faults.doubles import CountingDice, ScriptedSink

from oncebridge import Gateway, Settings, Unknown, Yes
from oncebridge.aws import lambda_handler
from oncebridge.dead_letters.memory import MemoryDeadLetters
from oncebridge.stores.memory import MemoryStore

QUICK = Settings(margin=timedelta(milliseconds=20))
OK = {"batchItemFailures": []}
"""All is well."""


class Context:
    """What Lambda gives, counted down in real time."""

    aws_request_id = "c9b8fa9f"
    function_name = "genesys-dedup"
    memory_limit_in_mb = 128
    invoked_function_arn = "arn:aws:lambda:us-east-1:123456789012:function:genesys-dedup"

    def __init__(self, seconds=30.0):
        self._ends = time.monotonic() + seconds

    def get_remaining_time_in_millis(self):
        return max(int((self._ends - time.monotonic()) * 1000), 0)


@contextmanager
def function(sink=None, *, store=None, dead=..., settings=QUICK, deliver=None, rules=(), **more):
    """Make a function with doubles around it; give the handler and the sink."""
    sink = ScriptedSink() if sink is None else sink
    gateway = Gateway(
        store=MemoryStore() if store is None else store,
        sink=sink,
        dead=MemoryDeadLetters() if dead is ... else dead,
        settings=settings,
        rules=rules,
        dice=CountingDice(0.1),  # back-offs of 100 ms
    )
    handler = lambda_handler(gateway, deliver, **{"metrics": None, **more})
    try:
        yield handler, sink
    finally:
        handler.close(timedelta(milliseconds=50))


def books(handler):
    (gateway,) = handler.router.gateways
    assert gateway.books.balance
    return gateway.books


def back(*names):
    return {"batchItemFailures": [{"itemIdentifier": name} for name in names]}


def numbers(sink):
    return [delivery.event.detail["n"] for delivery in sink.taken]


def failing(*bad, answer=None):
    """Answer a sink's yes, but for the events numbered *bad*."""
    refuse = Unknown("a fuse has blown") if answer is None else answer
    return ScriptedSink(otherwise=lambda d: refuse if d.event.detail["n"] in bad else Yes())
