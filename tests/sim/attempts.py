"""
The oracle's own count of the attempts that failed through the event's own fault.

What a worker decides from its memory and from the store's record is decided here from what
the sink answered. An answer counts for certain, or only perhaps where two things happen at
one moment, so there are two counts: an event may not be given up before the higher one has
reached the limit, and may not be sent once the lower one has.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from math import inf

from oncebridge.sinks.api import Already, Closed, JointAnswer, Lost, Never, Unknown, Unwell, Yes

from .simloop import Node

Content = tuple[int, int]
"""The number of an event, and the phase it belongs to."""


class Attempts:
    """Count attempts by content, up to *most*; *shares_keys*: two events may have one key."""

    def __init__(self, most: int, *, shares_keys: bool) -> None:
        self._most = most
        self._shares_keys = shares_keys
        self._at_most: Counter[Content] = Counter()
        self._at_least: Counter[Content] = Counter()
        self._passes: dict[Node, list[float]] = defaultdict(list)
        self._refused: dict[tuple[Node, int], tuple[float, int]] = {}
        """By worker and event: when it was last refused there, and in which phase."""
        self._disturbed: set[Content] = set()
        """What a stalled worker had, or began anew: an answer may belong to another attempt."""

    def lapse(self, contents: Iterable[Content]) -> None:
        """Record that a claim was taken over whose worker left no word."""
        self._at_most.update(contents)

    def stall(self, contents: Iterable[Content]) -> None:
        """Record that a worker stood still while it had *contents*."""
        contents = set(contents)
        self._at_most.update(contents)
        self._disturbed |= contents

    def begin_anew(self, contents: Iterable[Content]) -> None:
        """Record that the key was taken with other content, which ends the count of the old."""
        self._disturbed.update(contents)

    def time_out(self, content: Content) -> None:
        """Record that a send had no answer in its time."""
        self._at_most[content] += 1

    def hear(
        self,
        node: Node,
        began: float,
        now: float,
        answers: Sequence[tuple[Content, JointAnswer, bool]],
    ) -> None:
        """Record what one call, begun at *began*, said of each content, and whether it was claimed."""
        passes = self._passes[node]
        if any(isinstance(answer, Yes | Never | Already | Lost) for _, answer, _ in answers):
            passes.append(now)
        for content, answer, is_claimed in answers:
            match answer:
                case Unknown():
                    self._count(content, certain=is_claimed)
                case Unwell() | Closed():
                    event, phase = content
                    refused_at, refused_in = self._refused.get((node, event), (began, phase))
                    since = -inf if self._shares_keys else refused_at
                    surely_since = refused_at if refused_in == phase else began
                    if any(since <= passed for passed in passes):
                        is_certain = any(surely_since < passed < now for passed in passes)
                        self._count(content, certain=is_certain and is_claimed)
                    self._refused[node, event] = now, phase
                case _:
                    pass

    def _count(self, content: Content, *, certain: bool) -> None:
        self._at_most[content] += 1
        self._at_least[content] += certain

    def may_be_over(self, content: Content) -> bool:
        """Return True if the event may be given up for its attempts."""
        return self._at_most[content] >= self._most

    def must_be_over(self, content: Content) -> bool:
        """Return True if the event may not be sent any more."""
        if self._shares_keys or content in self._disturbed:
            return False
        return self._at_least[content] >= self._most

    def is_disturbed(self, content: Content) -> bool:
        return content in self._disturbed
