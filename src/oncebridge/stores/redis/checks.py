"""Checks of a Redis server by its `INFO`, before it is used."""

import re
from collections.abc import Iterator, Mapping
from typing import Final, Literal

from oncebridge.stores.faults import ServerFault

_LEAST_VERSION: Final = (6, 2)

Doubt = Literal["eviction_unknown", "without_aof", "too_few_replicas"]


def faults(info: Mapping[str, str], *, is_cluster: bool) -> Iterator[ServerFault]:
    """Yield why a server cannot be used, the most serious first; *is_cluster*: what is expected."""
    version = info.get("redis_version", "")
    if _numbers(version) < _LEAST_VERSION:
        yield ServerFault("version", f"is version {version or 'unknown'}", "6.2 or later is needed")
    is_node = info.get("cluster_enabled") == "1"
    if is_node != is_cluster:
        what, scheme = ("is", "redis+cluster") if is_node else ("is not", "redis")
        yield ServerFault(
            "cluster", f"{what} a node of a cluster", f"write {scheme}:// (rediss for TLS)"
        )
    if info.get("loading", "0") != "0":
        yield ServerFault("loading", "is still loading its data")
    if info.get("role") != "master":
        yield ServerFault("replica", "is a replica")
    policy = info.get("maxmemory_policy")
    if policy not in (None, "noeviction"):
        yield ServerFault(
            "eviction",
            f"has maxmemory-policy {policy}, which evicts records; each evicted record lets a "
            "duplicate through",
            "set it to noeviction (CONFIG SET, redis.conf, or the parameter group of a managed "
            "Redis)",
        )


def doubts(info: Mapping[str, str], *, replicas: int) -> Iterator[Doubt]:
    """Yield what is worth a warning; *replicas* is how many must confirm a commit."""
    if "maxmemory_policy" not in info:
        yield "eviction_unknown"
    if info.get("aof_enabled") == "0":
        yield "without_aof"
    if int(info.get("connected_slaves") or 0) < replicas:
        yield "too_few_replicas"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
