"""Checks of a server and of our tables before they are used."""

import logging
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final

import asyncpg

from oncebridge.base.secrets import mask_address
from oncebridge.errors import ConfigError
from oncebridge.stores.faults import ServerFault
from oncebridge.stores.postgres.pool import Link, Pool
from oncebridge.stores.postgres.schema import Layout, quoted

_OLDEST: Final = 140000  # reads a range of pages without reading the whole table
_MIGRATION: Final = timedelta(minutes=1)

_REMEDY: Final = "run `oncebridge migrate`, or set auto_migrate = true"

_SERVER = """
SELECT current_setting('server_version_num')::integer AS version,
    current_setting('server_version') AS version_name,
    pg_is_in_recovery() AS is_standby,
    current_setting('transaction_read_only') AS read_only,
    current_setting('transaction_isolation') AS isolation,
    current_setting('synchronous_commit') AS synchronous_commit,
    current_setting('fsync') AS fsync,
    current_setting('server_encoding') AS encoding,
    current_user::text AS role
"""
_TABLE = """
SELECT to_regclass($1) IS NOT NULL AS has_versions,
    (SELECT relpersistence::text FROM pg_class WHERE oid = to_regclass($2)) AS persistence,
    ARRAY(SELECT name FROM unnest($3::text[]) AS name WHERE to_regproc(name) IS NULL) AS functions,
    ARRAY(
        SELECT wanted FROM unnest($4::text[]) AS wanted
        WHERE NOT has_table_privilege(to_regclass($2), wanted)
    ) AS rights,
    current_user::text AS role
"""

_log = logging.getLogger("oncebridge")


async def read_server(link: Link) -> Any:
    """Return the settings of the server that matter."""
    (found,) = await link.fetch(_SERVER)
    return found


def server_faults(found: Any) -> Iterator[ServerFault]:
    """Yield the reasons why the server would refuse writes, or lose writes it has confirmed."""
    if found["version"] < _OLDEST:
        seen = f"the server is PostgreSQL {found['version_name']}"
        yield ServerFault("version", seen, "14 or later is needed")
    if found["is_standby"]:
        yield ServerFault(
            "standby",
            "the server is a standby and accepts no writes",
            "use the address of the primary, or list several hosts (postgresql://…@HOST,HOST/…): "
            "the primary among them is found",
        )
    elif found["read_only"] == "on":
        yield ServerFault(
            "read-only", "the server accepts no writes (default_transaction_read_only is on)"
        )
    role = quoted(found["role"])
    if found["isolation"] != "read committed":
        yield ServerFault(
            "isolation",
            f"transactions start as {found['isolation']!r}, but must see what others commit "
            "meanwhile",
            f"ALTER ROLE {role} SET default_transaction_isolation = 'read committed'",
        )
    if found["synchronous_commit"] == "off":
        yield ServerFault(
            "synchronous-commit",
            "synchronous_commit is off, so a crash of the server would lose what it has confirmed",
            f"ALTER ROLE {role} SET synchronous_commit = on",
        )


async def check_server(link: Link, pool: Pool) -> Any:
    """Return the server's settings; raise `ConfigError` if it cannot be used."""
    found = await read_server(link)
    for fault in server_faults(found):
        raise ConfigError("", f"{pool.address.shown!r}: {fault.text}")
    if found["fsync"] == "off":
        extra = {"server": mask_address(pool.address.shown)}
        _log.warning("oncebridge.postgres_without_fsync", extra=extra)
    return found


async def table_faults(link: Link, pool: Pool, layout: Layout) -> list[ServerFault]:
    """Return why tables cannot be used: another layout, not crash-safe, or missing privileges."""
    found, version = await _read_table(link, pool, layout)
    shown = layout.shown
    if version is None or not found["persistence"]:
        return [ServerFault("table", f"there is no table {shown}", _REMEDY)]
    faults = []
    if version > layout.version:
        seen = f"{shown} has layout {version}, which a newer oncebridge wrote"
        return [
            ServerFault("table-newer", seen, f"this one reads layout {layout.version}; upgrade it")
        ]
    if version < layout.version or found["functions"]:
        seen = (
            f"{shown} has layout {version}; this oncebridge needs layout {layout.version}, complete"
        )
        faults.append(ServerFault("table", seen, _REMEDY))
    if found["rights"]:
        missing, role = ", ".join(found["rights"]), quoted(found["role"])
        grant = f"GRANT {missing} ON {layout.named()} TO {role}"
        faults.append(ServerFault("rights", "a privilege is missing", grant))
    if found["persistence"] != "p":
        seen = f"{shown} is not logged, and a crash of the server would empty it"
        remedy = f"ALTER TABLE {layout.named()} SET LOGGED"
        faults.append(ServerFault("unlogged", seen, remedy))
    return faults


async def check_table(pool: Pool, layout: Layout, *, may_migrate: bool) -> None:
    """Raise `ConfigError` if the tables cannot be used; with *may_migrate*, create them first."""

    async def check(link: Link) -> None:
        for fault in await table_faults(link, pool, layout):
            raise ConfigError("", f"{pool.address.shown!r}: {fault.text}")

    try:
        await pool.run(check)
    except ConfigError:
        if not may_migrate:
            raise
        await migrate(pool, layout)
        await pool.run(check)


async def _read_table(link: Link, pool: Pool, layout: Layout) -> tuple[Any, int | None]:
    """Return which parts of *layout* exist, and the version of the table."""
    asked = (layout.versions, layout.named(), layout.functions, layout.rights)
    try:
        (found,) = await link.fetch(_TABLE, *asked)
        if not found["has_versions"]:
            return found, None
        rows = await link.fetch(
            f"SELECT version FROM {layout.versions} WHERE name = $1",  # noqa: S608 - our own name, quoted
            layout.table,
        )
    except asyncpg.InsufficientPrivilegeError as error:
        schema = quoted(layout.schema)
        raise ConfigError(
            "",
            f"{pool.address.shown!r}: {error}: GRANT USAGE ON SCHEMA {schema} TO this role; "
            f"GRANT SELECT ON {layout.versions} TO this role",
        ) from error
    return found, rows[0]["version"] if rows else None


async def migrate(pool: Pool, layout: Layout) -> list[str]:
    """Create or update the tables; return what was done."""
    found, version = await pool.run(lambda link: _read_table(link, pool, layout))
    if version == layout.version and found["persistence"] and not found["functions"]:
        return []
    try:
        await pool.run(lambda link: link.connection.execute(layout.sql), within=_MIGRATION)
    except asyncpg.InsufficientPrivilegeError as error:
        raise ConfigError(
            "",
            f"{pool.address.shown!r}: {error}; run `oncebridge migrate`, or the output of "
            "`oncebridge migrate --sql`, as a role that may create tables",
        ) from error
    except asyncpg.RaiseError as error:
        raise ConfigError("", f"{pool.address.shown!r}: {error}") from error
    verb = "updated" if found["persistence"] else "created"
    return [f"{verb} the table {layout.shown}, layout {layout.version}"]
