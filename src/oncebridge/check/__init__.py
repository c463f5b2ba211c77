"""`oncebridge check`: problems in settings, stores and the AWS account, and `oncebridge test`."""
