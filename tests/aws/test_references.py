"""
Parameters and secrets, kept in SSM and Secrets Manager, as commands and services use them.

A canary stands in every one of them. Whatever a command prints or writes is searched for it.
"""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count

import boto3
import pytest
from tests.servers.process import free_port

from oncebridge.base.secrets import resolve
from oncebridge.errors import ConfigError
from oncebridge.service.config import load

SECRET = "c4n4ry-5ecret-of-aws"
_numbers = count()


class Kept:
    """What this test keeps at AWS, under names that nobody else uses."""

    def __init__(self, server) -> None:
        self.endpoint = server.endpoint
        self._ssm = boto3.client("ssm", endpoint_url=server.endpoint, region_name="us-east-1")
        self._secrets = boto3.client(
            "secretsmanager", endpoint_url=server.endpoint, region_name="us-east-1"
        )

    def _name(self) -> str:
        return f"once/{os.getpid()}/{next(_numbers)}"

    def parameter(self, text, kind="SecureString") -> str:
        name = f"/{self._name()}"
        self._ssm.put_parameter(Name=name, Value=text, Type=kind)
        return name

    def change(self, name, text) -> None:
        self._ssm.put_parameter(Name=name, Value=text, Type="SecureString", Overwrite=True)

    def arn(self, name) -> str:
        return self._ssm.get_parameter(Name=name)["Parameter"]["ARN"]

    def secret(self, text) -> tuple[str, str]:
        made = self._secrets.create_secret(Name=self._name(), SecretString=text)
        return made["Name"], made["ARN"]

    def bytes(self, data) -> str:
        return self._secrets.create_secret(Name=self._name(), SecretBinary=data)["Name"]

    def close(self) -> None:
        self._ssm.close()
        self._secrets.close()


@pytest.fixture
def kept(ministack, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", ministack.endpoint)
    kept = Kept(ministack)
    yield kept
    kept.close()


def test_a_parameter_is_found_by_name_version_and_arn(kept):
    name = kept.parameter(f"{SECRET}-1")
    kept.change(name, f"{SECRET}-2")
    assert resolve(f"ssm:{name}", "here") == f"{SECRET}-2"
    assert resolve(f"ssm:{name}:1", "here") == f"{SECRET}-1"
    assert resolve(f"ssm:{kept.arn(name)}", "here") == f"{SECRET}-2"
    plain = kept.parameter("not secret", "String")
    assert resolve(f"ssm:{plain}", "here") == "not secret"


def test_a_secret_is_found_by_name_and_arn_whole_and_by_field(kept):
    text = json.dumps({"user": "me", "password": SECRET, "port": 5432})
    name, arn = kept.secret(text)
    assert resolve(f"secretsmanager:{name}", "here") == text
    assert resolve(f"secretsmanager:{name}#password", "here") == SECRET
    assert resolve(f"secretsmanager:{arn}#password", "here") == SECRET
    assert resolve(f"secretsmanager:{arn}#port", "here") == "5432"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("ssm:/no/such", "there is no such parameter in us-east-1"),
        ("ssm:{name}:99", "there is no such version of it in us-east-1"),
        ("secretsmanager:no/such", "there is no such secret in us-east-1"),
        ("secretsmanager:{secret}#no", "the secret has no field 'no'"),
        ("secretsmanager:{bytes}", "its value is binary"),
    ],
)
def test_what_is_not_there_is_told(kept, text, told):
    reference = text.format(
        name=kept.parameter(SECRET),
        secret=kept.secret(json.dumps({SECRET: SECRET}))[0],
        bytes=kept.bytes(SECRET.encode()),
    )
    with pytest.raises(ConfigError) as caught:
        resolve(reference, "store")
    assert str(caught.value).startswith(f"store: {reference!r}")
    assert told in str(caught.value)
    assert SECRET not in str(caught.value)


def test_a_configuration_with_all_four_references(kept, tmp_path, monkeypatch):
    name, _ = kept.secret(json.dumps({"key": f"{SECRET}-a", "old": f"{SECRET}-b"}))
    sink = kept.parameter(f"https://u:{SECRET}-c@crm.example.com/hook")
    (tmp_path / "token").write_text(f"{SECRET}-d\n")
    monkeypatch.setenv("SOME_TOKEN", f"{SECRET}-e")
    config = kept.parameter(
        f"""
        [source]
        url = "http://127.0.0.1:8080/events"
        api_keys = ["secretsmanager:{name}#key", "secretsmanager:{name}#old"]

        [sink]
        url = "ssm:{sink}"
        headers = {{ A = "file:{tmp_path / "token"}", B = "env:SOME_TOKEN" }}
        """
    )
    setup = load(f"ssm:{config}", environment={})
    assert setup.config.sink.url == f"https://u:{SECRET}-c@crm.example.com/hook"
    assert SECRET not in f"{setup!r}"
    assert (setup.routes[0].name, str(setup.routes[0].sink)) == ("default", f"ssm:{sink}")


