"""
What an AWS service said, as a sink's answer.

| what it said                                             | answer      |
| -------------------------------------------------------- | ----------- |
| nothing, because nothing was sent                        | `No`        |
| it is being changed; nothing was done                    | `No`        |
| too many requests; nothing was done                      | `Throttled` |
| 502, 503, 504                                            | `Unwell`    |
| nothing, though it was sent; an error of its own         | `Unknown`   |
| who are you, you may not, no such target, no such key    | `Closed`    |
| this content cannot be taken                             | `Never`     |
| anything else                                            | `Unknown`   |

What is not known here may be the event's fault or not. `Unknown` counts as an attempt, so such
an event ends in the dead letters rather than nowhere or in everybody's way.

A call is refused as a whole for the content of one entry, too. Who gets a `Never` for several
entries at once has to send them in parts (`oncebridge.sinks.aws.batches`).
"""

import re

from oncebridge.aws.client import AwsError, NotSent, Unclear
from oncebridge.sinks.api import Closed, Never, No, Throttled, Unknown, Unwell

Refusal = No | Unknown | Throttled | Unwell | Closed | Never

# Codes are compared as `AwsError.plain_code` gives them: services spell one in two to four ways.

_FAILED = frozenset(
    {"internal", "internalerror", "internalfailure", "internalserver", "internalservererror"}
)
_THROTTLED = frozenset({"kmsthrottled", "kmsthrottling", "throttled"})
_CHANGING = frozenset({"resourceinuse"})
_STRANGER = frozenset(
    {
        *("authfailure", "expiredtoken", "incompletesignature", "invalidaccesskeyid"),
        *("invalidclienttokenid", "invalidsecurity", "invalidsignature", "invalidtoken"),
        *("missingauthenticationtoken", "notsignedup", "optinrequired", "requestexpired"),
        *("requesttimetooskewed", "signaturedoesnotmatch", "tokenrefreshrequired"),
        *("unrecognizedclient",),
    }
)
_UNFIT = frozenset(
    {
        # the key that the target is encrypted with
        *("kmsaccessdenied", "kmsdisabled", "kmsinvalidkeyusage", "kmsinvalidstate"),
        *("kmsnotfound", "kmsoptinrequired"),
        # the target, or what we take it for
        *("endpointdisabled", "invalidaccountid", "invalidaction", "invalidaddress"),
        *("missingparameter", "platformapplicationdisabled", "unknownoperation"),
        *("unsupportedoperation",),
    }
)
_CONTENT = frozenset(
    {
        *("batchrequesttoolong", "invalidargument", "invalidattributevalue"),
        *("invalidmessagecontents", "invalidparameter", "invalidparametercombination"),
        *("invalidparametervalue", "malformeddetail", "malformedquerystring"),
        *("messagetoolong", "parametervalueinvalid", "requestentitytoolarge"),
        *("requesttoolarge", "serialization", "toomanyentriesinbatchrequest"),
        *("validation", "validationerror"),
    }
)
_UNWELL = frozenset({502, 503, 504})
_SHUT = frozenset({401, 403, 404, 407, 410})
_TOO_LARGE = 413
# SNS says in words only that it is the topic which it does not like.
_NOT_THE_CONTENT = re.compile(r"Invalid parameter: (Invalid )?TopicArn\b")


def answer_to(error: AwsError | NotSent | Unclear) -> Refusal:
    """Return what became of a whole call that ended in *error*."""
    if isinstance(error, NotSent):
        return No(str(error))
    if isinstance(error, Unclear):
        return Unknown(str(error))
    return answer_to_code(error.code, error.message, status=error.status)


def answer_to_code(code: str, message: str = "", *, status: int = 400) -> Refusal:
    """
    Return what became of one entry that was answered with an error.

    *message* is passed on where it tells of the target or of our access. Where it tells of the
    content it may quote it, and is not.
    """
    error = AwsError(status, code, message)
    plain, told = error.plain_code, str(error)
    if plain in _THROTTLED or error.is_throttling:
        return Throttled(told)
    if plain in _CHANGING:
        return No(told)
    if status in _UNWELL:
        return Unwell(code)
    if status >= 500 or plain in _FAILED:
        return Unknown(code)
    if plain in _CONTENT and not _NOT_THE_CONTENT.match(message):
        return Never(code)
    if plain in _CONTENT or _is_shut(error) or status in _SHUT or 300 <= status < 400:
        return Closed(told)
    return Never(code) if status == _TOO_LARGE else Unknown(code)


def _is_shut(error: AwsError) -> bool:
    refused = error.is_denied or error.is_missing
    return refused or error.plain_code in _STRANGER or error.plain_code in _UNFIT
