"""Find the EventBridge rules that send events here, on every bus of a Region."""

import asyncio
import json
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Final

from msgspec import Struct

from oncebridge.check.aws.account import AwsLocation, AwsService, NoSuchResource, NotReadable
from oncebridge.check.aws.commands import aws
from oncebridge.check.aws.context import AwsContext

GENESYS: Final = "aws.partner/genesys.com"
LONGEST_AGE: Final = timedelta(hours=24)
"""How long EventBridge retries, unless a target says otherwise."""
MOST_ATTEMPTS: Final = 185
_SHOWN: Final = frozenset(
    {
        *("Arn", "DeadLetterConfig", "Id", "InputPath", "KinesisParameters", "RetryPolicy"),
        *("RoleArn", "SqsParameters"),
    }
)
"""Members of a target that may be printed: headers and texts may contain a secret."""


class Bus(Struct, frozen=True):
    """A bus; without its ARN if the buses could not be listed."""

    name: str
    arn: str = ""

    @property
    def organisation(self) -> str:
        """The Genesys organisation whose events it carries; empty for other buses."""
        parts = self.name.split("/")
        is_genesys = self.name.startswith(GENESYS) and len(parts) == 5
        return parts[3] if is_genesys else ""

    @property
    def is_partner(self) -> bool:
        """Whether it carries only events that a partner publishes."""
        return self.name.startswith("aws.partner/")


class EventFeed(Struct, frozen=True, kw_only=True):
    """One target of a rule that sends events here."""

    bus: Bus
    rule: str
    rule_arn: str
    pattern: Mapping[str, Any] | None
    """None for a schedule."""
    is_scheduled: bool
    is_enabled: bool
    target: Mapping[str, Any]
    to: str
    """The subject of the target in findings, such as `queue orders`."""
    where: AwsLocation
    changes: Mapping[str, Any] = {}
    """All changes to make at the target; a member that is None is to be removed."""

    @property
    def subject(self) -> str:
        return f"rule {self.rule} ({self.bus.name})"

    @property
    def id(self) -> str:
        return str(self.target.get("Id"))

    @property
    def age(self) -> timedelta:
        """How long EventBridge retries."""
        given = (self.target.get("RetryPolicy") or {}).get("MaximumEventAgeInSeconds")
        return LONGEST_AGE if given is None else timedelta(seconds=int(given))

    @property
    def attempts(self) -> int:
        given = (self.target.get("RetryPolicy") or {}).get("MaximumRetryAttempts")
        return MOST_ATTEMPTS if given is None else int(given)

    @property
    def dead(self) -> str:
        """The ARN of the dead-letter queue; empty if there is none."""
        return str((self.target.get("DeadLetterConfig") or {}).get("Arn") or "")

    @property
    def is_genesys(self) -> bool:
        """Whether it sends events of Genesys Cloud, by its bus and pattern."""
        return self.bus.name.startswith(GENESYS) or GENESYS in json.dumps(
            (self.pattern or {}).get("source", "")
        )

    def command(self, operation: str, *words: str, named: str = "--rule") -> str:
        """Return a command for the rule."""
        whose = ("--event-bus-name", self.bus.name, named, self.rule)
        return aws(self.where, "events", operation, *whose, *words)

    @property
    def removal(self) -> str:
        """The command that removes the target from the rule, and keeps its others."""
        return self.command("remove-targets", "--ids", self.id)

    def fix(self, what: str) -> str:
        """
        Return *what* to do, with the command.

        A target can only be replaced as a whole, so there is one command for all of its changes:
        following one finding does not undo another.
        """
        if len({None if given is None else name for name, given in self.changes.items()}) > 1:
            what += ", with all other changes to this target"
        target = {**self.target, **self.changes}
        target = {name: value for name, value in target.items() if value is not None}
        if target.keys() <= _SHOWN:
            return f"{what}:\n{self.command('put-targets', '--targets', json.dumps([target]))}"
        wanted = f'Targets[?Id==`"{self.id}"`]'
        listed = self.command("list-targets-by-rule", "--query", wanted, "--output", "json")
        given = {name: value for name, value in self.changes.items() if value is not None}
        gone = [name for name in self.changes if name in self.target and name not in given]
        steps = [f"remove from it: {', '.join(gone)}"] if gone else []
        steps += [f"add to it: {json.dumps(given)[1:-1]}"] if given else []
        put = self.command("put-targets", "--targets", "file://target.json")
        return "\n".join((f"{what}:", f"{listed} > target.json", *steps, put))


