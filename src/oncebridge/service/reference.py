"""
The reference of all settings, as JSON Schema and as a Markdown page.

Both are made from the declarations that the loader uses, so they cannot differ from it. Errors
across settings (a lease too short for its sink_timeout, a name used twice) are found by the
loader only.
"""

import re
from collections.abc import Iterator, Sequence
from importlib.metadata import entry_points
from typing import Any, Final, get_args, get_origin

from msgspec import Struct

from oncebridge.base.options import (
    Setting,
    bounds,
    describe_type,
    format_setting,
    schema,
    settings_of,
)
from oncebridge.base.secrets import ADDRESS_REFERENCE
from oncebridge.events.rule_options import LatestOptions, QuietOptions, RuleOptions, TierOptions
from oncebridge.service.addresses import (
    BackendAddress,
    DeadPlace,
    SinkPlace,
    SourcePlace,
    StorePlace,
)
from oncebridge.service.config import PREFIX, Config, RouteOptions

_PLACES: Final[dict[str, type[BackendAddress]]] = {
    "source": SourcePlace,
    "store": StorePlace,
    "sink": SinkPlace,
    "dead": DeadPlace,
}
_HEADINGS: Final = {"source": "Sources", "store": "Stores", "sink": "Sinks", "dead": "Dead letters"}


# --- JSON Schema --------------------------------------------------------------------------


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of the configuration, with the backends installed here."""
    described = schema(Config)
    properties = described["properties"]
    for name in _PLACES:
        place: dict[str, Any] = {"$ref": f"#/$defs/{name}"}
        if name == "source":
            place = {"anyOf": [place, {"type": "array", "items": place}]}
        properties[name] = place | _notes(properties[name])
    route = properties["routes"]["items"]["properties"]
    route["sink"] = {"$ref": "#/$defs/sink"} | _notes(route["sink"])
    rules = properties["rules"]["items"]
    properties["rules"]["items"] = route["rules"]["items"] = {"$ref": "#/$defs/rule"}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "The configuration of oncebridge",
        **described,
        "$defs": {"rule": rules, **{name: _place(kind) for name, kind in _PLACES.items()}},
    }


def _notes(described: dict[str, Any]) -> dict[str, Any]:
    return {name: described[name] for name in ("description", "default") if name in described}


def _place(kind: type[BackendAddress]) -> dict[str, Any]:
    """Describe an address: bare, or in a table with the options of its scheme."""
    tables = []
    everything: list[str] = []
    for schemes, options in _backends(kind):
        everything += schemes
        properties = schema(options)["properties"] if options is not None else {}
        tables.append(_table(_pattern(schemes), properties) | {"additionalProperties": False})
    looked_up = ADDRESS_REFERENCE  # its options are known when it is resolved
    return {
        "anyOf": [
            {"type": "string", "pattern": f"{_pattern(everything)}|{looked_up}"},
            *tables,
            _table(looked_up, {}),
        ]
    }


def _table(pattern: str, properties: dict[str, Any]) -> dict[str, Any]:
    url = {"type": "string", "pattern": pattern, "description": "The address."}
    return {"type": "object", "properties": {"url": url, **properties}, "required": ["url"]}


def _pattern(schemes: Sequence[str]) -> str:
    return "|".join(["^-$" if scheme == "-" else f"^{scheme}:" for scheme in schemes])


def _backends(kind: type[BackendAddress]) -> list[tuple[list[str], type[Struct] | None]]:
    """Return the installed backends: schemes that share options, and the options."""
    options = kind.option_kinds()
    found: dict[type[Struct] | str, list[str]] = {}
    for scheme in sorted({point.name for point in entry_points(group=kind.group)}):
        found.setdefault(options.get(scheme, scheme), []).append(scheme)
    return [(schemes, None if isinstance(of, str) else of) for of, schemes in found.items()]


# --- the page -----------------------------------------------------------------------------

_INTRODUCTION: Final = """\
# Configuration

Settings come from a TOML file; environment variables override the file, and flags override
both. `oncebridge init` writes a starter file. A file is used only if it is named, by `-c FILE` or
`ONCEBRIDGE_CONFIG`. All errors are reported together, and nothing starts until they are fixed.

* A **duration** is a number and a unit: `500ms`, `30s`, `5m`, `36h`, `6d`.
* A **size** is `500B`, `64KiB`, `1MiB`, `2GiB`; a **rate** is `100/s`, `3000/m`, `5000/h`.
* A **secret** is a reference: `env:NAME`, `file:PATH`, `ssm:NAME` or `secretsmanager:NAME`
  ([secrets](secrets.md)). It is never printed.
* An **address** is a URL: `sqlite:oncebridge.db`, `https://crm.example.com/hooks`. To set
  options, use a table: `sink = { url = "https://…", concurrency = 16 }`.
* In the **environment** a setting is `ONCEBRIDGE_` and its name in capitals, with two
  underscores for a dot: `ONCEBRIDGE_SINK__CONCURRENCY=16`. A list is written with commas.
* Every setting is a **flag** of `oncebridge run`: `--sink-timeout 5s`, `--set sink.concurrency=16`.

This page is generated by `oncebridge schema --markdown`; `oncebridge schema` prints the same as
JSON Schema, for editors and validators.
"""
_RULES: Final = """\
## Rules

`[[rules]]` define what makes two events the same. The first rule that matches decides; an event
that matches none is identified by its content. A rule has one key, or several `tiers`, each with
its own key and window; the settings of a single tier can be in the rule itself.
"""
_ROUTES: Final = """\
## Routes

