"""An S3 server of our own, on loopback, with a bucket for whoever asks."""

import http.client
import os
import sys
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path

import pytest
from tests.servers.process import Process, free_port

_numbers = count()


class S3Server:
    """A server that honours the conditions of PutObject and DeleteObject."""

    access_key = "AKIAINVENTEDEXAMPLE"
    secret_key = "invented/secret/of/nobody"
    region = "us-east-1"

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        env = {
            "GATEWAY_PORT": str(self.port),
            "BIND_HOST": "127.0.0.1",
            "SERVICES": "s3",
            "LOG_LEVEL": "ERROR",
            "TMPDIR": str(folder),
            **self.environment,
        }
        self.process = Process(
            [sys.executable, "-m", "ministack"],
            log=folder / "s3.log",
            ready=self._answers,
            env=env,
        )

    @property
    def environment(self) -> dict[str, str]:
        """What a client needs to find in its environment."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": self.region,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def show_to(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Put into the environment what a client looks for there."""
        for name, value in self.environment.items():
            monkeypatch.setenv(name, value)

    def bucket(self) -> str:
        """Make an empty bucket that nobody else uses."""
        name = f"records-{next(_numbers)}"
        status, _ = self.ask("PUT", f"/{name}")
        assert status == 200, status
        return name

    def ask(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> tuple[int, bytes]:
        """Send one request as an administrator would."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request(method, path, body, dict(headers or {}))
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def _answers(self) -> bool:
        try:
            return self.ask("GET", "/_ministack/health")[0] == 200
        except OSError:
            return False


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    server = S3Server(tmp_path_factory.mktemp("s3"))
    server.process.start()
    yield server
    server.process.kill()
