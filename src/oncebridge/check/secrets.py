"""
Secrets that stand in the configuration file itself, and who may read it.

What is found is named by its place, and never shown.
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
from oncebridge.check.finding import Checkup, Severity, in_shell
from oncebridge.errors import ConfigError
from oncebridge.service.addresses import BackendAddress, as_table, backend
from oncebridge.service.config import Config, Setup

_REFERENCE: Final = re.compile(r"(env|file|ssm|secretsmanager):.")
_TELLING: Final = re.compile(r"(?i)auth|cookie|key|pass|secret|sign|token")
_NOT_SECRET: Final = ("client_id",)
_ANYBODY: Final = stat.S_IRGRP | stat.S_IROTH


def check_secrets(setup: Setup, checkup: Checkup) -> None:
    """Look through the file for secrets that are written out."""
    if not setup.file or is_at_aws(setup.file):
        return
    path = Path(setup.file)
    places = list(written_out(tomllib.loads(path.read_text("utf-8-sig"))))
    if not places:
        checkup.fine(f"file {setup.file}", "no secret is written out in it")
        return
    checkup.find(
        "secret-written",
        Severity.WARNING,
        f"file {setup.file}",
        seen=f"written out: {', '.join(places)}",
        why="Whoever sees the file, its backups or its history in version control has them, and "
        "they cannot be replaced without a change to it.",
        fix="Name where they are kept instead (env:NAME, file:PATH, ssm:NAME, secretsmanager:NAME):\n"
        f'{places[0].rpartition(".")[2].partition("[")[0]} = "env:NAME"',
    )
    mode = path.stat().st_mode
    if mode & _ANYBODY:
        checkup.find(
            "config-readable",
            Severity.WARNING,
            f"file {setup.file}",
            seen=f"others on this host may read it (mode {stat.S_IMODE(mode):04o}), with the "
            "secrets in it",
            why="Every program on the host can act as oncebridge does.",
            fix=f"Let only its owner read it:\nchmod 600 {in_shell(path)}",
        )


def written_out(table: Mapping[str, Any]) -> Iterator[str]:
    """Name the places of a configuration where a secret stands itself."""
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
        # Of headers, most are no secret; their names tell.
        named = value.items() if isinstance(value, Mapping) else ()
        for name, item in named:
            if _TELLING.search(name):
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
