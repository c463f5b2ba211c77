"""
What AWS may say to a reference, and what is made of it.

A small server on loopback answers as SSM and Secrets Manager do, also in ways that no emulator
does: access denied, throttled, broken, silent.
"""

import gc
import json
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from tests.servers.process import free_port

from oncebridge.aws import references
from oncebridge.aws.references import NotNow
from oncebridge.base.secrets import asked_once, resolve
from oncebridge.errors import ConfigError, ConfigErrors, OncebridgeError
from oncebridge.service.addresses import SinkPlace
from oncebridge.service.config import load

CANARY = "c4n4ry-5hh"
WHERE = "sink.headers.Authorization"


class Aws:
    """What the server is to say, and what it was asked."""

    def __init__(self) -> None:
        self.status = 200
        self.answer: object = {}
        self.asked: list[tuple[str, dict[str, object]]] = []
        self.port = 0

    def gives(self, text: str) -> None:
        """Keep *text*, as a parameter and as a secret."""
        self.status, self.answer = 200, {"Parameter": {"Value": text}, "SecretString": text}

    def refuses(self, status: int, code: str, message: str = "") -> None:
        self.status, self.answer = status, {"__type": code, "message": f"{message} {CANARY}"}


@pytest.fixture
def aws(aws_identity: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Aws]:
    said = Aws()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            said.asked.append((self.headers["X-Amz-Target"], json.loads(body)))
            answer = json.dumps(said.answer).encode()
            self.send_response(said.status)
            self.send_header("Content-Type", "application/x-amz-json-1.1")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        said.port = server.server_address[1]
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{said.port}")
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield said
        server.shutdown()
        thread.join()


def refused(text: str, kind: type[OncebridgeError] = ConfigError) -> str:
    """Give what is told about *text*, which never is the value."""
    with pytest.raises(kind) as caught:
        resolve(text, WHERE)
    told = str(caught.value)
    assert CANARY not in told
    assert told.startswith(f"{WHERE}: {text!r}")
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None
    return told


# --- what is asked, and found -----------------------------------------------------------


def test_a_parameter_is_asked_for_decrypted(aws):
    aws.gives(CANARY)
    assert resolve("ssm:/crm/token", WHERE) == CANARY
    assert aws.asked == [("AmazonSSM.GetParameter", {"Name": "/crm/token", "WithDecryption": True})]


def test_a_secret_is_asked_for_without_its_field(aws):
    aws.gives(json.dumps({"token": CANARY, "port": 5432, "a#b": "odd"}))
    assert resolve("secretsmanager:crm#token", WHERE) == CANARY
    assert resolve("secretsmanager:crm#port", WHERE) == "5432"
    assert resolve("secretsmanager:crm#a#b", WHERE) == "odd"
    assert aws.asked == [("secretsmanager.GetSecretValue", {"SecretId": "crm"})] * 3


def test_what_is_found_is_not_looked_up_again(aws):
    aws.gives("env:HOME")
    assert resolve("ssm:x", WHERE) == "env:HOME"


def test_the_end_of_a_line_is_left_out_as_of_a_file(aws):
    aws.gives(" with blanks \r\n")
    assert resolve("secretsmanager:x", WHERE) == " with blanks "
    aws.gives("\n\n")
    assert refused("ssm:b").endswith("it is empty")


def test_each_thing_is_asked_for_once_while_a_configuration_is_read(aws):
    aws.gives(json.dumps({"user": "me", "token": CANARY}))
    with asked_once():
        assert resolve("secretsmanager:crm#user", WHERE) == "me"
        assert resolve("secretsmanager:crm#token", WHERE) == CANARY
        aws.refuses(400, "AccessDeniedException")
        assert resolve("secretsmanager:crm", WHERE).startswith("{")
        assert len(aws.asked) == 1
        assert "denied" in refused("ssm:x")
        aws.gives("too late")
        assert "denied" in refused("ssm:x")
        assert len(aws.asked) == 2
    assert resolve("ssm:x", WHERE) == "too late"


def test_the_region_of_an_arn_is_asked(aws, monkeypatch):
    monkeypatch.delenv("AWS_REGION")
    aws.refuses(400, "ParameterNotFound")
    arn = "arn:aws:ssm:eu-west-1:123456789012:parameter/crm/token"
    assert refused(f"ssm:{arn}").endswith("there is no such parameter in eu-west-1")
    assert aws.asked[0][1]["Name"] == arn


