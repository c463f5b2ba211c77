"""Rules as the configuration writes them; not needed by a program that makes its rules itself."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Annotated, Any, Literal

from msgspec import Struct

from oncebridge.base.options import Doc, Problems, read
from oncebridge.errors import ConfigError
from oncebridge.events.key import ContentKey, FieldsKey, IdKey, Scope, compile_field
from oncebridge.events.pattern import Pattern
from oncebridge.events.rules import (
    DEFAULT_AHEAD,
    Latest,
    OnConflict,
    OnMissing,
    OnReplay,
    Quiet,
    Tier,
)


def read_rule(spec: Mapping[str, Any], where: str, window: timedelta) -> dict[str, Any]:
    """Return the arguments of the `Rule` that *spec* describes; raise all errors together."""
    problems = Problems()
    options = read(RuleOptions, spec, where, problems)
    problems.check()
    assert options is not None  # noqa: S101 - or an error was raised
    return options.build(where, window, problems)


class TierOptions(Struct, frozen=True, kw_only=True):
    """One way to recognise a duplicate, as the configuration writes it."""

    key: Annotated[
        Literal["content", "id", "none"] | list[str],
        Doc(
            'What identifies an event: "content", "id", a list of JMESPath expressions, or '
            '"none" to deliver without deduplication.',
            example='["detail.orderId", "detail.status"]',
        ),
    ] = "content"
    ignore: Annotated[
        list[str],
        Doc(
            "Paths that are ignored in the content: if it is the key, if it is compared (check), and "
            "if it replaces a key of which a field is missing.",
            example='["detail.sentAt"]',
        ),
    ] = []
    window: Annotated[
        timedelta | None,
        Doc("How long an event is remembered; by default the window of the file.", example="6d"),
    ] = None
    sliding: Annotated[bool, Doc("Every duplicate extends the window, up to max_window.")] = False
    max_window: Annotated[
        timedelta | None,
        Doc("The longest a sliding window may become.", example="30d"),
    ] = None
    check: Annotated[
        bool | None,
        Doc(
            "Compare the content too: the same key with different content is a conflict. "
            'On for key = "id", otherwise off.'
        ),
    ] = None

    def tier(self, where: str, window: timedelta) -> Tier:
        """Return the tier, or raise `ConfigError`."""
        key = self._key(where)
        window = self.window or window
        longest = self.max_window or max(Tier().max_window, window)
        if self.max_window is not None and not self.sliding:
            raise ConfigError(f"{where}.max_window", "needs sliding = true")
        if longest < window:
            raise ConfigError(f"{where}.max_window", "must not be shorter than the window")
        check = isinstance(key, IdKey) if self.check is None else self.check
        content = None
        if self.ignore and not isinstance(key, ContentKey):
            content = ContentKey(self.ignore, where=f"{where}.ignore")
        return Tier(
            key=key,
            window=window,
            sliding=self.sliding,
            max_window=longest,
            check=check,
            content=content,
        )

    def _key(self, where: str) -> ContentKey | IdKey | FieldsKey:
        if self.key == "content":
            return ContentKey(self.ignore, where=f"{where}.ignore")
        if self.key == "id":
            return IdKey()
        if isinstance(self.key, list) and self.key:
            return FieldsKey(self.key, where=f"{where}.key")
        raise ConfigError(
            f"{where}.key",
            f'{self.key!r}: must be "content", "id", "none", or a list of JMESPath expressions '
            'such as ["detail.orderId"]',
        )


_Entity = Annotated[
    str | None,
    Doc("What the event is about; by default the entity of the rule.", example="detail.orderId"),
]


class LatestOptions(Struct, frozen=True, kw_only=True):
    """Only the newest version is delivered, as the configuration writes it."""

    entity: _Entity = None
    version: Annotated[str, Doc("Its version: a number or an instant.", example="detail.timestamp")]
    ahead: Annotated[
        timedelta,
        Doc(
            "How far ahead of the store's clock a version that is an instant may be. A later one "
            "is a conflict: it does not replace the newest version.",
            example="1d",
        ),
    ] = DEFAULT_AHEAD


class QuietOptions(Struct, frozen=True, kw_only=True, rename={"time": "for"}):
    """A repeated state is dropped for a time, as the configuration writes it."""

    entity: _Entity = None
    state: Annotated[str, Doc("Its state.", example="detail.status")]
    time: Annotated[timedelta, Doc("How long the same state counts as noise.", example="500ms")]


class RuleOptions(TierOptions, frozen=True, kw_only=True):
    """One rule, as the configuration writes it."""

    name: Annotated[str, Doc("The name of the rule in verdicts and counts.", example="orders")]
    match: Annotated[
        dict[str, Any] | None,
        Doc(
            "The events it is for, as an EventBridge event pattern; all by default.",
            example='{ source = ["com.example.orders"] }',
        ),
    ] = None
    tiers: Annotated[
        list[TierOptions] | None,
        Doc(
            "Several keys for an event, the identifying one last.",
            example='[{ key = "id", window = "5m" }, { key = "content" }]',
        ),
    ] = None
    entity: Annotated[
        str | None,
        Doc('The entity of the event, for order = "entity".', example="detail.conversationId"),
    ] = None
    latest: Annotated[
        LatestOptions | None,
        Doc(
            "Drop events that are older than the latest delivered one of the same entity.",
            example='{ entity = "detail.orderId", version = "detail.timestamp" }',
        ),
    ] = None
    quiet: Annotated[
        QuietOptions | None,
        Doc(
            "Drop a repeated state of the same entity within a short time.",
            example='{ entity = "detail.orderId", state = "detail.status", for = "500ms" }',
        ),
    ] = None
    on_missing: Annotated[
        OnMissing, Doc("What to do if a field of the key is missing or null.")
    ] = "content"
    on_conflict: Annotated[
        OnConflict, Doc("What to do with an event that has the same key and different content.")
    ] = "deliver"
    on_replay: Annotated[
        OnReplay, Doc("What to do with events that are replayed from an archive.")
    ] = "deduplicate"
    scope: Annotated[
        Scope,
        Doc('"organisation" treats all Genesys integrations of one organisation as one source.'),
    ] = "source"
    discard: Annotated[bool, Doc("Drop events that match: acknowledged, and not delivered.")] = (
        False
    )

    def build(self, where: str, window: timedelta, problems: Problems) -> dict[str, Any]:
        """Return the arguments of a `Rule`; raise all errors together."""
        made: dict[str, Any] = {"name": self.name, "discard": self.discard, "entity": self.entity}
        for name in ("on_missing", "on_conflict", "on_replay", "scope"):
            made[name] = getattr(self, name)
        with problems.caught():
            made["tiers"] = self._tiers(where, window, problems)
        if self.match is not None:
            with problems.caught():
                made["match"] = Pattern.compile(self.match, f"{where}.match")
        if self.entity is not None:
            with problems.caught():
                compile_field(self.entity, f"{where}.entity")
        if self.latest is not None:
            with problems.caught():
                place, entity = f"{where}.latest", self.latest.entity or self.entity
                made["latest"] = Latest(
                    _expression(entity, f"{place}.entity"),
                    _expression(self.latest.version, f"{place}.version"),
                    self.latest.ahead,
                )
        if self.quiet is not None:
            with problems.caught():
                place, entity = f"{where}.quiet", self.quiet.entity or self.entity
                made["quiet"] = Quiet(
                    _expression(entity, f"{place}.entity"),
                    _expression(self.quiet.state, f"{place}.state"),
                    self.quiet.time,
                )
        if made.get("tiers") == () and (self.latest or self.quiet):
            problems.add(where, "latest and quiet need a key")
        problems.check()
        return made

    def _tiers(self, where: str, window: timedelta, problems: Problems) -> tuple[Tier, ...]:
        default = TierOptions()
        own = [
            name
            for name in TierOptions.__struct_fields__
            if getattr(self, name) != getattr(default, name)
        ]
        if self.discard or self.key == "none":
            beside = [name for name in own if name != "key" or self.discard]
            beside += ["tiers"] if self.tiers is not None else []
            why = "discard" if self.discard else 'key = "none"'
            for name in beside:
                problems.add(f"{where}.{name}", f"has no effect with {why}; remove it")
            return ()
        if self.tiers is None:
            return (self._tier(self, where, window),)
        if own:
            raise ConfigError(
                f"{where}.{own[0]}", "cannot be combined with tiers; set it inside a tier"
            )
        if not self.tiers:
            raise ConfigError(f"{where}.tiers", "must be a list of at least one tier")
        tiers = []
        for at, tier in enumerate(self.tiers):
            place = f"{where}.tiers[{at}]"
            with problems.caught():
                if tier.key == "none":
                    raise ConfigError(
                        f"{place}.key", '"none" can be set for a rule only, not for a tier'
                    )
                tiers.append(self._tier(tier, place, window))
        return tuple(tiers)

    def _tier(self, options: TierOptions, where: str, window: timedelta) -> Tier:
        tier = options.tier(where, window)
        if tier.content is not None and not tier.check and self.on_missing != "content":
            raise ConfigError(
                f"{where}.ignore",
                f"has no effect: with on_missing = {self.on_missing!r} and without check = true, "
                "the content is not used; remove it, or set check = true",
            )
        return tier


def _expression(text: str | None, where: str) -> str:
    if text is None:
        raise ConfigError(where, "is missing, and the rule has no entity; set one of them")
    compile_field(text, where)
    return text
