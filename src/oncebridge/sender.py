"""One call of the sink: bounded in time, never trusted, one answer for each delivery."""

import asyncio
from collections.abc import Iterable, Sequence

from oncebridge.errors import SinkRejected
from oncebridge.holds import Hold
from oncebridge.sink import Delivery, Never, Sink, SinkAnswer, Unknown


async def send(
    sink: Sink, deliveries: Sequence[Delivery], *, timeout_s: float, holds: Iterable[Hold]
) -> Sequence[SinkAnswer]:
    """
    Call the sink once; whatever it does, give one answer for each delivery.

    If one of *holds* is lost meanwhile, the call is broken off.
    """
    task = asyncio.ensure_future(sink.deliver(deliveries))
    for hold in holds:
        hold.sending = task
    try:
        done, _ = await asyncio.wait({task}, timeout=timeout_s)
    except asyncio.CancelledError:
        task.cancel()
        task.add_done_callback(_look_away)
        raise
    if done:
        return _answers(task, len(deliveries))
    # Not awaited: a sink that ignores its cancellation must not hold us up too.
    task.cancel()
    task.add_done_callback(_look_away)
    return [Unknown(f"no answer within {timeout_s:g} s")] * len(deliveries)


def _answers(task: asyncio.Future[Sequence[SinkAnswer]], count: int) -> Sequence[SinkAnswer]:
    """Take the sink's answers, or make some from the way it failed."""
    answer: SinkAnswer
    if task.cancelled():
        answer = Unknown("the send was broken off")
    elif isinstance(error := task.exception(), SinkRejected):
        answer = Never(type(error).__name__)
    elif error is not None:
        # Its type only: the text of an exception may quote the event.
        answer = Unknown(type(error).__name__)
    elif not _are_answers(answers := task.result()):
        answer = Unknown("the sink gave something else than answers")
    elif len(answers) != count:
        answer = Unknown(f"the sink gave {len(answers)} answers for {count} events")
    else:
        return answers
    return [answer] * count


def _are_answers(answers: object) -> bool:
    return isinstance(answers, Sequence) and all(isinstance(a, SinkAnswer) for a in answers)


def _look_away(task: asyncio.Future[Sequence[SinkAnswer]]) -> None:
    """Retrieve what a send that was given up ends in, so that nobody complains about it."""
    if not task.cancelled():
        task.exception()
