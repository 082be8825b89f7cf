"""RewardJudge: calls the reward function with a deadline and retries; what fails is a failure, never a reward of zero.

answer ids ──decode──► a process ──a finite number in time──► reward
                           └──raised, too late, not finite, died──► next try ... ──► RewardFailedError
"""

import asyncio
import json
import logging
from collections.abc import Collection, Sequence
from typing import Any, overload

from corral.experiments.worker_specs import RewardSpec
from corral.workers.episodes.partial_answer import PartialAnswer
from corral.workers.rollout.reward_processes import RewardProcesses
from corral.workers.rollout.rewards import Problem
from corral.workers.user_code.reward_host import Call

logger = logging.getLogger(__name__)

_SHOWN_PROBLEM = 80  # characters of it, where a failure is told


class RewardFailedError(RuntimeError):
    """A reward function failed on every try; its prompt is dropped and counted."""


class RewardJudge:
    """Judges answers in processes, so that whatever a reward does holds up nothing else.

    Raises:
        RewardHostError: by all that judges, if no process can be started.
    """

    def __init__(self, reward: RewardSpec, tokenizer: Any, *, stop_token_ids: Collection[int]) -> None:
        """
        Args:
            stop_token_ids: a last token that is one of them is not part of the answer's text.
        """
        self._reward = reward
        self._tokenizer = tokenizer
        self._stop_token_ids = frozenset(stop_token_ids)
        self._processes = RewardProcesses(reward.function, number=reward.processes)

    @overload
    async def __call__(self, problem: Problem, answers: PartialAnswer) -> float: ...
    @overload
    async def __call__(self, problem: Problem, answers: Sequence[PartialAnswer]) -> list[float]: ...
    async def __call__(self, problem: Problem, answers: PartialAnswer | Sequence[PartialAnswer]) -> float | list[float]:
        """`judge` answers as an agent holds them."""
        if isinstance(answers, PartialAnswer):
            return (await self.judge(problem, [answers.output_ids]))[0]
        return await self.judge(problem, [answer.output_ids for answer in answers])

    async def judge(self, problem: Problem, outputs: Sequence[Sequence[int]]) -> list[float]:
        """The rewards of a group of answers, judged at the same time, or by one call if the reward takes groups.

        Raises:
            RewardFailedError: naming the last cause of the first answer that failed.
            CancelledError: if the worker leaves: nothing was judged, so nothing failed, and its prompt is not dropped.
        """
        shown, texts = json.dumps(problem), [self._text(output) for output in outputs]
        groups = [texts] if self._processes.start().takes_group else [[text] for text in texts]
        calls = [Call(shown, group, self._reward.timeout_s) for group in groups]
        judged = await asyncio.gather(*map(self._try, calls), return_exceptions=True)
        rewards: list[float] = []
        for each in judged:
            if isinstance(each, BaseException):
                raise each
            rewards += each
        return rewards

    async def _try(self, call: Call) -> list[float]:
        """Of one call and, where it fails, those after it."""
        tries, cause = 1 + self._reward.retries, ""
        for _ in range(tries):
            outcome = await self._processes.call(call)
            if not outcome.cause:
                return outcome.rewards
            cause = outcome.cause
            logger.warning(
                "reward %s failed on %.*s: %s\n%s",
                self._reward.function,
                _SHOWN_PROBLEM,
                call.problem,
                cause,
                outcome.traceback,
            )
        raise RewardFailedError(f"the reward function failed {tries} times, last: {cause}")

    def _text(self, output_ids: Sequence[int]) -> str:
        ended = len(output_ids) > 0 and output_ids[-1] in self._stop_token_ids
        text: str = self._tokenizer.decode(list(output_ids[:-1] if ended else output_ids))
        return text

    def start(self) -> None:
        """Not with the first answer."""
        self._processes.start()

    def close(self) -> None:
        """Nothing is judged any more; what runs is ended."""
        self._processes.close()
