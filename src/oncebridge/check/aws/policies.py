"""
Evaluate the policy of a queue by its text.

It answers whether a rule of EventBridge may send, and who else may. None means that a condition
cannot be evaluated.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, Final

EVENTS: Final = "events.amazonaws.com"
_TESTS: Final = re.compile(
    r"(?:ForAnyValue:)?(Arn|String|Bool)(Not)?(Equals|Like)?(IgnoreCase)?(?:IfExists)?"
)
_ALWAYS: Final = {
    "aws:securetransport": "true",
    "aws:principalisawsservice": "true",
    "aws:principalservicename": EVENTS,
}
"""Condition keys that are the same whenever EventBridge sends."""


def statements(policy: str) -> list[Mapping[str, Any]]:
    """Return the statements of a policy; none if it is empty or not readable."""
    try:
        found = json.loads(policy) if policy else {}
    except ValueError:
        return []
    several = _listed(found.get("Statement")) if isinstance(found, dict) else []
    return [one for one in several if isinstance(one, dict)]


def lets_send(policy: str, *, rule: str, queue: str) -> bool | None:
    """Return whether EventBridge may send to *queue* on behalf of *rule*; None: it depends."""
    known = {**_ALWAYS, "aws:sourcearn": rule, "aws:sourceaccount": _account(rule)}
    allowed: set[bool | None] = set()
    denied: set[bool | None] = set()
    for one in statements(policy):
        is_named = _names(one, EVENTS)
        if is_named is not False and _covers(one, "sqs:SendMessage", queue):
            holds = _all_of([is_named, _holds(one.get("Condition"), known)])
            (denied if one.get("Effect") == "Deny" else allowed).add(holds)
    if True in denied or not allowed - {False}:
        return False
    # One statement that allows is enough; one that may deny cannot be ignored.
    return True if True in allowed and None not in denied else None


def lets_principal(policy: str, *, arn: str, action: str, resource: str) -> bool:
    """
    Return whether the policy alone allows it to the user or role *arn*, without conditions.

    A statement for an account or its root only delegates to IAM; and for a queue of another
    account, the policy alone is not enough.
    """
    return _account(arn) == _account(resource) and any(
        one.get("Effect") == "Allow"
        and not one.get("Condition")
        and _covers(one, action, resource)
        and arn in _principals(one, "AWS")
        for one in statements(policy)
    )


def open_to_all(policy: str) -> list[str]:
    """Return the actions that everyone is allowed, without a condition."""
    return sorted(
        {
            action
            for one in statements(policy)
            if one.get("Effect") == "Allow"
            and not one.get("Condition")
            and "*" in [*_principals(one, "AWS"), *_principals(one, "*")]
            for action in _listed(one.get("Action"))
        }
    )


# --- parts of a statement -------------------------------------------------------------------


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _account(arn: str) -> str:
    parts = arn.split(":")
    return parts[4] if len(parts) > 4 else ""


def _principals(one: Mapping[str, Any], kind: str) -> Iterator[str]:
    """Yield the principals of a *kind*; for `*`, those of a plain string."""
    named = one.get("Principal")
    if isinstance(named, dict):
        yield from map(str, _listed(named.get(kind)))
    elif kind == "*":
        yield from map(str, _listed(named))


def _names(one: Mapping[str, Any], service: str) -> bool | None:
    """Return whether a statement names a service; None for a `NotPrincipal` without it."""
    if "NotPrincipal" in one:
        named = one["NotPrincipal"]
        spared = _listed(named.get("Service")) if isinstance(named, dict) else []
        return False if service in spared else None
    # {"AWS": "*"} is another way to write "*", which is everyone.
    principals = [*_principals(one, "*"), *_principals(one, "AWS"), *_principals(one, "Service")]
    return service in _principals(one, "Service") or "*" in principals


def _covers(one: Mapping[str, Any], action: str, resource: str) -> bool:
    actions = {
        name: [str(text).lower() for text in _listed(one.get(name))]
        for name in ("Action", "NotAction")
    }
    is_meant = _any_like(action.lower(), actions["Action"]) or (
        "NotAction" in one and not _any_like(action.lower(), actions["NotAction"])
    )
    if "NotResource" in one:
        return is_meant and not _any_like(resource, map(str, _listed(one["NotResource"])))
    return is_meant and _any_like(resource, map(str, _listed(one.get("Resource"))))


def _any_like(text: str, patterns: Iterable[str]) -> bool:
    return any(_like(text, pattern) for pattern in patterns)


def _like(text: str, pattern: str) -> bool:
    # IAM knows * and ? only
    return fnmatchcase(text, pattern.replace("[", "[[]"))


def _holds(condition: Any, known: Mapping[str, str]) -> bool | None:
    """Return whether a condition holds; None if it depends on something that is not *known*."""
    if not condition:
        return True
    if not isinstance(condition, dict):
        return None
    answers: list[bool | None] = []
    for test, wanted in condition.items():
        form = _TESTS.fullmatch(test)
        for name, values in wanted.items() if isinstance(wanted, dict) else [("", None)]:
            text = known.get(str(name).lower())
            if form is None or text is None:
                answers.append(None)
                continue
            given = [str(value) for value in _listed(values)]
            if form[4] or form[1] == "Bool":
                text, given = text.lower(), [one.lower() for one in given]
            # ArnEquals and ArnLike do the same
            is_exact = form[1] == "Bool" or (form[1] == "String" and form[3] == "Equals")
            answers.append(bool(form[2]) ^ (text in given if is_exact else _any_like(text, given)))
    return _all_of(answers)


def _all_of(answers: Iterable[bool | None]) -> bool | None:
    """Return whether all hold; None if that depends on one that is not known."""
    several = set(answers)
    if False in several:
        return False
    return None if None in several else True
