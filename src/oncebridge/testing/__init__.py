"""
What a third party needs to trust its own store.

`StoreContract` is the suite to inherit, `StoreMachine` the Hypothesis machine that
compares a store with `Reference`, and `ManualClock` the time of both.
Needs the extra `testing`.
"""

import pytest

# Before the imports below: a failing promise shows its values, as in a test file.
pytest.register_assert_rewrite("oncebridge.testing.contract", "oncebridge.testing.store_contract")

from oncebridge.testing.clock import ManualClock  # noqa: E402 - see above
from oncebridge.testing.reference import Reference  # noqa: E402
from oncebridge.testing.store_contract import StoreContract, needs  # noqa: E402
from oncebridge.testing.store_machine import StoreMachine  # noqa: E402

__all__ = ["ManualClock", "Reference", "StoreContract", "StoreMachine", "needs"]
