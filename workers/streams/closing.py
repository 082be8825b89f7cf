"""Orderly ends: base classes of objects that close with their `with` block, and waits that leave no task behind."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from typing import Any, Self


class Closing(ABC):
    """Something that a `with` block closes."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class AsyncClosing(ABC):
    """Something that an `async with` block closes."""

    @abstractmethod
    async def close(self) -> None: ...

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()


async def all_or_first_error(*awaited: Coroutine[Any, Any, Any] | asyncio.Future[Any]) -> list[Any]:
    """The results of all, none of which is worth anything without the others.

    The first error cancels the others, and is raised when they have ended.
    """
    tasks = [asyncio.ensure_future(one) for one in awaited]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel(*tasks)


async def cancel(*tasks: asyncio.Future[Any]) -> None:
    """Cancels what of them has not ended, and returns when all have, whatever came of them."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
