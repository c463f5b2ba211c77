"""Addresses of what AWS knows by a name: a table, a queue, a stream, a bus."""

from urllib.parse import parse_qsl, urlsplit

from oncebridge.errors import ConfigError


def name_and_region(rest: str, region: str | None) -> tuple[str, str | None] | None:
    """
    Read `//NAME` or `//NAME?region=REGION`, what an address has behind its scheme.

    Gives the name, and the Region that it or the option *region* says; None where it is
    something else.
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
        raise ConfigError("region", f"the address says {own}")
    return parts.netloc, own or region
