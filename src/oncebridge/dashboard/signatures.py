"""
Signs sessions, form tokens and notes.

Each is signed for one purpose, so that one cannot be used as another. If `dashboard_token` is set,
the key is derived from it: sessions survive a restart, and a new token ends them. Otherwise each
process draws its own key.
"""

import base64
import hmac
from hashlib import pbkdf2_hmac, sha256
from typing import Final

from oncebridge.base.clock import Clock, Dice

_ROUNDS: Final = 100_000
"""Makes it slow to guess the token from a cookie."""


class CookieSigner:
    """Sign and verify values; *token* is the dashboard's token, if any."""

    def __init__(self, token: str, *, clock: Clock, dice: Dice) -> None:
        drawn = b"".join(dice.tokens(2))
        given = token.encode("utf-8", "surrogateescape")
        salt = b"oncebridge dashboard"
        self._key = pbkdf2_hmac("sha256", given, salt, _ROUNDS) if given else drawn
        self._clock = clock
        self._dice = dice
        self.name = self._sign("name", "")[:8]
        """Part of the cookie names: dashboards on the same host share cookies."""

    def nonce(self) -> str:
        """Return a random value that is never repeated."""
        return self._dice.tokens(1)[0].hex()

    def sign(self, purpose: str, text: str) -> str:
        """Return a signature of *text*; each is different."""
        nonce = self.nonce()
        return f"{nonce}.{self._sign(purpose, f'{nonce}.{text}')}"

    def is_signature(self, purpose: str, text: str, given: str) -> bool:
        """Return True if *given* is a signature of *text* made here."""
        nonce, _, signature = given.partition(".")
        return _equal(self._sign(purpose, f"{nonce}.{text}"), signature)

    def sign_value(self, purpose: str, text: str, *, for_s: int) -> str:
        """Return *text* signed for a cookie, valid for *for_s* seconds."""
        packed = base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")
        body = f"{self._clock() // 1000 + for_s}.{packed}"
        return f"{body}.{self._sign(purpose, body)}"

    def read_value(self, purpose: str, signed: str) -> str | None:
        """Return the text of a signed value; None if it was not signed here, or has expired."""
        body, _, signature = signed.rpartition(".")
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
