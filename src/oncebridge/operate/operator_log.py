"""
The operator log: operator actions, in a file, in the log, and in the store.

In the store, the actions on an event are in a record under a key made of the event's own key,
and those on a route under a key made of its name. Every store supports it, and it can be read
on every machine that reaches the store. To add an action, the record is claimed, which locks
it, and released with the action in its memo. It is never committed.

An action is logged before it begins. If it cannot be logged, it is not done.

A record has the last 20 actions, about 2 KB, and is kept for 90 days after the last one.
"""

import fcntl
import json
import logging
import os
import platform
import pwd
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from oncebridge.base.clock import Clock, Dice, SystemDice, system_clock
from oncebridge.base.formatting import iso_time
from oncebridge.base.private_files import open_private, sync_directory
from oncebridge.errors import ConfigError, StoreUnavailable
from oncebridge.events.key import make_key
from oncebridge.stores.api import NoAnswer, Record, Store
from oncebridge.stores.cell import Cells, Edit

_log = logging.getLogger("oncebridge")
MOST_ACTS: Final = 20
MOST_BYTES: Final = 2048
KEPT_MS: Final = 90 * 24 * 3600 * 1000

_KIND: Final = b"operator log"
_PATIENCE_S: Final = 30.0
"""Longer than usual: an action that cannot be logged is not done."""
_LONGEST_REASON: Final = 200
_LONGEST_NAME: Final = 100
_LONGEST_USER: Final = 60
_NOTHING: Final[Mapping[bytes, bytes]] = {}


class OperatorAction(Struct, frozen=True, array_like=True):
    """One operator action."""

    name: str
    """Random: the same action is logged under every key of an event."""
    at_ms: int
    """When, by the store's clock."""
    who: str
    """The user of the operating system, and the host."""
    verb: str
    route: str = ""
    """Empty for an action on keys of any route."""
    reason: str = ""
    """As given by the operator; may be empty."""
    of: str = ""
    """The beginning of the event's content hash, as another event may have the same key; empty if
    it is not known."""

    def is_of(self, content: bytes, *, surely: bool = False) -> bool:
        """Return whether it is, or may be, an action on the event with *content*."""
        if not self.of or not content:
            return not surely
        return self.of == _content_prefix(content)


class OperatorActions(Struct, frozen=True, omit_defaults=True):
    """Operator actions as stored in a record: a JSON object, unlike any other memo."""

    acts: tuple[OperatorAction, ...] = ()
    """The latest last."""
    before: int = 0
    """How many older ones are not kept any more."""

    @classmethod
    def read(cls, memo: bytes) -> "OperatorActions":
        """Read a memo; one that cannot be decoded counts as one older action."""
        try:
            return _read(memo) if memo else cls()
        except msgspec.MsgspecError:
            return cls(before=1)

    def write(self) -> bytes:
        return _write(self)

    def with_action(self, act: OperatorAction) -> "OperatorActions":
        """Return these with *act* added; the oldest are dropped if there is no room."""
        acts, before = (*self.acts, act), self.before
        while len(acts) > 1 and (len(acts) > MOST_ACTS or len(_write(acts)) > MOST_BYTES - 50):
            acts, before = acts[1:], before + 1
        return OperatorActions(acts, before)


_read = msgspec.json.Decoder(OperatorActions).decode
_write = msgspec.json.Encoder().encode


# --- reading ------------------------------------------------------------------------------


def event_log_key(key: bytes) -> bytes:
    """Return the key of the record with the actions on an event's *key*."""
    return make_key("", _KIND, "", "", (key,))


def route_log_key(route: str) -> bytes:
    """Return the key of the record with the actions on *route* itself."""
    return make_key(route, _KIND, "", "", ())


def is_operator_log(record: Record) -> bool:
    """Return whether a record has operator actions, by its memo."""
    return record.fate is None and record.memo.startswith(b'{"acts":')


async def read(store: Store, names: Sequence[bytes]) -> dict[bytes, OperatorActions]:
    """Read the operator actions in the records *names*; those that exist."""
    distinct = list(dict.fromkeys(names))
    records = await store.peek(distinct) if distinct else []
    return {
        record.key: OperatorActions.read(record.memo)
        for record in records
        if record is not None and record.fate is None and record.memo
    }


def merged(logs: Sequence[OperatorActions]) -> OperatorActions:
    """Merge the actions on all keys of one event, each once, in the order of time."""
    acts = {act.name: act for log in logs for act in log.acts}
    before = max([log.before for log in logs], default=0)
    return OperatorActions(tuple(sorted(acts.values(), key=lambda act: act.at_ms)), before)


# --- writing ------------------------------------------------------------------------------


class StoreOperatorLog:
    """Writes actions to *store*, which is open."""

    def __init__(self, store: Store, *, dice: Dice | None = None, by: str | None = None) -> None:
        self._dice = dice or SystemDice()
        self._cells = Cells(store, self._dice, idempotent=True)
        self._by = by

    async def write(
        self,
        verb: str,
        names: Iterable[bytes],
        *,
        route: str = "",
        reason: str = "",
        contents: Mapping[bytes, bytes] = _NOTHING,
    ) -> None:
        """
        Write one action to every record of *names*; durable when this returns.

        *contents* are the content hashes of the event, by the same names.
        Raise `StoreUnavailable` if it cannot be written; some records may have it then.
        """
        act = OperatorAction(
            self._dice.tokens(1)[0][:6].hex(),
            0,
            _short(self._by or who(), _LONGEST_NAME),
            verb,
            _short(route, _LONGEST_NAME),
            _short(reason, _LONGEST_REASON),
        )
        own = {name: _content_prefix(contents.get(name, b"")) for name in names}
        answers = await self._cells.edit(
            {name: Edit(partial(_added, replace(act, of=of)), KEPT_MS) for name, of in own.items()},
            patience_s=_PATIENCE_S,
        )
        missed = [answer for answer in answers.values() if not isinstance(answer, bytes)]
        if missed:
            reasons = [answer.reason for answer in missed if isinstance(answer, NoAnswer)]
            why = reasons[0] if reasons else "other processes keep writing to it"
            raise StoreUnavailable(
                f"the operator log in the store cannot be written, so nothing was done ({why})"
            )


