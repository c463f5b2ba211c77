"""
A function on Lambda as people write it, read by type checkers and never run.

A line that stops type-checking here is a breaking change for somebody.
"""

from typing import Any, assert_type

from aws_lambda_powertools import Logger, Metrics
from aws_lambda_powertools.utilities.data_classes import SQSEvent, event_source
from aws_lambda_powertools.utilities.typing import LambdaContext

from oncebridge import Event, Gateway
from oncebridge.aws import HandedBack, NotRecognised, lambda_handler
from oncebridge.aws.function import handler as ready_made
from oncebridge.aws.handler import Context, Failures, LambdaHandler
from oncebridge.service import make_router
from oncebridge.service.config import load
from oncebridge.stores.memory import MemoryStore

logger = Logger()
metrics = Metrics()
gateway = Gateway(store=MemoryStore(), sink=print)


def process(event: Event) -> None:
    print(event.detail["eventBody"]["conversationId"])


async def process_later(event: Event) -> int:
    return len(event.raw)


handler = lambda_handler(gateway, deliver=process)
assert_type(handler, LambdaHandler)
assert_type(lambda_handler(gateway, deliver=process_later), LambdaHandler)
assert_type(lambda_handler(gateway, process, metrics=None), LambdaHandler)
assert_type(lambda_handler(make_router(load()), metrics="crm"), LambdaHandler)
assert_type(ready_made, LambdaHandler)


class MyContext:
    def get_remaining_time_in_millis(self) -> int:
        return 1000


own: Context = MyContext()
assert_type(handler({"detail": {}}, own), Failures | None)
assert_type(handler([{"eventSource": "aws:sqs"}], LambdaContext()), Failures | None)


def plain(event: dict[str, Any], context: LambdaContext) -> Failures | None:
    try:
        return handler(event, context)
    except (HandedBack, NotRecognised) as error:
        logger.warning(str(error))
        raise


@logger.inject_lambda_context
@metrics.log_metrics
def decorated(event: dict[str, Any], context: LambdaContext) -> Failures | None:
    answer = handler(event, context)
    if answer is not None:
        for failure in answer["batchItemFailures"]:
            assert_type(failure["itemIdentifier"], str)
    return answer


@event_source(data_class=SQSEvent)
def with_a_data_class(event: SQSEvent, context: LambdaContext) -> Failures | None:
    logger.info("a batch", extra={"records": len(list(event.records))})
    return handler(event, context)


wrapped = logger.inject_lambda_context(handler)
