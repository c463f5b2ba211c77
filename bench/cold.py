"""
Starting: imports and the first event of a Lambda function, and the shortest command.

Each figure is the time inside a fresh interpreter that sees what a Lambda function sees: what a
managed runtime brings, and our package, with and without bytecode (`--compile` of the build).
The table is ministack's, on loopback. Rounds are interleaved. The command is `oncebridge --version`
of this environment; its time is that of the processor.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from table import Effort, Line, Measured, Results, Topic, met, spread

sys.path.insert(0, str(Path(__file__).parents[1]))

AIM_MS = 90
AIM_COMMAND_S = 0.15
TIMED = """
import time
started = time.perf_counter()
{code}
print((time.perf_counter() - started) * 1000)
"""
BOTO3 = "import boto3"
BOTO3_FIRST = """
import boto3, os
table = boto3.resource("dynamodb").Table(os.environ["BENCH_TABLE"])
key = {"k": os.urandom(8)}
table.put_item(Item=key, ConditionExpression="attribute_not_exists(k)")
table.update_item(Key=key, UpdateExpression="SET d = :d", ExpressionAttributeValues={":d": 1})
"""
OURS = "from oncebridge.aws import lambda_handler"
OURS_FIRST = """
import os
from oncebridge import Gateway
from oncebridge.aws import lambda_handler
handler = lambda_handler(Gateway.from_config(), deliver=lambda event: None, metrics=None)

class Context:
    def get_remaining_time_in_millis(self):
        return 30_000

handler({"id": os.urandom(8).hex(), "source": "a", "detail-type": "b", "detail": {}}, Context())
"""
READY = "import oncebridge.aws.function, oncebridge.stores.dynamodb.store"


def unpacked(path: Path) -> Path:
    with zipfile.ZipFile(path) as archive:
        archive.extractall(path.with_suffix(""))
    return path.with_suffix("")


def measure(code: str, env: dict[str, str]) -> float:
    done = subprocess.run(
        [getattr(sys, "_base_executable", sys.executable), "-S", "-c", TIMED.format(code=code)],
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout)


def command(_: Effort) -> Measured:
    """Measure `oncebridge --version`, again and again; seconds of CPU."""
    return {"cpu_s": [_command_cpu_s() for _ in range(11)][1:]}  # the first writes the bytecode


def _command_cpu_s() -> float:
    program = Path(sys.executable).with_name("oncebridge")
    process = subprocess.Popen([program, "--version"], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{program} --version ended with {process.returncode}")
    return used.ru_utime + used.ru_stime


def cold(effort: Effort) -> Measured:
    from tests.servers.aws import _ministack
    from tests.servers.lambda_runtime import ARCH, PYTHON, LambdaRuntime, builder

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runtime = LambdaRuntime(folder)
        package = builder().build(ARCH, folder / "compiled", python=PYTHON, compiled=True)
        server = _ministack(folder)
        server.process.start()
        try:
            found = rounds(3 if effort.quick else 7, runtime, unpacked(package), server)
        finally:
            server.process.kill()
    return {"python": PYTHON, "ms": found}


def rounds(count: int, runtime: Any, compiled: Path, server: Any) -> dict[str, list[float]]:
    from tests.servers.aws import AWS

    table = server.table()
    common = {
        **AWS,
        "PATH": os.defpath,
        "PYTHONDONTWRITEBYTECODE": "1",
        "AWS_DEFAULT_REGION": AWS["AWS_REGION"],
        "AWS_ENDPOINT_URL": server.endpoint,
        "BENCH_TABLE": table,
        "ONCEBRIDGE_STORE": f"dynamodb://{table}",
        "ONCEBRIDGE_DEAD": "memory:",
        "ONCEBRIDGE_SOURCE": "-",
    }
    plain = {**common, "PYTHONPATH": f"{runtime.package}:{runtime.brought}"}
    quick = {**common, "PYTHONPATH": f"{compiled}:{runtime.brought}"}
    rows = {
        "boto3": (BOTO3, plain),
        "boto3, first": (BOTO3_FIRST, plain),
        "ours": (OURS, plain),
        "both": (f"{BOTO3}\n{OURS}", plain),
        "ours, first": (OURS_FIRST, plain),
        "ready": (READY, plain),
        "ours, bytecode": (OURS, quick),
        "both, bytecode": (f"{BOTO3}\n{OURS}", quick),
        "ours, first, bytecode": (OURS_FIRST, quick),
        "ready, bytecode": (READY, quick),
    }
    found: dict[str, list[float]] = {what: [] for what in rows}
    for _ in range(count):
        for what, (code, env) in rows.items():
            found[what].append(measure(code, env))
    return found


# --- what is told -----------------------------------------------------------------------


def medians(runs: Iterable[Measured], what: str) -> list[float]:
    """Give the median of each run's rounds."""
    return [statistics.median(run["ms"][what]) for run in runs]


def line(results: Results, work: str, more: str = "") -> Line:
    """Tell what our import adds where boto3 is imported as well, as in most functions."""
    runs = results["cold"]
    both, boto3 = medians(runs, f"both{more}"), medians(runs, "boto3")
    added = [a - b for a, b in zip(both, boto3, strict=True)]
    alone = spread(medians(runs, f"ours{more}"), "{:.0f} ms")
    return Line(
        work,
        f"+{spread(added, '{:.0f} ms')}, alone {alone}",
        "",
        f"{spread(boto3, '{:.0f} ms')} boto3",
        "",
        f"≤ +{AIM_MS} ms",
        met(statistics.median(added) <= AIM_MS),
    )


def command_line(results: Results, work: str) -> Line:
    found = [statistics.median(run["cpu_s"]) for run in results["command"]]
    reached = met(statistics.median(found) <= AIM_COMMAND_S)
    return Line(work, f"{spread(found, '{:.2f} s')} CPU", aim=f"≤ {AIM_COMMAND_S} s", met=reached)


def lines(results: Results) -> Iterator[Line]:
    runs = results["cold"]
    first = spread(medians(runs, "boto3, first"), "{:.0f} ms")
    for more, how in (("", ""), (", bytecode", ", with bytecode")):
        yield line(results, f"import of oncebridge.aws{how}", more)
        ours = spread(medians(runs, f"ours, first{more}"), "{:.0f} ms")
        yield Line("  and its first event", ours, "", f"{first} boto3, put and update")
        ready = spread(medians(runs, f"ready{more}"), "{:.0f} ms")
        yield Line("  the function without code, with the DynamoDB store", ready)
    yield command_line(results, "`oncebridge --version`")


TOPIC = Topic(
    "cold",
    "Start",
    {"cold": cold, "command": command},
    lines,
    "Lambda cold starts, in a new interpreter with only the packages of the Lambda runtime and oncebridge. "
    "The first line is the time that the import adds if boto3 is imported too. The command is the shortest "
    "one, in CPU time.",
)
