"""Addresses of AWS resources with a name: a table, a queue, a stream, a bus."""

from urllib.parse import parse_qsl, urlsplit

from oncebridge.errors import ConfigError


def name_and_region(rest: str, region: str | None) -> tuple[str, str | None] | None:
    """
    Return the name and the Region of `//NAME` or `//NAME?region=REGION`.

    This is an address without its scheme. The Region comes from it or from the option
    *region*. Return None if it is another kind of address.
    """
    try:
        parts = urlsplit(rest)
    except ValueError:
        return None
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    own = query.pop("region", None)
    if parts.scheme or not parts.netloc or "@" in parts.netloc:
        return None
    if query or parts.path.strip("/") or parts.fragment:
        return None
    if own is not None and region not in (None, own):
        raise ConfigError("region", f"is {region}, but the address has {own}; remove one of them")
    return parts.netloc, own or region