# --- what is missing ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said", "told"),
    [
        ("ssm:/a/b", (400, "ParameterNotFound"), "there is no such parameter in us-east-1"),
        ("ssm:b:9", (400, "ParameterVersionNotFound"), "there is no such version of it in us-"),
        ("ssm:b", (400, "ValidationException"), "ssm in us-east-1 says ValidationException"),
        (
            "ssm:/a/b:3",
            (400, "AccessDeniedException", "User is not authorized to perform: ssm:GetParameter"),
            "allow ssm:GetParameter on arn:aws:ssm:us-east-1:ACCOUNT:parameter/a/b",
        ),
        (
            "ssm:b",
            (400, "AccessDeniedException", "not authorized to perform: kms:Decrypt on resource"),
            "its key cannot be used (AccessDeniedException); allow kms:Decrypt",
        ),
        ("ssm:b", (400, "InvalidKeyId"), "allow kms:Decrypt on the key"),
        ("secretsmanager:a/b", (400, "ResourceNotFoundException"), "there is no such secret in"),
        (
            "secretsmanager:a/b#c",
            (400, "AccessDeniedException", "is not authorized"),
            "GetSecretValue on arn:aws:secretsmanager:us-east-1:ACCOUNT:secret:a/b-??????",
        ),
        (
            "secretsmanager:arn:aws:secretsmanager:us-east-1:123456789012:secret:a-AbCdEf",
            (400, "AccessDeniedException", "is not authorized"),
            "on arn:aws:secretsmanager:us-east-1:123456789012:secret:a-AbCdEf",
        ),
        (
            "secretsmanager:b",
            (400, "AccessDeniedException", "Access to KMS is not allowed"),
            "allow kms:Decrypt",
        ),
        ("secretsmanager:b", (400, "DecryptionFailure"), "its key cannot be used"),
        ("secretsmanager:b", (400, "InvalidRequestException"), "says InvalidRequestException"),
        ("ssm:b", (400, "UnrecognizedClientException"), "says UnrecognizedClientException"),
    ],
)
def test_a_no_is_told_with_what_to_do(aws, text, said, told):
    aws.refuses(*said)
    assert told in refused(text)
    assert len(aws.asked) == 1


@pytest.mark.parametrize(
    ("status", "code"),
    [(400, "ThrottlingException"), (500, "InternalServerError"), (503, ""), (429, "")],
)
def test_what_may_pass_is_no_mistake_of_the_configuration(aws, status, code):
    aws.refuses(status, code)
    told = refused("ssm:b", NotNow)
    assert "cannot answer now" in told
    assert len(aws.asked) <= 2  # once more at most


def test_nobody_there_is_told_by_its_kind(aws, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL_SSM", f"http://127.0.0.1:{free_port()}")
    told = refused("ssm:b", NotNow)
    assert told.endswith("ssm cannot be reached (EndpointConnectionError)")


def test_a_silent_service_is_not_waited_for_long(aws, monkeypatch):
    monkeypatch.setattr(references, "_READ_S", 0.3)
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        port = silent.getsockname()[1]
        monkeypatch.setenv("AWS_ENDPOINT_URL_SECRETS_MANAGER", f"http://127.0.0.1:{port}")
        told = refused("secretsmanager:b", NotNow)
    assert told.endswith("secretsmanager cannot be reached (ReadTimeoutError)")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None}, "no AWS credentials were"),
        ({"AWS_SECRET_ACCESS_KEY": None}, "PartialCredentialsError"),
        ({"AWS_REGION": None}, "no AWS Region is set"),
        ({"AWS_REGION": "not a region"}, "InvalidRegionError"),
        ({"AWS_PROFILE": "nobody"}, "ProfileNotFound"),
        ({"AWS_ENDPOINT_URL": "nowhere"}, "the AWS configuration cannot be used (ValueError"),
    ],
)
def test_an_environment_that_is_not_in_order_is_told(aws, monkeypatch, change, told):
    for name, value in change.items():
        if value is None:
            monkeypatch.delenv(name)
        else:
            monkeypatch.setenv(name, value)
    assert told in refused("ssm:b")
    assert not aws.asked


@pytest.mark.parametrize(
    "text", ["ssm:", "secretsmanager:", "secretsmanager:#a", "secretsmanager:a#"]
)
def test_half_a_reference_is_told(aws, text):
    assert "is incomplete; write" in refused(text)
    assert not aws.asked


@pytest.mark.parametrize(
    ("kept", "told"),
    [
        (CANARY, "the secret is no JSON object"),
        (f'["{CANARY}"]', "the secret is no JSON object"),
        ("[" * 50_000, "the secret is no JSON object"),
        (f'{{"other": "{CANARY}", "{CANARY}": "x"}}', "the secret has no field 'token'"),
        (f'{{"token": ["{CANARY}"]}}', "the field must be a text"),
        ('{"token": ""}', "the field must be a text"),
        ('{"token": null}', "the field must be a text"),
        ('{"token": true}', "the field must be a text"),
    ],
)
def test_a_field_that_is_not_there_is_told_without_the_others(aws, kept, told):
    aws.gives(kept)
    assert told in refused("secretsmanager:crm#token")


