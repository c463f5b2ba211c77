"""
The world in which the sessions of a page run.

Addresses of the documentation lead to real servers on loopback: AWS to an emulator, on which the
queues, streams, tables and parameters that a page names are made first; databases and hosts under
`example.com` to servers of the tests. Ports are exchanged for free ones. A `toml` block with a file
name as its title is that file; where a page has none, `oncebridge.toml` is what `init` writes.
"""

import asyncio
import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import asyncpg
import boto3
import pytest
from click.testing import CliRunner
from tests.docs.pages import ROOT
from tests.servers.aws import AWS, fresh
from tests.servers.process import free_port

from oncebridge.cli.app import app
from oncebridge.cli.init import starter

REGION = "eu-west-1"
"""Not where other tests make theirs: names of the documentation are nobody's own."""
_PORTS = ("127.0.0.1:8080", "127.0.0.1:8081")
_SECRET = "a-secret-of-nobody-at-all"
_DATABASE = "postgresql://oncebridge:PASSWORD@db.example.com/events"
_CACHE = "redis://cache.example.com"


class World:
    """Where one page is tried: a folder, an environment, and servers when they are asked for."""

    def __init__(self, page: str, folder: Path, request: pytest.FixtureRequest) -> None:
        self.page = page
        self.folder = folder
        self._request = request
        self._ports = {one: f"127.0.0.1:{free_port()}" for one in _PORTS}
        (folder / "home").mkdir()
        for name in ("examples", "deploy"):
            (folder / name).symlink_to(ROOT / name)

    # --- servers --------------------------------------------------------------------------

    @cached_property
    def aws(self) -> dict[str, str]:
        """The environment in which AWS is an emulator."""
        server = self._request.getfixturevalue("ministack")
        s3 = self._request.getfixturevalue("s3_server")
        return {
            **_identity(),
            "AWS_ENDPOINT_URL": server.endpoint,
            "AWS_ENDPOINT_URL_S3": s3.endpoint,
        }

    def client(self, service: str) -> Any:
        """Give a client of AWS, as an administrator has one."""
        return _client(service, self.aws["AWS_ENDPOINT_URL"])

    @cached_property
    def database(self) -> str:
        """An empty database of our own."""
        url = self._request.getfixturevalue("postgres").url
        name = fresh("docs").replace("-", "_")
        asyncio.run(_execute(url, f"CREATE DATABASE {name}"))
        return re.sub(r"/[^/?]*(?=$|\?)", f"/{name}", url)

    @cached_property
    def cache(self) -> str:
        url: str = self._request.getfixturevalue("redis_server").url
        return url

    # --- what a page names ----------------------------------------------------------------

    def environment(self, text: str) -> dict[str, str]:
        """Give the environment for commands and files that *text* has, and make what it names."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if name in ("LANG", "LC_ALL", "TMPDIR")
        }
        made = {
            **kept,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(self.folder / "home"),
            "COLUMNS": "120",
            **_identity(),
        }
        if "env:DATABASE_URL" in text:
            made["DATABASE_URL"] = self.database
        made = self.secrets(text) | made
        if re.search(r"\b(sqs|kinesis|dynamodb|events|sns|s3|ssm|secretsmanager):", text):
            made |= self.aws
            self._make(text)
        return made

    def secrets(self, text: str) -> dict[str, str]:
        """Give the variables that *text* refers to, and keep at AWS what it has there."""
        kept = {"DATABASE_URL": _DATABASE, "CRM_URL": "https://crm.example.com/hooks"}
        made = {name: kept.get(name, _SECRET) for name in re.findall(r"\benv:(\w+)", text)}
        parameters = set(re.findall(r"\bssm:(/?[\w/-]+)", text))
        others = set(re.findall(r"\bsecretsmanager:([\w/-]+)(?:#(\w+))?", text))
        for name in parameters:
            value = self.told(starter("http")) if name.endswith("/config") else _SECRET
            for _ in range(3):  # a version that is asked for has to be there
                self.client("ssm").put_parameter(
                    Name=name, Value=value, Type="SecureString", Overwrite=True
                )
        for name, member in others:
            self._secret(name, member)
        return {**made, **(self.aws if parameters or others else {})}

    def _make(self, text: str) -> None:
        """Make what *text* takes for given on AWS; again is fine."""
        sqs = self.client("sqs")
        for name in set(re.findall(r"\bsqs://([\w.-]+)", text)):
            kind = {"FifoQueue": "true"} if name.endswith(".fifo") else {}
            sqs.create_queue(QueueName=name, Attributes=kind)
        for name in set(re.findall(r"\bdynamodb://([\w.-]+)", text)):
            self._table(name)
        for name in set(re.findall(r"\bkinesis://([\w.-]+)", text)):
            self._stream(name)

    def _table(self, name: str) -> None:
        client = self.client("dynamodb")
        if name not in client.list_tables()["TableNames"]:
            client.create_table(
                TableName=name,
                AttributeDefinitions=[{"AttributeName": "k", "AttributeType": "B"}],
                KeySchema=[{"AttributeName": "k", "KeyType": "HASH"}],
                BillingMode="PAY_PER_REQUEST",
            )
            expiry = {"Enabled": True, "AttributeName": "x"}
            client.update_time_to_live(TableName=name, TimeToLiveSpecification=expiry)

    def _stream(self, name: str) -> None:
        client = self.client("kinesis")
        if name not in client.list_streams()["StreamNames"]:
            client.create_stream(StreamName=name, ShardCount=1)
            client.get_waiter("stream_exists").wait(StreamName=name, WaiterConfig={"Delay": 1})

    def _secret(self, name: str, member: str) -> None:
        client = self.client("secretsmanager")
        value = _DATABASE if "database" in name else _SECRET
        known = [one["Name"] for one in client.list_secrets()["SecretList"]]
        held = (
            json.loads(client.get_secret_value(SecretId=name)["SecretString"])
            if name in known
            else {}
        )
        text = json.dumps(held | {member or "value": value})
        if name in known:
            client.put_secret_value(SecretId=name, SecretString=text)
        else:
            client.create_secret(Name=name, SecretString=text)

    # --- words ----------------------------------------------------------------------------

    def told(self, text: str) -> str:
        """Put what is here in the place of what the documentation says."""
        if _DATABASE in text:
            text = text.replace(_DATABASE, self.database)
        if _CACHE in text:
            text = text.replace(_CACHE, self.cache)
        for path in re.findall(r"file:(/(?:run|etc)/[\w./-]+)", text):
            self._file(path, _SECRET)
            text = text.replace(path, str(self._at(path)))
        for theirs, ours in self._ports.items():
            text = text.replace(theirs, ours)
        return text

    def retold(self, text: str) -> str:
        """Put what the documentation says in the place of what is here."""
        for theirs, ours in self._ports.items():
            text = text.replace(ours, theirs)
        return text.replace(f"{self.folder}/", "")

    def write(self, name: str, text: str) -> None:
        """Write a file as the page shows it."""
        (self.folder / name).write_text(self.told(text))

    def _at(self, path: str) -> Path:
        return self.folder / "root" / path.lstrip("/")

    def _file(self, path: str, text: str) -> None:
        self._at(path).parent.mkdir(parents=True, exist_ok=True)
        self._at(path).write_text(text)


@cache
def _client(service: str, endpoint: str) -> Any:
    session = boto3.Session(AWS["AWS_ACCESS_KEY_ID"], AWS["AWS_SECRET_ACCESS_KEY"])
    return session.client(service, REGION, endpoint_url=endpoint)


def _identity() -> dict[str, str]:
    return {**AWS, "AWS_REGION": REGION}


async def _execute(url: str, *statements: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        for statement in statements:
            await connection.execute(statement)
    finally:
        await connection.close()


# --- what a page takes for given ----------------------------------------------------------


@dataclass(frozen=True)
class Given:
    """What is there before the sessions of a page begin."""

    prepare: Callable[[World], None] = lambda _world: None
    config: str = field(default_factory=lambda: starter("http"))
    """What `oncebridge.toml` is where the page does not show it."""
    instead: dict[str, str] = field(default_factory=dict)
    """Words of the page that stand for something else."""
    exits: dict[str, int] = field(default_factory=dict)
    """Commands that do not end with 0, by how they begin."""
    columns: int = 120


def invoke(*words: str) -> str:
    """Run a command of ours in this process, and give what it prints."""
    done = CliRunner().invoke(app, [*words])
    assert done.exit_code == 0, (words, done.output)
    return done.stdout


_COARSE = """\
route = "crm"
store = "sqlite:oncebridge.db"
dead = "sqlite:oncebridge-dead.db"
sink = "file:crm.ndjson"

