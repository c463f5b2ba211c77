"""
Check Redis and Valkey servers with `INFO`, `CONFIG GET` and `TIME`, and nothing that writes.

The conditions under which the store refuses to start are those of `oncebridge.stores.redis.checks`;
here all of them are reported together.
"""

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Final

from oncebridge.base.clock import Clock
from oncebridge.check.clocks import judge, measure
from oncebridge.check.finding import Checkup, Severity, capitalised
from oncebridge.errors import StoreError, StoreUnavailable
from oncebridge.stores.redis.checks import faults
from oncebridge.stores.redis.connection import parse_info
from oncebridge.stores.redis.servers import Servers
from oncebridge.stores.redis.store import RedisStore

_FULL: Final = 0.8
_SETTINGS: Final = (b"save", b"appendfsync", b"min-replicas-to-write")
_SNIPPETS: Final[Mapping[str, str]] = {
    "replica": """Use the address of the primary, or of the Sentinels:
store = "redis+sentinel://HOST,HOST/SERVICE\"""",
    "eviction": "\nredis-cli CONFIG SET maxmemory-policy noeviction",
}


async def check_redis(store: RedisStore, subject: str, checkup: Checkup, *, clock: Clock) -> None:
    """Check every server that keeps records."""
    servers = store.unchecked_servers()
    try:
        places = [*await servers.nodes()]
        for place in places:
            where = subject if len(places) == 1 else f"{subject} at {place.decode()}"
            await _check_server(store, servers, place, where, checkup)
            await _check_clock(servers, place, where, checkup, clock)
        if store.address.kind == "cluster":
            await _check_cluster(servers, places, subject, checkup)
        await _check_sentinels(store, subject, checkup)
    finally:
        await servers.aclose()


async def _check_server(
    store: RedisStore, servers: Servers, place: bytes, subject: str, checkup: Checkup
) -> None:
    info = await servers.info(place)
    before = len(checkup.findings)
    for fault in faults(info, is_cluster=store.address.kind == "cluster"):
        if fault.code == "loading":
            raise StoreUnavailable("Redis is still loading its data")
        checkup.report(
            f"redis-{fault.code}",
            Severity.ERROR,
            subject,
            seen=f"it {fault.seen}",
            why="The service does not start.",
            fix=f"{capitalised(fault.remedy)}{_SNIPPETS.get(fault.code, '')}",
        )
    if "maxmemory_policy" not in info:
        checkup.report_not_checked(
            subject, "maxmemory-policy", "a server that reports it in INFO memory"
        )
    check_memory(info, subject, checkup)
    _check_disk(info, subject, checkup)
    settings = await _settings(servers, place)
    if settings is None:
        checkup.report_not_checked(
            subject,
            "save, appendfsync, min-replicas-to-write",
            "the command CONFIG GET (+config|get); managed services forbid it: check their "
            "parameter group instead",
        )
    _check_persistence(info, settings, subject, checkup)
    _check_replicas(store, info, settings or {}, subject, checkup)
    if len(checkup.findings) == before:
        checkup.report_passed(subject, "eviction, persistence, memory and replicas")


async def _settings(servers: Servers, place: bytes) -> dict[str, str] | None:
    """Return settings of the server; None if that is forbidden."""
    try:
        replies = [await servers.ask_server(place, (b"CONFIG", b"GET", name)) for name in _SETTINGS]
    except StoreUnavailable:
        raise
    except StoreError:
        return None
    pairs = [one for one in replies if isinstance(one, list) and len(one) == 2]
    return {name.decode(): value.decode("utf-8", "replace") for name, value in pairs}


# --- one server -----------------------------------------------------------------------


def check_memory(info: Mapping[str, str], subject: str, checkup: Checkup) -> None:
    """Report a server that is nearly full, by its `INFO`, and how much memory is enough."""
    most, used = int(info.get("maxmemory") or 0), int(info.get("used_memory") or 0)
    if most and used > _FULL * most:
        checkup.report(
            "redis-memory",
            Severity.WARNING,
            subject,
            seen=f"{used / 1024**2:,.0f} of {most / 1024**2:,.0f} MiB are in use",
            why="When the memory is full, Redis refuses writes, and every event is returned to the "
            "source.",
            fix=f"Raise maxmemory, if the host has it{_has(info)}: twice 230 bytes for each event of "
            "the longest window. Set it in redis.conf too, or it is lost at the next restart:\n"
            f"redis-cli CONFIG SET maxmemory {_size(2 * max(most, used))}",
        )


def _has(info: Mapping[str, str]) -> str:
    there = int(info.get("total_system_memory") or 0)
    return f" ({there / 1024**3:,.1f} GiB in all)" if there else ""


def _size(least: int) -> str:
    """Return a size as Redis reads it, rounded up."""
    unit, name = (1024**3, "gb") if least >= 1024**3 else (1024**2, "mb")
    return f"{-(-least // unit)}{name}"


