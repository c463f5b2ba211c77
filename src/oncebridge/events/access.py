"""
The allowlist of senders: sources, accounts and Regions.

An event of another sender is neither claimed nor sent, not even in shadow mode. An empty list
allows all senders; with a list, an event without the field is not allowed.

This checks what an event says about itself; it does not prove it. EventBridge sets account and
region itself; events from other sources have the values that the sender wrote.
"""

import re
from typing import Annotated, Final, Literal

from msgspec import Struct

from oncebridge.base.options import Doc, Problems
from oncebridge.events.event import Event


class AllowOptions(Struct, frozen=True, kw_only=True):
    """Which senders are allowed; an empty list allows all."""

    sources: Annotated[
        tuple[str, ...],
        Doc(
            "Allowed sources; a star at the end allows every source with this prefix.",
            example='["aws.partner/genesys.com/*"]',
        ),
    ] = ()
    accounts: Annotated[
        tuple[str, ...], Doc("Allowed AWS accounts.", example='["123456789012"]')
    ] = ()
    regions: Annotated[
        tuple[str, ...], Doc("Allowed AWS Regions.", example='["eu-central-1"]')
    ] = ()
    otherwise: Annotated[
        Literal["dead", "discard"],
        Doc("What to do with an event of another sender: keep it in the dead letters, or drop it."),
    ] = "dead"

    @property
    def is_open(self) -> bool:
        """True if all senders are allowed."""
        return not (self.sources or self.accounts or self.regions)


# Custom producers may write any text, but not one that looks like a misspelt AWS value.
_NO_ACCOUNT: Final = re.compile(r"|.*[*\s].*|(?!\d{12}\Z)\d+", re.ASCII | re.DOTALL)
_NO_SOURCE: Final = re.compile(r"|.*\*.+", re.DOTALL)
_NO_REGION: Final = re.compile(r"|.*[*\sA-Z].*", re.ASCII | re.DOTALL)
_MOST_REMEMBERED: Final = 10_000
_LONGEST_SHOWN: Final = 256


class SenderAllowlist:
    """Decides whether the sender of an event is allowed; raise all errors in *options* together."""

    def __init__(self, options: AllowOptions) -> None:
        _check(options)
        self.otherwise = options.otherwise
        self._sources = frozenset(options.sources)
        self._prefixes = tuple(text[:-1] for text in options.sources if text.endswith("*"))
        self._accounts = frozenset(options.accounts)
        self._regions = frozenset(options.regions)
        self._known: dict[tuple[str, str | None, str | None], str] = {}

    def refusal(self, event: Event) -> str:
        """Return why the sender of *event* is not allowed; empty if it is."""
        sender = (event.source, event.account, event.region)
        why = self._known.get(sender)
        if why is None:
            if len(self._known) >= _MOST_REMEMBERED:  # senders can invent any number of sources
                self._known.clear()
            why = self._known[sender] = self._judge(*sender)
        return why

    def _judge(self, source: str, account: str | None, region: str | None) -> str:
        if self._sources and not (
            source and (source in self._sources or source.startswith(self._prefixes))
        ):
            return _not_among("source", source)
        if self._accounts and account not in self._accounts:
            return _not_among("account", account)
        if self._regions and region not in self._regions:
            return _not_among("region", region)
        return ""


def _not_among(what: str, value: str | None) -> str:
    # This text is part of the key of the dead letter: do not change it.
    if not value:
        return f"it names no {what}, and allow.{what}s is set"
    # Escaped by repr: it is the sender's text, and is printed on terminals.
    return f"the {what} {value[:_LONGEST_SHOWN]!r} is not among allow.{what}s"


def _check(options: AllowOptions) -> None:
    problems = Problems()
    for name, refused, message in (
        ("sources", _NO_SOURCE, "must be a source, or a prefix and a star"),
        ("accounts", _NO_ACCOUNT, "is not an AWS account; it has 12 digits"),
        ("regions", _NO_REGION, "is not an AWS Region such as eu-central-1"),
    ):
        for at, value in enumerate(getattr(options, name)):
            if refused.fullmatch(value):
                problems.add(f"allow.{name}[{at}]", f"{value!r}: {message}")
    problems.check()
