"""
The answer of a sink for each error of an AWS service.

| error                                                          | answer      |
| -------------------------------------------------------------- | ----------- |
| the request was not sent                                       | `No`        |
| the target is being changed; nothing was done                  | `No`        |
| too many requests; nothing was done                            | `Throttled` |
| 502, 503, 504                                                  | `Unwell`    |
| no answer to a request that was sent; an internal error        | `Unknown`   |
| bad credentials, access denied, no such target, no such key    | `Closed`    |
| the content is not acceptable                                  | `Never`     |
| any other error                                                | `Unknown`   |

An error that is not listed here may be caused by the event or not. `Unknown` counts as an attempt,
so such an event ends in the dead letters and does not block others for ever.

AWS may refuse a whole call for the content of one entry. On a `Never` for several entries, send
them in smaller parts (`oncebridge.sinks.aws.batches`).
"""

import re

from oncebridge.aws.client import AwsError, NotSent, Unclear
from oncebridge.sinks.api import Closed, Never, No, Throttled, Unknown, Unwell

Refusal = No | Unknown | Throttled | Unwell | Closed | Never

# Codes are compared as `AwsError.plain_code` returns them: services spell one in several ways.

_FAILED = frozenset(
    {"internal", "internalerror", "internalfailure", "internalserver", "internalservererror"}
)
_THROTTLED = frozenset({"kmsthrottled", "kmsthrottling", "throttled"})
_CHANGING = frozenset({"resourceinuse"})
_BAD_CREDENTIALS = frozenset(
    {
        *("authfailure", "expiredtoken", "incompletesignature", "invalidaccesskeyid"),
        *("invalidclienttokenid", "invalidsecurity", "invalidsignature", "invalidtoken"),
        *("missingauthenticationtoken", "notsignedup", "optinrequired", "requestexpired"),
        *("requesttimetooskewed", "signaturedoesnotmatch", "tokenrefreshrequired"),
        *("unrecognizedclient",),
    }
)
_UNUSABLE_TARGET = frozenset(
    {
        # the key that the target is encrypted with
        *("kmsaccessdenied", "kmsdisabled", "kmsinvalidkeyusage", "kmsinvalidstate"),
        *("kmsnotfound", "kmsoptinrequired"),
        # the target
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
_UNWELL_STATUS = frozenset({502, 503, 504})
_REFUSED_STATUS = frozenset({401, 403, 404, 407, 410})
_TOO_LARGE = 413
# SNS has no error code of its own for a wrong topic, only this text.
_NOT_THE_CONTENT = re.compile(r"Invalid parameter: (Invalid )?TopicArn\b")


def answer_to(error: AwsError | NotSent | Unclear) -> Refusal:
    """Return the answer for all entries of a call that ended in *error*."""
    if isinstance(error, NotSent):
        return No(str(error))
    if isinstance(error, Unclear):
        return Unknown(str(error))
    return answer_to_code(error.code, error.message, status=error.status)


def answer_to_code(code: str, message: str = "", *, status: int = 400) -> Refusal:
    """
    Return the answer for one entry that AWS answered with an error.

    The reason contains *message* if that is about the target or the access to it. A message about
    the content may quote the event, so it is left out.
    """
    error = AwsError(status, code, message)
    plain, text = error.plain_code, str(error)
    if plain in _THROTTLED or error.is_throttling:
        return Throttled(text)
    if plain in _CHANGING:
        return No(text)
    if status in _UNWELL_STATUS:
        return Unwell(code)
    if status >= 500 or plain in _FAILED:
        return Unknown(code)
    if plain in _CONTENT and not _NOT_THE_CONTENT.match(message):
        return Never(code)
    if plain in _CONTENT or _is_refused(error) or status in _REFUSED_STATUS or 300 <= status < 400:
        return Closed(text)
    return Never(code) if status == _TOO_LARGE else Unknown(code)


def _is_refused(error: AwsError) -> bool:
    refused = error.is_denied or error.is_missing
    return refused or error.plain_code in _BAD_CREDENTIALS or error.plain_code in _UNUSABLE_TARGET
