"""
All checks of a configuration, made at once.

Each has a time, and a list of its own. One that does not come to its end in time keeps what it
has found, and one that breaks says so: neither takes the others with it.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

from msgspec import Struct

from oncebridge.base.clock import Clock, system_clock
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
    """One check: what it looks at, and for how long it may."""

    what: str
    work: Callable[[Checkup], Awaitable[None]]
    within_s: float = WITHIN_S


class AwsScope(Struct, frozen=True, kw_only=True):
    """What is on AWS and in no address, as whoever asks for a check names it."""

    functions: tuple[str, ...] = ()
    """Lambda functions that run with this configuration."""
    destinations: tuple[str, ...] = ()
    """API destinations that lead to an HTTP source of it."""
    role: str | None = None
    """The role it runs as, if that is not the caller's."""


async def check(
    setup: Setup, aims: AwsScope | None = None, *, clock: Clock = system_clock
) -> Checkup:
    """Look at everything that *setup* and *aims* name, and change nothing."""
    found = await run_all(checks(setup, aims, clock=clock))
    if any(one.code == "window-horizon" for one in found.findings):
        # It was looked up how long events come again; what is known without is told by that.
        found.findings = [one for one in found.findings if not _is_common_window(one)]
    return found


def _is_common_window(finding: Finding) -> bool:
    return (finding.code, finding.subject) == ("window-short", "window")


def checks(setup: Setup, aims: AwsScope | None = None, *, clock: Clock) -> list[Check]:
    """List the checks that there are for *setup*."""
    aims = aims or AwsScope()
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
        functions=aims.functions,
        destinations=aims.destinations,
        role=aims.role,
        clock=clock,
    )
    return [*found, Check("AWS", on_aws, _AWS_WITHIN_S)]


async def run_all(checks: Sequence[Check]) -> Checkup:
    """Make all checks, and gather what they found."""
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
            one.what, "all of it", f"an answer within {one.within_s:g} seconds"
        )
    except Exception as error:  # noqa: BLE001 - of others: their text may quote a secret
        needs = f"a mistake to be mended: {type(error).__name__}, which nobody foresaw"
        found.report_not_checked(one.what, "all of it", needs)
    return found


def _in_loop(work: Callable[[Checkup], None]) -> Callable[[Checkup], Awaitable[None]]:
    async def look(checkup: Checkup) -> None:
        work(checkup)

    return look


def in_thread(work: Callable[[Checkup], None]) -> Callable[[Checkup], Awaitable[None]]:
    """Do *work* where it may hang, as on a disk that is gone, and nobody waits for its end."""

    async def look(checkup: Checkup) -> None:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        found = Checkup()

        def tell(error: BaseException | None) -> None:
            if not done.done():
                done.set_result(None) if error is None else done.set_exception(error)

        def run() -> None:
            problem: BaseException | None = None
            try:
                work(found)
            except Exception as error:  # noqa: BLE001 - handed to whoever asked for it
                problem = error
            with suppress(RuntimeError):  # nobody waits any more, and the loop is gone
                loop.call_soon_threadsafe(tell, problem)

        threading.Thread(target=run, name="oncebridge-check", daemon=True).start()
        try:
            await done
        finally:
            checkup.take(found)

    return look
