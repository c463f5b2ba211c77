"""
Renders the stacks, tables and policies that are printed.

Statements of Jinja are comments in YAML and Terraform (`#% if … %#`), so an editor shows a template
as what it becomes. Names are checked before they get here, and autoescape is on; a text in quotes
is written with the filter `quoted`.
"""

import json
from functools import cache
from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:
    from jinja2 import Environment

Format = Literal["cloudformation", "terraform"]
_SUFFIXES: Final = {"cloudformation": "yaml", "terraform": "tf"}


def render(template: str, format: Format, **values: Any) -> str:  # noqa: A002
    """Return the text of *template* in one of the formats."""
    return _environment().get_template(f"{template}.{_SUFFIXES[format]}.jinja").render(values)


@cache
def _environment() -> "Environment":
    # Here, because `check` uses these modules without rendering anything.
    from jinja2 import Environment, PackageLoader, StrictUndefined  # noqa: PLC0415
    from markupsafe import Markup  # noqa: PLC0415

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
