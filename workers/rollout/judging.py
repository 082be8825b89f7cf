"""RewardJudge: calls the reward function with a deadline and retries; what fails is a failure, never a reward of zero.

answer ids ──decode──► RewardThreads ──a finite number in time──► reward
                            └──raised, too late, not finite──► next try ... ──► RewardFailedError
"""

import asyncio
import logging
from collections.abc import Collection, Sequence
from typing import Any

from corral.workers.rollout.partial_rollout import PartialAnswer
from corral.workers.rollout.reward_threads import RewardThreads
from corral.workers.rollout.rewards import Problem, RewardFunction
from corral.workers.user_code.blame import describe_error
from corral.workers.user_code.trials import checked_reward

logger = logging.getLogger(__name__)

_NUM_THREADS = 4


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
        self._threads = RewardThreads(_NUM_THREADS)
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
            if self._is_closed:
                raise asyncio.CancelledError
            outcome = await self._call_once(problem, text)
            if isinstance(outcome, float):
                return outcome
            error = outcome
            cause = describe_error(error) if error else f"no result within {self._timeout_s:g} s"
            logger.warning("the reward function failed: %s", cause)
        raise RewardFailedError(f"the reward function failed {self._tries} times, last: {cause}") from error

    async def _call_once(self, problem: Problem, text: str) -> float | BaseException | None:
        """What came out of one call: a reward, what it raised, or None if its time was up."""
        call = self._threads.submit(lambda: checked_reward(self._reward(problem, text)))
        try:
            await asyncio.wrap_future(call.started)  # without a deadline: every call before it has one
            await asyncio.wait([asyncio.wrap_future(call.outcome)], timeout=self._timeout_s)
        finally:
            self._threads.abandon(call)
        return call.outcome.result() if call.outcome.done() else None

    def close(self) -> None:
        self._is_closed = True
        self._threads.close()
