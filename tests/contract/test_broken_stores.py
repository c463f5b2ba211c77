"""A test of the tests: each fault is convicted, and a healthy store is not."""

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test
from tests.size import sized

from oncebridge.stores.memory import MemoryStore

from .broken_stores import FAULTS, Carried, Faulty, contract_of, failures, machine_of

# The same walks every time, and no time spent on making a conviction short.
FIXED = settings(
    max_examples=200,
    stateful_step_count=50,
    phases=[Phase.generate],
    database=None,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)

WALKS = settings(FIXED, max_examples=sized(80, 200))

seen_by_machine = [fault for fault in FAULTS if fault.seen_by_machine]


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_the_contract_convicts(fault):
    broken = failures(fault.contract)
    print(f"{fault.name}: {len(broken)} of {len(fault.contract.cases())} cases failed")
    assert fault.convicted_by
    assert fault.convicted_by <= set(broken)
    # A store that fails everywhere would say nothing about the cases that name its fault.
    assert len(broken) < len(fault.contract.cases()) // 2


@pytest.mark.parametrize("fault", seen_by_machine, ids=[fault.name for fault in seen_by_machine])
def test_the_machine_finds_a_divergence(fault):
    with pytest.raises(AssertionError):
        run_state_machine_as_test(seed(1)(fault.machine), settings=FIXED)


@pytest.mark.parametrize("store_class", [MemoryStore, Faulty, Carried])
def test_a_healthy_store_passes_the_same_runs(store_class):
    contract = contract_of(store_class)
    assert len(contract.cases()) >= 60
    assert failures(contract) == {}


@pytest.mark.parametrize("store_class", [MemoryStore, Faulty])
def test_a_healthy_store_does_not_diverge_on_the_same_walks(store_class):
    asked = []

    class Counted(machine_of(store_class)):
        def teardown(self):
            asked.append(self.count)
            super().teardown()

    run_state_machine_as_test(seed(1)(Counted), settings=WALKS)
    assert sum(asked) > 1000
