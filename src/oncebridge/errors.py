"""
What can go wrong, as a tree.

    OncebridgeError
    ├── ConfigError           wrong settings; raised at start, names the place
    │   └── ConfigErrors      all that is wrong with them
    ├── EventError            the input is not an event we can key; carries the reason
    ├── StoreError            the store could not answer (cause kept)
    │   └── StoreUnavailable  worth trying again
    ├── SinkError             the sink could not take it
    │   └── SinkRejected      never worth trying again
    ├── DeadLetterError       the dead letters could not take it; nothing is acknowledged
    │   └── DeadLetterRefused  they never will take this one, and may take others
    ├── BadGzip, TooLarge     a body or file cannot be unpacked (`oncebridge.events.framing`)
    ├── NotSent, Unclear      what an HTTP request came to (`oncebridge.http.client`)
    ├── AwsError              what AWS said no with (`oncebridge.aws.client`)
    ├── NotNow                a reference could not be looked up for now (`oncebridge.base.secrets`)
    ├── NotRecognised         a Lambda function was called with we do not know what
    ├── Taken                 another process goes on from a checkpoint
    ├── HandedBack            a call protected by `once`, or of a Lambda function, has to come again
    └── Idempotency…          what Powertools' decorators raise (`oncebridge.aws.powertools`)

An expected outcome (a duplicate, a busy key) is a value, never one of these.
"""

from collections.abc import Sequence


class OncebridgeError(Exception):
    """Everything this library raises on purpose."""


class ConfigError(OncebridgeError):
    """
    A setting that cannot work.

    *where* names the place (``rules[0].match.detail.state``), *message* says what
    was found and what is allowed.
    """

    def __init__(self, where: str, message: str) -> None:
        super().__init__(f"{where}: {message}" if where else message)
        self.where = where
        self.message = message


class ConfigErrors(ConfigError):
    """All mistakes of one configuration, each with its place; *file* is where it stands."""

    def __init__(self, problems: Sequence[ConfigError], file: str = "") -> None:
        lines = [f"{file}: {problem}" if file else str(problem) for problem in problems]
        super().__init__("", "\n".join(lines))
        self.problems = tuple(problems)
        self.file = file


class EventError(OncebridgeError):
    """
    The input is not an event, or not a safe one.

    *reason* is one word for counting (see `oncebridge.events.event.REASONS`); the message
    says what to do and never quotes the payload.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class StoreError(OncebridgeError):
    """The store could not answer; whether the request was applied is not known."""


class StoreUnavailable(StoreError):
    """The store could not answer now; the same request may be sent again."""


class SinkError(OncebridgeError):
    """The sink did not take the event; it may be sent again."""


class SinkRejected(SinkError):
    """The sink will never take this event; it belongs in the dead letters."""


class DeadLetterError(OncebridgeError):
    """The dead letters could not be written, so the event must come again."""


class DeadLetterRefused(DeadLetterError):
    """One of the letters will never be taken; others may be, without it."""


class HandedBack(OncebridgeError):
    """
    What was asked for did not happen, and is not known to have happened: ask again.

    *retry_after_s* says when. The usual reason is that another worker is at it.
    """

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
