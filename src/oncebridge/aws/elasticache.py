"""
IAM tokens for logging in to ElastiCache without a password.

A token is a signed URL that is never requested, valid for 15 minutes. A new one is signed for
each connection, which needs no call. ElastiCache ends a connection 12 hours after its last login.
"""

import re
from datetime import timedelta
from typing import Final

from oncebridge.aws.account import Account, SampleCall
from oncebridge.aws.signing import AwsCredentials, Signer
from oncebridge.base.clock import Clock, system_clock
from oncebridge.errors import ConfigError

LOGIN_EVERY: Final = timedelta(hours=6)
"""Half of what ElastiCache allows, so that there is time for retries."""
_VALID_S: Final = 900
_CACHE: Final = re.compile(r"[A-Za-z][A-Za-z0-9-]{0,49}")


class IamCredentials:
    """Logs in as *user* at the cache named *cache*, with the AWS credentials of this host."""

    def __init__(
        self,
        user: str,
        cache: str,
        *,
        region: str | None = None,
        serverless: bool = False,
        clock: Clock = system_clock,
    ) -> None:
        if not _CACHE.fullmatch(cache):
            raise ConfigError(
                "iam_cache",
                f"{cache!r} is not the name of a cache; write the ID of the replication group or "
                "the name of the serverless cache, not its address",
            )
        self._user = user
        self._cache = cache.lower()
        self._asked = [("Action", "connect"), ("User", user)]
        self._asked += [("ResourceType", "ServerlessCache")] if serverless else []
        self._clock = clock
        self._account = Account(SampleCall("elasticache", "describe_users", {}), region=region)
        self._credentials: AwsCredentials | None = None
        self._signer: Signer | None = None

    async def login(self) -> tuple[str, str]:
        """Return the user and a new token."""
        return await self._signed_by(await self._account.credentials())

    async def login_again(self) -> tuple[str, str]:
        """Return the user and a token of newly found credentials: the last were refused."""
        if self._credentials is None:
            return await self.login()
        return await self._signed_by(await self._account.renewed_credentials(self._credentials))

    async def _signed_by(self, credentials: AwsCredentials) -> tuple[str, str]:
        if self._signer is None:
            self._signer = Signer("elasticache", await self._account.region())
        self._credentials = credentials
        token = self._signer.presigned(
            self._cache, self._asked, credentials, self._clock(), valid_s=_VALID_S
        )
        return self._user, token

    def close(self) -> None:
        """Cancel the search for credentials."""
        self._account.close()
