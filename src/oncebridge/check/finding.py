"""
The results of a check: findings, passed checks, and checks that could not be made.

A finding says what was seen, why it is a problem and how to fix it. Checks that could not be made
are reported too: they have not passed.
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
        *("records-lost", "route-lost", "mixed-rules", "mixed-sinks"),
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
    """Events are lost or delivered twice, or the service does not start."""
    WARNING = "warning"
    """It causes harm when something else happens: an outage, a replay, a deployment."""
    NOTE = "note"
    """For information."""


class Finding(Struct, frozen=True, kw_only=True):
    """One problem to fix."""

    code: str
    """A stable name, such as `sqs-visibility`, to look up and to ignore."""
    severity: Severity
    subject: str
    """What it is about: `queue genesys-events`, `rule crm`, `store dynamodb://…`."""
    seen: str
    why: str
    fix: str
    """What to do: a sentence, and a command or a snippet on the lines after it."""
    docs: str
    """The page, and the place in it, from the root of the project: `docs/sqs.md#visibility`."""


class NotChecked(Struct, frozen=True, kw_only=True):
    """Something that could not be checked."""

    subject: str
    what: str
    """What was not checked."""
    needs: str
    """What is needed to check it: an IAM action (`events:ListRules`), or in words."""


class PassedCheck(Struct, frozen=True):
    """Something that was checked, without a finding."""

    subject: str
    what: str


class Checkup:
    """Collects the results of checks."""

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
        """Add something that could not be checked."""
        self.not_checked.append(NotChecked(subject=subject, what=what, needs=needs))

    def report_passed(self, subject: str, what: str) -> None:
        """Add something that was checked, without a finding."""
        self.passed.append(PassedCheck(subject, what))

    def take(self, other: "Checkup") -> None:
        """Add all results of *other*."""
        self.findings += other.findings
        self.not_checked += other.not_checked
        self.passed += other.passed

    def worst_first(self) -> list[Finding]:
        """Return the findings, errors first."""
        order = list(Severity)
        return sorted(self.findings, key=lambda one: (order.index(one.severity), one.code))


def shell_path(path: str | Path) -> str:
    """Return an absolute path, quoted for a shell."""
    return shlex.quote(str(Path(path).absolute()))


def capitalised(text: str) -> str:
    """Return *text* with a capital letter and a full stop."""
    return f"{text[:1].upper()}{text[1:]}." if text else ""
