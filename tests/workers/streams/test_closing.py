"""What a `with` block closes is closed when the block ends, and when it raises."""

import asyncio

import pytest

from corral.workers.streams.closing import AsyncClosing, Closing


class Door(Closing):
    is_closed = False

    def close(self) -> None:
        self.is_closed = True


class SlowDoor(AsyncClosing):
    is_closed = False

    async def close(self) -> None:
        await asyncio.sleep(0)
        self.is_closed = True


def test_a_block_closes_and_lets_its_error_through() -> None:
    with Door() as door:
        assert not door.is_closed
    assert door.is_closed
    with pytest.raises(KeyError, match="draught"), Door() as another:
        raise KeyError("draught")
    assert another.is_closed


def test_an_async_block_waits_for_the_closing_and_lets_its_error_through() -> None:
    async def run() -> None:
        async with SlowDoor() as door:
            assert not door.is_closed
        assert door.is_closed
        with pytest.raises(KeyError, match="draught"):
            async with SlowDoor() as another:
                raise KeyError("draught")
        assert another.is_closed

    asyncio.run(run())
