"""Waiting for something, and no longer than that makes sense."""

import asyncio


async def happens_within(event: asyncio.Event, seconds: float | None) -> bool:
    """Wait for *event*, *seconds* at most, and tell whether it happened in time."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True
