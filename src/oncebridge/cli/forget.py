"""`oncebridge forget`: let an event pass again."""

import json
import re
import sys
from collections.abc import Iterator, Sequence

import click
from msgspec import Struct

from oncebridge.cli.manners import (
    as_json_option,
    audited,
    chosen_routes,
    command,
    field,
    note,
    open_file,
    opened,
    screen,
)
from oncebridge.cli.setup import NEEDS_YOU, run_loop
from oncebridge.config import Setup
from oncebridge.event import Unreadable
from oncebridge.explain import ENDED
from oncebridge.forget import Forgotten
from oncebridge.forget import forget as forget_keys
from oncebridge.identity import Identities
from oncebridge.reach import is_missing, refuse_memory
from oncebridge.records import Records

_KEY = re.compile(r"[0-9a-f]{66}")


@command(
    "oncebridge forget event.json -c oncebridge.toml",
    "oncebridge forget event.json --route crm -c oncebridge.toml",
    "oncebridge forget 01d4… -c oncebridge.toml    # a key as `explain` shows it",
)
@click.argument("what", nargs=-1, required=True, metavar="FILE|KEY...")
@click.option("--route", "routes", multiple=True, help="Only on this route; may be repeated.")
@as_json_option
def forget(setup: Setup, *, what: tuple[str, ...], routes: tuple[str, ...], as_json: bool) -> None:
    """
    Let events pass again: remove what the store knows of them.

    Name files of events (- is standard input) or keys in hex. An event is forgotten on every
    route that it takes, with all its keys. It is refused while a worker holds the event. What
    a rule with latest knows of the entity stays: an older state is still stale.

    Exit code 1: nothing was found, something could not be read, or it was refused.
    """
    refuse_memory(setup.config.store, "store")
    names = chosen_routes(setup, routes)
    sys.exit(run_loop(_forget(setup, what, names, as_json=as_json)))


class _Asked(Struct, frozen=True):
    """Keys that belong together, and how to call them."""

    name: str
    keys: list[bytes]
    route: str = ""
    unreadable: str = ""


async def _forget(setup: Setup, what: Sequence[str], routes: list[str], *, as_json: bool) -> int:
    asked = [each for name in what for each in _asked(setup, name, routes)]
    audit = audited(setup)
    place = setup.config.store
    if is_missing(place):
        note(f"the store {place} is not there yet, so there is nothing to forget")
        return NEEDS_YOU
    code = 0
    seen: set[bytes] = set()
    async with opened(place.opened) as store:
        for each in asked:
            done: list[Forgotten] = []
            if each.keys and seen.issuperset(each.keys):
                continue  # the same event again, further up in the file
            if each.keys:
                seen.update(each.keys)

                def write(keys: list[bytes], route: str = each.route) -> None:
                    where = {"routes": [route]} if route else {}
                    audit.write("forget", **where, keys=[key.hex() for key in keys])

                done = await forget_keys(store, each.keys, before=write)
            if not _is_done(done):
                code = NEEDS_YOU
            _tell(each, done, several=len(setup.routes) > 1, as_json=as_json)
    return code


def _asked(setup: Setup, name: str, routes: Sequence[str]) -> Iterator[_Asked]:
    """Find the keys of one argument."""
    if _KEY.fullmatch(name.lower()):
        yield _Asked(f"key {name[:10]}…", [bytes.fromhex(name)])
        return
    identities = Identities(setup)
    with open_file(name) as file:
        for record in Records(file):
            label = f"{name}, line {record.line}"
            event = identities.read(record)
            if isinstance(event, Unreadable):
                yield _Asked(label, [], unreadable=f"{event.reason}: {event.message}")
                continue
            ways = [way for way in identities.of(event) if way.route.name in routes]
            if not ways:
                yield _Asked(label, [])
            for way in ways:
                yield _Asked(label, way.all_keys(), way.route.name)


def _is_done(done: Sequence[Forgotten]) -> bool:
    return any(one.gone for one in done) and all(one.gone or one.was == "absent" for one in done)


def _tell(each: _Asked, done: Sequence[Forgotten], *, several: bool, as_json: bool) -> None:
    verdict = _verdict(each, done)
    if as_json:
        keys = [
            {
                "key": one.key.hex(),
                "was": one.was,
                "fate": one.fate.name.lower() if one.fate else None,
                "forgotten": one.gone,
            }
            for one in done
        ]
        told = {"what": each.name, "route": each.route or None, "result": verdict, "keys": keys}
        click.echo(json.dumps(told))
        return
    where = f" on {each.route}" if each.route and several else ""
    click.echo(f"{each.name}{where}: {verdict}")
    console = screen()
    for one in done:
        console.print(field(one.was, one.key.hex()))


def _verdict(each: _Asked, done: Sequence[Forgotten]) -> str:
    if each.unreadable:
        return f"not an event: {each.unreadable}"
    held = max([one.left_ms for one in done], default=0)
    if held:
        return (
            "refused: a worker holds it, or it waits for its next attempt, "
            f"for {held / 1000:.1f} s more"
        )
    if not each.keys:
        return "has no key here"
    if not any(one.gone for one in done):
        return "not known"
    fate = next((one.fate for one in reversed(done) if one.fate and one.gone), None)
    return f"forgotten; {ENDED[fate]}" if fate else "forgotten"
