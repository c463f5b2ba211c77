"""The Python of a page runs, one block after the other, and prints what the page says."""

import subprocess
import sys

import pytest
from tests.docs.pages import blocks, every
from tests.docs.world import World

from oncebridge.cli.init import starter

PAGES = sorted({block.page for block in every("python")})
MARK = "=== end of a block ==="
_RUN = """
import sys
space = {"__name__": "__main__"}
for name in sys.argv[1:]:
    with open(name) as file:
        exec(compile(file.read(), name, "exec"), space)
    print(MARK, flush=True)
"""


def test_there_is_python_that_prints():
    assert sum(block.output is not None for block in every("python")) >= 3


@pytest.mark.parametrize("page", PAGES)
def test_the_python_of_a_page_prints_what_it_says(page, tmp_path, request):
    """One process for a page: what stands further down may build on what stands above."""
    world = World(page, tmp_path, request)
    world.write("oncebridge.toml", starter("lambda"))
    for block in blocks(page):
        if block.title:
            world.write(block.title, block.text)
    code = [block for block in blocks(page) if block.language == "python"]
    names = [f"block_{block.line}.py" for block in code]
    for name, block in zip(names, code, strict=True):
        (tmp_path / name).write_text(block.text)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"MARK = {MARK!r}\n{_RUN}", *names],
        cwd=tmp_path,
        env=world.environment("".join(block.text for block in code)),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), page
    printed = done.stdout.split(f"{MARK}\n")[:-1]
    for block, text in zip(code, printed, strict=True):
        assert text == (block.output or ""), block.place
