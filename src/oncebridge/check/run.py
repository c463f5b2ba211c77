"""
Run all checks of a configuration concurrently.

Each has its own time limit and results. A check that times out keeps the results so far, and a
check that fails reports it; neither affects the others.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final

from msgspec import Struct

from oncebridge.base.clock import Clock, system_clock
from oncebridge.base.threads import run_in_thread
from oncebridge.check.aws import check_aws
from oncebridge.check.endpoints import check_endpoints
from oncebridge.check.files import check_files
from oncebridge.check.finding import Checkup, Finding
from oncebridge.check.secrets import check_secrets
from oncebridge.check.settings import check_rules, check_settings
from oncebridge.check.stores import check_sinks, check_store
from oncebridge.service.config import Setup

WITHIN_S: Final = 10.0
_AWS_WITHIN_S: Final = 60.0  # many questions, some of them page by page


class Check(Struct, frozen=True):
    """One check: its subject, and its time limit."""

    what: str
    work: Callable[[Checkup], Awaitable[None]]
    within_s: float = WITHIN_S


class AwsScope(Struct, frozen=True, kw_only=True):
    """Resources on AWS that no address of the configuration names."""

    functions: tuple[str, ...] = ()
    """Lambda functions that run with this configuration."""
    destinations: tuple[str, ...] = ()
    """API destinations that lead to an HTTP source of it."""
    role: str | None = None
    """The role it runs as, if that is not the caller's."""


async def check(
    setup: Setup, scope: AwsScope | None = None, *, clock: Clock = system_clock
) -> Checkup:
    """Check everything that *setup* and *scope* name, without changing it."""
    found = await run_all(checks(setup, scope, clock=clock))
    if any(one.code == "window-horizon" for one in found.findings):
        # The finding from AWS is exact, so the general one is left out.
        found.findings = [one for one in found.findings if not _is_common_window(one)]
    return found


def _is_common_window(finding: Finding) -> bool:
    return (finding.code, finding.subject) == ("window-short", "window")


def checks(setup: Setup, scope: AwsScope | None = None, *, clock: Clock) -> list[Check]:
    """Return the checks for *setup*."""
    scope = scope or AwsScope()
    found = [
        Check("settings", _in_loop(partial(check_settings, setup))),
        Check("rules", _in_loop(partial(check_rules, setup))),
        Check("addresses", _in_loop(partial(check_endpoints, setup))),
        Check("secrets", in_thread(partial(check_secrets, setup))),
        Check("files", in_thread(partial(check_files, setup))),
        Check("store", partial(check_store, setup, clock=clock)),
        Check("sinks", partial(check_sinks, setup, clock=clock)),
    ]
    on_aws = partial(
        check_aws,
        setup,
        functions=scope.functions,
        destinations=scope.destinations,
        role=scope.role,
        clock=clock,
    )
    return [*found, Check("AWS", on_aws, _AWS_WITHIN_S)]


async def run_all(checks: Sequence[Check]) -> Checkup:
    """Run all checks, and return their results."""
    all_results = Checkup()
    for found in await asyncio.gather(*[_bounded(one) for one in checks]):
        all_results.take(found)
    return all_results


async def _bounded(one: Check) -> Checkup:
    found = Checkup()
    try:
        async with asyncio.timeout(one.within_s):
            await one.work(found)
    except TimeoutError:
        found.report_not_checked(
            one.what, "all of it", f"a response within {one.within_s:g} seconds"
        )
    except Exception as error:  # noqa: BLE001 - without its text, which may quote a secret
        needs = f"a fix in oncebridge: unexpected {type(error).__name__}"
        found.report_not_checked(one.what, "all of it", needs)
    return found


def _in_loop(work: Callable[[Checkup], None]) -> Callable[[Checkup], Awaitable[None]]:
    async def check_in(checkup: Checkup) -> None:
        work(checkup)

    return check_in


def in_thread(work: Callable[[Checkup], None]) -> Callable[[Checkup], Awaitable[None]]:
    """Run *work* in a thread of its own, where it may hang (as on a failed disk)."""

    async def check_in(checkup: Checkup) -> None:
        found = Checkup()
        try:
            await run_in_thread(partial(work, found), "oncebridge-check")
        finally:
            checkup.take(found)

    return check_in
