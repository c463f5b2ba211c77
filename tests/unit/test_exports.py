import ast
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
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


def ours(names):
    return {name for name in names if name.partition(".")[0] == "oncebridge"}


def test_type_checkers_and_programs_get_the_same_public_names_from_the_same_modules():
    tree = ast.parse(Path(oncebridge.__file__).read_text("utf-8"))
    imported = {
        (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module.startswith("oncebridge.")
        for alias in node.names
    }
    assert imported == {(m, name) for m, names in oncebridge._MODULES.items() for name in names}
    assert sorted(name for _, name in imported) == oncebridge.__all__
    assert set(oncebridge.__all__) <= set(dir(oncebridge))


def test_a_name_that_is_not_public_is_an_error():
    assert not hasattr(oncebridge, "Gatewy")
    with pytest.raises(ImportError, match="cannot import name 'Gatewy'"):
        exec("from oncebridge import Gatewy")


def test_a_public_name_loads_only_what_it_needs():
    assert ours(loaded_after("import oncebridge")) == {"oncebridge"}
    loaded = ours(loaded_after("from oncebridge import StoreError"))
    assert loaded == {"oncebridge", "oncebridge.errors"}


UNUSED = {
    *("oncebridge.events.pattern", "oncebridge.events.access", "oncebridge.events.rule_options"),
    *("oncebridge.engine.shared_rate_limit", "oncebridge.engine.once"),
    *("oncebridge.service", "oncebridge.observe", "importlib.metadata", "http.server"),
}


def test_a_lambda_handler_loads_nothing_of_rules_rates_and_configurations_that_it_may_not_have():
    loaded = loaded_after("from oncebridge.aws import lambda_handler")
    assert "oncebridge.engine.gateway" in loaded
    assert not loaded & UNUSED


def test_the_function_without_code_loads_nothing_of_a_service():
    loaded = loaded_after("import oncebridge.aws.function, oncebridge.stores.dynamodb.store")
    assert "oncebridge.service.routes" in loaded
    assert "oncebridge.service.service" not in loaded
    assert "oncebridge.sources.spool" not in loaded
    assert not {name for name in loaded if name.startswith(("oncebridge.observe", "sqlite3"))}


@pytest.mark.parametrize("name", oncebridge.__all__)
def test_every_public_name_says_what_it_is(name):
    value = getattr(oncebridge, name)
    if inspect.isclass(value) or inspect.isfunction(value):
        assert value.__doc__
        assert value.__module__.startswith("oncebridge.")


PUBLIC = {
    "oncebridge": tuple(oncebridge.__all__),
    "oncebridge.aws": ("HandedBack", "NotRecognised", "lambda_handler"),
    "oncebridge.aws.handler": ("Context", "Failures", "LambdaHandler"),
    "oncebridge.aws.powertools": ("IdempotencyConfig", "idempotent", "idempotent_function"),
    "oncebridge.base.options": ("Doc", "Rate", "Size", "schema"),
    "oncebridge.base.secrets": ("Secret",),
    "oncebridge.dead_letters.api": ("DeadLetter", "DeadLetters"),
    "oncebridge.dead_letters.file": ("FileDeadLetters",),
    "oncebridge.dead_letters.memory": ("MemoryDeadLetters",),
    "oncebridge.dead_letters.sqlite": ("SQLiteDeadLetters",),
    "oncebridge.dead_letters.sqs": ("SqsDeadLetters",),
    "oncebridge.errors": ("ConfigError", "ConfigErrors", "OncebridgeError"),
    "oncebridge.events.envelopes": ("unwrap",),
    "oncebridge.events.rules": ("RuleSet",),
    "oncebridge.genesys.preset": ("genesys_rules",),
    "oncebridge.genesys.simulator": ("simulate",),
    "oncebridge.observe.telemetry.spans": ("Spans",),
    "oncebridge.service": ("Service", "gateways", "make_router"),
    "oncebridge.service.addresses": ("SinkPlace", "SourcePlace", "StorePlace"),
    "oncebridge.service.config": ("Config", "Route", "Setup", "load", "with_sink"),
    "oncebridge.sinks.api": ("Delivery", "Sink", "SinkAnswer", "Yes"),
    "oncebridge.sinks.events": ("EventsSink",),
    "oncebridge.sinks.file": ("FileSink",),
    "oncebridge.sinks.function": ("FunctionOptions", "FunctionSink"),
    "oncebridge.sinks.http": ("HttpSink", "HttpSinkOptions"),
    "oncebridge.sinks.kinesis": ("KinesisSink",),
    "oncebridge.sinks.postgres": ("PostgresSink",),
    "oncebridge.sinks.sns": ("SnsSink",),
    "oncebridge.sinks.sqs": ("SqsSink",),
    "oncebridge.sinks.stdout": ("StdoutSink",),
    "oncebridge.sources.api": ("Host", "Source"),
    "oncebridge.sources.file": ("FileSource",),
    "oncebridge.sources.http": ("HttpSource", "HttpSourceOptions"),
    "oncebridge.sources.kinesis": ("KinesisSource",),
    "oncebridge.sources.sqs": ("SqsSource",),
    "oncebridge.stores.api": (
        *("HELD", "Busy", "Claim", "ClaimAnswers", "Commit", "Commits", "Duplicate", "Extensions"),
        *("Held", "Memories", "Mismatch", "Record", "Releases", "Reply", "Store", "Want", "Wants"),
    ),
    "oncebridge.stores.dynamodb": ("DynamoDBStore",),
    "oncebridge.stores.memory": ("MemoryStore",),
    "oncebridge.stores.postgres": ("PostgresStore",),
    "oncebridge.stores.redis": ("RedisStore",),
    "oncebridge.stores.s3": ("S3Store",),
    "oncebridge.stores.sqlite": ("SQLiteStore",),
    "oncebridge.testing": ("ManualClock", "Reference", "StoreContract", "StoreMachine", "needs"),
}
"""What people import: the interface. A name leaves this list with a line in CHANGELOG.md."""


@pytest.mark.parametrize(("module", "name"), [(m, n) for m, names in PUBLIC.items() for n in names])
def test_a_public_import_works(module, name):
    assert hasattr(importlib.import_module(module), name)


def test_the_documentation_imports_only_what_is_public():
    root = Path(__file__).parents[2]
    pages = [root / "README.md", *root.glob("docs/**/*.md"), *root.glob("examples/**/*.py")]
    found = set()
    for page in pages:
        for module, names in re.findall(
            r"^\s*from (oncebridge[\w.]*) import ([\w, ]+)", page.read_text("utf-8"), re.MULTILINE
        ):
            found |= {(module, name.split(" as ")[0].strip()) for name in names.split(",")}
    assert len(found) > 20
    modules = {("oncebridge.aws", "powertools")}
    assert found - modules <= {(module, name) for module, names in PUBLIC.items() for name in names}


def test_the_version_is_the_packages():
    from importlib.metadata import version

    assert oncebridge.__version__ == version("oncebridge")


def test_the_core_asks_for_no_driver():
    loaded = loaded_after("from oncebridge import *")
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
        "import threading, asyncio\n"
        "from oncebridge import *\n"
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
    for name in (
        "gateway.py",
        "leases.py",
        "batch.py",
        "ordering.py",
        "entity_state.py",
        "claims.py",
        "backlog.py",
    ):
        tree = ast.parse((SOURCE / "engine" / name).read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            iterables = [node.iter] if isinstance(node, ast.For | ast.comprehension) else []
            for iterable in iterables:
                text = ast.unparse(iterable)
                if isinstance(iterable, ast.Set | ast.SetComp) or text == "self._leases":
                    walked.append(f"{name}: {text}")
    leases = oncebridge.Gateway(
        store=importlib.import_module("oncebridge.stores.memory").MemoryStore(), sink=print
    )._leases._leases
    if not isinstance(leases, set):
        walked = [one for one in walked if "self._leases" not in one]
    assert walked == []


@pytest.mark.parametrize("name", ["oncebridge", *MODULES])
def test_every_exported_name_exists(name):
    module = importlib.import_module(name)
    missing = [each for each in getattr(module, "__all__", ()) if not hasattr(module, each)]
    assert missing == []
