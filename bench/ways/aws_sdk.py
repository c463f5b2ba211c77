"""DynamoDB and S3 with boto3 and nothing else."""

import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import ClientError
from traffic import IGNORED, naive_key

from ways import LEASE_S, REGION, WINDOW_S, Address, Decide


def table_client(address: Address) -> Any:
    """Give a client, and see to it that there is a table."""
    client = boto3.client("dynamodb", endpoint_url=address.endpoint, region_name=REGION)
    if address.name not in client.list_tables()["TableNames"]:
        client.create_table(
            TableName=address.name,
            AttributeDefinitions=[{"AttributeName": "id", "AttributeType": "S"}],
            KeySchema=[{"AttributeName": "id", "KeyType": "HASH"}],
            BillingMode="PAY_PER_REQUEST",
        )
        client.get_waiter("table_exists").wait(TableName=address.name)
    return client


@asynccontextmanager
async def single_dynamodb(address: Address) -> AsyncIterator[Decide]:
    client = table_client(address)

    def claim(key: str) -> bool:
        until = {"N": str(int(time.time()) + LEASE_S)}
        try:
            client.put_item(
                TableName=address.name,
                Item={"id": {"S": key}, "until": until, "done": {"BOOL": False}},
                ConditionExpression="attribute_not_exists(id)",
            )
        except client.exceptions.ConditionalCheckFailedException:
            return False
        return True

    def commit(key: str) -> None:
        client.update_item(
            TableName=address.name,
            Key={"id": {"S": key}},
            UpdateExpression="SET done = :done, #until = :until",
            ExpressionAttributeNames={"#until": "until"},
            ExpressionAttributeValues={
                ":done": {"BOOL": True},
                ":until": {"N": str(int(time.time()) + WINDOW_S)},
            },
        )

    async def decide(batch: list[bytes]) -> int:
        duplicates = 0
        for raw in batch:
            key = naive_key(raw, IGNORED)
            if claim(key):
                commit(key)
            else:
                duplicates += 1
        return duplicates

    yield decide
    client.close()


@asynccontextmanager
async def floor_dynamodb(address: Address) -> AsyncIterator[Decide]:
    client = table_client(address)
    claim = f"INSERT INTO \"{address.name}\" VALUE {{'id': ?, 'until': ?, 'done': ?}}"
    commit = f'UPDATE "{address.name}" SET "done" = ? SET "until" = ? WHERE "id" = ?'

    def tell(statement: str, items: list[list[Any]]) -> list[Any]:
        answers: list[Any] = []
        for at in range(0, len(items), 25):
            answers += client.batch_execute_statement(
                Statements=[
                    {"Statement": statement, "Parameters": item} for item in items[at : at + 25]
                ]
            )["Responses"]
        return answers

    async def decide(keys: list[bytes]) -> int:
        lease = {"N": str(int(time.time()) + LEASE_S)}
        ids = [{"S": key.hex()} for key in keys]
        answers = tell(claim, [[name, lease, {"BOOL": False}] for name in ids])
        held = [name for name, answer in zip(ids, answers, strict=True) if "Error" not in answer]
        window = {"N": str(int(time.time()) + WINDOW_S)}
        tell(commit, [[{"BOOL": True}, window, name] for name in held])
        return len(keys) - len(held)

    yield decide
    client.close()


def s3_one_by_one(address: Address) -> tuple[Any, Callable[[str], bool]]:
    """Give a client, and a function that claims a key and commits it."""
    client = boto3.client(
        "s3",
        endpoint_url=address.endpoint,
        region_name=REGION,
        config=Config(max_pool_connections=32, s3={"addressing_style": "path"}),
    )

    def put(key: str) -> bool:
        lease = b"%d" % (time.time() + LEASE_S)
        try:
            made = client.put_object(Bucket=address.name, Key=key, Body=lease, IfNoneMatch="*")
        except ClientError as error:
            if error.response["Error"]["Code"] not in ("PreconditionFailed", "412"):
                raise
            return False
        window = b"done %d" % (time.time() + WINDOW_S)
        client.put_object(Bucket=address.name, Key=key, Body=window, IfMatch=made["ETag"])
        return True

    return client, put


@asynccontextmanager
async def single_s3(address: Address) -> AsyncIterator[Decide]:
    client, put = s3_one_by_one(address)

    async def decide(batch: list[bytes]) -> int:
        return sum(not put(naive_key(raw, IGNORED)) for raw in batch)

    yield decide
    client.close()


@asynccontextmanager
async def floor_s3(address: Address) -> AsyncIterator[Decide]:
    """There are no batches on S3, so a batch is many requests at once, in threads."""
    client, put = s3_one_by_one(address)

    async def decide(keys: list[bytes]) -> int:
        return sum(not won for won in threads.map(put, [key.hex() for key in keys]))

    with ThreadPoolExecutor(32) as threads:
        yield decide
    client.close()
