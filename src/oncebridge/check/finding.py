"""
What a check found, and what it could not look at.

A finding says what was seen, why it bites and how to put it right. Whatever the caller may not
see is said too: a check that was not made is not a check that passed.
"""

import shlex
from enum import StrEnum
from pathlib import Path
from typing import Final

from msgspec import Struct

_PAGE: Final = "docs/check.md"

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
"""
All codes of findings, so that a mistyped one is noticed; each is a heading of docs/check.md.

Those of AWS are in `oncebridge.check.aws`.
"""


class Severity(StrEnum):
    """How bad it is."""

    ERROR = "error"
    """Events are lost or repeated by it, or nothing can start."""
    WARNING = "warning"
    """It bites when something else happens: an outage, a replay, a deployment."""
    NOTE = "note"
    """Good to know."""


class Finding(Struct, frozen=True, kw_only=True):
    """One thing to put right."""

    code: str
    """A stable name, such as `sqs-visibility`; what people look up and silence."""
    severity: Severity
    subject: str
    """What it is about: `queue genesys-events`, `rule crm`, `store dynamodb://…`."""
    seen: str
    why: str
    fix: str
    """What to do: a sentence, and a command or a snippet on lines of its own."""
    docs: str
    """The page, and the place in it, from the root of the project: `docs/sqs.md#visibility`."""


class NotChecked(Struct, frozen=True, kw_only=True):
    """Something that could not be looked at."""

    subject: str
    what: str
    """What was not looked at."""
    needs: str
    """What it takes: an action (`events:ListRules`), or in words."""


class PassedCheck(Struct, frozen=True):
    """Something that was looked at and is in order."""

    subject: str
    what: str


class Checkup:
    """What the checks found so far; each check adds to it."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.not_checked: list[NotChecked] = []
        self.passed: list[PassedCheck] = []

    def report(
        self,
        code: str,
        severity: Severity,
        subject: str,
        *,
        seen: str,
        why: str,
        fix: str,
        docs: str = "",
    ) -> None:
        """Add a finding; without *docs*, its code is a heading of docs/check.md."""
        self.findings.append(
            Finding(
                code=code,
                severity=severity,
                subject=subject,
                seen=seen,
                why=why,
                fix=fix,
                docs=docs or f"{_PAGE}#{code}",
            )
        )

    def report_not_checked(self, subject: str, what: str, needs: str) -> None:
        """Add what could not be looked at."""
        self.not_checked.append(NotChecked(subject=subject, what=what, needs=needs))

    def report_passed(self, subject: str, what: str) -> None:
        """Add what is in order."""
        self.passed.append(PassedCheck(subject, what))

    def take(self, other: "Checkup") -> None:
        """Add all that another has."""
        self.findings += other.findings
        self.not_checked += other.not_checked
        self.passed += other.passed

    def worst_first(self) -> list[Finding]:
        """List the findings in the order in which to read them."""
        order = list(Severity)
        return sorted(self.findings, key=lambda one: (order.index(one.severity), one.code))


def shell_path(path: str | Path) -> str:
    """Write a path as a word of a command that works anywhere on this host."""
    return shlex.quote(str(Path(path).absolute()))


def capitalised(text: str) -> str:
    """Make a sentence of what is told in the middle of one elsewhere."""
    return f"{text[:1].upper()}{text[1:]}." if text else ""
