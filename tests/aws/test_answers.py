import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncebridge import Closed, ConfigError, Never, No, Throttled, Unknown, Unwell, Yes
from oncebridge.aws.client import AwsError, NotSent, Unclear
from oncebridge.sinks.aws.answers import answer_to, answer_to_code
from oncebridge.sinks.aws.batches import CallLimits, Entry, send_all

LIMITS = CallLimits(entries=10, bytes=100, each=100)


# --- what an error means ----------------------------------------------------------------------


def test_what_was_not_sent_is_a_no():
    assert answer_to(NotSent("no free connection within 5 s")) == No(
        "no free connection within 5 s"
    )


def test_what_was_sent_without_an_answer_is_unknown():
    assert answer_to(Unclear("no answer within 5 s")) == Unknown("no answer within 5 s")


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, "ThrottlingException", Throttled),
        (400, "Throttling", Throttled),
        (400, "Throttled", Throttled),
        (403, "RequestThrottled", Throttled),
        (503, "ThrottlingException", Throttled),
        (429, "TooManyRequestsException", Throttled),
        (400, "ProvisionedThroughputExceededException", Throttled),
        (400, "LimitExceededException", Throttled),
        (400, "KMSThrottlingException", Throttled),
        (400, "KmsThrottled", Throttled),
        (400, "ResourceInUseException", No),
        (500, "InternalFailure", Unknown),
        (400, "InternalFailure", Unknown),
        (500, "InternalException", Unknown),
        (500, "HTTP 500", Unknown),
        (503, "ServiceUnavailable", Unwell),
        (502, "HTTP 502", Unwell),
        (408, "RequestTimeout", Unknown),
        (400, "RedactionFailure", Unknown),
        (400, "SomethingNewException", Unknown),
        (400, "AccessDeniedException", Closed),
        (403, "AccessDenied", Closed),
        (403, "AuthorizationError", Closed),
        (403, "HTTP 403", Closed),
        (401, "HTTP 401", Closed),
        (404, "HTTP 404", Closed),
        (307, "HTTP 307", Closed),
        (400, "ExpiredTokenException", Closed),
        (403, "ExpiredToken", Closed),
        (403, "InvalidClientTokenId", Closed),
        (400, "UnrecognizedClientException", Closed),
        (400, "InvalidSignatureException", Closed),
        (403, "SignatureDoesNotMatch", Closed),
        (403, "RequestExpired", Closed),
        (403, "InvalidSecurity", Closed),
        (400, "ResourceNotFoundException", Closed),
        (400, "QueueDoesNotExist", Closed),
        (400, "AWS.SimpleQueueService.NonExistentQueue", Closed),
        (404, "NotFound", Closed),
        (404, "NotFoundException", Closed),
        (400, "KMSDisabledException", Closed),
        (400, "KmsDisabled", Closed),
        (400, "KMS.DisabledException", Closed),
        (400, "KMSNotFoundException", Closed),
        (400, "KMSInvalidStateException", Closed),
        (400, "KMSAccessDenied", Closed),
        (403, "KMSOptInRequired", Closed),
        (400, "KmsInvalidKeyUsage", Closed),
        (400, "InvalidAddress", Closed),
        (400, "UnsupportedOperation", Closed),
        (400, "ValidationException", Never),
        (400, "InvalidParameter", Never),
        (400, "InvalidParameterException", Never),
        (400, "ParameterValueInvalid", Never),
        (400, "InvalidArgumentException", Never),
        (400, "InvalidMessageContents", Never),
        (400, "BatchRequestTooLong", Never),
        (400, "SerializationException", Never),
        (413, "HTTP 413", Never),
    ],
)
def test_what_the_service_says_has_one_meaning(status, code, kind):
    assert type(answer_to(AwsError(status, code, "so it is"))) is kind


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("InternalFailure", Unknown),
        ("InternalError", Unknown),
        ("ThrottlingException", Throttled),
        ("ProvisionedThroughputExceededException", Throttled),
        ("MalformedDetail", Never),
        ("InvalidArgument", Never),
        ("InvalidParameter", Never),
        ("AccessDeniedException", Closed),
        ("NotAuthorizedForSourceException", Closed),
        ("NotAuthorizedForDetailTypeException", Closed),
        ("InvalidAccountIdException", Closed),
        ("", Unknown),
    ],
)
def test_what_is_said_about_one_entry_means_the_same(code, kind):
    assert type(answer_to_code(code, "so it is")) is kind


def test_a_topic_that_is_not_liked_is_not_the_fault_of_the_message():
    told = "Invalid parameter: TopicArn Reason: An ARN must have at least 6 elements"
    assert type(answer_to_code("InvalidParameter", told)) is Closed
    told = "Invalid parameter: Message Reason: it holds the word TopicArn"
    assert type(answer_to_code("InvalidParameter", told)) is Never


