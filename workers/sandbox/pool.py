"""SandboxPool: so many sandboxes at a time, for async functions and plain ones, of any thread.

    use(work), use_now(work) ──► a slot, within wait_s ──► a new sandbox ──work──► closed, and the slot is free
                                        └── none: SandboxError

Sandboxes are made in a thread of the pool's own: what runs in them ends with the thread that started it.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, Self, TypeVar

from corral.workers.sandbox.base import SandboxError
from corral.workers.sandbox.bubblewrap import Bubblewrap

ResultT = TypeVar("ResultT")
Work = Callable[[Bubblewrap], Awaitable[ResultT]]
"""What is done with one sandbox. Its own deadlines bound how long it has it."""


class SandboxPool:
    """At most `number` sandboxes at a time, in a `with` block; each is new.

    Example:
        >>> async def answer(sandbox):
        ...     return (await sandbox.exec(["python3", "-c", "print(6 * 7)"], timeout_s=5.0)).stdout
        >>> with SandboxPool(4) as pool:
        ...     pool.use_now(answer)  # b"42\\n"; in a coroutine: await pool.use(answer)
    """

    def __init__(self, number: int, *, wait_s: float = 60.0) -> None:
        """
        Args:
            wait_s: longest wait for a slot.
        """
        if number < 1:
            raise ValueError(f"a pool of sandboxes has at least 1 slot, got {number}")
        self._number = number
        self._wait_s = wait_s
        self._loop = asyncio.new_event_loop()
        self._slots = asyncio.Semaphore(number)
        self._uses = set[asyncio.Task[Any]]()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sandboxes", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Ends what is still running; its callers get a CancelledError."""
        asyncio.run_coroutine_threadsafe(self._cancel_all(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def use(self, work: Work[ResultT]) -> ResultT:
        """What the work returns or raises; it is cancelled with the caller.

        Raises:
            SandboxError: if no slot is free in time, or no sandbox can be made.
        """
        return await asyncio.wrap_future(self._submit(work))

    def use_now(self, work: Work[ResultT]) -> ResultT:
        """`use` for a plain function."""
        future = self._submit(work)
        try:
            return future.result()
        finally:
            future.cancel()

    def _submit(self, work: Work[ResultT]) -> "Future[ResultT]":
        return asyncio.run_coroutine_threadsafe(self._use(work), self._loop)

    async def _use(self, work: Work[ResultT]) -> ResultT:
        task = asyncio.current_task()
        assert task is not None, "it runs in the pool's loop"
        self._uses.add(task)
        task.add_done_callback(self._uses.discard)
        try:
            async with asyncio.timeout(self._wait_s):
                await self._slots.acquire()
        except TimeoutError as error:
            raise SandboxError(
                f"none of {self._number} sandboxes was free within {self._wait_s:g} s; give the pool more slots, or "
                "shorter deadlines to what runs in them"
            ) from error
        try:
            async with await Bubblewrap.create() as sandbox:
                return await work(sandbox)
        finally:
            self._slots.release()

    async def _cancel_all(self) -> None:
        uses = list(self._uses)
        for task in uses:  # not twice: each sees to the end of what it has started
            if not task.cancelling():
                task.cancel()
        await asyncio.gather(*uses, return_exceptions=True)
