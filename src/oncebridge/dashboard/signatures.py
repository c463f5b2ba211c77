"""
What only this dashboard can have written: sessions, form tokens, notes.

Each is signed for one purpose, so that none can stand in for another. With a token the key is
made of it: a restart keeps sessions, and another token ends them. Without one the key is drawn
anew for each process.
"""

import base64
import hmac
from hashlib import pbkdf2_hmac, sha256
from typing import Final

from oncebridge.base.clock import Clock, Dice

_ROUNDS: Final = 100_000
"""So that whoever has a cookie can hardly try out which token it was made with."""


class Seal:
    """Sign, and know one's own signature again; *token* is what people log in with, if any."""

    def __init__(self, token: str, *, clock: Clock, dice: Dice) -> None:
        drawn = b"".join(dice.tokens(2))
        given = token.encode("utf-8", "surrogateescape")
        salt = b"oncebridge dashboard"
        self._key = pbkdf2_hmac("sha256", given, salt, _ROUNDS) if given else drawn
        self._clock = clock
        self._dice = dice
        self.name = self._sign("name", "")[:8]
        """Tells the cookies of this dashboard from those of others on the same host."""

    def nonce(self) -> str:
        """Draw what never comes again."""
        return self._dice.tokens(1)[0].hex()

    def mark(self, purpose: str, text: str) -> str:
        """Sign *text*, which the reader has too; no two marks are alike."""
        nonce = self.nonce()
        return f"{nonce}.{self._sign(purpose, f'{nonce}.{text}')}"

    def is_mark(self, purpose: str, text: str, mark: str) -> bool:
        """Return whether *mark* was made of *text* here."""
        nonce, _, signature = mark.partition(".")
        return _equal(self._sign(purpose, f"{nonce}.{text}"), signature)

    def close(self, purpose: str, text: str, *, for_s: int) -> str:
        """Put *text* into a form that travels in a cookie, and holds for so many seconds."""
        packed = base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")
        body = f"{self._clock() // 1000 + for_s}.{packed}"
        return f"{body}.{self._sign(purpose, body)}"

    def open(self, purpose: str, sealed: str) -> str | None:
        """Return the text back; None where it is not of us, or too old."""
        body, _, signature = sealed.rpartition(".")
        if not _equal(self._sign(purpose, body), signature):
            return None
        until, _, packed = body.partition(".")
        if int(until) <= self._clock() // 1000:
            return None
        return base64.urlsafe_b64decode(packed + "=" * (-len(packed) % 4)).decode()

    def _sign(self, purpose: str, text: str) -> str:
        signed = f"{purpose}\n{text}".encode("utf-8", "surrogateescape")
        return hmac.new(self._key, signed, sha256).hexdigest()


def _equal(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(), other.encode("utf-8", "surrogateescape"))
