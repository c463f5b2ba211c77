"""Commands that fix a finding; every word is quoted for a shell."""

import shlex
from typing import Final
from urllib.parse import quote

from oncebridge.check.aws.account import AwsLocation

_SERVICES: Final = {"s3api": "s3"}


def aws(where: AwsLocation, service: str, *words: object) -> str:
    """Return a command of the AWS CLI for the Region, profile and endpoint of *where*."""
    given = ["aws", service, *map(str, words)]
    if where.region:
        given += ["--region", where.region]
    if where.profile:
        given += ["--profile", where.profile]
    if where.endpoint and where.service == _SERVICES.get(service, service):
        given += ["--endpoint-url", where.endpoint]
    return shlex.join(given)


def migrate(where: AwsLocation, scheme: str, name: str) -> str:
    """Return the command that creates a store."""
    address = f"{scheme}://{name}" + (f"?region={quote(where.region)}" if where.region else "")
    return shlex.join(["oncebridge", "migrate", "--store", address])