class EventFeeds(Struct, frozen=True):
    """All feeds of one target."""

    found: tuple[EventFeed, ...]
    is_sure: bool
    """Whether all could be read."""
    to: str
    """The subject of the target in findings, such as `queue orders`."""


async def buses(context: AwsContext, where: AwsLocation) -> tuple[list[Bus], bool]:
    """Return the buses of a Region, and whether these are all; there is always a default bus."""
    events = context.at("events", where)
    asked = events.ask_all("ListEventBuses", "EventBuses")
    found = await context.look_if_exists("EventBridge", "the list of buses", asked)
    if found is None:
        return [Bus("default")], False
    return [Bus(one["Name"], one.get("Arn", "")) for one in found], True


async def feeds(context: AwsContext, to: str, target: str, where: AwsLocation) -> EventFeeds:
    """Return the feeds of the ARN *target*, whose subject is *to*."""
    several, is_sure = await buses(context, where)
    answers = await asyncio.gather(*[_of_bus(context, bus, to, target, where) for bus in several])
    found = [feed for answer in answers for feed in answer.found]
    return EventFeeds(tuple(found), is_sure and all(answer.is_sure for answer in answers), to)


async def rules_to(
    context: AwsContext, bus: Bus, target: str, where: AwsLocation
) -> list[str] | None:
    """Return the names of the rules of a *bus* with *target*; None if that is denied."""
    events = context.at("events", where)
    asked = events.ask_all(
        "ListRuleNamesByTarget", "RuleNames", TargetArn=target, EventBusName=bus.name
    )
    return await context.look_if_exists(
        f"bus {bus.name}", "which of its rules send events here", asked
    )


async def _of_bus(
    context: AwsContext, bus: Bus, to: str, target: str, where: AwsLocation
) -> EventFeeds:
    names = await rules_to(context, bus, target, where)
    if not names:
        return EventFeeds((), names is not None, to)
    events, named = context.at("events", where), {"EventBusName": bus.name}
    listed = await context.look_if_exists(
        f"bus {bus.name}",
        "the patterns and states of its rules",
        events.ask_all("ListRules", "Rules", **named),
    )
    rules = {str(one.get("Name")): one for one in listed or ()}
    asked = [
        context.look_if_exists(
            f"rule {name} ({bus.name})",
            "its targets",
            events.ask_all("ListTargetsByRule", "Targets", Rule=name, **named),
        )
        for name in names
    ]
    found: list[EventFeed] = []
    is_sure = True
    for name, targets in zip(names, await asyncio.gather(*asked), strict=True):
        is_sure = is_sure and name in rules and targets is not None
        rule = rules.get(name, {})  # unknown settings are assumed to be right
        found += [
            EventFeed(
                bus=bus,
                rule=name,
                rule_arn=rule.get("Arn", ""),
                pattern=_pattern(rule),
                is_scheduled=bool(rule.get("ScheduleExpression")),
                is_enabled=rule.get("State", "ENABLED") != "DISABLED",
                target=one,
                to=to,
                where=where,
            )
            for one in targets or ()
            if one.get("Arn") == target
        ]
    return EventFeeds(tuple(found), is_sure, to)


def _pattern(rule: Mapping[str, Any]) -> Mapping[str, Any] | None:
    try:
        found = json.loads(rule.get("EventPattern") or "null")
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


async def partner_sources(events: AwsService) -> list[Mapping[str, Any]]:
    """Return the event sources of Genesys Cloud; raises `NotReadable`."""
    try:
        return await events.ask_all("ListEventSources", "EventSources", NamePrefix=GENESYS)
    except NoSuchResource:
        raise NotReadable("events:ListEventSources") from None
