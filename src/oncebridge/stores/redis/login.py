"""
How connections to Redis log in: with what the address says, or with what is asked for each time.

Nothing here quotes a password, nor what a failing function said: that may hold one.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable

from oncebridge.base.secrets import Secret
from oncebridge.errors import ConfigError, OncebridgeError, StoreError, StoreUnavailable
from oncebridge.stores.redis.connection import Login, Unfit, Words

Credentials = Callable[[], tuple[str, str] | Awaitable[tuple[str, str]]]
"""
Returns a user and a password; an empty user is the default one.

An `async` function is called on the loop, a plain one in a thread, so that it may block.
"""


def fixed(user: str, password: Secret | None) -> Login | None:
    """Return a login that never changes; None without a password."""
    if password is None:
        return None
    words = _auth(user, password.reveal())

    async def login(_: bool) -> Words:  # noqa: FBT001 - a `Login`
        return words

    return login


def asked(credentials: Credentials, again: Credentials | None = None) -> Login:
    """Return a login that asks *credentials* each time, or *again* after a refusal."""

    async def login(is_refused: bool) -> Words:  # noqa: FBT001 - a `Login`
        ask = again if again is not None and is_refused else credentials
        try:
            told = ask() if inspect.iscoroutinefunction(ask) else await asyncio.to_thread(ask)
            match await told if inspect.isawaitable(told) else told:
                case (str(user), str(password)) if password:
                    return _auth(user, password)
        except StoreError:
            raise
        except ConfigError as error:
            raise Unfit(f"no credentials for Redis: {error.message}") from error
        except OncebridgeError as error:
            raise StoreUnavailable(f"no credentials for Redis: {error}") from error
        except Exception as error:
            name = type(error).__name__
            raise StoreUnavailable(f"no credentials for Redis: {name} was raised") from error
        raise Unfit("no credentials for Redis: a user and a password must be returned, as texts")

    return login


def _auth(user: str, password: str) -> Words:
    given = [text.encode(errors="surrogateescape") for text in (user, password) if text]
    return (b"AUTH", *given)
