"""Reading a configuration: a setup, or every mistake as a `ConfigError`."""

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["oncebridge", "tomllib"]):
    from oncebridge.errors import ConfigError
    from oncebridge.service import config

FOLDER = tempfile.TemporaryDirectory(prefix="oncebridge-fuzz-")
FILE = Path(FOLDER.name) / "oncebridge.toml"


def look(data: bytes) -> None:
    """Take the first line for an environment variable, the second for a flag, the rest for TOML."""
    if b"python" in data.lower():
        return  # it would import what it names
    name, text, toml = [*data.split(b"\n", 2), b"", b""][:3]
    FILE.write_bytes(toml)
    variable, _, value = name.decode("latin-1").partition("=")
    flag, _, setting = text.decode("latin-1").partition("=")
    try:
        setup = config.load(
            FILE,
            environment={f"ONCEBRIDGE_{variable}": value},
            flags={flag: setting} if flag else {},
        )
    except ConfigError:
        return
    assert setup.routes


if __name__ == "__main__":
    atheris.Setup(sys.argv, look)
    atheris.Fuzz()
