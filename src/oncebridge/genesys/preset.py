"""
Rules for the events of Genesys Cloud, one for each family of topics.

Genesys gives most events no id, and EventBridge gives each publication a new one. What
stays the same when an event comes again is its topic and its body; the time it was
published and the correlation of the request do not count. All else in the detail does,
`version` too: it is the same in every copy, and if it ever is not, the body is to be read
in another way. Two integrations of one organisation are one source, unless told otherwise.

Where a topic has an id of its own, that is the key, and the content is compared: the same
id with other content is a conflict, and is delivered. Observations are readings of a gauge:
the same value again is another reading, so the time of publication belongs to them.

Topics are told by the beginning and the end of their `detail-type`. Between stands `{id}`,
or whatever name another tool gives it; real ids are in `detail.topicName` only. A topic that
nobody knows yet is met by the last rule. A detail that comes without its envelope is told by
its `topicName`, in which ids stand where `{id}` stood.

What all events of a topic have in common, its name and version, is no key by itself. Without
a body they are known by their ids, and so are readings that do not say when they were made.
"""

from collections.abc import Sequence
from datetime import timedelta
from functools import lru_cache
from typing import Any, Final

from msgspec.structs import replace

from oncebridge.errors import ConfigError
from oncebridge.events.key import ContentKey, Scope
from oncebridge.events.pattern import Pattern
from oncebridge.events.rules import DEFAULT_WINDOW, Bare, Rule, Tier
from oncebridge.service.genesys_options import GenesysOptions

_VOLATILE: Final = ["detail.timestamp", "detail.metadata"]
_LABELS: Final = ("topicName", "version")
_BODY: Final = "detail.eventBody"

# One expression for all that may be about a conversation, or its events had several orders.
_CONVERSATION: Final = f"{_BODY}.conversationId || {_BODY}.id || detail.topicName"
_TOPIC: Final = "detail.topicName"

# What a topic is called that nobody knows yet, where no source says that it is one.
_ANY_TOPIC: Final = [{"prefix": f"v{version}."} for version in range(1, 10)]

# Detail events stand first, for there are more of them than of all others together.
_FAMILIES: Final[Sequence[dict[str, Any]]] = (
    {
        "name": "genesys attributes",
        "topics": [{"wildcard": "v2.detail.events.conversation.*.attributes"}],
        "entity": _CONVERSATION,
    },
    {
        "name": "genesys detail events",
        "topics": [{"prefix": "v2.detail.events."}],
        "entity": _CONVERSATION,
    },
    {
        "name": "genesys observations",
        "topics": [{"suffix": ".observations"}],
        "ignore": ["detail.metadata"],
        "needs": ["timestamp"],
        "entity": _TOPIC,
    },
    {
        "name": "genesys audits",
        "topics": [{"prefix": "v2.audits."}],
        "key": [_TOPIC, f"{_BODY}.id"],
        "check": True,
        "entity": _TOPIC,
    },
    {
        "name": "genesys conversation metrics",
        "topics": [{"wildcard": "v2.analytics.conversation.*.metrics"}],
        "key": [_TOPIC, *(f"{_BODY}.{name}" for name in ("recordId", "metric", "metricDate"))],
        "check": True,
        "entity": _CONVERSATION,
    },
    {
        # A partial utterance and its final form share their id; both are wanted.
        "name": "genesys transcription",
        "topics": [{"wildcard": "v2.conversations.*.transcription"}],
        "key": [
            _TOPIC,
            f"{_BODY}.communicationId",
            f"{_BODY}.transcripts[].utteranceId",
            f"{_BODY}.transcripts[].isFinal",
            f"{_BODY}.status.offsetMs",
        ],
        "check": True,
        "entity": _CONVERSATION,
    },
    {
        # `eventBody.id` is what the snapshot is of, not which snapshot it is.
        "name": "genesys snapshots",
        "topics": [{"prefix": "v2.users."}, {"prefix": "v2.routing.queues."}],
        "entity": _CONVERSATION,
    },
    {
        "name": "genesys operational events",
        "topics": [{"prefix": "v2.operations.events."}],
        "entity": f"{_BODY}.entityId || detail.topicName",
    },
    {"name": "genesys", "entity": _CONVERSATION},
)


def genesys_rules(
    options: GenesysOptions = GenesysOptions(),  # noqa: B008 - frozen
    *,
    window: timedelta = DEFAULT_WINDOW,
) -> list[Rule]:
    """Return the preset's rules, for the sources and the scope that *options* say."""
    return list(_rules(options.sources, options.scope, window))


@lru_cache(maxsize=16)
def _rules(sources: tuple[str, ...], scope: Scope, window: timedelta) -> tuple[Rule, ...]:
    _check(sources)
    return tuple(_rule(family, sources, scope, window) for family in _FAMILIES)


def _rule(
    family: dict[str, Any], sources: tuple[str, ...], scope: Scope, window: timedelta
) -> Rule:
    spec = {"ignore": _VOLATILE, "scope": scope, **family}
    topics, needs = spec.pop("topics", None), spec.pop("needs", ())
    match: dict[str, Any] = {"source": [{"prefix": prefix} for prefix in sources]}
    if topics:
        match["detail-type"] = topics
    made = Rule.parse({**spec, "match": match}, family["name"], window=window)
    alone = Pattern.compile({"detail": {"topicName": topics or _ANY_TOPIC}}, family["name"])
    content = ContentKey(spec["ignore"], labels=_LABELS, needs=needs)
    return replace(
        made,
        bare=Bare(alone, members=("eventBody",)),
        tiers=tuple(_with_content(tier, content) for tier in made.tiers),
        together="genesys",
    )


def _with_content(tier: Tier, content: ContentKey) -> Tier:
    """Let *content* be the tier's key if it goes by content, or else what stands in for it."""
    if isinstance(tier.key, ContentKey):
        return replace(tier, key=content)
    return replace(tier, content=content)


def _check(sources: tuple[str, ...]) -> None:
    where = "genesys.sources"
    if not sources:
        raise ConfigError(where, "is empty; say how the sources begin")
    for at, prefix in enumerate(sources):
        if not prefix:
            raise ConfigError(f"{where}[{at}]", "is empty, and every source begins like that")
        if "*" in prefix:
            message = f"{prefix!r}: say how the sources begin, without a star"
            raise ConfigError(f"{where}[{at}]", message)
