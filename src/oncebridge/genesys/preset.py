"""
Rules for the events of Genesys Cloud, one for each family of topics.

Genesys gives most events no id, and EventBridge gives each publication a new one. The topic
and the body of an event stay the same when it is published again; the time of publication
and the correlation of the request do not count. Everything else in the detail counts, also
`version`: it is the same in every copy, and if it ever changes, the body has another meaning.
Two integrations of one organisation are one source, unless configured otherwise.

If a topic has an id of its own, that is the key, and the content is compared: the same id
with other content is a conflict, and is delivered. Observations are measurements: the same
value again is another measurement, so their time of publication counts.

Topics are recognised by the beginning and the end of their `detail-type`. Between is `{id}`,
or a name that another tool uses; real ids are in `detail.topicName` only. An unknown topic
matches the last rule. A detail without its envelope is recognised by its `topicName`, which
has real ids instead of `{id}`.

The name and version that all events of a topic share are not a key by themselves. Events
without a body are identified by their ids, and so are measurements without a time.
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

# One expression for all events of a conversation, so that they share one order.
_CONVERSATION: Final = f"{_BODY}.conversationId || {_BODY}.id || detail.topicName"
_TOPIC: Final = "detail.topicName"

# Names of unknown topics, for details without a source.
_ANY_TOPIC: Final = [{"prefix": f"v{version}."} for version in range(1, 10)]

# Detail events come first, because there are more of them than of all others together.
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
        # A partial utterance and its final form have the same id; both are delivered.
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
        # `eventBody.id` is the id of the object, not of the snapshot.
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
    """Return the preset's rules, for the sources and the scope of *options*."""
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
    """Use *content* as the tier's key if it is a content key, or else as its fallback."""
    if isinstance(tier.key, ContentKey):
        return replace(tier, key=content)
    return replace(tier, content=content)


def _check(sources: tuple[str, ...]) -> None:
    where = "genesys.sources"
    if not sources:
        raise ConfigError(where, "is empty; list how the sources begin")
    for at, prefix in enumerate(sources):
        if not prefix:
            raise ConfigError(f"{where}[{at}]", "is empty, and would match every source; remove it")
        if "*" in prefix:
            message = f"{prefix!r}: write how the sources begin, without a star"
            raise ConfigError(f"{where}[{at}]", message)
