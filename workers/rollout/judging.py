"""Judge: calls the reward function with a deadline and retries; what fails is a failure, never a reward of zero."""

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from corral.experiments.config import RolloutConfig
from corral.workers.rollout.partial_rollout import PartialAnswer
from corral.workers.rollout.rewards import Problem, RewardFunction

logger = logging.getLogger(__name__)

_NUM_THREADS = 4


class RewardFailedError(RuntimeError):
    """A reward function failed on every try; its prompt is dropped and counted."""


class RewardJudge:
    """Judges answers in threads, so that a slow reward holds up nothing else."""

    def __init__(self, reward: RewardFunction, tokenizer: Any, *, eos_token_id: int, config: RolloutConfig) -> None:
        self._reward = reward
        self._tokenizer = tokenizer
        self._eos = eos_token_id
        self._config = config
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="reward")
        self._is_closed = False

    async def __call__(self, problem: Problem, answer: PartialAnswer) -> float:
        """The reward of one answer.

        Raises:
            RewardFailedError: naming the last cause.
            CancelledError: if the worker leaves: nothing was judged, so nothing failed, and its prompt is not dropped.
        """
        ids = answer.output_ids[:-1] if answer.output_ids[-1:] == [self._eos] else answer.output_ids
        text = self._tokenizer.decode(ids)
        cause = ""
        for _ in range(1 + self._config.reward_retries):
            if self._is_closed:
                raise asyncio.CancelledError
            try:
                async with asyncio.timeout(self._config.reward_timeout_s):
                    loop = asyncio.get_running_loop()
                    return float(await loop.run_in_executor(self._threads, self._reward, problem, text))
            except TimeoutError:
                cause = f"no result within {self._config.reward_timeout_s:g} s"
            except Exception as error:  # user code: anything may come out of it
                cause = f"{type(error).__name__}: {error}"
            logger.warning("the reward function failed: %s", cause)
        raise RewardFailedError(f"the reward function failed {1 + self._config.reward_retries} times, last: {cause}")

    def close(self) -> None:
        self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
