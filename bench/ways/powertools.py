"""Powertools for AWS Lambda: its idempotency utility, one event at a time, as people use it."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aws_lambda_powertools.utilities.idempotency import (
    DynamoDBPersistenceLayer,
    IdempotencyConfig,
    exceptions,
    idempotent_function,
)
from aws_lambda_powertools.utilities.idempotency.persistence.base import BasePersistenceLayer
from aws_lambda_powertools.utilities.idempotency.persistence.cache import CachePersistenceLayer

from ways import LEASE_S, WINDOW_S, Address, Decide
from ways.aws_sdk import table_client


class Invocation:
    """What Powertools asks Lambda: how much time is left."""

    def get_remaining_time_in_millis(self) -> int:
        return LEASE_S * 1000


def idempotent(layer: Any) -> Decide:
    """Handle one event after the other, each with the decorator around it."""
    config = IdempotencyConfig(
        event_key_jmespath="detail.[topicName, version, eventBody]",  # all but IGNORED
        raise_on_no_idempotency_key=True,
        expires_after_seconds=WINDOW_S,
        hash_function="sha256",
        lambda_context=Invocation(),
    )
    delivered = 0

    @idempotent_function(data_keyword_argument="event", config=config, persistence_store=layer)
    def handle(event: dict[str, Any]) -> None:
        nonlocal delivered
        delivered += 1

    async def decide(batch: list[bytes]) -> int:
        before = delivered
        for raw in batch:
            handle(event=json.loads(raw))
        return len(batch) - (delivered - before)

    return decide


class DictLayer(BasePersistenceLayer):
    """Keep records in a dict, as its other layers keep them elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.records: dict[str, Any] = {}

    def _get_record(self, idempotency_key: str) -> Any:
        try:
            return self.records[idempotency_key]
        except KeyError:
            raise exceptions.IdempotencyItemNotFoundError from None

    def _put_record(self, data_record: Any) -> None:
        known = self.records.get(data_record.idempotency_key)
        if known is not None and not known.is_expired:
            raise exceptions.IdempotencyItemAlreadyExistsError(old_data_record=known)
        self.records[data_record.idempotency_key] = data_record

    def _update_record(self, data_record: Any) -> None:
        self.records[data_record.idempotency_key] = data_record

    def _delete_record(self, data_record: Any) -> None:
        self.records.pop(data_record.idempotency_key, None)


@asynccontextmanager
async def memory(_: Address) -> AsyncIterator[Decide]:
    yield idempotent(DictLayer())


@asynccontextmanager
async def redis(address: Address) -> AsyncIterator[Decide]:
    yield idempotent(CachePersistenceLayer(host="127.0.0.1", port=address.port, ssl=False))


@asynccontextmanager
async def dynamodb(address: Address) -> AsyncIterator[Decide]:
    client = table_client(address)
    yield idempotent(DynamoDBPersistenceLayer(address.name, boto3_client=client))
    client.close()
