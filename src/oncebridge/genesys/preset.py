"""
Rules for the events of Genesys Cloud.

Genesys gives most events no id, and EventBridge gives each publication a new one. What
stays the same when an event comes again is its topic and its body; the time it was
published and the correlation of the request do not count. Two integrations of one
organisation are one source.

Observations are readings of a gauge: the same value again is another reading, so there
the time of publication belongs to the identity.
"""

from typing import Any, Final

from oncebridge.rules import Rule

_SOURCES: Final[list[Any]] = [
    {"prefix": "aws.partner/genesys.com/"},
    {"prefix": "aws.partner/genesys.com.test/"},
]

GENESYS: Final = [
    Rule.parse(
        {
            "name": "genesys observations",
            "match": {"source": _SOURCES, "detail-type": [{"wildcard": "*.observations"}]},
            "ignore": ["detail.metadata"],
            "scope": "organisation",
        }
    ),
    Rule.parse(
        {
            "name": "genesys",
            "match": {"source": _SOURCES},
            "ignore": ["detail.timestamp", "detail.metadata"],
            "scope": "organisation",
            "entity": "detail.eventBody.conversationId || detail.eventBody.id || detail.topicName",
        }
    ),
]