def _check_disk(info: Mapping[str, str], subject: str, checkup: Checkup) -> None:
    names = ("rdb_last_bgsave_status", "aof_last_write_status", "aof_last_bgrewrite_status")
    failed = [name for name in names if info.get(name, "ok") != "ok"]
    if failed:
        checkup.report(
            "redis-disk",
            Severity.ERROR,
            subject,
            seen=f"it could not write to its disk ({', '.join(failed)})",
            why="Its records are in memory only, and Redis may refuse further writes until the disk "
            "works again.",
            fix="Check its log, its disk and the permissions of its directory:\n"
            "redis-cli INFO persistence",
        )


def _check_persistence(
    info: Mapping[str, str], settings: Mapping[str, str] | None, subject: str, checkup: Checkup
) -> None:
    fix = (
        "Turn on the append-only file, in redis.conf too, or it is lost at the next restart:\n"
        "redis-cli CONFIG SET appendonly yes"
    )
    if info.get("aof_enabled") == "0":
        # Without CONFIG, snapshots cannot be seen.
        snapshots = (settings or {}).get("save", "")
        lost = "since the last snapshot" if snapshots else "before"
        checkup.report(
            "redis-persistence",
            Severity.WARNING,
            subject,
            seen=f"snapshots only (save {snapshots})"
            if snapshots
            else "no persistence: nothing is written to disk",
            why="After a crash or restart, the records of events that were delivered "
            f"{lost} are lost. If these events are redelivered, they are delivered again.",
            fix=fix,
        )
    elif (settings or {}).get("appendfsync") == "no":
        checkup.report(
            "redis-fsync",
            Severity.WARNING,
            subject,
            seen="appendfsync no",
            why="The operating system decides when the file is written to disk: a crash of the machine "
            "loses half a minute or more of records.",
            fix="Write it every second, which is the default:\nredis-cli CONFIG SET appendfsync everysec",
        )


def _check_replicas(
    store: RedisStore,
    info: Mapping[str, str],
    settings: Mapping[str, str],
    subject: str,
    checkup: Checkup,
) -> None:
    there = int(info.get("connected_slaves") or 0)
    wanted = store.options.wait_replicas
    least = int(settings.get("min-replicas-to-write") or 0)
    if there < max(wanted, least):
        who = "wait_replicas" if wanted >= least else "min-replicas-to-write"
        checkup.report(
            "redis-replicas",
            Severity.ERROR,
            subject,
            seen=f"{who} asks for {max(wanted, least)} replicas, but {there} are connected",
            why="Deliveries cannot be recorded, so events are returned to the source or delivered "
            "again.",
            fix="Start the missing replicas, or require fewer:\nredis-cli INFO replication",
        )
    elif there and not wanted:
        checkup.report(
            "redis-failover",
            Severity.NOTE,
            subject,
            seen=f"{there} replicas, but wait_replicas is 0",
            why="At a failover, records that no replica has yet are lost, and their events may be "
            "delivered again.",
            fix='Wait for one replica, which costs a round trip:\nstore = { url = "…", wait_replicas = 1 }',
        )


async def _check_clock(
    servers: Servers, place: bytes, subject: str, checkup: Checkup, clock: Clock
) -> None:
    judge(subject, await measure(partial(servers.time_ms, place), clock), checkup, decides=True)


# --- clusters and Sentinels ----------------------------------------------------------------------------


async def _check_cluster(
    servers: Servers, places: list[bytes], subject: str, checkup: Checkup
) -> None:
    replies = await asyncio.gather(
        *[servers.ask_server(place, (b"CLUSTER", b"INFO")) for place in places]
    )
    states = [parse_info(one) for one in replies if isinstance(one, bytes)]
    bad = [one for one in states if one.get("cluster_state") != "ok"]
    if bad:
        checkup.report(
            "redis-cluster-state",
            Severity.ERROR,
            subject,
            seen=f"{len(bad)} of {len(states)} primaries report that the cluster is "
            f"{bad[0].get('cluster_state', 'unknown')}; slots served: "
            f"{bad[0].get('cluster_slots_ok', '?')} of 16384",
            why="Events whose records belong to the other slots are returned to the source.",
            fix="Start the missing servers, or move their slots to others:\n"
            "redis-cli --cluster check HOST:PORT",
        )
    else:
        checkup.report_passed(subject, f"the cluster, {len(places)} primaries")


async def _check_sentinels(store: RedisStore, subject: str, checkup: Checkup) -> None:
    sentinels = store.sentinels()
    if sentinels is None:
        return
    refusals = await sentinels.refusals()
    if refusals:
        who, why = next(iter(refusals.items()))
        checkup.report(
            "redis-sentinel",
            Severity.WARNING,
            subject,
            seen=f"{len(refusals)} Sentinels do not confirm a quorum; {who}: {why}",
            why="If the primary fails, the Sentinels may not elect another one, and the store stays "
            "unavailable.",
            fix="Start the missing Sentinels; run at least three on three hosts:\n"
            "redis-cli -p 26379 SENTINEL CKQUORUM SERVICE",
        )
    else:
        checkup.report_passed(subject, "the Sentinels confirm a quorum")
