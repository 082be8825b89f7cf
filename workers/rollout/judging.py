"""RewardJudge: calls the reward function with a deadline and retries; what fails is a failure, never a reward of zero.

answer ids ──decode──► a thread ──a finite number in time──► reward
                           └──raised, too late, not finite──► next try ... ──► RewardFailedError

A thread cannot be ended from outside. So one that hangs is left behind until its call returns, if ever, and blocks
nobody else; too many of them at a time are an error: only a new process is rid of them.
"""

import asyncio
import logging
import threading
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from typing import Any

from corral.workers.rollout.partial_rollout import PartialAnswer
from corral.workers.rollout.rewards import Problem, RewardFunction
from corral.workers.user_code.blame import describe_error
from corral.workers.user_code.trials import checked_reward

logger = logging.getLogger(__name__)

_NUM_THREADS = 4
_MAX_LEFT_BEHIND = 64  # each holds a stack and whatever its call holds, such as a connection or an open file


class ThreadsHangError(RuntimeError):
    """So many calls hang that only a new process can go on."""


class RewardFailedError(RuntimeError):
    """A reward function failed on every try; its prompt is dropped and counted."""


class RewardJudge:
    """Judges answers in threads, so that a slow reward holds up nothing else."""

    def __init__(
        self, reward: RewardFunction, tokenizer: Any, *, stop_token_ids: Collection[int], timeout_s: float, retries: int
    ) -> None:
        """
        Args:
            stop_token_ids: a last token that is one of them is not part of the answer's text.
            timeout_s: of one call, from the moment that a thread takes it up.
            retries: further tries of a call that failed.
        """
        self._reward = reward
        self._tokenizer = tokenizer
        self._stop_token_ids = frozenset(stop_token_ids)
        self._timeout_s = timeout_s
        self._tries = 1 + retries
        self._places = asyncio.Semaphore(_NUM_THREADS)
        self._places_of: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        self._num_left_behind = 0
        self._is_closed = False

    async def __call__(self, problem: Problem, answer: PartialAnswer) -> float:
        """`judge` an answer as an agent holds it."""
        return await self.judge(problem, answer.output_ids)

    async def judge(self, problem: Problem, output_ids: Sequence[int]) -> float:
        """The reward of one answer.

        Raises:
            RewardFailedError: naming the last cause.
            ThreadsHangError: if so many calls hang that only a new process can go on.
            CancelledError: if the worker leaves: nothing was judged, so nothing failed, and its prompt is not dropped.
        """
        ended = len(output_ids) > 0 and output_ids[-1] in self._stop_token_ids
        text = self._tokenizer.decode(list(output_ids[:-1] if ended else output_ids))
        cause, error = "", None
        for _ in range(self._tries):
            outcome = await self._call_once(problem, text)
            if isinstance(outcome, float):
                return outcome
            error = outcome
            cause = describe_error(error) if error else f"no result within {self._timeout_s:g} s"
            logger.warning("the reward function failed: %s", cause)
        raise RewardFailedError(f"the reward function failed {self._tries} times, last: {cause}") from error

    async def _call_once(self, problem: Problem, text: str) -> float | BaseException | None:
        """What came out of one call: a reward, what it raised, or None if its time was up."""
        if self._places_of is not (loop := asyncio.get_running_loop()):  # an evaluation has a loop for each batch
            self._places, self._places_of = asyncio.Semaphore(_NUM_THREADS), loop
        async with self._places:  # without a deadline: every call before it has one
            if self._is_closed:
                raise asyncio.CancelledError
            if self._num_left_behind >= _MAX_LEFT_BEHIND:
                raise ThreadsHangError(
                    f"{self._num_left_behind} calls of user code have not returned after their deadline; threads "
                    "cannot be ended, so this process has to: give the function a time limit of its own"
                )
            outcome: Future[float | BaseException] = Future()
            threading.Thread(target=self._run, args=(problem, text, outcome), name="reward", daemon=True).start()
            try:
                await asyncio.wait([asyncio.wrap_future(outcome)], timeout=self._timeout_s)
            finally:
                with self._lock:
                    self._num_left_behind += outcome.cancel()
        return None if outcome.cancelled() else outcome.result()

    def _run(self, problem: Problem, text: str, outcome: "Future[float | BaseException]") -> None:
        """In a thread of its own. What it raises is a value: StopIteration and SystemExit travel through no future."""
        value: float | BaseException
        try:
            value = checked_reward(self._reward(problem, text))
        except BaseException as error:
            value = error
        with self._lock:
            if outcome.cancelled():
                self._num_left_behind -= 1
            else:
                outcome.set_result(value)

    def close(self) -> None:
        """Nothing is judged any more; what runs is left to end by itself."""
        self._is_closed = True