# --- as people run it ----------------------------------------------------------------------


def run(kept, folder, *arguments, **more):
    env = {n: v for n, v in os.environ.items() if not n.startswith("ONCEBRIDGE_")}
    return subprocess.run(
        [sys.executable, "-m", "oncebridge", *arguments],
        cwd=folder,
        env={**env, "AWS_ENDPOINT_URL": kept.endpoint, **more},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


EVENT = json.dumps({"id": "1", "source": "shop", "detail-type": "Order", "detail": {"n": 1}})


@pytest.fixture
def refusing():
    """Start a server that refuses for good, and gives the port and what it was sent."""
    heard = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            heard.append(self.headers["Authorization"])
            self.send_response(400, self.headers["Authorization"])
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server.server_address[1], heard
        server.shutdown()
        thread.join()


def test_a_service_runs_on_a_parameter_and_tells_no_value(kept, tmp_path, refusing):
    port, heard = refusing
    (tmp_path / "in.ndjson").write_text(f"{EVENT}\n{EVENT}\n")
    store = kept.parameter(f"sqlite:{tmp_path / 'seen.db'}")
    name, _ = kept.secret(json.dumps({"other": SECRET}))
    config = kept.parameter(
        f'source = "file:in.ndjson"\nstore = "ssm:{store}"\nlog_level = "debug"\n'
        f'dead = "sqlite:dead.db"\nroute = "out"\n'
        f'[sink]\nurl = "http://127.0.0.1:{port}/"\nallow_private = true\n'
        f'headers = {{ Authorization = "secretsmanager:{name}#other" }}\n'
    )
    first = run(kept, tmp_path, "run", "-c", f"ssm:{config}", "--json")
    assert json.loads(first.stdout)["dead"] >= 1, first.stderr
    assert heard == [SECRET]
    assert (tmp_path / "seen.db").exists()
    second = run(kept, tmp_path, "dead", "list", ONCEBRIDGE_CONFIG=f"ssm:{config}")
    assert second.returncode == 0, second.stderr
    assert SECRET not in first.stdout + first.stderr + second.stdout + second.stderr
    for path in tmp_path.iterdir():
        assert SECRET.encode() not in path.read_bytes(), path


def test_every_mistake_is_told_at_once_and_without_values(kept, tmp_path):
    name, _ = kept.secret(json.dumps({"a": SECRET}))
    odd = kept.parameter(f"{SECRET}://{SECRET}")
    config = kept.parameter(
        f'store = "ssm:{odd}"\ndead = "ssm:/no/such"\nlease = "{SECRET[:6]}"\n'
        f'[source]\nurl = "http://127.0.0.1:0/"\napi_keys = ["secretsmanager:{name}#b"]\n'
    )
    done = run(kept, tmp_path, "run", "-c", f"ssm:{config}")
    assert done.returncode == 2
    told = done.stderr.splitlines()
    assert told[0] == f"oncebridge: 4 errors in ssm:{config}"
    assert f"store: 'ssm:{odd}' does not hold an address" in done.stderr
    assert "dead: 'ssm:/no/such' cannot be read: there is no such parameter" in done.stderr
    assert f"source.api_keys[0]: 'secretsmanager:{name}#b'" in done.stderr
    assert SECRET not in done.stderr
    missing = run(kept, tmp_path, "run", "-c", "ssm:/no/such/config")
    assert missing.returncode == 2
    assert "there is no such parameter in us-east-1" in missing.stderr


def test_an_outage_of_aws_is_no_mistake_and_is_worth_another_start(kept, tmp_path):
    nobody = f"http://127.0.0.1:{free_port()}"
    done = run(kept, tmp_path, "run", "-c", "ssm:/x", AWS_ENDPOINT_URL=nobody)
    assert done.returncode == 3
    assert done.stderr == (
        "oncebridge: 'ssm:/x' cannot be read: ssm cannot be reached (EndpointConnectionError)\n"
    )
