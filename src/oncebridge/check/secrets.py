"""
Check for secrets in the configuration file, and for users that can read it.

Findings name the setting, and never show the secret.
"""

import re
import stat
import tomllib
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Union, get_args, get_origin

from msgspec import Struct

from oncebridge.base.options import settings_of
from oncebridge.base.secrets import Secret, has_credentials, is_at_aws, resolve_address
from oncebridge.check.finding import Checkup, Severity, shell_path
from oncebridge.errors import ConfigError
from oncebridge.service.addresses import BackendAddress, as_table, backend
from oncebridge.service.config import Config, Setup

_REFERENCE: Final = re.compile(r"(env|file|ssm|secretsmanager):.")
_SECRET_NAME: Final = re.compile(r"(?i)auth|cookie|key|pass|secret|sign|token")
_NOT_SECRET: Final = ("client_id",)
_ANYBODY: Final = stat.S_IRGRP | stat.S_IROTH


def check_secrets(setup: Setup, checkup: Checkup) -> None:
    """Check the file for plain-text secrets."""
    if not setup.file or is_at_aws(setup.file):
        return
    path = Path(setup.file)
    places = list(written_out(tomllib.loads(path.read_text("utf-8-sig"))))
    if not places:
        checkup.report_passed(f"file {setup.file}", "it contains no plain-text secret")
        return
    checkup.report(
        "secret-written",
        Severity.WARNING,
        f"file {setup.file}",
        seen=f"secrets in plain text: {', '.join(places)}",
        why="Everyone who can read the file, its backups or its version history has them, and the "
        "file must be changed to rotate them.",
        fix="Refer to them instead (env:NAME, file:PATH, ssm:NAME, secretsmanager:NAME):\n"
        f'{places[0].rpartition(".")[2].partition("[")[0]} = "env:NAME"',
    )
    mode = path.stat().st_mode
    if mode & _ANYBODY:
        checkup.report(
            "config-readable",
            Severity.WARNING,
            f"file {setup.file}",
            seen=f"other users of this host can read it (mode {stat.S_IMODE(mode):04o}), and it "
            "contains secrets",
            why="Every program on the host can use these secrets.",
            fix=f"Allow only its owner to read it:\nchmod 600 {shell_path(path)}",
        )


def written_out(table: Mapping[str, Any]) -> Iterator[str]:
    """Return the settings of a configuration that contain a plain-text secret."""
    yield from _in_record(Config, table, "")


def _in_record(kind: type[Struct], table: Any, where: str) -> Iterator[str]:
    if not isinstance(table, Mapping):
        return
    for setting in settings_of(kind):
        if setting.name in table and setting.name not in _NOT_SECRET:
            place = f"{where}.{setting.name}" if where else setting.name
            yield from _in_value(setting.kind, table[setting.name], place)


def _in_value(kind: Any, value: Any, where: str) -> Iterator[str]:
    outer = get_origin(kind)
    if kind is Secret:
        if isinstance(value, str) and not _REFERENCE.match(value):
            yield where
    elif outer in (Annotated, Union, types.UnionType):
        for one in get_args(kind)[: 1 if outer is Annotated else None]:
            yield from _in_value(one, value, where)
    elif outer is not None:
        yield from _in_items(kind, value, where)
    elif isinstance(kind, type) and issubclass(kind, BackendAddress):
        yield from _in_place(kind, as_table(value), where)
    elif isinstance(kind, type) and issubclass(kind, Struct):
        yield from _in_record(kind, value, where)


def _in_items(kind: Any, value: Any, where: str) -> Iterator[str]:
    if get_origin(kind) is dict:
        # Most headers are not secret; their names show it.
        named = value.items() if isinstance(value, Mapping) else ()
        for name, item in named:
            if _SECRET_NAME.search(name):
                yield from _in_value(get_args(kind)[1], item, f"{where}.{name}")
    elif get_origin(kind) in (list, tuple):
        for at, item in enumerate(value) if isinstance(value, list) else [(None, value)]:
            place = where if at is None else f"{where}[{at}]"
            yield from _in_value(get_args(kind)[0], item, place)


def _in_place(kind: type[BackendAddress], table: Any, where: str) -> Iterator[str]:
    if not isinstance(table, Mapping) or not isinstance(table.get("url"), str):
        return
    url = table["url"]
    if has_credentials(url) and not _has_user_only(url):
        yield f"{where}.url" if len(table) > 1 else where
    try:
        options = getattr(
            backend(kind.group, resolve_address(url, where), where, written=url), "Options", None
        )
    except ConfigError:
        return  # it would not have been loaded
    if options is not None:
        yield from _in_record(options, table, where)


def _has_user_only(url: str) -> bool:
    """Return whether an address names a user, and neither a password nor anything else secret."""
    scheme, _, rest = url.partition("://")
    user, at, host = rest.rpartition("@")
    return bool(at) and ":" not in user and not has_credentials(f"{scheme}://{host}")
