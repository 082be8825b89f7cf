"""LoopThread: an asyncio loop in a thread of its own, so that streams go on while the main thread computes."""

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from corral.workers.streams.errors import StreamClosedError, StreamTimeoutError

ResultT = TypeVar("ResultT")

_CALL_DEADLINE_S = 30.0  # the loop only moves messages: if it does not answer by then, it never will


class LoopThread:
    """Runs functions and coroutines on its loop for callers of other threads."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], ResultT], *, deadline_s: float = _CALL_DEADLINE_S) -> ResultT:
        """Run `function` on the loop and return its result.

        Raises:
            StreamTimeoutError: if the loop did not get to it before the deadline.
            StreamClosedError: if the thread was closed.
        """

        async def run() -> ResultT:
            return function()

        return self.wait(run(), deadline_s=deadline_s)

    def post(self, function: Callable[[], None]) -> None:
        """Run `function` on the loop soon, and do not wait for it; after the thread was closed it is not run."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function)

    def wait(self, coroutine: Coroutine[Any, Any, ResultT], *, deadline_s: float = _CALL_DEADLINE_S) -> ResultT:
        """Run `coroutine` on the loop until it is done; errors as for `call`."""
        if self._loop.is_closed() or not self._thread.is_alive():
            coroutine.close()
            raise StreamClosedError(f"the thread {self._name!r} is closed")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(deadline_s)
        except concurrent.futures.TimeoutError as error:
            if future.done():
                raise  # the coroutine's own TimeoutError
            future.cancel()
            raise StreamTimeoutError(f"the thread {self._name!r} did not answer within {deadline_s:.0f} s") from error

    async def run(self, coroutine: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Run `coroutine` on the loop for a caller in another loop; it is cancelled with the caller."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    def close(self) -> None:
        """End the loop and the thread; what still runs on the loop is cancelled."""
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CALL_DEADLINE_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        finally:
            self._loop.close()
