"""One browser for each worker; and tests that use it run where it lives."""

import pytest
from tests.browser.stage import Stage, Visits


@pytest.fixture(scope="session")
def stage():
    made = Stage()
    yield made
    made.close()


@pytest.fixture
def visits(stage):
    """Open pages; at the end nothing may have been wrong with any of them."""
    made = Visits(stage)
    yield made
    stage.run(made.close)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    stage = pyfuncitem.funcargs.get("stage")
    if stage is None:
        return None
    wanted = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    stage.run(pyfuncitem.obj, **wanted)
    return True
