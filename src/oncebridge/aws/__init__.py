"""
AWS: our own client, and the handler of a Lambda function.

Credentials, Regions and endpoints are found by botocore, as everywhere else on AWS. The requests
are our own: the SDK uses five to forty times the CPU time for each.

The handler is imported from here: `from oncebridge.aws import lambda_handler`. It is loaded on
first use, because the stores on AWS import this package, too, and do not need the handler.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oncebridge.aws.handler import lambda_handler as lambda_handler
    from oncebridge.aws.invocation import NotRecognised as NotRecognised
    from oncebridge.errors import HandedBack as HandedBack

__all__ = ["HandedBack", "NotRecognised", "lambda_handler"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from oncebridge.aws import handler, invocation  # noqa: PLC0415 - see above
    from oncebridge.errors import HandedBack  # noqa: PLC0415

    return {
        "HandedBack": HandedBack,
        "NotRecognised": invocation.NotRecognised,
        "lambda_handler": handler.lambda_handler,
    }[name]
