"""The service files name only what exists, and keep the promises they make."""

import asyncio
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import click
import pytest
import yaml

from oncebridge.aws.templates.rendering import stack
from oncebridge.base.options import settings_of
from oncebridge.cli.app import app
from oncebridge.http.server import Response, Server
from oncebridge.service import config
from oncebridge.service.config import PREFIX, Config
from oncebridge.sources.http.source import HttpSourceOptions

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "deploy" / "oncebridge.service"
CONTAINER = ROOT / "deploy" / "Containerfile"
README = (ROOT / "deploy" / "README.md").read_text()
OPTIONS = {setting.name: setting for setting in settings_of(Config)}


def unit() -> dict[str, dict[str, list[str]]]:
    """Read the unit: by section and name, all values in their order."""
    sections: dict[str, dict[str, list[str]]] = {}
    for line in UNIT.read_text().splitlines():
        if line.startswith("["):
            section = sections.setdefault(line.strip("[]"), {})
        elif line and not line.startswith("#"):
            name, equals, value = line.partition("=")
            assert equals, line
            section.setdefault(name, []).append(value)
    return sections


def instructions() -> list[tuple[str, str]]:
    """Read the recipe: each instruction with what follows it, continued lines joined."""
    text = "\n".join(
        line for line in CONTAINER.read_text().splitlines() if not line.startswith("#")
    )
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in lines if line]


def values(name: str) -> list[str]:
    return [rest for instruction, rest in instructions() if instruction == name]


def parse(argv: list[str]) -> dict:
    """Parse what follows `oncebridge` as the command line itself would, running nothing."""
    name, *rest = argv
    command = app.commands[name]
    with click.Context(app, info_name="oncebridge", **app.context_settings) as group:
        return command.make_context(name, rest, parent=group).params


def test_the_unit_starts_a_command_that_parses():
    (start,) = unit()["Service"]["ExecStart"]
    program, *argv = shlex.split(start)

    assert program == "/opt/oncebridge/bin/oncebridge"
    assert parse(argv)["config"] == "/etc/oncebridge/oncebridge.toml"


def test_the_unit_gives_a_stop_the_time_it_may_take():
    service = unit()["Service"]
    answers = HttpSourceOptions().answer_within

    assert service["KillSignal"] == ["SIGTERM"]
    limit = timedelta(seconds=int(service["TimeoutStopSec"][0]))
    assert limit > OPTIONS["grace"].default + answers + timedelta(seconds=10)


def test_the_unit_comes_back_unless_the_configuration_is_wrong():
    assert unit()["Service"]["Restart"] == ["always"]
    assert unit()["Service"]["RestartPreventExitStatus"] == ["2"]
    assert unit()["Unit"]["StartLimitIntervalSec"] == ["0"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DynamicUser", "yes"),
        ("StateDirectory", "oncebridge"),
        ("WorkingDirectory", "%S/oncebridge"),
        ("NoNewPrivileges", "yes"),
        ("ProtectSystem", "strict"),
        ("ProtectHome", "yes"),
        ("PrivateTmp", "yes"),
        ("PrivateDevices", "yes"),
        ("MemoryDenyWriteExecute", "yes"),
        ("CapabilityBoundingSet", ""),
        ("AmbientCapabilities", ""),
        ("RestrictAddressFamilies", "AF_INET AF_INET6 AF_UNIX"),
        ("SystemCallArchitectures", "native"),
        ("EnvironmentFile", "-/etc/oncebridge/environment"),
    ],
)
def test_the_unit_gives_the_service_no_more_than_it_needs(name, value):
    assert unit()["Service"][name] == [value]


