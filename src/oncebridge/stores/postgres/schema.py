"""
Our tables, and the SQL that creates them.

The SQL is in files next to this one, with names in the form `@name@`. It can be run again without
effect, and by several processes at once: the first takes a lock that the others wait for. The table
`oncebridge_schema` has the version of each layout.
"""

import re
from collections.abc import Mapping
from functools import cached_property
from importlib.resources import files
from typing import Any

from msgspec import Struct

from oncebridge.errors import ConfigError

_SCHEMA = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,62}")
_TABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,49}")
_FUNCTION = re.compile(r"FUNCTION @([a-z_]+)@")
_NAME = re.compile(r"@([a-z_]+)@")

_FRAME = """\
-- {title}, layout {version}.
-- Running this again changes nothing. Give the role that oncebridge connects as
--   GRANT USAGE ON SCHEMA {schema} TO the_role;
--   GRANT SELECT ON {versions} TO the_role;
--   GRANT {rights} ON {table} TO the_role;

BEGIN;
SELECT pg_advisory_xact_lock({lock});
DO $$
BEGIN
    IF to_regnamespace('{schema}') IS NULL THEN
        CREATE SCHEMA {schema};
    END IF;
END
$$;
CREATE TABLE IF NOT EXISTS {versions} (
    name    text    PRIMARY KEY,
    version integer NOT NULL
);
DO $$
DECLARE
    found integer := (SELECT version FROM {versions} WHERE name = '{name}');
    one   regprocedure;
BEGIN
    IF found > {version} THEN
        RAISE EXCEPTION '{name} was made by a newer oncebridge; use that one';
    END IF;
    -- A function whose parameters have changed would stay beside the new one.
    FOR one IN
        SELECT oid FROM pg_proc
        WHERE found < {version} AND pronamespace = to_regnamespace('{schema}')
            AND proname = ANY ('{{{functions}}}')
    LOOP
        EXECUTE 'DROP FUNCTION ' || one;
    END LOOP;
END
$$;

{body}
INSERT INTO {versions} VALUES ('{name}', {version})
ON CONFLICT (name) DO UPDATE SET version = excluded.version;
COMMIT;
"""
_SETTINGS = """SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off
SET plan_cache_mode = force_generic_plan SET lock_timeout = '10s'"""
_OPERATION = """\
RETURNS TABLE (part integer, verdict integer)
LANGUAGE plpgsql VOLATILE @settings@
AS $$
#variable_conflict use_column
DECLARE
    now_ms bigint := @now@(told);"""
_LOCK = 0x6F6E6365  # any number does, if it is always the same


class Layout(Struct, frozen=True, dict=True):
    """One of our tables, with the functions and indexes in *file*."""

    file: str
    version: int
    rights: tuple[str, ...]
    schema: str
    table: str

    @property
    def shown(self) -> str:
        """The table's name, unquoted, for messages."""
        return f"{self.schema}.{self.table}"

    @property
    def versions(self) -> str:
        """The table with the versions of layouts, quoted."""
        return f"{quoted(self.schema)}.oncebridge_schema"

    def named(self, name: str = "") -> str:
        """Return the quoted name of the table, or of its function or index *name*."""
        return f"{quoted(self.schema)}.{quoted(f'{self.table}_{name}' if name else self.table)}"

    @cached_property
    def functions(self) -> list[str]:
        """The functions of the table, quoted."""
        return [self.named(name) for name in _FUNCTION.findall(self._text)]

    @cached_property
    def _text(self) -> str:
        return (files(__package__) / self.file).read_text("utf-8")

    @cached_property
    def sql(self) -> str:
        """The SQL that creates or updates the table, for an administrator to read and run."""
        kind = self.file.removesuffix(".sql")
        index = quoted(f"{self.table}_key")  # an index has no schema of its own
        names = {kind: self.named(), f"{kind}_key": index, "settings": _SETTINGS}
        text = self._text.replace("@operation@", _OPERATION)
        body = _NAME.sub(lambda found: names.get(found[1]) or self.named(found[1]), text)
        return _FRAME.format(
            title=kind.capitalize(),
            version=self.version,
            versions=self.versions,
            schema=quoted(self.schema),
            table=self.named(),
            rights=", ".join(self.rights),
            name=self.table,
            lock=_LOCK,
            functions=", ".join(f"{self.table}_{name}" for name in _FUNCTION.findall(self._text)),
            body=body,
        )


def chosen_names(options: Any, given: Mapping[str, str], default: str) -> tuple[str, str]:
    """
    Return the names of the schema and the table, from *options* or from an address.

    Raise `ConfigError` if the two differ, or if a name is too long or needs quoting.
    """
    schema = _chosen("schema", options.schema, given, "public")
    table = _chosen("table", options.table, given, default)
    if not _SCHEMA.fullmatch(schema):
        raise ConfigError(
            "schema", f"{schema!r}: must be letters, digits, _ and -, at most 63 of them"
        )
    if not _TABLE.fullmatch(table):
        raise ConfigError("table", f"{table!r}: must be letters, digits and _, at most 50 of them")
    return schema, table


def _chosen(name: str, option: str | None, given: Mapping[str, str], default: str) -> str:
    written = given.get(name)
    if option is not None and written is not None and option != written:
        raise ConfigError(name, f"is {option!r}, but the address has {written!r}; remove one")
    return option or written or default


def quoted(name: str) -> str:
    """Return *name* as a quoted identifier of SQL."""
    return '"' + name.replace('"', '""') + '"'
