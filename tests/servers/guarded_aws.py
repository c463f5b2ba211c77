"""
AWS on loopback that looks at rights: who may not do something is refused, as in AWS.

It is a ministack of its own, which checks signatures and policies; functions run as their role.
The administrator may do everything.
"""

import http.client
import ssl
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3
import pytest
from tests.servers.aws import AWS
from tests.servers.process import Process, free_port

ACCOUNT = "000000000000"
_SERVICES = (
    "cloudformation,cloudwatch,dynamodb,events,iam,kinesis,kms,lambda,logs,s3,secretsmanager,"
    "sns,sqs,ssm,sts"
)


class GuardedAws:
    """A server, seen by its administrator."""

    def __init__(self, process: Process, endpoint: str, authority: Path | None) -> None:
        self.process = process
        self.endpoint = endpoint
        self.authority = str(authority) if authority else None
        """A certificate by which it is known."""

    def client(self, service: str, **identity: str) -> Any:
        """Give a client of the SDK, for the administrator or another *identity*."""
        identity = identity or {"aws_access_key_id": "test", "aws_secret_access_key": "test"}
        return boto3.client(
            service,
            region_name="us-east-1",
            endpoint_url=self.endpoint,
            verify=self.authority,
            **identity,
        )


@pytest.fixture(scope="session")
def guarded_aws(
    aws_identity: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GuardedAws]:
    with _running(tmp_path_factory.mktemp("guarded"), is_tls=False) as server:
        yield server


@pytest.fixture(scope="session")
def encrypted_aws(
    aws_identity: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GuardedAws]:
    """By https, as the policies of the stacks deny everything else."""
    with _running(tmp_path_factory.mktemp("encrypted"), is_tls=True) as server:
        yield server


@contextmanager
def _running(folder: Path, *, is_tls: bool) -> Iterator[GuardedAws]:
    port = free_port()
    inherited = {name: value for name, value in AWS.items() if "KEY" not in name}
    process = Process(
        [sys.executable, "-m", "ministack"],
        log=folder / "ministack.log",
        ready=lambda: _answers(port, is_tls=is_tls),
        env={
            "GATEWAY_PORT": str(port),
            "BIND_HOST": "127.0.0.1",
            "SERVICES": _SERVICES,
            "AUTH": "true",
            **({"USE_SSL": "1"} if is_tls else {}),
            "LOG_LEVEL": "WARNING",
            "TMPDIR": str(folder),
            **inherited,
        },
    )
    endpoint = f"{'https' if is_tls else 'http'}://127.0.0.1:{port}"
    authority = folder / "ministack-tls" / "server.crt" if is_tls else None
    process.start()
    try:
        yield GuardedAws(process, endpoint, authority)
    finally:
        process.kill()


def _answers(port: int, *, is_tls: bool) -> bool:
    connection: http.client.HTTPConnection = (
        http.client.HTTPSConnection(
            "127.0.0.1", port, timeout=10, context=ssl._create_unverified_context()
        )
        if is_tls
        else http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    )
    try:
        connection.request("GET", "/_ministack/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
