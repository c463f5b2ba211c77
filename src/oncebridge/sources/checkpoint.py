"""
How far a source has come, remembered in the store.

A checkpoint is a record like an entity's: it is claimed, so that one worker at a time goes
on from it, and its memo is the place. It lives where the keys live, and as long: a store that
was lost makes the source begin anew, which is what its keys need too.
"""

from collections.abc import Sequence

from msgspec import Struct

from oncebridge.base.clock import Dice
from oncebridge.errors import OncebridgeError, StoreUnavailable
from oncebridge.events.key import Part, make_key
from oncebridge.stores.api import Claim, Extension, NoAnswer, Release, Reply, Store, Want

_NAMESPACE = "checkpoint"


class CheckpointTaken(OncebridgeError):
    """Another worker goes on from this checkpoint; *left_s* says until when at least."""

    def __init__(self, name: str, left_s: float) -> None:
        super().__init__(f"{name}: another process is reading it (for {left_s:.0f} s at least)")
        self.left_s = left_s


class CheckpointState(Struct, frozen=True, gc=False):
    """What a look at a checkpoint shows; it may be another's a moment later."""

    place: bytes
    is_held: bool
    """Somebody holds it, until *until_ms* unless it is extended."""
    until_ms: int
    """In the store's time. Where nobody holds it: when it was given back."""


class Checkpoint:
    """
    The place in *name*, of a kind of source, held for *lease_ms* at a time.

    *mark* tells apart what has the same name and is not the same any more.
    """

    def __init__(
        self,
        store: Store,
        kind: str,
        name: str,
        mark: str = "",
        *,
        dice: Dice,
        lease_ms: int,
        keep_ms: int,
    ) -> None:
        self._store = store
        self._name = name
        self.key = make_key(_NAMESPACE, b"source", kind, f"{name}\0{mark}", ())
        self._dice = dice
        self._lease_ms = lease_ms
        self._keep_ms = keep_ms
        self._token = b""
        self._asked: list[bytes] = []
        """Token and generation of a claim that got no answer: it may have been granted."""
        self.taken_ms = 0
        """When it was taken last, by the store's clock."""

    async def take(self) -> bytes:
        """Take hold, and give the place; nothing where there is none yet."""
        self._asked = self._asked or self._dice.tokens(2)
        token, generation = self._asked
        want = Want((Part(self.key),), token, generation, self._lease_ms, self._keep_ms, b"")
        (answer,) = await self._store.claim([want])
        match answer:
            case Claim():
                self._token, self._asked = token, []
                self.taken_ms = answer.now_ms
                return answer.held[0].memo
            case NoAnswer():
                raise StoreUnavailable(answer.reason)
            case _:
                self._asked = []
                raise CheckpointTaken(self._name, getattr(answer, "left_ms", self._lease_ms) / 1000)

    async def extend(self) -> None:
        """Hold on for another lease; raise `CheckpointTaken` if another has taken over meanwhile."""
        extension = Extension(self.key, self._token, self._lease_ms)
        (answer,) = await self._store.extend([extension])
        if isinstance(answer, NoAnswer):
            raise StoreUnavailable(answer.reason)
        if answer is not Reply.EXTENDED:
            # Perhaps it is only that an answer was lost on the way, and nobody has it.
            await self.take()

    async def save(self, place: bytes) -> None:
        """Write the place down, and take hold again; raise `CheckpointTaken` if another was quicker."""
        if not await self._release(place):
            await self.take()
            await self._release(place)
        await self.take()

    async def release(self, place: bytes) -> None:
        """Write the place down, and let others go on from it."""
        if not await self._release(place):
            await self.take()
            await self._release(place)

    async def clear(self) -> None:
        """Forget the place: the next one begins at the beginning."""
        await self.release(b"")
        await self._store.forget([self.key])

    async def _release(self, place: bytes) -> bool:
        """Return whether it was ours to give back."""
        release = Release(self.key, self._token, 0, self._keep_ms, place, unsent=True)
        (answer,) = await self._store.release([release])
        if isinstance(answer, NoAnswer):
            raise StoreUnavailable(answer.reason)
        return answer is Reply.RELEASED


async def read_states(store: Store, checkpoints: Sequence[Checkpoint]) -> list[CheckpointState]:
    """Look at several checkpoints, without taking hold of any."""
    records = await store.peek([checkpoint.key for checkpoint in checkpoints])
    return [
        CheckpointState(record.memo, bool(record.token), record.until_ms)
        if record is not None
        else CheckpointState(b"", is_held=False, until_ms=0)
        for record in records
    ]
