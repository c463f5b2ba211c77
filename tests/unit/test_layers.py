"""A module imports only from its own layer or from one below it."""

import ast
from pathlib import Path

import pytest

import oncebridge

SOURCE = Path(oncebridge.__file__).parent

LAYERS = (
    ("errors",),
    ("base",),
    ("events",),
    ("http", "aws"),
    ("stores", "sinks", "dead_letters"),
    ("engine",),
    ("sources",),
    ("observe",),
    ("genesys", "service"),
    ("operate",),
    ("audit", "check", "dashboard", "the Lambda handler"),
    ("cli", "testing"),
)
"""Bottom up. docs/architecture.md has the same list in words."""
HANDLER = ("handler", "function", "invocation", "emf", "powertools", "templates")
"""The part of `aws` that stands on the engine: the Lambda handler and what it is deployed with."""

EXCEPTIONS = {
    # Public, and a convenience: it reads the configuration when it is called.
    ("engine.gateway", "service.config"),
}


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def layer(name: str) -> int:
    folder, _, rest = name.partition(".")
    if folder == "aws" and (not rest or rest.split(".")[0] in HANDLER):
        folder = "the Lambda handler"
    return next(at for at, layer in enumerate(LAYERS) if folder in layer)


def imports(path: Path) -> set[str]:
    """Every module of ours that *path* imports, inside of functions and for types too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import"
            module = node.module or ""
            found |= {
                f"{module}.{alias.name}"
                if f"{module}.{alias.name}".removeprefix("oncebridge.") in MODULES
                else module
                for alias in node.names
            }
    ours = {name.removeprefix("oncebridge.") for name in found if name.startswith("oncebridge.")}
    return ours & set(MODULES)


def climbs(name: str, path: Path) -> set[tuple[str, str]]:
    return {(name, other) for other in imports(path) if layer(other) > layer(name)}


@pytest.mark.parametrize("name", sorted(set(MODULES) - {"", "__main__"}))
def test_a_module_imports_from_its_own_layer_or_below(name):
    assert climbs(name, MODULES[name]) <= EXCEPTIONS


def test_every_exception_is_still_needed():
    found = {
        pair for name in set(MODULES) - {"", "__main__"} for pair in climbs(name, MODULES[name])
    }
    assert found == EXCEPTIONS


def test_the_top_of_the_package_holds_nothing_else():
    files = {path.name for path in SOURCE.iterdir() if path.is_file()}
    assert files == {"__init__.py", "__main__.py", "errors.py", "py.typed"}
    folders = {path.name for path in SOURCE.iterdir() if any(path.glob("**/*.py"))}
    assert folders == {name for row in LAYERS for name in row} - {"errors", "the Lambda handler"}


def test_an_import_from_above_is_found(tmp_path):
    path = tmp_path / "wrong.py"
    path.write_text("def f():\n    from oncebridge.cli import main\n")
    assert climbs("events.wrong", path) == {("events.wrong", "cli")}
