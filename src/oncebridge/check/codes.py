"""
All codes of findings there are, so that a mistyped one is noticed.

Each is a heading of docs/check.md; those of AWS are in `oncebridge.check.aws`.
"""

from typing import Final

CODES: Final = frozenset(
    {
        # settings
        *("window-short", "lease-long", "attempts-one", "attempts-outlast", "backoff-window"),
        *("shadow", "outage-deliver", "bare-unneeded", "unrouted-discard", "health-missing"),
        "audit-missing",
        # rules
        *("key-coarse", "key-time", "key-volatile", "key-id-only", "key-none"),
        *("content-volatile", "conflict-duplicate", "latest-publish-stamp", "quiet-long"),
        "rule-unreachable",
        # addresses and secrets
        *("loop", "dead-is-sink", "memory-store", "memory-dead", "sink-plain", "sink-no-key"),
        *("proxy-unusable", "spool-unused", "spool-shared", "secret-written", "config-readable"),
        # files
        *("directory-missing", "not-writable", "file-readable", "disk-space", "sqlite-network"),
        *("sqlite-one-host", "sqlite-layout", "sqlite-journal", "sqlite-damaged"),
        # servers
        *("store-unreachable", "sink-unreachable", "clock-skew", "stale-runs"),
        *("redis-version", "redis-cluster", "redis-replica", "redis-eviction", "redis-memory"),
        *("redis-disk", "redis-persistence", "redis-fsync", "redis-replicas", "redis-failover"),
        *("redis-cluster-state", "redis-sentinel"),
        *("postgres-version", "postgres-standby", "postgres-read-only", "postgres-isolation"),
        *("postgres-synchronous-commit", "postgres-fsync", "postgres-pooler"),
        *("postgres-connections", "postgres-table", "postgres-table-newer", "postgres-rights"),
        *("postgres-unlogged", "postgres-autovacuum", "postgres-unpurged"),
    }
)
