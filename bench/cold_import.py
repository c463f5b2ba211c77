"""
What a cold start costs: imports, and the first event through a table in DynamoDB.

    python bench/cold_import.py [--rounds 9]

Each figure is the time inside a fresh interpreter that sees what a Lambda function sees: what a
managed runtime brings, and our package, with and without bytecode (`--compile` of the build).
The table is ministack's, on loopback. Rounds are interleaved; medians, and half the spread.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from table import middle

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.servers.aws import AWS, _ministack
from tests.servers.lambda_runtime import ARCH, PYTHON, LambdaRuntime, builder

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
READY = "import oncebridge.aws.function, oncebridge.stores.dynamodb"


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true", help="print all figures, in ms")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runtime = LambdaRuntime(folder)
        compiled = unpacked(
            builder().build(ARCH, folder / "compiled", python=PYTHON, compiled=True)
        )
        server = _ministack(folder)
        server.process.start()
        try:
            found = rounds(chosen.rounds, runtime, compiled, server)
        finally:
            server.process.kill()
    if chosen.json:
        print(json.dumps(found))
        return
    print(f"Python {PYTHON}, {chosen.rounds} rounds\n\n{'cold, in a fresh process':<46} ms")
    for what, times in found.items():
        print(f"{what:<46} {middle([{'ms': ms} for ms in times], 'ms', '{:.0f}')}")


def rounds(
    count: int, runtime: LambdaRuntime, compiled: Path, server: Any
) -> dict[str, list[float]]:
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
        "import boto3": (BOTO3, plain),
        "  and its first put and update": (BOTO3_FIRST, plain),
        "from oncebridge.aws import lambda_handler": (OURS, plain),
        "  with bytecode": (OURS, quick),
        "  and its first event": (OURS_FIRST, plain),
        "  and its first event, with bytecode": (OURS_FIRST, quick),
        "the ready-made function and store": (READY, plain),
        "  the same, with bytecode": (READY, quick),
    }
    found: dict[str, list[float]] = {what: [] for what in rows}
    for _ in range(count):
        for what, (code, env) in rows.items():
            found[what].append(measure(code, env))
    return found


if __name__ == "__main__":
    main()
