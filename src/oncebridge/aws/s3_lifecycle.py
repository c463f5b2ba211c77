"""The lifecycle rules of a bucket: which there are, and how ours gets among them."""

import base64
from collections.abc import Iterator
from hashlib import md5
from typing import Final
from xml.etree import ElementTree as ET

from oncebridge.aws.client import AwsClient, AwsError
from oncebridge.aws.s3_rule import Expiry
from oncebridge.errors import StoreError

_NAMESPACE: Final = "http://s3.amazonaws.com/doc/2006-03-01/"


async def expiries(client: AwsClient, prefix: str) -> list[Expiry] | None:
    """List the rules in force that remove any objects under *prefix*; None if that is not told."""
    try:
        document = await _read(client)
    except AwsError as error:
        if error.retryable:
            raise
        return None
    return [
        rule
        for rule in _rules(document)
        if prefix.startswith(rule.prefix) or rule.prefix.startswith(prefix)
    ]


async def write_expiry(client: AwsClient, expiry: Expiry) -> bool:
    """Put *expiry* among the rules, in the place of one with its id; False if it is there."""
    document = await _read(client)
    if expiry in _rules(document):
        return False
    for rule in _elements(document, "Rule"):
        if _text(rule, "ID") == expiry.id:
            document.remove(rule)
    document.append(_rule(expiry))
    body = ET.tostring(document)
    digest = base64.b64encode(md5(body, usedforsecurity=False).digest()).decode()
    await client.request(
        "PUT", query=[("lifecycle", "")], headers=[("content-md5", digest)], body=body
    )
    return True


async def _read(client: AwsClient) -> ET.Element:
    try:
        answer = await client.request("GET", query=[("lifecycle", "")])
    except AwsError as error:
        if error.code == "NoSuchLifecycleConfiguration":
            return ET.Element(f"{{{_NAMESPACE}}}LifecycleConfiguration")
        raise
    try:
        return ET.fromstring(answer.body)  # noqa: S314 - the parser limits how far it expands
    except ET.ParseError as error:
        raise StoreError(f"the bucket's lifecycle rules cannot be read ({error})") from None


def _rules(document: ET.Element) -> list[Expiry]:
    found = []
    for rule in _elements(document, "Rule"):
        days = [_text(expiration, "Days") for expiration in _elements(rule, "Expiration")]
        if _text(rule, "Status") != "Enabled" or not days or not days[0].isdecimal():
            continue
        if next(rule.iter(_named(rule, "Tag")), None) is not None:
            continue  # our objects have no tags
        below = _inside(rule, "ObjectSizeLessThan")
        found.append(
            Expiry(
                _text(rule, "ID"),
                _inside(rule, "Prefix"),
                int(days[0]),
                int(below) if below.isdecimal() else None,
            )
        )
    return found


def _rule(expiry: Expiry) -> ET.Element:
    rule = ET.Element(f"{{{_NAMESPACE}}}Rule")
    _add(rule, "ID", expiry.id)
    conditions = {"Prefix": expiry.prefix} if expiry.prefix else {}
    if expiry.below is not None:
        conditions["ObjectSizeLessThan"] = str(expiry.below)
    where = _add(rule, "Filter")
    if len(conditions) > 1:
        where = _add(where, "And")
    for name, value in conditions.items():
        _add(where, name, value)
    _add(rule, "Status", "Enabled")
    _add(_add(rule, "Expiration"), "Days", str(expiry.days))
    # Where the bucket keeps versions, those that were replaced go soon.
    _add(_add(rule, "NoncurrentVersionExpiration"), "NoncurrentDays", "1")
    return rule


# --- XML, with or without its namespace ---------------------------------------------------


def _named(element: ET.Element, name: str) -> str:
    namespace, brace, _ = element.tag.rpartition("}")
    return f"{namespace}{brace}{name}"


def _elements(element: ET.Element, name: str) -> list[ET.Element]:
    return element.findall(_named(element, name))


def _text(element: ET.Element, name: str) -> str:
    return (element.findtext(_named(element, name)) or "").strip()


def _inside(element: ET.Element, name: str) -> str:
    """Give the text of *name*, however deep it stands."""
    found: Iterator[ET.Element] = element.iter(_named(element, name))
    return next((one.text or "" for one in found), "").strip()


def _add(element: ET.Element, name: str, text: str | None = None) -> ET.Element:
    added = ET.SubElement(element, f"{{{_NAMESPACE}}}{name}")
    added.text = text
    return added
