"""
A small Kinesis: one stream or several, in memory, that fail on request.

`Model.call` is the API as its documentation tells it: shards are closed by a split or a merge
and stay listed, a closed shard ends with no next iterator, iterators expire, numbers grow and
are of different lengths. `modelled` is a stream of ours that speaks with it on any loop, also
one with virtual time; `Kinesis` serves it over HTTP.
"""

import asyncio
import base64
import hashlib
import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from oncebridge.aws.client import AwsError
from oncebridge.aws.options import AwsOptions
from oncebridge.sources.kinesis.stream import KinesisStream

_KEYS = 2**128
_EXPIRES_MS = 300_000


class Refused(Exception):
    def __init__(self, code: str, message: str = "") -> None:
        super().__init__(code)
        self.code = code
        self.message = message


@dataclass
class _Shard:
    id: str
    low: int
    high: int
    first: int
    parents: tuple[str, ...] = ()
    is_closed: bool = False
    records: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class _Stream:
    name: str
    shards: dict[str, _Shard] = field(default_factory=dict)
    consumers: dict[str, str] = field(default_factory=dict)

    @property
    def arn(self) -> str:
        return f"arn:aws:kinesis:us-east-1:000000000000:stream/{self.name}"


class Model:
    """Streams by their names; *clock* tells the milliseconds."""

    def __init__(self, clock: Callable[[], int] = lambda: time.time_ns() // 1_000_000) -> None:
        self._clock = clock
        self.retention_hours = 24
        self.behind_ms = 1000
        """How far who has not read everything is said to be behind."""
        self.streams: dict[str, _Stream] = {}
        self.calls: Counter[str] = Counter()
        self.log: list[tuple[str, dict[str, Any], float]] = []
        """Each call: the operation, what was asked, and when."""
        self._faults: dict[str, list[BaseException]] = {}
        # The next one has a digit more: who compares them as text goes wrong.
        self._numbers = itertools.count(999_999_990)
        self._iterators: dict[str, tuple[str, str, int, int]] = {}

    # --- for tests -----------------------------------------------------------------------

    def fail(self, operation: str, *errors: BaseException) -> None:
        """Answer the next calls of *operation* with *errors*."""
        self._faults.setdefault(operation, []).extend(errors)

    def expire_iterators(self) -> None:
        self._iterators.clear()

    def trim(self, stream: str, keep: int) -> None:
        """Drop all but the newest *keep* records of each shard."""
        for shard in self.streams[stream].shards.values():
            shard.records = shard.records[len(shard.records) - keep :] if keep else []

    def forget_shard(self, stream: str, shard: str) -> None:
        """List a shard no longer: all that was in it is too old."""
        del self.streams[stream].shards[shard]

    # --- the API -------------------------------------------------------------------------

    def call(self, operation: str, asked: dict[str, Any]) -> dict[str, Any]:
        self.calls[operation] += 1
        with suppress(RuntimeError):
            self.log.append((operation, asked, asyncio.get_running_loop().time()))
        if self._faults.get(operation):
            raise self._faults[operation].pop(0)
        method = getattr(self, f"_{operation}", None)
        if method is None:
            raise Refused("UnknownOperationException", operation)
        return method(asked)

    def _CreateStream(self, asked: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        name, count = asked["StreamName"], asked.get("ShardCount", 1)
        if name in self.streams:
            raise Refused("ResourceInUseException")
        stream = self.streams[name] = _Stream(name)
        for at in range(count):
            self._add(stream, _KEYS * at // count, _KEYS * (at + 1) // count - 1)
        return {}

    def _DeleteStream(self, asked: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        del self.streams[self._stream(asked).name]
        return {}

    def _DescribeStreamSummary(self, asked: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        stream = self._stream(asked)
        told = {"StreamName": stream.name, "StreamARN": stream.arn, "StreamStatus": "ACTIVE"}
        hours = {"RetentionPeriodHours": self.retention_hours}
        return {"StreamDescriptionSummary": told | hours}

    def _ListShards(self, asked: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        token = asked.get("NextToken")
        if token is not None:
            if "StreamName" in asked:
                raise Refused("InvalidArgumentException", "NextToken and StreamName")
            name, _, after = token.partition("/")
            stream = self.streams[name]
        else:
            stream, after = self._stream(asked), ""
        most = asked.get("MaxResults", 1000)
        ids = [shard for shard in sorted(stream.shards) if shard > after]
        page = [self._listed(stream.shards[shard]) for shard in ids[:most]]
        more = {"NextToken": f"{stream.name}/{ids[most - 1]}"} if len(ids) > most else {}
        return {"Shards": page} | more

    def _SplitShard(self, asked: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        stream = self._stream(asked)
        old = self._open(stream, asked["ShardToSplit"])
        middle = int(asked["NewStartingHashKey"])
        old.is_closed = True
        self._add(stream, old.low, middle - 1, old.id)
        self._add(stream, middle, old.high, old.id)
        return {}

    def _MergeShards(self, asked: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        stream = self._stream(asked)
        both = [self._open(stream, asked[x]) for x in ("ShardToMerge", "AdjacentShardToMerge")]
        for shard in both:
            shard.is_closed = True
        low, high = min(shard.low for shard in both), max(shard.high for shard in both)
        self._add(stream, low, high, *[shard.id for shard in both])
        return {}

    def _PutRecords(self, asked: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        stream = self._stream(asked)
        answers = [self._put(stream, record) for record in asked["Records"]]
        return {"FailedRecordCount": 0, "Records": answers}

    def _GetShardIterator(self, asked: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        stream = self._stream(asked)
        shard = self._shard(stream, asked["ShardId"])
        kind, after = asked["ShardIteratorType"], -1
        if kind == "AFTER_SEQUENCE_NUMBER":
            after = int(asked["StartingSequenceNumber"])
        elif kind == "AT_TIMESTAMP":
            if asked["Timestamp"] * 1000 > self._clock() + 1:
                raise Refused("InvalidArgumentException", "Timestamp is in the future")
            earlier = [
                int(record["SequenceNumber"])
                for record in shard.records
                if record["ApproximateArrivalTimestamp"] < asked["Timestamp"]
            ]
            after = max(earlier, default=-1)
        elif kind != "TRIM_HORIZON":
            raise Refused("InvalidArgumentException", kind)
        return {"ShardIterator": self._iterator(stream, shard, after)}

    def _GetRecords(self, asked: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        found = self._iterators.get(asked["ShardIterator"])
        if found is None or self._clock() - found[3] > _EXPIRES_MS:
            raise Refused("ExpiredIteratorException")
        name, shard_id, after, _ = found
        if name not in self.streams:
            raise Refused("ResourceNotFoundException")
        stream = self.streams[name]
        shard = self._shard(stream, shard_id)
        left = [record for record in shard.records if int(record["SequenceNumber"]) > after]
        page = left[: asked.get("Limit", 10_000)]
        if page:
            after = int(page[-1]["SequenceNumber"])
        is_end = shard.is_closed and len(page) == len(left)
        behind = self.behind_ms if len(page) < len(left) else 0
        more = {} if is_end else {"NextShardIterator": self._iterator(stream, shard, after)}
        return {"Records": page, "MillisBehindLatest": behind} | more

    # --- inside --------------------------------------------------------------------------

    def _stream(self, asked: dict[str, Any]) -> _Stream:
        name = asked.get("StreamName") or asked.get("StreamARN", "").rpartition("/")[2]
        if name not in self.streams:
            raise Refused("ResourceNotFoundException", f"no stream {name}")
        return self.streams[name]

    @staticmethod
    def _shard(stream: _Stream, shard: str) -> _Shard:
        if shard not in stream.shards:
            raise Refused("ResourceNotFoundException", f"no shard {shard}")
        return stream.shards[shard]

    def _open(self, stream: _Stream, shard: str) -> _Shard:
        found = self._shard(stream, shard)
        if found.is_closed:
            raise Refused("InvalidArgumentException", f"{shard} is closed")
        return found

    def _add(self, stream: _Stream, low: int, high: int, *parents: str) -> None:
        number = len(stream.shards)
        shard = _Shard(f"shardId-{number:012d}", low, high, next(self._numbers), parents)
        stream.shards[shard.id] = shard

    @staticmethod
    def _listed(shard: _Shard) -> dict[str, Any]:
        told = {
            "ShardId": shard.id,
            "HashKeyRange": {"StartingHashKey": str(shard.low), "EndingHashKey": str(shard.high)},
            "SequenceNumberRange": {"StartingSequenceNumber": str(shard.first)},
        }
        names = ("ParentShardId", "AdjacentParentShardId")
        return told | dict(zip(names, shard.parents, strict=False))

    def _put(self, stream: _Stream, record: dict[str, Any]) -> dict[str, Any]:
        key = record["PartitionKey"]
        at = int.from_bytes(hashlib.md5(key.encode()).digest())
        shard = next(
            one for one in stream.shards.values() if not one.is_closed and one.low <= at <= one.high
        )
        number = str(next(self._numbers))
        arrived = {"ApproximateArrivalTimestamp": self._clock() / 1000}
        stored = {"SequenceNumber": number, "PartitionKey": key, "Data": record["Data"]}
        shard.records.append(stored | arrived)
        return {"SequenceNumber": number, "ShardId": shard.id}

    def _iterator(self, stream: _Stream, shard: _Shard, after: int) -> str:
        token = base64.b64encode(f"{next(self._numbers)}".encode()).decode()
        self._iterators[token] = (stream.name, shard.id, after, self._clock())
        return token


class _ModelClient:
    """Stands where the thin client stands, and speaks with a model instead of a network."""

    def __init__(self, model: Model) -> None:
        self._model = model

    async def call(self, operation: str, body: bytes, *, within: timedelta | None = None) -> bytes:
        await asyncio.sleep(0.01)
        try:
            return json.dumps(self._model.call(operation, json.loads(body))).encode()
        except Refused as error:
            raise AwsError(400, error.code, error.message) from None

    async def aclose(self) -> None:
        pass


def modelled(model: Model, name: str, clock: Callable[[], int]) -> KinesisStream:
    """Give a stream whose calls go to *model*."""
    stream = KinesisStream(name, AwsOptions(region="us-east-1"))
    stream._client = _ModelClient(model)
    stream.clock.local = clock
    return stream


# --- over HTTP ----------------------------------------------------------------------------


class Kinesis:
    """Serve a model on loopback, on a port of its own."""

    def __init__(self) -> None:
        self.model = Model()
        lock, model = threading.Lock(), self.model

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                operation = self.headers["X-Amz-Target"].rpartition(".")[2]
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                try:
                    with lock:
                        status, told = 200, model.call(operation, asked)
                except Refused as error:
                    status, told = 400, {"__type": error.code, "message": error.message}
                body = json.dumps(told).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/x-amz-json-1.1")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def kill(self) -> None:
        self._server.shutdown()
        self._server.server_close()
