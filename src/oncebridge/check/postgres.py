"""
Check a PostgreSQL server and the tables of oncebridge with `SELECT` alone.

The conditions under which the store and the sink refuse to start are those of
`oncebridge.stores.postgres.checks`; here all of them are reported together.
"""

from collections.abc import Mapping
from typing import Any, Final

import asyncpg

from oncebridge.base.clock import Clock
from oncebridge.check.clocks import judge, measure
from oncebridge.check.finding import Checkup, Severity, capitalised
from oncebridge.errors import ConfigError
from oncebridge.stores.faults import ServerFault
from oncebridge.stores.postgres.checks import read_server, server_faults, table_faults
from oncebridge.stores.postgres.pool import Link, Pool
from oncebridge.stores.postgres.schema import Layout, quoted

_STALE_MS: Final = 60 * 60 * 1000
_MANY: Final = 1000
_SAMPLE_PAGES: Final = 200
_WHY: Final[Mapping[str, str]] = {
    "unlogged": "After a crash of the server, every event of the window would be delivered again if it is "
    "redelivered. ",
    "synchronous-commit": "Events that were delivered just before a crash may be delivered again. ",
}

_BY_DBA: Final = "As a database administrator, run:"
_STORE_TAKES: Final = 'store = { url = "…", connections'
_SINK_TAKES: Final = 'sink = { url = "…", concurrency'
_RELOAD: Final = "SELECT pg_reload_conf();"  # on a line of its own: ALTER SYSTEM has to be alone
_FIXES: Final[Mapping[str, str]] = {
    "table-newer": "Use that version of oncebridge here too, or a later one: this one does not know the layout.",
    "read-only": "It was set for the role, the database or the whole server. This query, run as the "
    "same role, shows where to reset it:\n"
    "SELECT source, sourcefile FROM pg_settings WHERE name = 'default_transaction_read_only';",
}

_NOW = "SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint AS now_ms"
_VACUUM = """
SELECT current_setting('autovacuum') AS autovacuum,
    EXISTS (
        SELECT FROM pg_class, unnest(reloptions) AS option
        WHERE oid = to_regclass($1) AND option = 'autovacuum_enabled=false'
    ) AS is_off_here
"""
_ROOM = """
SELECT current_setting('max_connections')::integer
        - current_setting('superuser_reserved_connections')::integer AS most,
    (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend') AS used,
    (SELECT rolconnlimit FROM pg_roles WHERE rolname = current_user) AS own_most,
    (SELECT count(*) FROM pg_stat_activity WHERE usename = current_user) AS own_used
"""
_PAGES = """
SELECT pg_relation_size(to_regclass($1)) / current_setting('block_size')::bigint AS pages
"""


async def check_postgres(
    pool: Pool,
    layout: Layout | None,
    subject: str,
    checkup: Checkup,
    *,
    clock: Clock,
    auto_migrate: bool,
    connections: int,
) -> None:
    """Check the server of *pool*, and the table of *layout* if there is one."""
    try:
        if await pool.run(_has_statement_pooler):
            _report_statement_pooler(subject, checkup)
            return
        server = await pool.run(read_server)
        before = len(checkup.findings)
        for fault in server_faults(server):
            _report_fault(fault, subject, checkup)
        _check_fsync(server, subject, checkup)
        if len(checkup.findings) == before:
            checkup.report_passed(subject, "the server accepts and keeps writes")
        if await pool.run(Link.is_direct):
            await _check_room(pool, connections, subject, checkup)
        else:
            checkup.report_passed(subject, "its pooler works by transaction or session")
        if layout is not None:
            role = quoted(server["role"])
            await _check_layout(pool, layout, role, subject, checkup, auto_migrate=auto_migrate)
        await _check_clock(pool, subject, checkup, clock)
    finally:
        await pool.aclose()


def _report_fault(fault: ServerFault, subject: str, checkup: Checkup) -> None:
    fix = f"{_BY_DBA}\n{fault.remedy};" if fault.is_sql else capitalised(fault.remedy)
    checkup.report(
        f"postgres-{fault.code}",
        Severity.ERROR,
        subject,
        seen=fault.seen,
        why=f"{_WHY.get(fault.code, '')}The service does not start.",
        fix=_FIXES.get(fault.code) or fix,
    )


# --- the server ---------------------------------------------------------------------------------


def _check_fsync(server: Any, subject: str, checkup: Checkup) -> None:
    if server["fsync"] == "off":
        checkup.report(
            "postgres-fsync",
            Severity.WARNING,
            subject,
            seen="fsync is off",
            why="A crash of the machine may damage the whole database, including the records of "
            "delivered events.",
            fix=f"{_BY_DBA}\nALTER SYSTEM SET fsync = on;\n{_RELOAD}",
        )


async def _has_statement_pooler(link: Link) -> bool:
    """Return whether a pooler in statement mode answers."""
    try:
        # In the simple protocol, which such a pooler does not mix up.
        await link.connection.execute("BEGIN READ ONLY")
        await link.connection.execute("COMMIT")
    except asyncpg.PostgresError as error:
        if "statement pooling" in str(error):
            return True
        raise
    return False


