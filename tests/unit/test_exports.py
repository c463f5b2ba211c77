import ast
import importlib
import inspect
import pkgutil
import subprocess
import sys
import types
from pathlib import Path

import pytest

import oncebridge

SOURCE = Path(oncebridge.__file__).parent
DRIVERS = {
    *("sqlite3", "boto3", "botocore", "aioboto3", "redis", "psycopg", "asyncpg", "httpx"),
    *("aiohttp", "requests", "rich", "hypothesis", "pytest", "click", "httptools", "uvloop"),
    *("hiredis", "duckdb", "jinja2", "prometheus_client", "opentelemetry"),
}
MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(oncebridge.__path__, "oncebridge.")
    if ".testing" not in module.name
)


def loaded_after(code):
    """List the modules that a fresh interpreter has loaded after *code*."""
    script = f"{code}\nimport sys; print('\\n'.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return set(done.stdout.split())


def test_the_public_names_are_those_that_are_announced():
    found = {
        name
        for name, value in vars(oncebridge).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    # The name of the module `once` is taken by the decorator.
    assert callable(oncebridge.once)
    assert found == set(oncebridge.__all__)
    assert list(oncebridge.__all__) == sorted(oncebridge.__all__)


@pytest.mark.parametrize("name", oncebridge.__all__)
def test_every_public_name_says_what_it_is(name):
    value = getattr(oncebridge, name)
    if inspect.isclass(value) or inspect.isfunction(value):
        assert value.__doc__
        assert value.__module__.startswith("oncebridge.")


def test_the_version_is_the_packages():
    from importlib.metadata import version

    assert oncebridge.__version__ == version("oncebridge")


def test_the_core_asks_for_no_driver():
    loaded = loaded_after("import oncebridge")
    assert "oncebridge.engine.gateway" in loaded
    assert not loaded & DRIVERS


def test_the_store_in_memory_asks_for_no_driver():
    assert not loaded_after("from oncebridge.stores.memory import MemoryStore") & DRIVERS


# Was a bug: both read the rules for buckets from the package of the S3 store, which needs botocore.
@pytest.mark.parametrize("module", ["oncebridge.cli.template", "oncebridge.cli.check"])
def test_templates_and_checks_ask_for_no_driver_of_aws(module):
    assert not loaded_after(f"import {module}") & {"boto3", "botocore", "hiredis", "asyncpg"}


def test_a_configuration_loads_the_drivers_of_what_it_names_and_no_others():
    assert not loaded_after("from oncebridge.service.config import load") & DRIVERS
    flags = {"source": "-", "store": "memory:", "dead": "memory:", "sink": "python:builtins:print"}
    code = f"from oncebridge.service.config import load\nload(environment={{}}, flags={flags!r})"
    assert not loaded_after(code) & DRIVERS
    code = code.replace("python:builtins:print", "https://crm.example.com/")
    assert loaded_after(code) & DRIVERS == {"httptools"}


def test_sqlite_is_loaded_by_who_asks_for_it():
    loaded = loaded_after("from oncebridge.stores.sqlite import SQLiteStore")
    assert loaded & DRIVERS == {"sqlite3"}


def test_importing_touches_no_loop_and_no_thread():
    code = (
        "import threading, oncebridge, asyncio\n"
        "assert threading.active_count() == 1\n"
        "assert asyncio._get_running_loop() is None"
    )
    assert "oncebridge" in loaded_after(code)


@pytest.mark.parametrize("name", MODULES)
def test_every_module_can_be_imported_first(name):
    assert importlib.import_module(name).__name__ == name


OWNED = {"time", "random", "uuid", "secrets"}
"""Modules whose use would escape the clock and the dice."""


def _imports(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def _calls(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield ast.unparse(node.func)


@pytest.mark.parametrize(
    "path",
    [path for path in sorted(SOURCE.rglob("*.py")) if "testing" not in path.parts],
    ids=lambda path: str(path.relative_to(SOURCE)),
)
def test_only_the_clock_asks_the_machine(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if path.name == "clock.py":
        assert OWNED & set(_imports(tree)) == {"random", "time"}
        return
    owned = OWNED & set(_imports(tree))
    if owned == {"random"}:  # seeded dice of its own will do
        drawn = [call for call in _calls(tree) if call.startswith("random.")]
        assert drawn
        assert set(drawn) == {"random.Random"}
    else:
        assert not owned
    asked = {"datetime.now", "datetime.utcnow", "os.urandom", "datetime.datetime.now", "date.today"}
    assert not asked & set(_calls(tree))


# Was a bug: a set of verdicts is walked in `_drop`, and a set of holds in the heartbeat: the order depends on
# PYTHONHASHSEED and on addresses, so a simulated run cannot be repeated from its seed.
def test_nothing_walks_a_set_whose_order_differs_from_run_to_run():
    walked = []
    for name in ("gateway.py", "holds.py", "flight.py", "registers.py", "ledger.py", "backlog.py"):
        tree = ast.parse((SOURCE / name).read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            iterables = [node.iter] if isinstance(node, ast.For | ast.comprehension) else []
            for iterable in iterables:
                text = ast.unparse(iterable)
                if isinstance(iterable, ast.Set | ast.SetComp) or text == "self._holds":
                    walked.append(f"{name}: {text}")
    holds = oncebridge.engine.gateway.Gateway(
        store=importlib.import_module("oncebridge.stores.memory").MemoryStore(), sink=print
    )._holds._holds
    if not isinstance(holds, set):
        walked = [one for one in walked if "self._holds" not in one]
    assert walked == []
