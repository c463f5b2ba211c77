"""Servers for the tests of this folder: each kind is started once, when it is first asked for."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from tests.size import some

from .kinds import QUICK, SHARED, Kind, Running, running


@pytest.fixture(scope="session")
def server_of(aws_identity: None) -> Iterator[Callable[[Kind], Running]]:
    started: dict[Kind, Running] = {}
    with ExitStack() as stack:

        def get(kind: Kind) -> Running:
            if kind not in started:
                started[kind] = stack.enter_context(running(kind))
            return started[kind]

        yield get


@pytest.fixture(params=some(SHARED, QUICK), ids=repr)
def shared(request: pytest.FixtureRequest, server_of: Callable[[Kind], Running]) -> Running:
    """A server of each kind, for any number of tests at once: use keys of your own."""
    return server_of(request.param)