def _report_statement_pooler(subject: str, checkup: Checkup) -> None:
    checkup.report(
        "postgres-pooler",
        Severity.ERROR,
        subject,
        seen="its pooler uses statement mode: each statement may get another connection",
        why="Transactions and prepared statements do not work. The service does not start. The server "
        "was not checked further.",
        fix="Set PgBouncer to transaction mode:\npool_mode = transaction",
    )


async def _check_room(pool: Pool, connections: int, subject: str, checkup: Checkup) -> None:
    (room,) = await pool.fetch(_ROOM)
    left = room["most"] - room["used"]
    if room["own_most"] is not None and room["own_most"] >= 0:
        left = min(left, room["own_most"] - room["own_used"])
    if left < connections:
        takes = _STORE_TAKES if subject.startswith("store") else _SINK_TAKES
        checkup.report(
            "postgres-connections",
            Severity.WARNING,
            subject,
            seen=f"connections left: {max(left, 0)}; one worker uses up to {connections}",
            why="A worker without a connection returns its events to the source; other clients of the "
            "server may fail too.",
            fix="Allow more (max_connections, or the limit of the role), use a pooler, or use "
            f"fewer:\n{takes} = {max(left, 1)} }}",
        )
    else:
        checkup.report_passed(subject, f"{left} connections are left")


async def _check_clock(pool: Pool, subject: str, checkup: Checkup, clock: Clock) -> None:
    async def theirs() -> int:
        ((now_ms,),) = await pool.fetch(_NOW)
        return int(now_ms)

    judge(subject, await measure(theirs, clock), checkup, decides=True)


# --- our table ----------------------------------------------------------------------------------


async def _check_layout(
    pool: Pool, layout: Layout, role: str, subject: str, checkup: Checkup, *, auto_migrate: bool
) -> None:
    try:
        faults = await pool.run(lambda link: table_faults(link, pool, layout))
    except ConfigError:
        checkup.report(
            "postgres-rights",
            Severity.ERROR,
            subject,
            seen=f"the role {role} has no access to the schema {layout.schema}",
            why="The service does not start. The rights to the table were not checked.",
            fix=f"{_BY_DBA}\n"
            f"GRANT USAGE ON SCHEMA {quoted(layout.schema)} TO {role};\n"
            f"GRANT SELECT ON {layout.versions} TO {role};",
        )
        return
    if auto_migrate and [fault.code for fault in faults] == ["table"]:
        checkup.report_passed(subject, f"{faults[0].seen}; auto_migrate creates it at the start")
        return
    for fault in faults:
        _report_fault(fault, subject, checkup)
    if any(fault.code in ("table", "table-newer", "rights") for fault in faults):
        return
    if not faults:
        checkup.report_passed(subject, f"the table {layout.shown}, layout {layout.version}")
    await _check_vacuum(pool, layout, subject, checkup)
    if layout.file == "records.sql":
        await _check_purged(pool, layout, subject, checkup)


async def _check_vacuum(pool: Pool, layout: Layout, subject: str, checkup: Checkup) -> None:
    (found,) = await pool.fetch(_VACUUM, layout.named())
    if found["autovacuum"] != "off" and not found["is_off_here"]:
        return
    is_here = found["is_off_here"]
    remedy = (
        f"ALTER TABLE {layout.named()} RESET (autovacuum_enabled);"
        if is_here
        else f"ALTER SYSTEM SET autovacuum = on;\n{_RELOAD}"
    )
    checkup.report(
        "postgres-autovacuum",
        Severity.WARNING,
        subject,
        seen=f"autovacuum is off{f' for {layout.shown}' if is_here else ''}",
        why="Each event writes its row twice, and the row is deleted later. Without vacuum the table "
        "grows without limit, and every call gets slower.",
        fix=f"{_BY_DBA}\n{remedy}",
    )


async def _check_purged(pool: Pool, layout: Layout, subject: str, checkup: Checkup) -> None:
    """Check a sample of the table's pages, for a table of any size."""
    ((pages,),) = await pool.fetch(_PAGES, layout.named())
    if not pages:
        return
    share = min(100.0, 100.0 * _SAMPLE_PAGES / pages)
    ((stale, seen),) = await pool.fetch(
        "SELECT count(*) FILTER (WHERE keep_until_ms < "  # noqa: S608 - our own name, quoted
        "extract(epoch FROM clock_timestamp()) * 1000 - $1::bigint), count(*) "
        f"FROM {layout.named()} TABLESAMPLE SYSTEM ({share:.6f})",
        _STALE_MS,
    )
    estimate = round(stale * 100 / share)
    if estimate >= _MANY and stale > seen / 2:
        checkup.report(
            "postgres-unpurged",
            Severity.WARNING,
            subject,
            seen=f"about {estimate:,} rows of {layout.shown} expired more than an hour ago",
            why="Only a running worker removes expired rows; Lambda functions do not. They use disk "
            "space and make calls slower.",
            fix="Run a worker, or delete them regularly:\n"
            f"DELETE FROM {layout.named()} WHERE keep_until_ms < "
            "extract(epoch FROM now()) * 1000;",
        )
