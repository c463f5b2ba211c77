"""The README's Python runs as it stands, and prints what it says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"
SNIPPETS = re.findall(
    r"```python\n(.*?)```(?:\n+```text\n(.*?)```)?", README.read_text(), re.DOTALL
)


def test_the_readme_has_snippets_with_output():
    assert sum(bool(output) for _, output in SNIPPETS) >= 3


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_a_snippet_prints_what_the_readme_says(number, tmp_path: Path):
    code, output = SNIPPETS[number]
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
