"""What all tests share: servers that are started once for each worker, when first asked for."""

import logging
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings
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

# Who is started in the background is told to ignore Ctrl-C, and would hand that down to what it
# starts: tests that send it would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Under `nohup` it is the hang-up. A handler stays here, and is not handed down.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)

# A slow machine is no reason to fail, and a failure comes with what is needed to repeat it.
settings.register_profile("oncebridge", deadline=None, print_blob=True)
settings.load_profile("oncebridge")


@pytest.fixture(autouse=True)
def _logger_as_it_was() -> Iterator[None]:
    """A command that runs in this process sets the logger up for itself, and others read it."""
    log = logging.getLogger("oncebridge")
    level, propagate, handlers = log.level, log.propagate, list(log.handlers)
    yield
    log.setLevel(level)  # also forgets what it remembers of which levels are on
    log.propagate = propagate
    log.handlers[:] = handlers
