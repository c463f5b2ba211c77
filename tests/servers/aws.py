"""
DynamoDB on loopback: ministack, which comes with the packages, and dynoxide, where npm is.

dynoxide is fetched once into `build/`; where that cannot be done, its tests run on ministack.
`emulators()` says which will run.
"""

import hashlib
import http.client
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from tests.servers.process import Process, free_port

_DYNOXIDE = "@dynoxide/linux-x64@1.2.1"
_DYNOXIDE_SHA256 = "80e1ed33e33ec33c7bdcb1779ea09678e5c6f87c5c225f44c2037d2b2ea71164"
_BUILD = Path(__file__).parents[2] / "build" / "dynoxide-1.2.1"

AWS = {
    "AWS_ACCESS_KEY_ID": "AKIAINVENTEDEXAMPLE",
    "AWS_SECRET_ACCESS_KEY": "invented/secret/of/nobody",
    "AWS_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}
_numbers = count()


def fresh(word: str) -> str:
    """Make a name that nobody else uses, on any of the servers."""
    return f"{word}-{os.getpid()}-{next(_numbers)}"


class DynamoDBServer:
    """A server that honours conditions, also when many ask at once."""

    def __init__(self, kind: str, process: Process, port: int) -> None:
        self.kind = kind
        self.process = process
        self.port = port

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def table(self) -> str:
        """Make an empty table that nobody else uses."""
        name = fresh("records")
        self.ask(
            "CreateTable",
            {
                "TableName": name,
                "AttributeDefinitions": [{"AttributeName": "k", "AttributeType": "B"}],
                "KeySchema": [{"AttributeName": "k", "KeyType": "HASH"}],
                "BillingMode": "PAY_PER_REQUEST",
            },
        )
        expiry = {"Enabled": True, "AttributeName": "x"}
        self.ask("UpdateTimeToLive", {"TableName": name, "TimeToLiveSpecification": expiry})
        return name

    def drop(self, table: str) -> None:
        self.ask("DeleteTable", {"TableName": table})

    def ask(self, operation: str, body: Mapping[str, Any]) -> Any:
        """Call an operation as an administrator would."""
        status, answer = ask(self.port, operation, body)
        assert status == 200, answer
        return answer


DYNAMODB, KINESIS = ("dynamodb", "DynamoDB_20120810", "1.0"), ("kinesis", "Kinesis_20131202", "1.1")
"""What signs a request, what stands before its operation, and which JSON it speaks."""


def ask(
    port: int,
    operation: str,
    body: Mapping[str, Any],
    service: tuple[str, str, str] = DYNAMODB,
) -> tuple[int, Any]:
    """Send one request; these servers do not look at signatures, but want to see one."""
    name, prefix, version = service
    scope = f"{AWS['AWS_ACCESS_KEY_ID']}/20260101/us-east-1/{name}/aws4_request"
    headers = {
        "Content-Type": f"application/x-amz-json-{version}",
        "X-Amz-Target": f"{prefix}.{operation}",
        "X-Amz-Date": "20260101T000000Z",
        "Authorization": f"AWS4-HMAC-SHA256 Credential={scope}, SignedHeaders=host, Signature=0",
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request("POST", "/", json.dumps(body), headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read() or b"{}")
    finally:
        connection.close()


def emulators() -> str:
    """Say what DynamoDB is tested on, for the head of a test run."""
    found = ["ministack"]
    if _dynoxide() is not None:
        found.append("dynoxide")
    return f"DynamoDB on: {', '.join(found)}"


def _answers(port: int) -> bool:
    try:
        return ask(port, "ListTables", {})[0] == 200
    except (OSError, http.client.HTTPException, ValueError):
        return False


def _ministack(folder: Path) -> DynamoDBServer:
    port = free_port()
    env = {
        "GATEWAY_PORT": str(port),
        "BIND_HOST": "127.0.0.1",
        "SERVICES": "dynamodb,cloudformation,iam,sts,sqs,sns,events,kinesis,lambda,ssm,secretsmanager,logs,cloudwatch",
        "LOG_LEVEL": "ERROR",
        "TMPDIR": str(folder),
        **AWS,
    }
    process = Process(
        [sys.executable, "-m", "ministack"],
        log=folder / "ministack.log",
        ready=lambda: _answers(port),
        env=env,
    )
    return DynamoDBServer("ministack", process, port)


def _dynoxide_server(folder: Path, program: Path) -> DynamoDBServer:
    port = free_port()
    process = Process(
        [program, "--host", "127.0.0.1", "--port", str(port)],
        log=folder / "dynoxide.log",
        ready=lambda: _answers(port),
    )
    return DynamoDBServer("dynoxide", process, port)


@cache
def _dynoxide() -> Path | None:
    """Give the program, fetched if need be; None where there is no npm or no way to it."""
    program = _BUILD / "dynoxide"
    if program.exists():
        return program
    npm = shutil.which("npm")
    if npm is None or (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return None
    _BUILD.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_BUILD.parent) as folder:
        try:
            subprocess.run(
                [npm, "pack", "--silent", _DYNOXIDE],
                cwd=folder,
                check=True,
                timeout=120,
                capture_output=True,
            )
        except (subprocess.SubprocessError, OSError):
            return None
        (archive,) = Path(folder).glob("*.tgz")
        found = hashlib.sha256(archive.read_bytes()).hexdigest()
        assert found == _DYNOXIDE_SHA256, f"{archive.name} is not what it was: {found}"
        with tarfile.open(archive) as files:
            member = files.extractfile("package/dynoxide")
            assert member is not None
            made = Path(folder, "dynoxide")
            made.write_bytes(member.read())
        made.chmod(0o755)
        _BUILD.mkdir(exist_ok=True)
        made.rename(program)  # another worker may have been faster; the files are the same
    return program


@pytest.fixture(scope="session")
def aws_identity() -> Iterator[None]:
    """Be somebody, for all AWS clients of this process; nothing of the machine's is read."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        for name, value in AWS.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="session")
def ministack(
    aws_identity: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DynamoDBServer]:
    server = _ministack(tmp_path_factory.mktemp("ministack"))
    server.process.start()
    yield server
    server.process.kill()


@pytest.fixture(scope="session")
def dynoxide(
    aws_identity: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DynamoDBServer]:
    """Start the fast server, or the other one where it cannot be had."""
    program = _dynoxide()
    folder = tmp_path_factory.mktemp("dynoxide")
    server = _ministack(folder) if program is None else _dynoxide_server(folder, program)
    server.process.start()
    yield server
    server.process.kill()
