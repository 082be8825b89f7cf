"""Bases of what is closed when its `with` block ends, whether or not the block raised."""

from abc import ABC, abstractmethod
from typing import Self


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
