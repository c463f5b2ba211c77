"""The models live beside the tests, not among what is installed."""

import sys
from pathlib import Path

import pytest
from tests.servers.spin import ready

sys.path.append(str(Path(__file__).parents[2]))


@pytest.fixture(scope="session")
def spin_tools():
    return ready()