def _added(act: OperatorAction, memo: bytes, now_ms: int) -> bytes | None:
    """Add *act*, unless a lost answer means that it is there already."""
    acts = OperatorActions.read(memo)
    if any(other.name == act.name for other in acts.acts):
        return None
    return acts.with_action(replace(act, at_ms=now_ms)).write()


def _content_prefix(content: bytes) -> str:
    return content[:6].hex()


def _named(user: str) -> str:
    """Return the name of a user, shortened to leave room for the host."""
    return _short(user, _LONGEST_USER) or "unknown"


def _short(text: str, most: int) -> str:
    """Return *text* shortened and as valid UTF-8: an argument may have lone surrogates."""
    return text[:most].encode("utf-8", "replace").decode()


# --- in a file ----------------------------------------------------------------------------


class AuditFile:
    """Appends to the file at *path*; without one, actions go to the log only."""

    def __init__(self, path: str | None, *, clock: Clock = system_clock) -> None:
        self._path = path
        self._clock = clock

    def write(self, verb: str, **facts: object) -> None:
        """Log the action *verb*; durable when this returns."""
        fields = {"user": _user(), "host": platform.node(), "verb": verb, **facts}
        if self._path is not None:
            self._append(self._path, {"time": iso_time(self._clock()), **fields})
        _log.warning("oncebridge.audit", extra=fields)

    def _append(self, path: str, line: dict[str, object]) -> None:
        text = json.dumps(line).encode() + b"\n"
        try:
            file, _ = open_private(Path(path), os.O_RDWR | os.O_APPEND, mode=0o640)
            try:
                fcntl.flock(file, fcntl.LOCK_EX)  # or half of another line might be seen
                size = os.fstat(file).st_size
                if size and os.pread(file, 1, size - 1) != b"\n":
                    text = b"\n" + text  # ends a line that was cut short
                _write_all(file, text)
                os.fsync(file)
            finally:
                os.close(file)
            if not size:
                sync_directory(Path(path).parent)
        except OSError as error:
            why = error.strerror or type(error).__name__
            raise ConfigError(
                "audit", f"{path}: cannot be written ({why}), so nothing was done"
            ) from None


def who() -> str:
    """Return the user and the host of this process."""
    return f"{_user()}@{platform.node()}"


def _user() -> str:
    # By the owner of the process: the environment can be changed.
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return f"uid {os.getuid()}"


def _write_all(file: int, text: bytes) -> None:
    while text:
        text = text[os.write(file, text) :]


# --- everywhere ---------------------------------------------------------------------------


class OperatorLog:
    """
    Logs actions before they begin: to the file, the log and the store.

    *store* is None if it does not exist yet or is in memory. *user* is the user of the
    dashboard, empty if unknown; None stands for the user of this process.
    """

    def __init__(
        self,
        audit: AuditFile,
        store: Store | None,
        *,
        reason: str = "",
        user: str | None = None,
    ) -> None:
        self._audit = audit
        by = None if user is None else f"{_named(user)} (dashboard on {platform.node()})"
        self._store = StoreOperatorLog(store, by=by) if store is not None else None
        self._facts: dict[str, object] = {}
        if user is not None:
            self._facts = {"user": _named(user), "via": "dashboard"}
        self._reason = reason
        self._logged: set[tuple[str, str]] = set()
        """Actions on events without a key that are logged already, by route."""

    async def write(
        self,
        verb: str,
        *,
        routes: Sequence[str] = (),
        keys: Mapping[bytes, bytes] = _NOTHING,
        **facts: object,
    ) -> None:
        """
        Log an action on the events of *keys*, on *routes*, before it begins.

        Each key has the content hash of the event; empty if not known. Events without a key have
        no record of their own: in the store, the action is logged once for their route.
        """
        fields: dict[str, object] = self._facts | ({"routes": list(routes)} if routes else {})
        fields |= facts
        fields |= {"keys": [key.hex() for key in keys]} if keys else {}
        fields |= {"reason": self._reason} if self._reason else {}
        self._audit.write(verb, **fields)
        if self._store is None:
            return
        route = routes[0] if len(routes) == 1 else ""
        if keys:
            contents = {event_log_key(key): content for key, content in keys.items()}
            await self._store.write(
                verb, contents, route=route, reason=self._reason, contents=contents
            )
            return
        unkeyed = [name for name in routes if name and (verb, name) not in self._logged]
        if unkeyed:
            names = [route_log_key(name) for name in unkeyed]
            await self._store.write(verb, names, route=route, reason=self._reason)
            self._logged.update((verb, name) for name in unkeyed)

    async def write_on_routes(self, verb: str, routes: Sequence[str]) -> None:
        """Log an action on whole *routes* before it begins."""
        facts = {"reason": self._reason} if self._reason else {}
        self._audit.write(verb, routes=list(routes), **self._facts, **facts)
        if self._store is not None:
            names = [route_log_key(route) for route in routes]
            await self._store.write(verb, names, reason=self._reason)
