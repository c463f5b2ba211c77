"""
The exceptions of the library, as a tree.

    OncebridgeError
    ├── ConfigError           an invalid setting; raised at start, names the setting
    │   └── ConfigErrors      all errors of one configuration
    ├── EventError            the input is not an event that can be keyed; has the reason
    ├── StoreError            the store failed (the cause is kept)
    │   └── StoreUnavailable  the same request may be retried
    ├── SinkError             the sink did not accept the event
    │   └── SinkRejected      it never will; do not retry
    ├── DeadLetterError       a dead letter could not be stored; nothing is acknowledged
    │   └── DeadLetterRefused  this one never will be; others may be
    ├── BadGzip, TooLarge     a body or file cannot be unpacked (`oncebridge.events.framing`)
    ├── NotSent, Unclear      an HTTP request failed (`oncebridge.http.client`)
    ├── AwsError              AWS returned an error (`oncebridge.aws.client`)
    ├── NotNow                a secret cannot be looked up at the moment (`oncebridge.aws.references`)
    ├── NotRecognised         a Lambda function was invoked with an unknown payload
    ├── Taken                 another process has taken over a checkpoint
    ├── HandedBack            a call protected by `once`, or a Lambda invocation, must be retried
    └── Idempotency…          the errors of Powertools' decorators (`oncebridge.aws.powertools`)

An expected outcome (a duplicate, a busy key) is a value, never an exception.
"""

from collections.abc import Sequence


class OncebridgeError(Exception):
    """The base class of every exception that this library raises."""


class ConfigError(OncebridgeError):
    """
    An invalid setting.

    *where* is the setting (``rules[0].match.detail.state``), *message* says what was found
    and what is allowed.
    """

    def __init__(self, where: str, message: str) -> None:
        super().__init__(f"{where}: {message}" if where else message)
        self.where = where
        self.message = message


class ConfigErrors(ConfigError):
    """All errors of one configuration, each with its setting, and the *file* they are in."""

    def __init__(self, problems: Sequence[ConfigError], file: str = "") -> None:
        lines = [f"{file}: {problem}" if file else str(problem) for problem in problems]
        super().__init__("", "\n".join(lines))
        self.problems = tuple(problems)
        self.file = file


class EventError(OncebridgeError):
    """
    The input is not an event, or not one that can be read safely.

    *reason* is a short code for counting (see `oncebridge.events.event.REASONS`). The
    message says what to do and never quotes the payload.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class StoreError(OncebridgeError):
    """The store failed; it is not known whether the request was applied."""


class StoreUnavailable(StoreError):
    """The store is unavailable; the same request may be retried."""


class SinkError(OncebridgeError):
    """The sink did not accept the event; it may be sent again."""


class SinkRejected(SinkError):
    """The sink will never accept this event; it becomes a dead letter."""


class DeadLetterError(OncebridgeError):
    """The dead letter could not be stored, so the source must deliver the event again."""


class DeadLetterRefused(DeadLetterError):
    """One of the dead letters will never be accepted; the others may be, without it."""


class HandedBack(OncebridgeError):
    """
    The event was not delivered, as far as is known: retry after *retry_after_s* seconds.

    The usual reason is that another worker is processing the same event.
    """

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
