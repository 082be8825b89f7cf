"""A pool: so many sandboxes at a time, a bounded wait, from coroutines and plain functions."""

import asyncio
import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor

import pytest

from corral.workers.sandbox.base import SandboxError
from corral.workers.sandbox.bubblewrap import Bubblewrap
from corral.workers.sandbox.pool import SandboxPool

DEADLINE_S = 60.0


async def answer(sandbox: Bubblewrap) -> bytes:
    return (await sandbox.exec(["sh", "-c", "echo $((6 * 7))"], timeout_s=DEADLINE_S)).stdout


def test_plain_functions_of_many_threads_and_coroutines_share_the_places() -> None:
    at_a_time, most, lock = [0], [0], threading.Lock()

    async def count(sandbox: Bubblewrap) -> bytes:
        with lock:
            at_a_time[0] += 1
            most[0] = max(most[0], at_a_time[0])
        try:
            return await answer(sandbox)
        finally:
            with lock:
                at_a_time[0] -= 1

    with SandboxPool(2) as pool, ThreadPoolExecutor(4) as threads:
        now = threads.map(lambda _: pool.use_now(count), range(4))

        async def several() -> list[bytes]:
            return await asyncio.gather(*(pool.use(count) for _ in range(4)))

        assert asyncio.run(several()) == [b"42\n"] * 4
        assert list(now) == [b"42\n"] * 4
    assert most[0] == 2


def test_a_wait_for_a_place_ends_and_says_what_to_do() -> None:
    async def run() -> None:
        begun = threading.Event()

        async def hold(sandbox: Bubblewrap) -> None:
            begun.set()
            await sandbox.exec(["sleep", "1000"], timeout_s=DEADLINE_S)

        with SandboxPool(1, wait_s=0.05) as pool:
            holding = asyncio.create_task(pool.use(hold))
            assert await asyncio.to_thread(begun.wait, DEADLINE_S)
            with pytest.raises(SandboxError, match="none of 1 sandboxes was free within 0.05 s; give"):
                await pool.use(answer)
            holding.cancel()
            with pytest.raises(asyncio.CancelledError):
                await holding

    asyncio.run(run())


def test_what_the_work_raises_is_the_callers_and_frees_the_place() -> None:
    async def fail(sandbox: Bubblewrap) -> None:
        raise KeyError("mine")

    with SandboxPool(1) as pool:
        for _ in range(2):
            with pytest.raises(KeyError, match="mine"):
                pool.use_now(fail)
        assert pool.use_now(answer) == b"42\n"


def test_a_pool_that_ends_ends_what_runs_in_it() -> None:
    begun = threading.Event()

    async def hold(sandbox: Bubblewrap) -> None:
        begun.set()
        await sandbox.exec(["sleep", "1000"], timeout_s=DEADLINE_S)

    with ThreadPoolExecutor(1) as threads:
        with SandboxPool(1) as pool:
            held = threads.submit(pool.use_now, hold)
            assert begun.wait(DEADLINE_S)
        with pytest.raises(CancelledError):
            held.result(DEADLINE_S)


def test_a_pool_has_a_place() -> None:
    with pytest.raises(ValueError, match="at least 1 slot, got 0"):
        SandboxPool(0)
