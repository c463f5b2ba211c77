"""
The permissions on AWS that a configuration needs, by its addresses and references.

Nothing is opened or requested, and no driver is needed.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from msgspec import Struct
from msgspec.structs import replace

from oncebridge.aws.s3_buckets import checked_prefix
from oncebridge.base.secrets import is_at_aws, mask_address, resolve_address
from oncebridge.errors import ConfigError
from oncebridge.service.addresses import as_table

ARN = re.compile(
    r"arn:(aws[a-z-]*):([a-z0-9]+):([a-z0-9-]*):(\d*):([A-Za-z0-9_.:/+=@,-]+)", re.ASCII
)
_QUEUE_URL = re.compile(
    r"https?://(?:[a-z0-9.-]*?sqs(?:-fips)?\.([a-z0-9-]+)\.(?:vpce\.)?(?:amazonaws\.com(?:\.cn)?|"
    r"api\.aws)|([a-z0-9-]+)\.queue\.amazonaws\.com|[^/]+)/(\d{12})/([^/]+)"
)
_NAMES = {
    "dynamodb": r"[A-Za-z0-9_.-]{3,255}",
    "elasticache": r"[A-Za-z][A-Za-z0-9-]{0,49}",
    "events": r"[A-Za-z0-9/_.-]{1,256}",
    "kinesis": r"[A-Za-z0-9_.-]{1,128}",
    "secretsmanager": r"[A-Za-z0-9/_+=.@-]{1,512}",
    "sns": r"[A-Za-z0-9_-]{1,256}(\.fifo)?",
    "sqs": r"[A-Za-z0-9_-]{1,80}(\.fifo)?",
    "ssm": r"[A-Za-z0-9/_.-]{1,1011}",
}
_BEFORE = {"dynamodb": "table/", "events": "event-bus/", "kinesis": "stream/"}
"""The text before the name in an ARN."""
_KINDS = {
    "source": ("kinesis", "sqs"),
    "store": ("dynamodb", "s3"),
    "sink": ("events", "kinesis", "sns", "sqs"),
    "dead": ("sqs",),
}


class Resource(Struct, frozen=True):
    """The parts of an ARN; an empty one is not known."""

    service: str
    name: str
    region: str = ""
    account: str = ""
    partition: str = ""


class Grant(Struct, frozen=True):
    """The actions of a backend on a resource; *what* is its name in `ACTIONS`."""

    what: str
    resource: Resource


def needed(table: Mapping[str, Any]) -> list[Grant]:
    """Return the grants that the configuration *table* needs; references are not resolved."""
    grants: list[Grant] = []
    for kind, where, written in _places(table):
        place = as_table(written)
        url = place.get("url") if isinstance(place, Mapping) else None
        if not isinstance(url, str):
            raise ConfigError(where, "must be an address, or a table with url and options")
        if not is_at_aws(url):  # those are reported below; where they lead is not known
            url = resolve_address(url, where)
            grants += _of_place(kind, url, place, where)
    return grants + [grant for text, where in _texts(table) for grant in _of_reference(text, where)]


def _places(table: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    for kind in _KINDS:
        given = table.get(kind)
        several = given if isinstance(given, list) else [given]
        for at, place in enumerate(several):
            if place is not None:
                yield kind, f"{kind}[{at}]" if isinstance(given, list) else kind, place
    routes = table.get("routes")
    for at, route in enumerate(routes if isinstance(routes, list) else []):
        if isinstance(route, Mapping) and "sink" in route:
            yield "sink", f"routes[{at}].sink", route["sink"]


def _of_place(kind: str, url: str, options: Mapping[str, Any], where: str) -> Iterator[Grant]:
    scheme, _, rest = url.partition(":")
    if kind == "store" and scheme in ("rediss", "rediss+cluster") and "iam_user" in options:
        yield from _of_cache(options, where)
    if scheme not in _KINDS[kind]:
        return
    what = f"{kind}.{scheme}"
    if scheme == "s3":
        yield from _of_bucket(what, rest, where)
        return
    found = _resource(scheme, rest, where)
    region = options.get("region")
    if isinstance(region, str) and not found.region:
        found = replace(found, region=_plain(region, where))
    yield Grant(what, found)
    consumer = options.get("fan_out")
    if scheme == "kinesis" and kind == "source" and isinstance(consumer, str):
        yield Grant(f"{what}.fan_out", found)
        # AWS assigns the number after the colon when the consumer is registered.
        name = f"{found.name}/consumer/{_named('kinesis', consumer, where)}:*"
        yield Grant(f"{what}.consumer", replace(found, name=name))


def _of_cache(options: Mapping[str, Any], where: str) -> Iterator[Grant]:
    """Yield the grants for a login at ElastiCache: the cache, and the user."""
    user = _named("elasticache", str(options["iam_user"]), where)
    cache = _named("elasticache", str(options.get("iam_cache", "")).lower(), where)
    region = _plain(str(options.get("iam_region", "")), where)
    is_serverless = str(options.get("iam_serverless", "")).lower() == "true"
    kind = "serverlesscache" if is_serverless else "replicationgroup"
    for name in (f"{kind}:{cache}", f"user:{user}"):
        yield Grant("store.redis", Resource("elasticache", name, region))


def _of_bucket(what: str, rest: str, where: str) -> Iterator[Grant]:
    bucket, _, prefix = rest.removeprefix("//").partition("?")[0].partition("/")
    try:
        prefix = checked_prefix(bucket, prefix)
    except ConfigError as error:
        raise ConfigError(where, error.message) from None
    yield Grant(what, Resource("s3", bucket))
    yield Grant(f"{what}.objects", Resource("s3", f"{bucket}/{prefix}*"))


def _of_reference(text: str, where: str) -> Iterator[Grant]:
    service, _, name = text.partition(":")
    if service == "secretsmanager":
        name = name.partition("#")[0]
    found = ARN.fullmatch(name)
    if found is not None:
        yield Grant(f"secret.{service}", of_arn(found))
    elif service == "ssm":
        # A version or a label may follow; both are allowed with the parameter.
        name = _named(service, name.partition(":")[0], where).removeprefix("/")
        yield Grant("secret.ssm", Resource("ssm", f"parameter/{name}"))
    else:
        # Secrets Manager adds a hyphen and six characters to the name.
        name = f"secret:{_named(service, name, where)}-??????"
        yield Grant("secret.secretsmanager", Resource("secretsmanager", name))


def _texts(value: Any, where: str = "") -> Iterator[tuple[str, str]]:
    """Yield every reference to AWS in *value*, with its setting."""
    if isinstance(value, str):
        if is_at_aws(value):
            yield value, where
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _texts(item, f"{where}.{name}" if where else str(name))
    elif isinstance(value, list):
        for at, item in enumerate(value):
            yield from _texts(item, f"{where}[{at}]")


def _resource(service: str, rest: str, where: str) -> Resource:
    """Read what follows `SCHEME:`: an ARN, the URL of a queue, or `//NAME?region=REGION`."""
    found = ARN.fullmatch(rest)
    if found is not None:
        if found[2] != service:
            raise ConfigError(where, f"{rest!r} is not an ARN of {service}")
        return of_arn(found)
    url = _QUEUE_URL.fullmatch(rest) if service == "sqs" else None
    if url is not None:
        return Resource("sqs", _named("sqs", url[4], where), url[1] or url[2] or "", url[3])
    try:
        parts = urlsplit(rest)
    except ValueError:
        parts = urlsplit("")
    name = _named(service, f"{parts.netloc}{parts.path}", where)
    region = dict(parse_qsl(parts.query)).get("region", "")
    return Resource(service, _BEFORE.get(service, "") + name, _plain(region, where))


def of_arn(found: re.Match[str]) -> Resource:
    partition, service, region, account, name = found.groups()
    return Resource(service, name, region, account, partition)


def _named(service: str, name: str, where: str) -> str:
    if not re.fullmatch(_NAMES[service], name, re.ASCII):
        raise ConfigError(where, f"{mask_address(name)!r} is not a name in {service}")
    return name


def _plain(region: str, where: str) -> str:
    if not re.fullmatch(r"[a-z0-9-]{0,30}", region, re.ASCII):
        raise ConfigError(where, f"{region!r} is not a Region")
    return region
