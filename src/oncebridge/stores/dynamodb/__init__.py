"""The DynamoDB store."""

from oncebridge.stores.dynamodb.store import DynamoDBStore

__all__ = ["DynamoDBStore"]