def test_the_unit_is_one_that_systemd_accepts(tmp_path):
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("systemd-analyze is not here")
    copy = tmp_path / UNIT.name
    # A program that is not there is the one thing it may complain about.
    copy.write_text(UNIT.read_text().replace("/opt/oncebridge/bin/oncebridge", sys.executable))
    done = subprocess.run(
        [tool, "verify", "--man=no", str(copy)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    # What other units of this host do wrong is told too.
    assert [line for line in done.stderr.splitlines() if UNIT.name in line] == []


DENY = """
import ctypes, os, sys
if ctypes.CDLL(None).prctl(65, 1, 0, 0, 0):  # PR_SET_MDWE
    sys.exit(77)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
MAKE_CODE = "import mmap; mmap.mmap(-1, 4096, prot=mmap.PROT_WRITE | mmap.PROT_EXEC)"


def without_write_execute(*args: str) -> subprocess.CompletedProcess[str]:
    """Run Python as `MemoryDenyWriteExecute=` does; 77 where the kernel knows no such thing."""
    return subprocess.run(
        [sys.executable, "-c", DENY, *args],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.full
def test_nothing_in_it_makes_code_at_run_time():
    control = without_write_execute("-c", MAKE_CODE)
    if control.returncode == 77:
        pytest.skip("this kernel cannot deny memory that is writable and executable")
    assert "PermissionError" in control.stderr
    done = without_write_execute("-m", "oncebridge", "demo", "--json", "--seconds", "2")

    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["right"] is True


def test_the_container_starts_a_command_that_parses():
    (entry,), (command,) = values("ENTRYPOINT"), values("CMD")

    assert json.loads(entry) == ["oncebridge"]
    assert "config" in parse(json.loads(command))


def test_every_instruction_that_runs_something_needs_no_shell():
    for rest in [*values("RUN"), *values("CMD"), *values("ENTRYPOINT"), *values("VOLUME")]:
        assert all(isinstance(word, str) for word in json.loads(rest))


def test_the_container_runs_as_nobody_in_particular_and_writes_to_one_place():
    *_, user = values("USER")

    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user)
    assert f"--from=build --chown={user} /data /data" in values("COPY")
    assert json.loads(values("VOLUME")[0]) == ["/data"]
    assert values("WORKDIR")[-1] == "/data"
    assert values("STOPSIGNAL") == ["SIGTERM"]


def test_the_container_is_built_of_what_is_here_and_its_first_stage_stays_behind():
    given = [rest.split() for rest in values("COPY") if "--from=build" not in rest]

    assert all((ROOT / name).exists() for *names, _ in given for name in names)
    ignored = (ROOT / "deploy" / "Containerfile.dockerignore").read_text().split()
    assert ignored[0] == "*"
    tops = {name.partition("/")[0] for *names, _ in given for name in names}
    assert tops == {line[1:] for line in ignored if line.startswith("!")}
    assert [rest.split()[0] for rest in values("FROM")] == ["python:3.11-slim"] * 2
    assert values("ADD") == values("ARG") == []


def test_the_base_is_a_python_that_the_project_supports():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    assert project["requires-python"] == ">=3.11"
    assert "service" in project["optional-dependencies"]


def test_the_settings_in_the_environment_exist():
    pairs = [pair.split("=", 1) for rest in values("ENV") for pair in rest.split()]
    ours = {name: value for name, value in pairs if name.startswith(PREFIX)}
    file = ours.pop(f"{PREFIX}CONFIG")

    assert file == "/etc/oncebridge/oncebridge.toml"
    assert config.load(environment=ours).config.log_format == "json"
    mentioned = set(re.findall(rf"{PREFIX}([A-Z_]+)=", README)) - {"CONFIG"}
    assert mentioned
    for name in mentioned:
        assert name.lower().split("__")[0] in OPTIONS


@pytest.fixture
def health_check() -> list[str]:
    (rest,) = values("HEALTHCHECK")
    return json.loads(rest[rest.index("CMD ") + 4 :])


@pytest.mark.parametrize("status", [200, 503])
async def test_the_health_check_hears_what_healthz_says(health_check, status):
    asked = []

    def answer(request, respond):
        asked.append(request.path)
        respond(Response(status))

    server = Server(answer, host="127.0.0.1", port=0)
    await server.open()
    try:
        code = await check(health_check, server.port)
    finally:
        await server.aclose()

    assert asked == ["/healthz"]
    assert (code == 0) is (status == 200)


async def test_the_health_check_fails_where_nobody_answers(health_check):
    server = Server(lambda *_: None, host="127.0.0.1", port=0)
    await server.open()
    await server.aclose()

    assert await check(health_check, server.port) != 0


async def check(command: list[str], port: int) -> int:
    program, flag, code = command
    assert (program, flag) == ("python", "-c")
    assert ":8080/" in code
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        flag,
        code.replace(":8080/", f":{port}/"),
        stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, "no_proxy": "127.0.0.1"},
    )
    return await process.wait()


@pytest.mark.parametrize("number", [0, 1])
def test_a_configuration_of_the_readme_is_in_order(number, tmp_path):
    text = re.findall(r"```toml\n(.*?)```", README, re.DOTALL)[number]
    for name, secret in {
        "api-key": "invented-key-of-a-sender",
        "crm-token": "Bearer invented",
    }.items():
        (tmp_path / name).write_text(f"{secret}\n")
    assert "file:/run/" in text
    (tmp_path / "oncebridge.toml").write_text(
        re.sub(r"file:/run/[\w./-]+/([\w-]+)\"", rf'file:{tmp_path}/\1"', text)
    )
    setup = config.load(tmp_path / "oncebridge.toml", environment={})

    assert setup.config.preset == "genesys"
    (route,) = setup.routes
    assert route.sink.url == "https://crm.example.com/hooks/genesys"


def test_the_other_commands_of_the_readme_parse():
    found = re.findall(r"oncebridge (dead list[^`\n]*)`", README)

    assert len(found) == 2
    for line in found:
        group, name, *rest = shlex.split(line)
        command = app.commands[group].load().commands[name]
        made = command.make_context(name, rest, **app.context_settings)
        assert made.args == []  # nothing is left over


def test_credentials_of_the_unit_are_those_the_readme_names():
    loaded = set(re.findall(r"^#LoadCredential=([\w-]+):", UNIT.read_text(), re.MULTILINE))
    named = set(re.findall(rf"file:/run/credentials/{UNIT.name}/([\w-]+)", README))

    assert loaded == named == {"api-key", "crm-token"}


def test_the_readme_runs_the_container_with_as_little_as_the_recipe_allows():
    runs = re.findall(r"\$ (docker run --detach.*?\n    oncebridge)\n", README, re.DOTALL)
    (words,) = [shlex.split(run.replace("\\\n", " ")) for run in runs]

    pairs = list(pairwise(words))
    assert "--read-only" in words
    assert ("--cap-drop", "ALL") in pairs
    assert ("--security-opt", "no-new-privileges") in pairs
    assert ("--volume", "oncebridge:/data") in pairs
    (limit,) = [int(value) for option, value in pairs if option == "--stop-timeout"]
    assert timedelta(seconds=limit) > OPTIONS["grace"].default
    (port,) = values("EXPOSE")
    assert ("--publish", f"127.0.0.1:{port}:{port}") in pairs


# --- Kubernetes -----------------------------------------------------------------------------

MANIFEST = (ROOT / "deploy" / "kubernetes.yaml").read_text()


@pytest.fixture
def manifest() -> dict[str, dict]:
    """Read what is applied, by its kind."""
    documents = [one for one in yaml.safe_load_all(MANIFEST) if one]
    found = {one["kind"]: one for one in documents}
    assert len(found) == len(documents)
    return found


@pytest.fixture
def pod(manifest) -> dict:
    return manifest["Deployment"]["spec"]["template"]["spec"]


@pytest.fixture
def in_cluster(manifest, pod, tmp_path, monkeypatch) -> config.Setup:
    """Load the configuration of the manifest, as the container would."""
    file = tmp_path / "oncebridge.toml"
    file.write_text(manifest["ConfigMap"]["data"]["oncebridge.toml"])
    (container,) = pod["containers"]
    for variable in container["env"]:
        assert "secretKeyRef" in variable["valueFrom"]
        monkeypatch.setenv(variable["name"], "Bearer invented")
    return config.load(file, environment={})


def test_what_the_manifest_configures_is_in_order(in_cluster, manifest):
    setup = in_cluster.config

    assert str(setup.source[0]).startswith("sqs:")
    assert str(setup.store).startswith("dynamodb:")
    assert str(setup.dead).startswith("sqs:")
    (route,) = in_cluster.routes
    assert route.name == "crm"
    assert "Bearer" not in manifest["ConfigMap"]["data"]["oncebridge.toml"]


def test_a_pod_has_the_time_that_a_stop_may_take(in_cluster, pod):
    limit = timedelta(seconds=pod["terminationGracePeriodSeconds"])

    assert limit > in_cluster.config.grace + timedelta(seconds=10)


def test_kubernetes_asks_where_the_worker_answers(in_cluster, pod):
    (container,) = pod["containers"]
    (port,) = container["ports"]
    asked = {
        name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")
    }

    assert in_cluster.config.health == f"http://0.0.0.0:{port['containerPort']}"
    assert {probe["port"] for probe in asked.values()} == {port["name"]}
    assert asked["readiness"]["path"] == "/readyz"
    assert asked["liveness"]["path"] == asked["startup"]["path"] == "/healthz"


def test_a_pod_has_no_more_than_it_needs(pod):
    (container,) = pod["containers"]
    *_, user = values("USER")

    assert container["args"] == json.loads(values("CMD")[0])
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    context = pod["securityContext"]
    assert context["runAsNonRoot"] is True
    assert f"{context['runAsUser']}:{context['runAsGroup']}" == user
    assert pod["automountServiceAccountToken"] is pod["enableServiceLinks"] is False
    assert set(container["resources"]["requests"]) == {"cpu", "memory"}
    assert "memory" in container["resources"]["limits"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert {volume["name"] for volume in pod["volumes"]} == set(mounts)
    env = dict(pair.split("=", 1) for rest in values("ENV") for pair in rest.split())
    assert str(Path(env["ONCEBRIDGE_CONFIG"]).parent) == mounts["config"]


def test_what_belongs_together_in_the_manifest_does(manifest, pod):
    labels = manifest["Deployment"]["spec"]["template"]["metadata"]["labels"]
    selectors = [
        manifest["Deployment"]["spec"]["selector"],
        manifest["PodDisruptionBudget"]["spec"]["selector"],
        *(one["labelSelector"] for one in pod["topologySpreadConstraints"]),
    ]
    assert all(selector == {"matchLabels": labels} for selector in selectors)
    names = {one["metadata"]["name"] for one in manifest.values()}
    assert names == {"oncebridge"}
    spaces = {
        one["metadata"].get("namespace") for kind, one in manifest.items() if kind != "Namespace"
    }
    assert spaces == names
    assert pod["serviceAccountName"] == "oncebridge"
    scaled = manifest["HorizontalPodAutoscaler"]["spec"]
    assert scaled["scaleTargetRef"]["name"] == "oncebridge"
    # Both would set the number of replicas, and one of them would lose at each apply.
    assert "replicas" not in manifest["Deployment"]["spec"]
    # So that one is left while another is moved.
    assert scaled["minReplicas"] > manifest["PodDisruptionBudget"]["spec"]["maxUnavailable"]


def test_the_other_way_of_scaling_looks_at_the_same_queue(manifest, in_cluster):
    text = "\n".join(
        line.removeprefix("#") for line in MANIFEST.partition("\n#---\n")[2].splitlines()
    )
    keda = yaml.safe_load(text)
    (trigger,) = keda["spec"]["triggers"]

    assert keda["spec"]["scaleTargetRef"]["name"] == manifest["Deployment"]["metadata"]["name"]
    assert f"sqs:{trigger['metadata']['queueURL']}" == str(in_cluster.config.source[0])
    scaled = manifest["HorizontalPodAutoscaler"]["spec"]
    assert keda["spec"]["minReplicaCount"] == scaled["minReplicas"]
    assert keda["spec"]["maxReplicaCount"] == scaled["maxReplicas"]


def test_the_service_account_is_the_one_that_the_worker_stack_trusts(manifest):
    account = manifest["ServiceAccount"]["metadata"]

    assert f"Default: {account['namespace']}:{account['name']}\n" in stack("worker")
