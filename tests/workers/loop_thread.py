"""An event loop in a thread of its own, as a worker process has one, asked from a test's thread.

test ──run(coroutine)──► loop in its thread ──► what it gives, or raises, within the deadline
"""

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """A running loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, deadline_s: float) -> None:
        self._loop = loop
        self._deadline_s = deadline_s

    def start(self, coroutine: Coroutine[Any, Any, T]) -> "Future[T]":
        """Begin it, and wait for nothing."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """What the coroutine gives; TimeoutError after the deadline."""
        return self.start(coroutine).result(self._deadline_s)


@contextmanager
def loop_thread(*, deadline_s: float) -> Iterator[LoopThread]:
    """One that ends with the block.

    Args:
        deadline_s: of each coroutine, and of the thread's end.
    """
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield LoopThread(loop, deadline_s=deadline_s)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(deadline_s)
        loop.close()
