"""Read the lifecycle rules of a bucket, and add ours."""

import base64
from collections.abc import Iterator
from hashlib import md5
from typing import Final
from xml.etree import ElementTree as ET

from oncebridge.aws.client import AwsClient, AwsError
from oncebridge.aws.s3_buckets import Expiry
from oncebridge.aws.xml import document

_NAMESPACE: Final = "http://s3.amazonaws.com/doc/2006-03-01/"
_TRANSITIONS: Final = "x-amz-transition-default-minimum-object-size"
"""A setting for all rules of the bucket; S3 resets it when rules are written without it."""

ET.register_namespace("", _NAMESPACE)  # writes rules without a prefix, as the SDK does


async def expiries(client: AwsClient, prefix: str) -> list[Expiry]:
    """Return the active rules that remove objects under *prefix*."""
    found, _ = await _read(client)
    return [
        rule
        for rule in _rules(found)
        if prefix.startswith(rule.prefix) or rule.prefix.startswith(prefix)
    ]


async def write_expiry(client: AwsClient, expiry: Expiry) -> bool:
    """Write *expiry*, in place of a rule with its id; return False if it exists already."""
    found, headers = await _read(client)
    if expiry in _rules(found):
        return False
    for rule in found.findall("{*}Rule"):
        if _text(rule, "{*}ID") == expiry.id:
            found.remove(rule)
    found.append(_rule(expiry))
    body = ET.tostring(found)
    digest = base64.b64encode(md5(body, usedforsecurity=False).digest()).decode()
    headers = [*headers, ("content-md5", digest)]
    await client.request("PUT", query=[("lifecycle", "")], headers=headers, body=body)
    return True


async def _read(client: AwsClient) -> tuple[ET.Element, list[tuple[str, str]]]:
    """Return the rules, and the headers to write them with so that nothing else changes."""
    try:
        answer = await client.request("GET", query=[("lifecycle", "")])
    except AwsError as error:
        if error.code == "NoSuchLifecycleConfiguration":
            return ET.Element(f"{{{_NAMESPACE}}}LifecycleConfiguration"), []
        raise
    transitions = answer.headers.get(_TRANSITIONS.encode(), b"").decode("latin-1")
    found = document(answer.body, "LifecycleConfiguration")
    return found, [(_TRANSITIONS, transitions)] if transitions else []


def _rules(configuration: ET.Element) -> Iterator[Expiry]:
    for rule in configuration.findall("{*}Rule"):
        days = _number(_text(rule, "{*}Expiration/{*}Days"))
        if _text(rule, "{*}Status") != "Enabled" or days is None:
            continue
        if rule.find(".//{*}Tag") is not None:
            continue  # our objects have no tags
        below = _number(_text(rule, ".//{*}ObjectSizeLessThan"))
        prefix = _text(rule, ".//{*}Prefix")
        yield Expiry(_text(rule, "{*}ID"), prefix, days, below)


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
    # If the bucket keeps versions, old ones are removed soon.
    _add(_add(rule, "NoncurrentVersionExpiration"), "NoncurrentDays", "1")
    return rule


def _text(element: ET.Element, path: str) -> str:
    return (element.findtext(path) or "").strip()


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() and len(text) < 19 else None


def _add(element: ET.Element, name: str, text: str | None = None) -> ET.Element:
    added = ET.SubElement(element, f"{{{_NAMESPACE}}}{name}")
    added.text = text
    return added