@pytest.mark.parametrize("code", ["ValidationException", "MalformedDetail", "InternalFailure", "?"])
def test_a_message_that_may_quote_the_event_is_not_passed_on(code):
    assert answer_to_code(code, "Value 's3cret' is not valid").reason == code


@pytest.mark.parametrize("code", ["AccessDeniedException", "KMSDisabled", "ThrottlingException"])
def test_a_message_about_our_access_is_passed_on(code):
    assert answer_to_code(code, "ask the owner").reason == f"{code}: ask the owner"


def test_who_may_not_ask_is_told_from_what_is_not_there():
    denied = AwsError(400, "AccessDeniedException", "")
    missing = AwsError(400, "ResourceNotFoundException", "")
    assert (denied.is_denied, denied.is_missing) == (True, False)
    assert (missing.is_denied, missing.is_missing) == (False, True)
    assert AwsError(403, "HTTP 403", "").is_denied
    assert not AwsError(403, "ExpiredToken", "").is_denied


# --- several in one call ----------------------------------------------------------------------


def entries(*sizes):
    return [Entry(at, size) for at, size in enumerate(sizes)]


class Service:
    """Takes everything but what is *bad*, for which it refuses the whole call."""

    def __init__(self, bad=(), code="ValidationException"):
        self.bad = bad
        self.code = code
        self.calls = []
        self.taken = []

    async def __call__(self, part):
        self.calls.append(list(part))
        await asyncio.sleep(0)
        if any(one in self.bad for one in part):
            raise AwsError(400, self.code, "")
        self.taken += part
        return [Yes() for _ in part]


async def test_entries_go_into_as_few_calls_as_their_number_allows():
    service = Service()
    assert await send_all(entries(*[1] * 23), LIMITS, service) == [Yes()] * 23
    assert [len(call) for call in service.calls] == [10, 10, 3]


async def test_entries_go_into_as_few_calls_as_their_size_allows():
    service = Service()
    assert await send_all(entries(60, 40, 1, 99, 1, 100), LIMITS, service) == [Yes()] * 6
    assert service.calls == [[0, 1], [2, 3], [4], [5]]


async def test_what_is_too_large_alone_is_not_sent():
    service = Service()
    answers = await send_all(entries(5, 101, 5), LIMITS, service)
    assert answers == [Yes(), Never("too large: 101 bytes; at most 100 are accepted"), Yes()]
    assert service.calls == [[0, 2]]


async def test_nothing_to_send_is_no_call():
    service = Service()
    assert await send_all([Never("no")], LIMITS, service) == [Never("no")]
    assert await send_all([], LIMITS, service) == []
    assert service.calls == []


@given(
    sizes=st.lists(st.integers(1, 120), max_size=40),
    bad=st.sets(st.integers(0, 39), max_size=5),
    in_order=st.booleans(),
)
def test_one_bad_entry_does_not_spoil_its_neighbours(sizes, bad, in_order):
    service = Service(bad)
    answers = asyncio.run(send_all(entries(*sizes), LIMITS, service, in_order=in_order))
    for at, (size, answer) in enumerate(zip(sizes, answers, strict=True)):
        assert type(answer) is (Never if size > 100 or at in bad else Yes)
    assert len(service.taken) == len(set(service.taken)), "sent again though it was taken"
    if in_order:
        assert service.taken == sorted(service.taken)


@pytest.mark.parametrize(
    ("code", "kind"),
    [("ThrottlingException", Throttled), ("AccessDeniedException", Closed), ("What", Unknown)],
)
async def test_only_a_call_refused_for_its_content_is_sent_in_parts(code, kind):
    service = Service(bad=[2], code=code)
    answers = await send_all(entries(1, 1, 1, 1), LIMITS, service)
    assert [type(answer) for answer in answers] == [kind] * 4
    assert len(service.calls) == 1


async def test_a_call_that_fails_leaves_the_others_of_the_batch_alone():
    async def send(part):
        if 0 in part:
            raise Unclear("gone")
        return [Yes() for _ in part]

    assert await send_all(entries(60, 60), LIMITS, send) == [Unknown("gone"), Yes()]


async def test_credentials_that_are_gone_are_told():
    async def send(part):
        raise ConfigError("", "no AWS credentials were found")

    assert await send_all(entries(1), LIMITS, send) == [Closed("no AWS credentials were found")]


async def test_too_few_answers_are_none():
    async def send(part):
        return [Yes()]

    answers = await send_all(entries(1, 1), LIMITS, send)
    assert answers == [Unknown("AWS returned 1 answers for 2 entries")] * 2
