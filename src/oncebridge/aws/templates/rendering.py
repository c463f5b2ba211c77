"""
Renders the stacks and tables that are printed.

Statements of Jinja are comments in YAML and Terraform (`#% if … %#`), so an editor shows a template
as what it becomes. Names are checked before they get here, and autoescape is on; a text in quotes
is written with the filter `quoted`.
"""

import json
import re
from datetime import timedelta
from functools import cache
from typing import Any, Final, Literal

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from oncebridge.aws.s3_buckets import checked_prefix, rule_for
from oncebridge.aws.templates.access import ACTIONS
from oncebridge.engine.settings import Settings
from oncebridge.errors import ConfigError

Format = Literal["cloudformation", "terraform"]
_SUFFIXES: Final = {"cloudformation": "yaml", "terraform": "tf"}
_STACK_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{2,47}")
_TABLE_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{3,255}")
_SPARE: Final = 5
"""Receives that are not a failed attempt: a message that was busy, a worker that stopped."""


def stack(
    kind: Literal["lambda", "worker"],
    name: str = "oncebridge",
    *,
    format: Format = "cloudformation",  # noqa: A002
) -> str:
    """
    Return the path of an event as a stack: rule, queue, function or worker, table, alarms.

    Its parameter for names is *name* by default.
    """
    if not _STACK_NAME.fullmatch(name):
        raise ConfigError("", f"{name!r}: a name is 3 to 48 letters, digits, _ and -")
    # oncebridge has to give up before the queue does.
    receives = Settings().max_attempts + _SPARE
    return render("stack", format, kind=kind, name=name, actions=ACTIONS, receives=receives)


def table(
    name: str = "oncebridge",
    *,
    format: Format = "cloudformation",  # noqa: A002
    window: timedelta | None = None,  # noqa: ARG001
) -> str:
    """
    Return the DynamoDB table *name*, and a policy for the workers that use it.

    Each item says when it ends, so the *window* makes no difference.
    """
    if not _TABLE_NAME.fullmatch(name):
        raise ConfigError("", f"{name!r} is not the name of a DynamoDB table")
    return render("table", format, name=name, actions=ACTIONS["store.dynamodb"])


def bucket(
    name: str = "oncebridge",
    *,
    format: Format = "cloudformation",  # noqa: A002
    window: timedelta = timedelta(days=6),
) -> str:
    """
    Return the S3 bucket and prefix *name*, its rule, and a policy for the workers that use it.

    Nothing is removed that was written within *window* and a day.
    """
    bucket, _, given = name.partition("/")
    prefix = checked_prefix(bucket, given)
    return render(
        "bucket",
        format,
        bucket=bucket,
        prefix=prefix,
        rule=rule_for(prefix, window + timedelta(days=1)),
        object_actions=ACTIONS["store.s3.objects"],
        bucket_actions=ACTIONS["store.s3"],
    )


def render(template: str, format: Format, **values: Any) -> str:  # noqa: A002
    """Return the text of *template* in one of the formats."""
    return _environment().get_template(f"{template}.{_SUFFIXES[format]}.jinja").render(values)


@cache
def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader("oncebridge.aws", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        block_start_string="#%",
        block_end_string="%#",
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters["quoted"] = lambda text: Markup(json.dumps(text))  # noqa: S704 - JSON is YAML and HCL
    return made
