"""The options of the Redis store, and their checks."""

import ssl
from datetime import timedelta
from typing import Annotated

from msgspec import Struct

from oncebridge.base.options import Doc
from oncebridge.base.secrets import Secret
from oncebridge.errors import ConfigError
from oncebridge.stores.redis.address import RedisAddress
from oncebridge.stores.redis.connection import reason_of


class RedisOptions(Struct, frozen=True, kw_only=True):
    """Options of the Redis store."""

    prefix: Annotated[
        str,
        Doc(
            "The prefix of all keys in Redis; a colon follows it. Stores with different prefixes "
            "are separate.",
            "orders",
        ),
    ] = "ob"
    timeout: Annotated[
        timedelta, Doc("How long to wait for a reply before the connection is closed.", "5s")
    ] = timedelta(seconds=5)
    connect_timeout: Annotated[
        timedelta, Doc("How long connecting may take, including TLS and login.", "2s")
    ] = timedelta(seconds=3)
    connections: Annotated[
        int,
        Doc("How many connections to open to each server at most.", "2", at_least=1, at_most=64),
    ] = 4
    wait_replicas: Annotated[
        int, Doc("How many replicas must confirm a commit before it counts.", "1", at_least=0)
    ] = 0
    wait_timeout: Annotated[
        timedelta, Doc("How long to wait for those replicas; keep it below timeout.", "500ms")
    ] = timedelta(seconds=1)
    ca_file: Annotated[
        str | None,
        Doc(
            "PEM file of the certificate authorities to trust instead of the system's.",
            "/etc/oncebridge/ca.pem",
        ),
    ] = None
    cert_file: Annotated[
        str | None,
        Doc(
            "PEM file of the client certificate, for servers that ask for one.",
            "/etc/oncebridge/client.pem",
        ),
    ] = None
    key_file: Annotated[
        str | None,
        Doc(
            "PEM file of the private key of cert_file, if it is not in the same file.",
            "/etc/oncebridge/client.key",
        ),
    ] = None
    tls_name: Annotated[
        str | None,
        Doc(
            "The name in the servers' certificates, if it is not the host of the address "
            "(Sentinel and clusters often report IP addresses).",
            "redis.example.com",
        ),
    ] = None
    sentinel_user: Annotated[
        str | None, Doc("The user for the Sentinels; the address has that for Redis.", "watcher")
    ] = None
    sentinel_password: Annotated[
        Secret | None,
        Doc("The password for the Sentinels, if any.", example="env:SENTINEL_PASSWORD"),
    ] = None
    iam_user: Annotated[
        str | None,
        Doc(
            "ElastiCache: the user to log in as, with AWS credentials instead of a password.",
            "oncebridge",
        ),
    ] = None
    iam_cache: Annotated[
        str | None,
        Doc(
            "ElastiCache: the ID of the replication group, or the name of the serverless cache.",
            "orders",
        ),
    ] = None
    iam_region: Annotated[
        str | None,
        Doc("ElastiCache: its Region, if not that of the AWS configuration.", "eu-west-1"),
    ] = None
    iam_serverless: Annotated[
        bool, Doc("ElastiCache: set to true if the cache is serverless.", "true")
    ] = False


def check(options: RedisOptions, address: RedisAddress) -> None:
    """Raise `ConfigError` for options that cannot work with *address*."""
    if not options.prefix or ":" in options.prefix:
        raise ConfigError("prefix", "must not be empty or contain a colon")
    for option in ("ca_file", "cert_file", "key_file", "tls_name"):
        value = getattr(options, option)
        if value is not None and not address.is_tls:
            raise ConfigError(option, "is for TLS, but the address does not start with rediss")
        if value == "":
            raise ConfigError(option, "is empty; set or remove it")
    if options.key_file is not None and options.cert_file is None:
        raise ConfigError("key_file", "needs cert_file, the certificate of the key")
    for option in ("sentinel_user", "sentinel_password"):
        if getattr(options, option) is not None and address.kind != "sentinel":
            raise ConfigError(option, "is for redis+sentinel:// only")
    _check_iam(options, address)
    _check_times(options)


def _check_iam(options: RedisOptions, address: RedisAddress) -> None:
    if options.iam_user is None:
        for option in ("iam_cache", "iam_region", "iam_serverless"):
            if getattr(options, option):
                raise ConfigError(option, "needs iam_user, the user to log in as")
        return
    if options.iam_cache is None:
        raise ConfigError("iam_user", "needs iam_cache, the name of the cache")
    if not address.is_tls or address.kind == "sentinel":
        raise ConfigError(
            "iam_user",
            "ElastiCache accepts AWS credentials over TLS only; the address must start with "
            "rediss:// or rediss+cluster://",
        )
    if address.password is not None:
        raise ConfigError("iam_user", "replaces the user and password in the address; remove those")


def _check_times(options: RedisOptions) -> None:
    for option in ("timeout", "connect_timeout", "wait_timeout"):
        if getattr(options, option) < timedelta(milliseconds=1):
            raise ConfigError(option, "must be at least 1ms")
    if options.wait_replicas and options.wait_timeout >= options.timeout:
        raise ConfigError("wait_timeout", "must be shorter than timeout")


def tls_context(options: RedisOptions) -> ssl.SSLContext:
    """Return the TLS context; raise `ConfigError` that names a file that cannot be used."""
    try:
        context = ssl.create_default_context(cafile=options.ca_file)
    except (OSError, ValueError) as error:
        raise ConfigError("ca_file", _unusable(options.ca_file, error)) from None
    if options.cert_file is not None:
        try:
            # Without a password OpenSSL would ask for one on the terminal and wait.
            context.load_cert_chain(options.cert_file, options.key_file, password="")
        except (OSError, ValueError) as error:
            files = " with ".join(filter(None, (options.cert_file, options.key_file)))
            raise ConfigError("cert_file", _unusable(files, error)) from None
    return context


def _unusable(files: str | None, error: Exception) -> str:
    return f"{files} cannot be used: {reason_of(error)}"
