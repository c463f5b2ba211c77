"""The DynamoDB store."""

from oncebridge.stores.dynamodb.store import DynamoDBOptions, DynamoDBStore

__all__ = ["DynamoDBOptions", "DynamoDBStore"]
