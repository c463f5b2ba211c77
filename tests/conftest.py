"""
What all tests share: the size of the run, marks, and servers.

A server is started once for each worker, when it is first asked for. All of them together take
about six seconds of CPU, so tests are not grouped by server (`--dist loadgroup`): it does not pay.
"""

import logging
import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings
from tests import size
from tests.servers.aws import aws_identity, dynoxide, ministack
from tests.servers.forward_proxy import proxies_of, start_proxy
from tests.servers.guarded_aws import encrypted_aws, guarded_aws
from tests.servers.kinesis import kinesis_server, ministack_kinesis
from tests.servers.lambda_runtime import lambda_runtime, start_function
from tests.servers.postgres import pgbouncer, postgres
from tests.servers.redis import redis_cluster, redis_cluster_of_one, redis_server
from tests.servers.s3 import s3_server

__all__ = [
    "aws_identity",
    "dynoxide",
    "encrypted_aws",
    "guarded_aws",
    "kinesis_server",
    "lambda_runtime",
    "ministack",
    "ministack_kinesis",
    "pgbouncer",
    "postgres",
    "proxies_of",
    "redis_cluster",
    "redis_cluster_of_one",
    "redis_server",
    "s3_server",
    "start_function",
    "start_proxy",
]

# Under `nohup`, or in the background of a shell, this process ignores some signals. Children would
# inherit that, and a test that sends them such a signal would wait for ever. A handler is not
# inherited, so children start with the default. Workers of xdist are children too: they keep
# running when the terminal of a run under `nohup` is closed.
_HANDLERS = {
    signal.SIGHUP: lambda *_: None,
    signal.SIGINT: signal.default_int_handler,
    signal.SIGQUIT: lambda *_: None,
    signal.SIGTERM: lambda *_: None,
    signal.SIGCHLD: signal.SIG_DFL,
}
for _number, _handler in _HANDLERS.items():
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)
if "PYTEST_XDIST_WORKER" in os.environ:
    signal.signal(signal.SIGHUP, _HANDLERS[signal.SIGHUP])
signal.pthread_sigmask(signal.SIG_SETMASK, [])

# A slow machine is no reason to fail, and a failure comes with what is needed to repeat it.
settings.register_profile("full", deadline=None, print_blob=True)
settings.register_profile("quick", settings.get_profile("full"), max_examples=25)

# Fixtures that start a server or a browser; a test that uses one gets the mark.
_SERVERS = {
    "dynoxide",
    "encrypted_aws",
    "guarded_aws",
    "kinesis_server",
    "lambda_runtime",
    "ministack",
    "pgbouncer",
    "postgres",
    "redis_cluster",
    "redis_cluster_of_one",
    "redis_server",
    "s3_server",
    "server_of",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full",
        action="store_true",
        help="run everything, at full size; without it, tests marked `full` are left out",
    )


def pytest_configure(config: pytest.Config) -> None:
    is_full = config.getoption("--full")
    size.choose(full=is_full)
    settings.load_profile("full" if is_full else "quick")


def pytest_report_header(config: pytest.Config) -> str:
    if config.getoption("--full"):
        return "size: full"
    return "size: quick (tests marked `full` are deselected unless named; --full runs everything)"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        _mark(item)
    if config.getoption("--full") or "full" in config.getoption("markexpr"):
        return
    named = [_node_id(config, arg) for arg in config.args if "::" in arg]
    left_out = {
        item for item in items if item.get_closest_marker("full") and not _is_in(item, named)
    }
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def _mark(item: pytest.Item) -> None:
    """Add the marks that follow from what a test uses and where it is."""
    fixtures = set(getattr(item, "fixturenames", ()))
    if fixtures & _SERVERS:
        item.add_marker("server")
    if "stage" in fixtures:
        item.add_marker("browser")
    if item.path.parent.name == "chaos":
        item.add_marker("chaos")


def _node_id(config: pytest.Config, arg: str) -> str:
    file, _, rest = arg.partition("::")
    path = config.invocation_params.dir.joinpath(file).resolve()
    return f"{path.relative_to(config.rootpath).as_posix()}::{rest}"


def _is_in(item: pytest.Item, named: list[str]) -> bool:
    """Return True if the command line names the test itself, not only its file or folder."""
    return any(
        f"{item.nodeid}[".startswith((f"{name}[", f"{name}::")) or item.nodeid == name
        for name in named
    )


@pytest.fixture(autouse=True)
def _logger_as_it_was() -> Iterator[None]:
    """A command that runs in this process sets the logger up for itself, and others read it."""
    log = logging.getLogger("oncebridge")
    level, propagate, handlers = log.level, log.propagate, list(log.handlers)
    yield
    log.setLevel(level)  # also forgets what it remembers of which levels are on
    log.propagate = propagate
    log.handlers[:] = handlers
