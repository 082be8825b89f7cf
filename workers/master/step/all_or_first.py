"""Waiting for several things of which none is worth anything without the others."""

import asyncio
from collections.abc import Coroutine
from typing import Any


async def all_or_first_error(*awaited: Coroutine[Any, Any, Any] | asyncio.Future[Any]) -> list[Any]:
    """The results of all of them; the first error cancels the others, and is raised when they have ended."""
    tasks = [asyncio.ensure_future(one) for one in awaited]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
