"""Check the proxy of a target."""

from oncebridge.check.finding import Checkup, Severity
from oncebridge.errors import ConfigError
from oncebridge.http.proxy import proxy_for
from oncebridge.http.target import HttpTarget


def check_proxy(target: HttpTarget, checkup: Checkup) -> None:
    """Report the proxy for *target*, if there is one."""
    subject = f"target {target.host_header}"
    try:
        proxy = proxy_for(target)
    except ConfigError as error:
        checkup.report(
            "proxy-unusable",
            Severity.ERROR,
            subject,
            seen=error.message,
            why="The service does not start: a configured proxy is never bypassed.",
            fix=f"Set another proxy, or exclude this target:\nNO_PROXY={target.host}",
        )
        return
    if proxy is not None:
        checkup.report_passed(subject, f"uses the proxy {proxy.authority}")
