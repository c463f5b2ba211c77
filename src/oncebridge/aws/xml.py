"""
Parse the XML responses of S3 and SNS with the standard library.

A response may come from another server: a proxy, a login page, a server that is not AWS. Raise
`Unclear` if it is not the expected document. A document type is refused before its content is
read, and with it every entity that could expand or refer to another file.
"""

from typing import Final
from xml.etree import ElementTree as ET

from oncebridge.http.client import Unclear

MOST_BYTES: Final = 8 << 20
"""The largest response is a list of 1000 names of up to 1024 bytes, percent-encoded."""


class _Builder(ET.TreeBuilder):
    def doctype(self, name: str, pubid: str, system: str) -> None:  # noqa: ARG002 - the parser's
        raise ValueError("it has a document type")


def document(body: bytes, root: str) -> ET.Element:
    """
    Return the root element of *body*, which must be *root*.

    Search in it with `{*}NAME`: some servers leave out the namespace.
    """
    found = _parsed(body)
    if found is None or _local(found) != root:
        raise Unclear(f"the response is not a {root}; check for a proxy in between")
    return found


def first_texts(body: bytes, *names: str) -> tuple[str, ...]:
    """Return the text of the first element of each name; empty if there is none."""
    found = _parsed(body)
    if found is None:
        return ("",) * len(names)
    return tuple(found.findtext(f".//{{*}}{name}", "").strip() for name in names)


def _parsed(body: bytes) -> ET.Element | None:
    if len(body) > MOST_BYTES:
        return None
    try:
        return ET.fromstring(body, ET.XMLParser(target=_Builder()))  # noqa: S314 - no entities
    except (ET.ParseError, LookupError, ValueError):  # the others: an unknown encoding
        return None


def _local(element: ET.Element) -> str:
    return element.tag.rpartition("}")[2]