`[[routes]]` deliver to several sinks, each with claims of its own: an event that one sink has
and another has not is a duplicate on one route and delivered on the other. They replace `sink`.
"""
_BACKENDS: Final = """\
## Addresses and their options
"""


def markdown() -> str:
    """Return the Markdown page."""
    return "\n".join([_INTRODUCTION, *_page()]).rstrip("\n") + "\n"


def _page() -> Iterator[str]:
    yield "## Settings\n"
    for setting in settings_of(Config):
        yield from _setting(setting, "###", environment=_variable(setting.name))
    yield _RULES
    yield from _settings(RuleOptions, beside=TierOptions)
    yield "### Tiers\n"
    yield from _settings(TierOptions, level="####")
    yield "### latest\n"
    yield from _settings(LatestOptions, level="####")
    yield "### quiet\n"
    yield from _settings(QuietOptions, level="####")
    yield _ROUTES
    yield from _settings(RouteOptions)
    yield _BACKENDS
    for name, kind in _PLACES.items():
        yield f"### {_HEADINGS[name]}\n"
        for schemes, options in _backends(kind):
            yield f"#### {', '.join(_shown_scheme(name, scheme) for scheme in schemes)}\n"
            if options is None:
                yield "No options.\n"
            else:
                environment = f"{PREFIX}{name.upper()}__"
                yield _table_of(settings_of(options), environment)
                for setting in settings_of(options):
                    if (inner := _struct(setting)) is not None:
                        yield f"##### `{setting.name}`\n"
                        yield _table_of(
                            settings_of(inner), f"{environment}{setting.name.upper()}__"
                        )


def _settings(
    kind: type[Struct], *, level: str = "###", beside: type[Struct] | None = None
) -> Iterator[str]:
    left_out = {setting.name for setting in settings_of(beside)} if beside else set()
    for setting in settings_of(kind):
        if setting.name not in left_out:
            yield from _setting(setting, level)


def _setting(setting: Setting, level: str, *, environment: str = "") -> Iterator[str]:
    inner = _struct(setting)
    is_listed = setting.name in ("rules", "routes", "tiers")
    facts = [_form(setting), _default(setting)]
    if is_listed:
        facts[0] = f"tables, `[[{setting.name}]]` each" if environment else "list of tables"
    if environment and inner is None and not is_listed:
        facts.append(f"`{environment}`")
    yield f"{level} `{setting.name}`\n"
    yield f"{setting.doc.text}\n"
    yield f"{' · '.join(fact for fact in facts if fact)}\n"
    if setting.doc.example:
        yield f"```toml\n{setting.name} = {_example(setting)}\n```\n"
    if inner is not None and environment:
        yield _table_of(settings_of(inner), f"{environment}__")


def _table_of(settings: Sequence[Setting], environment: str) -> str:
    """Return the settings of one table as a Markdown table."""
    lines = ["| setting | form | default | description | environment |", "|" + " --- |" * 5]
    for setting in settings:
        is_new = setting.doc.example and _example(setting).strip('"') != format_setting(
            setting.default
        )
        example = f" For example `{_example(setting)}`." if is_new else ""
        cells = [
            f"`{setting.name}`",
            _form(setting),
            _default(setting).removeprefix("default ") or "-",
            f"{setting.doc.text}{example}",
            "-" if _struct(setting) else f"`{environment}{setting.name.upper()}`",
        ]
        lines.append(f"| {' | '.join(map(_cell, cells))} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    """Escape bars in a cell; between backticks the escape would be shown as it is."""
    if "|" not in text:
        return text
    return re.sub("`([^`]*)`", r"<code>\1</code>", text).replace("|", "&#124;")


def _item(setting: Setting) -> Any:
    """Return the kind of a single value that may replace a list of one; None if there is none."""
    is_list = get_origin(setting.kind) in (list, tuple)
    return get_args(setting.kind)[0] if is_list and setting.doc.or_one else None


def _struct(setting: Setting) -> type[Struct] | None:
    kind = _item(setting) or setting.kind
    is_struct = (
        isinstance(kind, type) and issubclass(kind, Struct) and not issubclass(kind, BackendAddress)
    )
    return kind if is_struct else None


def _form(setting: Setting) -> str:
    limits = [
        f"{word} {format_setting(bound)}"
        for word, bound in zip(
            ("at least", "at most"), bounds(setting.kind, setting.doc), strict=True
        )
        if bound is not None
    ]
    inner = _item(setting)
    return ", ".join(
        [f"{describe_type(inner)}, or a list" if inner else describe_type(setting.kind), *limits]
    )


def _default(setting: Setting) -> str:
    if setting.required:
        return "required"
    shown = format_setting(setting.default)
    return f"default `{shown}`" if shown and shown not in ("[]", "{}") else ""


def _example(setting: Setting) -> str:
    """Return an example as TOML: text in quotes, all else as it is."""
    text = setting.doc.example
    kinds = get_args(setting.kind) or (setting.kind,)
    is_bare = text[0] in "[{" or any(kind in (int, float, bool) for kind in kinds)
    return text if is_bare else f'"{text}"'


def _variable(name: str) -> str:
    return f"{PREFIX}{name.upper()}"


def _shown_scheme(place: str, scheme: str) -> str:
    if scheme == "-":
        return f"`-` (standard {'input' if place == 'source' else 'output'})"
    return f"`{scheme}:`"