def test_what_is_empty_or_no_text_is_told(aws):
    aws.gives("")
    assert refused("ssm:b").endswith("it is empty")
    aws.answer = {"SecretBinary": "YzRuNHJ5LTVoaA=="}
    assert refused("secretsmanager:b").endswith("it holds bytes, and must hold a text")


# --- where it is kept out of --------------------------------------------------------------


def test_nothing_is_logged_even_where_everything_is(aws, caplog):
    aws.gives(json.dumps({"token": CANARY}))
    with caplog.at_level(logging.DEBUG):
        assert resolve("secretsmanager:crm#token", WHERE) == CANARY
        aws.gives(CANARY)
        assert resolve("ssm:crm", WHERE) == CANARY
        aws.refuses(400, "AccessDeniedException")
        refused("ssm:crm")
    assert any(record.name.startswith("botocore") for record in caplog.records)
    assert CANARY not in caplog.text
    logging.getLogger("botocore.parsers").warning("heard again")
    assert "heard again" in caplog.text


def test_no_connection_is_left_open(aws):
    aws.gives(CANARY)
    with asked_once():
        resolve("ssm:a", WHERE)
        resolve("secretsmanager:a", WHERE)
    gc.collect()  # a warning about a socket would be an error here
    assert len(aws.asked) == 2


def test_an_address_is_found_and_masked(aws):
    aws.gives(f"https://u:{CANARY}@crm.example.com/hook?token={CANARY}")
    place = SinkPlace.of("ssm:/crm/url")
    assert place.url == aws.answer["Parameter"]["Value"]
    assert CANARY not in f"{place}{place!r}"
    aws.gives(f"{CANARY}://x")
    with pytest.raises(ConfigError, match="'ssm:/crm/url' does not hold an address") as caught:
        SinkPlace.of("ssm:/crm/url")
    assert CANARY not in str(caught.value)


def test_a_configuration_is_read_from_a_parameter(aws):
    aws.gives('lease = "40s"\nsink = "https://crm.example.com/hook"\n')
    setup = load("ssm:/oncebridge/config", environment={})
    assert setup.config.lease.total_seconds() == 40
    assert setup.file == "ssm:/oncebridge/config"
    setup = load(environment={"ONCEBRIDGE_CONFIG": "secretsmanager:config"})
    assert setup.config.lease.total_seconds() == 40
    assert [name for name, _ in aws.asked] == [
        "AmazonSSM.GetParameter",
        "secretsmanager.GetSecretValue",
    ]


def test_a_configuration_that_is_not_there_is_told_once(aws):
    aws.refuses(400, "ParameterNotFound")
    with pytest.raises(ConfigErrors) as caught:
        load("ssm:/oncebridge/config", environment={})
    assert str(caught.value) == (
        "ssm:/oncebridge/config: 'ssm:/oncebridge/config' cannot be read: "
        "there is no such parameter in us-east-1"
    )
    aws.gives(f'lease = "{CANARY}')
    with pytest.raises(ConfigErrors, match="ssm:/oncebridge/config: is not TOML") as caught:
        load("ssm:/oncebridge/config", environment={})
    assert CANARY not in str(caught.value)


def test_every_setting_that_wants_what_is_missing_is_named(aws):
    aws.refuses(400, "ResourceNotFoundException")
    flags = {
        "source.api_keys": "secretsmanager:a#x,secretsmanager:a#y",
        "sink": "secretsmanager:b",
        "lease": "nonsense",
    }
    with pytest.raises(ConfigErrors) as caught:
        load(environment={}, flags=flags)
    told = str(caught.value).splitlines()
    assert len(told) == 4
    assert {line.partition(":")[0] for line in told} == {
        "--set source.api_keys",
        "--sink",
        "--lease",
    }
    assert len(aws.asked) == 2


WITHOUT_BOTOCORE = """
import sys
sys.modules["botocore"] = None
from oncebridge.errors import ConfigError
from oncebridge.base.secrets import resolve
try:
    resolve("ssm:x", "store")
except ConfigError as error:
    print(error)
"""


def test_without_botocore_it_is_told_what_to_install():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_BOTOCORE],
        env={**os.environ, "PYTHONWARNINGS": "error"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == (
        "store: 'ssm:x' cannot be read: it needs a package that is not installed; "
        "pip install botocore\n"
    )


def test_botocore_is_imported_only_when_it_is_needed():
    code = (
        "import sys; from oncebridge.base.secrets import resolve; from oncebridge.service.config import load; "
        "load(environment={}); resolve('x', ''); resolve('env:PATH', ''); "
        "print('botocore' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
