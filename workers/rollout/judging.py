"""RewardJudge: calls the reward function with a deadline and retries; what fails is a failure, never a reward of zero.

answers, episodes ──text──► a process ──a finite number in time──► reward
                                └──raised, too late, not finite, died──► next try ... ──► RewardFailedError
"""

import asyncio
import json
import logging
from collections.abc import Collection, Sequence
from dataclasses import asdict
from typing import Any

from corral.experiments.worker_specs import RewardSpec
from corral.workers.agents.contract import Episode
from corral.workers.rollout.reward_processes import RewardProcesses
from corral.workers.rollout.rewards import Problem
from corral.workers.sandbox.curtain import Curtain
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

    def __init__(
        self, reward: RewardSpec, tokenizer: Any, *, stop_token_ids: Collection[int], curtain: Curtain
    ) -> None:
        """
        Args:
            curtain: keeps the reward's processes from what it hides.
            stop_token_ids: a last token that is one of them is not part of the answer's text.
        """
        self.curtain = curtain
        """That user code runs behind."""
        self._reward = reward
        self._tokenizer = tokenizer
        self._stop_token_ids = frozenset(stop_token_ids)
        self._processes = RewardProcesses(reward.function, number=reward.processes, curtain=curtain)

    @property
    def takes_groups(self) -> bool:
        """Whether the reward judges the answers or episodes of a prompt together."""
        return self._processes.start().takes != "answer"

    async def judge(self, problem: Problem, outputs: Sequence[Sequence[int]]) -> list[float]:
        """The rewards of a group of answers, as `judge_episodes` gives those of episodes of one answer each."""
        return await self.judge_episodes(problem, [Episode([self.text_of(output)]) for output in outputs])

    async def judge_episodes(self, problem: Problem, episodes: Sequence[Episode]) -> list[float]:
        """The rewards of a group of episodes, by their last answers, judged at the same time; or by one call if the
        reward takes groups.

        Raises:
            RewardFailedError: naming the last cause of the first one that failed.
            CancelledError: if the worker leaves: nothing was judged, so nothing failed, and its prompt is not dropped.
        """
        shown, takes = json.dumps(problem), self._processes.start().takes
        if takes == "episodes":
            texts = [json.dumps(asdict(episode)) for episode in episodes]
        else:
            texts = [episode.turns[-1] if episode.turns else "" for episode in episodes]
        groups = [[text] for text in texts] if takes == "answer" else [texts]
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

    def text_of(self, output_ids: Sequence[int]) -> str:
        """An answer without the token that ended it."""
        ended = len(output_ids) > 0 and output_ids[-1] in self._stop_token_ids
        text: str = self._tokenizer.decode(list(output_ids[:-1] if ended else output_ids))
        return text

    def start(self) -> None:
        """Not with the first answer."""
        self._processes.start()

    def close(self) -> None:
        """Nothing is judged any more; what runs is ended."""
        self._processes.close()
