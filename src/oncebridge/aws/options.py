"""Settings that all users of AWS have."""

from datetime import timedelta
from typing import Annotated

from msgspec import Struct

from oncebridge.base.options import Doc


class AwsOptions(Struct, frozen=True, kw_only=True):
    """The endpoint of calls, and their timeouts."""

    region: Annotated[
        str | None,
        Doc("The AWS Region; the default is that of the AWS configuration.", "eu-west-1"),
    ] = None
    profile: Annotated[
        str | None, Doc("The profile of the AWS configuration to use.", "production")
    ] = None
    endpoint: Annotated[
        str | None,
        Doc("Another URL to call, for a VPC endpoint or another server.", "http://localhost:8000"),
    ] = None
    timeout: Annotated[timedelta, Doc("How long to wait for a response.", "5s", at_least=0.001)] = (
        timedelta(seconds=5)
    )
    connect_timeout: Annotated[
        timedelta, Doc("How long connecting may take, within that.", "2s", at_least=0.001)
    ] = timedelta(seconds=2)


class AwsStoreOptions(AwsOptions, frozen=True, kw_only=True):
    """The same for a store, which also needs the time at AWS."""

    max_skew: Annotated[
        timedelta,
        Doc(
            "By how much this host's clock may differ from AWS's. A claim is taken over only this "
            "long after its end.",
            "2s",
            at_least=2,  # the dates of two responses may differ by that much
        ),
    ] = timedelta(seconds=2)
