"""Terraform, where it is installed; and the AWS provider, where it lies on the machine."""

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

_AWS = "*/hashicorp/aws"
_USUAL = (
    "~/.terraform.d/plugins",
    "~/.terraform.d/plugin-cache",
    "/usr/share/terraform/plugins",
    "/usr/local/share/terraform/plugins",
)


@cache
def terraform() -> str | None:
    return shutil.which("terraform")


@cache
def plugins() -> Path | None:
    """Find a folder with the AWS provider in it; nothing is ever fetched."""
    named = [os.environ.get("TF_PLUGIN_CACHE_DIR", ""), *_USUAL]
    folders = [Path(name).expanduser() for name in named if name]
    folders += sorted(Path("/opt").glob("*"))
    return next((folder for folder in folders if any(folder.glob(_AWS))), None)


def what_reads_terraform() -> str:
    """Say what Terraform texts are tested with, for the head of a test run."""
    found = ["python-hcl2"]
    if terraform() is not None:
        found.append("terraform fmt")
        if plugins() is not None:
            found.append("terraform validate")
    return f"Terraform read by: {', '.join(found)}"


def run(folder: Path, *args: str) -> str:
    """Run Terraform in *folder*, which must succeed; give what it printed."""
    program = terraform()
    assert program is not None
    done = subprocess.run(
        [program, *args],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={
            **os.environ,
            "CHECKPOINT_DISABLE": "1",
            "TF_CLI_CONFIG_FILE": os.devnull,
            "TF_IN_AUTOMATION": "1",
        },
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
