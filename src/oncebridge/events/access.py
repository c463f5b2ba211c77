"""
Which senders are let in at all.

What comes from elsewhere is neither claimed nor sent, in shadow mode either. A list that is
empty allows everybody; where there is one, an event that does not say where it comes from is
not on it.

This is a check of what an event says about itself, and no proof of it: EventBridge fills in
account and region itself, other ways in take them from whoever sends.
"""

import re
from typing import Annotated, Final, Literal

from msgspec import Struct

from oncebridge.base.options import Doc, Problems
from oncebridge.events.event import Event


class AllowOptions(Struct, frozen=True, kw_only=True):
    """Who may send; an empty list allows everybody."""

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
        """Return whether everybody may send."""
        return not (self.sources or self.accounts or self.regions)


# Producers of one's own may write what they like; what AWS would write has a shape.
_NO_ACCOUNT: Final = re.compile(r"|.*[*\s].*|(?!\d{12}\Z)\d+", re.ASCII | re.DOTALL)
_NO_REGION: Final = re.compile(r"|.*[*\sA-Z].*", re.ASCII | re.DOTALL)
_MOST_REMEMBERED: Final = 10_000
_LONGEST_SHOWN: Final = 256


class Guard:
    """Know who is allowed; raise every mistake in *options* at once."""

    def __init__(self, options: AllowOptions) -> None:
        _check(options)
        self.otherwise = options.otherwise
        self._sources = frozenset(options.sources)
        self._prefixes = tuple(text[:-1] for text in options.sources if text.endswith("*"))
        self._accounts = frozenset(options.accounts)
        self._regions = frozenset(options.regions)
        self._known: dict[tuple[str, str | None, str | None], str] = {}

    def refusal(self, event: Event) -> str:
        """Say why *event* is not let in; nothing if it is."""
        sender = (event.source, event.account, event.region)
        why = self._known.get(sender)
        if why is None:
            if len(self._known) >= _MOST_REMEMBERED:  # senders invent what they like
                self._known.clear()
            why = self._known[sender] = self._judge(*sender)
        return why

    def _judge(self, source: str, account: str | None, region: str | None) -> str:
        if self._sources and not self._is_source(source):
            return _not_among("source", source)
        if self._accounts and account not in self._accounts:
            return _not_among("account", account)
        if self._regions and region not in self._regions:
            return _not_among("region", region)
        return ""

    def _is_source(self, source: str) -> bool:
        return bool(source) and (source in self._sources or source.startswith(self._prefixes))


def _not_among(what: str, value: str | None) -> str:
    if not value:
        return f"it names no {what}, and allow.{what}s is set"
    # Spelt out, for it is the sender's text and ends up on terminals.
    return f"the {what} {value[:_LONGEST_SHOWN]!r} is not among allow.{what}s"


def _check(options: AllowOptions) -> None:
    problems = Problems()
    for at, source in enumerate(options.sources):
        if not source or "*" in source[:-1]:
            message = "must be a source, or a prefix and a star"
            problems.add(f"allow.sources[{at}]", f"{source!r}: {message}")
    for at, account in enumerate(options.accounts):
        if _NO_ACCOUNT.fullmatch(account):
            message = "is not an AWS account; it has 12 digits"
            problems.add(f"allow.accounts[{at}]", f"{account!r}: {message}")
    for at, region in enumerate(options.regions):
        if _NO_REGION.fullmatch(region):
            message = "is not an AWS Region such as eu-central-1"
            problems.add(f"allow.regions[{at}]", f"{region!r}: {message}")
    problems.check()
