"""
Tests for stores that you write yourself.

`StoreContract` is a test suite to inherit. `StoreMachine` is a Hypothesis state machine that
compares a store with `Reference`. `ManualClock` is the clock of both. Needs the extra `testing`.
"""

import pytest

# Before the imports below: a failing assertion shows its values, as in a test file.
pytest.register_assert_rewrite("oncebridge.testing.contract", "oncebridge.testing.store_contract")

from oncebridge.testing.clock import ManualClock  # noqa: E402 - see above
from oncebridge.testing.reference import Reference  # noqa: E402
from oncebridge.testing.store_contract import StoreContract, needs  # noqa: E402
from oncebridge.testing.store_machine import StoreMachine  # noqa: E402

__all__ = ["ManualClock", "Reference", "StoreContract", "StoreMachine", "needs"]
