"""The README's Python and its console sessions run as they stand, and print what they say."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from oncebridge.cli.init import starter
from oncebridge.config import load

README = Path(__file__).parents[2] / "README.md"
SNIPPETS = re.findall(
    r"```python\n(.*?)```(?:\n+```text\n(.*?)```)?", README.read_text(), re.DOTALL
)


def test_the_readme_has_snippets_with_output():
    assert sum(bool(output) for _, output in SNIPPETS) >= 2


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_a_snippet_prints_what_the_readme_says(number, tmp_path: Path):
    code, output = SNIPPETS[number]
    (tmp_path / "oncebridge.toml").write_text(starter("lambda"))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == output


TOML = [
    pytest.param(block, id=f"{path.name}-{at}")
    for path in [README, README.parent / "docs" / "http.md"]
    for at, block in enumerate(re.findall(r"```toml\n(.*?)```", path.read_text(), re.DOTALL))
]


@pytest.mark.parametrize("block", TOML)
def test_a_configuration_of_the_documentation_is_in_order(block, tmp_path: Path, monkeypatch):
    file = tmp_path / "oncebridge.toml"
    file.write_text(block)
    for name in re.findall(r'"env:(\w+)"', block):
        monkeypatch.setenv(name, "a-secret")
    assert load(file).routes


SESSIONS = [
    block
    for block in re.findall(r"```console\n(.*?)```", README.read_text(), re.DOTALL)
    if "make " not in block and "run -c" not in block
]
MOMENT = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(\.\d+Z)?")


def test_the_console_session_goes_as_the_readme_says(tmp_path: Path):
    said = "".join(SESSIONS)
    commands = re.findall(r"^\$ (.*?\n(?:(?<=<<END\n).*?^END\n)?)", said, re.DOTALL | re.MULTILINE)
    assert len(commands) >= 4
    bin_ = Path(sys.executable).parent
    seen = ""
    for command in commands:
        done = subprocess.run(
            ["bash", "-ec", command],
            cwd=tmp_path,
            env={**os.environ, "PATH": f"{bin_}:{os.environ['PATH']}", "COLUMNS": "120"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stdout
        seen += f"$ {command}{done.stdout}"
    assert MOMENT.sub("…", seen) == MOMENT.sub("…", said)
