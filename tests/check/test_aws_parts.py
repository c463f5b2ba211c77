"""Patterns, inputs and policies: what can be proved of them, without any server."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from oncebridge.check.aws import CODES
from oncebridge.check.aws.inputs import sent_input
from oncebridge.check.aws.patterns import Overlap, RulePattern, overlap
from oncebridge.check.aws.policies import lets_principal, lets_send, open_to_all

ROOT = Path(__file__).parents[2]
QUEUE = "arn:aws:sqs:eu-west-1:111122223333:in"
RULE = "arn:aws:events:eu-west-1:111122223333:rule/bus/rule"
SAME, WITHIN, AROUND = Overlap.SAME, Overlap.WITHIN, Overlap.AROUND
PERHAPS, NEVER = Overlap.PERHAPS, Overlap.NEVER
A = {"source": ["a"]}


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (A, A, SAME),
        ({"source": ["a", "b"]}, {"source": ["b", "a"]}, SAME),
        (A, {}, WITHIN),
        (A, {"source": ["a", "b"]}, WITHIN),
        (A, A | {"detail-type": ["t"]}, AROUND),
        ({"source": ["abc"]}, {"source": [{"prefix": "ab"}]}, WITHIN),
        ({"source": [{"prefix": "abc"}]}, {"source": [{"prefix": "ab"}]}, WITHIN),
        ({"detail": {"x": [1]}}, {"detail": {"x": [1, 2]}}, WITHIN),
        (A, {"source": ["b"]}, NEVER),
        (A, {"source": [{"prefix": "b"}]}, NEVER),
        ({"source": [{"prefix": "a"}]}, {"source": [{"prefix": "b"}]}, NEVER),
        ({"detail": {"x": {"y": ["1"]}}}, {"detail": {"x": {"y": ["2"]}}}, PERHAPS),  # [1, 2]
        ({"resources": ["a"]}, {"resources": ["b"]}, PERHAPS),
        ({"resources": ["a"]}, {"resources": ["a", "b"]}, WITHIN),
        ({"detail": {"x": ["1"]}}, {"detail": {"x": [{"exists": False}]}}, NEVER),
        ({"detail": {"x": ["1"]}}, {"detail": {"x": [{"exists": False}, "2"]}}, PERHAPS),
        ({"detail": {"x": ["1"]}}, {"detail": {"x": [{"anything-but": "1"}]}}, PERHAPS),
        (A, {"source": [{"anything-but": ["b", "c"]}]}, WITHIN),
        (A, {"source": [{"anything-but": {"prefix": "a"}}]}, NEVER),
        ({"source": [{"prefix": "ab"}]}, {"source": [{"anything-but": {"prefix": "a"}}]}, NEVER),
        ({"source": [{"prefix": "a"}]}, {"source": [{"anything-but": "a"}]}, PERHAPS),
        ({"source": [{"anything-but": "a"}]}, {"source": [{"anything-but": "b"}]}, PERHAPS),
        (A, {"source": [{"anything-but": {"suffix": "a"}}]}, PERHAPS),
        (A | {"$or": [{"x": [1]}]}, {"source": ["b"]}, NEVER),
        (A, {"detail-type": ["t"]}, PERHAPS),
        (A, {"source": [{"suffix": "b"}]}, PERHAPS),
        (A, {"source": [{"anything-but": "a"}]}, NEVER),
        (A, A | {"$or": [{"x": [1]}, {"y": [1]}]}, PERHAPS),
        ({"detail": {"n": [{"numeric": [">", 0]}]}}, {"detail": {"n": [5]}}, PERHAPS),
        (
            {"detail": {"n": [{"numeric": [">", 0, "<", 5]}]}},
            {"detail": {"n": [{"numeric": ["<", 0, ">", 5]}]}},
            PERHAPS,
        ),
    ],
)
def test_what_two_patterns_have_in_common(one: Any, other: Any, expected: Overlap) -> None:
    first, second = RulePattern.of(one), RulePattern.of(other)
    assert overlap(first, second) is expected
    mirrored = {WITHIN: AROUND, AROUND: WITHIN}
    assert overlap(second, first) is mirrored.get(expected, expected)


@pytest.mark.parametrize(
    ("target", "bare", "is_event", "lost"),
    [
        ({}, False, True, ()),
        ({"InputPath": "$"}, False, True, ()),
        ({"InputPath": "$.detail"}, False, False, ()),
        ({"InputPath": "$.detail.eventBody"}, False, False, ()),
        ({"InputPath": "$.detail.eventBody"}, True, True, "detail"),
        ({"Input": '{"detail": {}}'}, False, False, ()),
        ({"InputTransformer": {"InputTemplate": "<aws.events.event>"}}, False, False, ()),
        ({"InputTransformer": {"InputTemplate": "<aws.events.event.json>"}}, False, True, ()),
        ({"InputTransformer": {"InputTemplate": '"something happened"'}}, False, False, ()),
        (
            {
                "InputTransformer": {
                    "InputPathsMap": {"i": "$.id", "d": "$.detail"},
                    "InputTemplate": '{"id": "<i>", "detail": <d>}',
                }
            },
            False,
            True,
            "source",
        ),
        (
            {
                "InputTransformer": {
                    "InputPathsMap": {"c": "$.detail.eventBody.conversationId"},
                    "InputTemplate": '{"detail": {"conversation": "<c>"}}',
                }
            },
            False,
            True,
            "detail",
        ),
    ],
)
def test_what_a_target_sends(
    target: dict[str, Any], *, bare: bool, is_event: bool, lost: str | tuple[str, ...]
) -> None:
    sent = sent_input(target, bare=bare)
    assert sent.is_event is is_event
    if lost:
        assert lost in sent.lost
    else:
        assert sent.lost == ()


def policy(**changes: Any) -> str:
    statement = {
        "Effect": "Allow",
        "Principal": {"Service": "events.amazonaws.com"},
        "Action": "sqs:SendMessage",
        "Resource": QUEUE,
    }
    return json.dumps({"Statement": statement | changes})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", False),
        ("not JSON", False),
        ("[]", False),
        (policy(), True),
        (policy(Effect="Deny"), False),
        (policy(Principal="*"), True),
        (policy(Principal={"AWS": "*"}), True),
        (policy(Principal={"Service": "sns.amazonaws.com"}), False),
        (policy(Action="sqs:*"), True),
        (policy(Action=["SQS:sendmessage"]), True),
        (policy(Action="sqs:ReceiveMessage"), False),
        (policy(Resource="arn:aws:sqs:*:*:*"), True),
        (policy(Resource=f"{QUEUE}-other"), False),
        (policy(Condition={"ArnEquals": {"aws:SourceArn": RULE}}), True),
        (policy(Condition={"ArnLike": {"AWS:SourceArn": f"{RULE[:-4]}*"}}), True),
        (policy(Condition={"StringEquals": {"aws:SourceArn": f"{RULE[:-4]}*"}}), False),
        (policy(Condition={"ArnEquals": {"aws:SourceArn": f"{RULE}-other"}}), False),
        (policy(Condition={"StringEquals": {"aws:SourceAccount": "111122223333"}}), True),
        (policy(Condition={"StringEquals": {"aws:SourceAccount": "444455556666"}}), False),
        (policy(Condition={"Bool": {"aws:SecureTransport": "true"}}), True),
        (policy(Condition={"Bool": {"aws:SecureTransport": "false"}}), False),
        (policy(Condition={"StringNotEquals": {"aws:SourceAccount": "111122223333"}}), False),
        (policy(Condition={"StringEquals": {"aws:PrincipalOrgID": "o-invented"}}), None),
        (policy(Condition={"Null": {"aws:SourceArn": "false"}}), None),
        (policy(Condition="odd"), None),
    ],
)
def test_whether_a_rule_may_send(text: str, *, expected: bool | None) -> None:
    assert lets_send(text, rule=RULE, queue=QUEUE) is expected


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"Effect": "Deny"}, False),
        ({"Effect": "Deny", "Action": None, "NotAction": "sqs:ReceiveMessage"}, False),
        ({"Effect": "Deny", "Action": None, "NotAction": "sqs:Send*"}, True),
        ({"Effect": "Deny", "Resource": None, "NotResource": f"{QUEUE}-other"}, False),
        ({"Effect": "Deny", "Resource": None, "NotResource": QUEUE}, True),
        (
            {
                "Effect": "Deny",
                "Principal": "*",
                "Action": "sqs:*",
                "Condition": {"Bool": {"aws:SecureTransport": "false"}},
            },
            True,
        ),
        (
            {
                "Effect": "Deny",
                "Principal": "*",
                "Condition": {
                    "StringNotEquals": {"aws:PrincipalOrgID": "o-invented"},
                    "BoolIfExists": {"aws:PrincipalIsAWSService": "false"},
                },
            },
            True,
        ),
        ({"Effect": "Deny", "Condition": {"IpAddress": {"aws:SourceIp": "192.0.2.0/24"}}}, None),
        ({"Principal": "*", "Condition": {"StringEquals": {"aws:PrincipalOrgID": "o-1"}}}, True),
        (
            {
                "Effect": "Deny",
                "Principal": None,
                "NotPrincipal": {"Service": "events.amazonaws.com"},
            },
            True,
        ),
        ({"Effect": "Deny", "Principal": None, "NotPrincipal": {"AWS": "444455556666"}}, None),
    ],
)
def test_a_second_statement(change: dict[str, Any], *, expected: bool | None) -> None:
    second = json.loads(policy(**change))["Statement"]
    second = {name: value for name, value in second.items() if value is not None}
    both = [json.loads(policy())["Statement"], second]
    assert lets_send(json.dumps({"Statement": both}), rule=RULE, queue=QUEUE) is expected


def test_who_else_may() -> None:
    assert open_to_all(policy()) == []
    assert open_to_all(policy(Principal="*")) == ["sqs:SendMessage"]
    assert open_to_all(policy(Principal={"AWS": ["*"]}, Action=["b", "a"])) == ["a", "b"]
    assert open_to_all(policy(Principal="*", Condition={"Bool": {"x": "true"}})) == []
    arn = "arn:aws:iam::111122223333:role/worker"
    asked = {"arn": arn, "action": "sqs:SendMessage", "resource": QUEUE}
    assert lets_principal(policy(Principal={"AWS": arn}), **asked)
    assert not lets_principal(policy(Principal={"AWS": "444455556666"}), **asked)


@pytest.mark.parametrize(
    ("principal", "arn"),
    [
        ("arn:aws:iam::111122223333:root", "arn:aws:iam::111122223333:role/worker"),
        ("111122223333", "arn:aws:iam::111122223333:role/worker"),
        ("arn:aws:iam::444455556666:role/worker", "arn:aws:iam::444455556666:role/worker"),
    ],
)
def test_what_the_policy_of_a_queue_does_not_grant_alone(principal: str, arn: str) -> None:
    """The account is handed the question; and another account has to allow it, too."""
    text = policy(Principal={"AWS": principal})
    assert not lets_principal(text, arn=arn, action="sqs:SendMessage", resource=QUEUE)


def test_every_code_is_explained_and_every_explanation_is_of_a_code() -> None:
    source = "".join(path.read_text() for path in (ROOT / "src/oncebridge/check/aws").glob("*.py"))
    found = set(re.findall(r'context\.report\(\s*"([a-z0-9-]+)"', source))
    found |= {"dead-missing", "sink-missing", "source-missing"}  # of whatever kind is missing
    told = re.findall(r"^### ([a-z0-9-]+)$", (ROOT / "docs/check-aws.md").read_text(), re.MULTILINE)
    assert sorted(told) == sorted(found) == sorted(CODES)
