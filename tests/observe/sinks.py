"""Sinks for the services of these tests."""

from oncebridge import SinkRejected


def take(event):
    """Take it."""


def refuse_odd(event):
    if event.detail["order"] % 2:
        raise SinkRejected("odd")