[[rules]]
name = "crm"
key = ["detail.conversationId"]
"""


def _recordings(world: World) -> None:
    """Put there what `aws` would have fetched: files, a queue's messages, a log's lines."""
    text = invoke("simulate", "--events", "5000")
    (world.folder / "recordings").mkdir()
    (world.folder / "recordings" / "events.ndjson").write_text(text)
    few = text.splitlines()[:40]
    sent = {"SentTimestamp": "1765552507657"}
    received = [
        {"MessageId": f"m{at}", "ReceiptHandle": f"r{at}", "Body": line, "Attributes": sent}
        for at, line in enumerate(few)
    ]
    batches = [json.dumps({"Messages": [one]}, indent=4) for one in received]
    (world.folder / "recording.json").write_text("\n".join(batches))
    lines = [
        {"timestamp": 1765552507657, "message": line, "eventId": str(at)}
        for at, line in enumerate(few)
    ]
    (world.folder / "logs.json").write_text(json.dumps({"events": lines}))


_EVENT = {"id": "6f5c", "source": "shop", "detail-type": "order", "detail": {"order": 7}}
_KEY = "013c11a11e6cf95bbf046d4fb997aef8c3183c8ba3561bfad43bb8621dd82a87d7"


def _letters(world: World) -> None:
    """Deliver an event, and bury seventeen lines that are not events."""
    (world.folder / "event.json").write_text(json.dumps(_EVENT))
    lines = [json.dumps(_EVENT), *[f"no event {number}" for number in range(17)]]
    (world.folder / "few.ndjson").write_text("\n".join(lines))
    invoke(
        *("run", "--source", f"file:{world.folder}/few.ndjson", "--sink", "-"),
        *("--store", f"sqlite:{world.folder}/oncebridge.db"),
        *("--dead", f"sqlite:{world.folder}/oncebridge-dead.db", "--log-level", "error"),
    )


GIVEN: dict[str, Given] = {
    "docs/audit.md": Given(
        _recordings,
        instead={"-c oncebridge.toml --warm": "-c oncebridge.toml --preset genesys --warm"},
    ),
    "docs/check.md": Given(config=_COARSE, columns=80),
    "docs/check-aws.md": Given(config=starter("worker")),
    "docs/deploy.md": Given(config=starter("worker")),
    "docs/operating.md": Given(
        _letters,
        instead={"01d4…": _KEY, "6f5c…": "6f5c", "dead drop 17": "dead drop 18 --yes"},
        exits={
            "oncebridge migrate -c oncebridge.toml --sql": 1,  # SQLite needs nothing
            "oncebridge dead replay": 1,  # what is no event dies again
        },
    ),
}


def given(page: str) -> Given:
    """Tell what a page takes for given."""
    return GIVEN.get(page) or Given()
