"""
All targets, one after the other, each for a while: `make fuzz FOR=1800`.

    python fuzz/run.py --seconds 1800 [--only event http]

What was found stays in build/found, and the next run goes on from there. Exit code 1 says that a
target failed; the file that makes it fail is named, and kept.
"""

import argparse
import re
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
BUILD = HERE.parent / "build"
TARGETS = ("event", "records", "http", "config")
_RUNS = re.compile(r"Done (\d+) runs|#(\d+)\s")
_COVERED = re.compile(r"cov: (\d+)")


def main() -> int:
    parser = argparse.ArgumentParser(description="Feed the parsers rubbish, guided by coverage.")
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--only", choices=TARGETS, nargs="+", default=TARGETS)
    asked = parser.parse_args()
    subprocess.run([sys.executable, HERE / "seeds.py", BUILD / "seeds"], check=True)
    rows = [fuzz(target, asked.seconds) for target in asked.only]
    print(f"\n{'target':<9} {'seconds':>7} {'runs':>10} {'covered':>8} {'kept':>6}  result")
    for target, took, runs, covered, kept, result in rows:
        print(f"{target:<9} {took:>7.0f} {runs:>10,} {covered:>8,} {kept:>6,}  {result}")
    return 0 if all(row[-1] == "nothing found" for row in rows) else 1


def fuzz(target: str, seconds: int) -> tuple[str, float, int, int, int, str]:
    """Run one target; give what it did, and the file that makes it fail, if there is one."""
    found = BUILD / "found" / target
    found.mkdir(parents=True, exist_ok=True)
    print(f"{target}: {seconds} s", flush=True)
    begins = time.monotonic()
    before = failures(target)
    words = f"-max_total_time={seconds}", "-timeout=10", f"-artifact_prefix={BUILD}/{target}-"
    done = subprocess.run(
        [
            sys.executable,
            HERE / f"fuzz_{target}.py",
            *words,
            f"-dict={HERE / 'words.dict'}",
            found,
            BUILD / "seeds" / target,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    said = done.stdout.decode(errors="replace")
    result = "nothing found"
    if done.returncode:
        print(said[-6000:])
        new = sorted(failures(target) - before)
        result = f"FAILED: {', '.join(new) or f'exit code {done.returncode}'}"
    runs = max((int(a or b) for a, b in _RUNS.findall(said)), default=0)
    covered = max(map(int, _COVERED.findall(said)), default=0)
    if result == "nothing found" and not (runs and covered):
        result = "FAILED: nothing was run"
    kept = sum(1 for _ in found.iterdir())
    return target, time.monotonic() - begins, runs, covered, kept, result


def failures(target: str) -> set[str]:
    kinds = "crash", "timeout", "oom", "leak"
    return {path.name for kind in kinds for path in BUILD.glob(f"{target}-{kind}-*")}


if __name__ == "__main__":
    sys.exit(main())
