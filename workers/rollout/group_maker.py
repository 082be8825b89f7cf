"""GroupMaker: one prompt becomes one judged group that a train step can use, or the reason why it cannot.

    row ──encode──► agent ⇄ generation servers, judge ──► checks ──► group, sample
                      │ raised, gave back what no step can use, or waited too long for something of its own
                      ├── again, `rollout.reward_retries` times
                      ├── PromptFailedError: the prompt is dropped and counted
                      ├── PromptsFailError: so many in a row failed that something else is to blame
                      └── UserCodeError: and none was ever judged: the code is

Whatever user code raises ends in one of these; what others are to blame for (servers, streams) passes through.
"""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from corral.experiments.config.rollout import RolloutConfig
from corral.experiments.inputs.dataset_file import DatasetRow
from corral.experiments.inputs.tokens import encode_prompt
from corral.workers.data.answer_seed import group_seeds
from corral.workers.data.sequence_sample import SequenceSample
from corral.workers.delivery.messages import FILTERED
from corral.workers.lifecycle.worker import UserCodeError
from corral.workers.rollout.agent_run import AgentRun
from corral.workers.rollout.agents import JudgedGroup
from corral.workers.rollout.generation_client import GenerationClient, RequestRefusedError
from corral.workers.rollout.judging import RewardFailedError, RewardJudge
from corral.workers.rollout.partial_rollout import PartialAnswer
from corral.workers.rollout.reward_processes import RewardHostError
from corral.workers.rollout.trajectories import make_sample
from corral.workers.user_code.blame import describe_error
from corral.workers.user_code.trials import checked_reward

logger = logging.getLogger(__name__)

_MAX_FAILED_IN_A_ROW = 16  # if every second prompt failed by itself, a run of so many would come once in 65,536 prompts

Agent = Callable[..., Awaitable[JudgedGroup]]


class PromptTooLongError(ValueError):
    """A prompt has more tokens than `dataset.max_prompt_tokens`: it would not fit a micro-batch."""


class PromptFailedError(RuntimeError):
    """A prompt is given up, or nothing is learned from it; its text begins with why, as the ledger has it."""


_FAILURES: dict[type[Exception], str] = {
    RewardFailedError: "reward_error",
    PromptTooLongError: "prompt_too_long",
    RequestRefusedError: "request_refused",
}


class PromptsFailError(RuntimeError):
    """Agent or reward fail on everything now, and did not before: the worker starts again, as what they ask may do."""


@dataclass(slots=True)
class GroupMaker:
    """Makes the groups of one rollout worker, many at a time."""

    agent: Agent
    judge: RewardJudge
    client: GenerationClient
    tokenizer: Any
    _: KW_ONLY
    config: RolloutConfig
    trial_seed: int
    group_size: int
    max_prompt_tokens: int
    num_prompts: int = _MAX_FAILED_IN_A_ROW
    """Of the worker's share; if all of them fail, nothing is left to try."""
    has_judged: bool = False
    """Whether a prompt of the trial was ever judged."""
    _failed_in_a_row: int = field(default=0, init=False)

    async def make(self, uid: str, row: DatasetRow, *, order: int) -> tuple[JudgedGroup, SequenceSample]:
        """The group of one prompt, whose answers follow from the trial's seed and the prompt's admission number.

        Raises:
            PromptFailedError: the prompt is to be dropped and counted.
            UserCodeError, PromptsFailError, RewardHostError: the worker has to end.
        """
        try:
            made = await self.attempt(uid, row, order=order)
        except PromptFailedError as error:
            self._failed_in_a_row += 1
            logger.warning("prompt %s failed: %s", uid, error, exc_info=error.__cause__)
            if self._failed_in_a_row >= min(_MAX_FAILED_IN_A_ROW, self.num_prompts):
                raise self._all_fail(
                    f"{self._failed_in_a_row} prompts in a row failed, the last one with {error}"
                ) from (error.__cause__)
            raise
        self._failed_in_a_row = 0
        self.has_judged = True
        rewards = made[0].rewards
        if self.config.drop_uniform_groups and len(set(rewards)) == 1:
            raise PromptFailedError(f"{FILTERED}: the rewards of all {len(rewards)} answers are {rewards[0]:g}")
        return made

    def _all_fail(self, what: str) -> RuntimeError:
        if self.has_judged:
            return PromptsFailError(f"{what}; mend agent {self.config.agent} or reward {self.config.reward}")
        return UserCodeError(
            f"{what}; mend agent {self.config.agent} or reward {self.config.reward}, in the folder `code` of the trial "
            "if it is your own, and rl-submit --resume it"
        )

    async def attempt(self, uid: str, row: DatasetRow, *, order: int) -> tuple[JudgedGroup, SequenceSample]:
        """As `make`, but nothing follows from how many prompts fail in a row."""
        num_answers = self.group_size + self.config.spare_answers
        # One after the other for all tries: what made an agent fail may be the answers, so the next try has others.
        seeds_by_call = (
            group_seeds(self.trial_seed, order=order, group_size=num_answers, call=call) for call in itertools.count()
        )
        for tries_left in reversed(range(1 + self.config.reward_retries)):
            try:
                return await self._try(uid, row, seeds_by_call)
            except RewardHostError:
                raise
            except tuple(_FAILURES) as error:  # what a further try would meet again; the judge has made its own
                kind = next(kind for cause, kind in _FAILURES.items() if isinstance(error, cause))
                raise PromptFailedError(f"{kind}: {error}") from error
            except BaseException as error:  # user code: even SystemExit may come out of it, and CancelledError
                if _is_being_cancelled():
                    raise
                if tries_left == 0:
                    raise PromptFailedError(f"agent_error: {describe_error(error)}") from error
                logger.warning("the agent failed on prompt %s: %s", uid, describe_error(error))
        raise AssertionError("the last try returns or raises")

    async def _try(
        self, uid: str, row: DatasetRow, seeds_by_call: Iterator[list[int]]
    ) -> tuple[JudgedGroup, SequenceSample]:
        async def sample_group(ids: Sequence[int]) -> list[PartialAnswer]:
            self._check_prompt(ids)
            return await self.client.sample_group(uid, ids, seeds=next(seeds_by_call), enough=self.group_size)

        prompt_ids = encode_prompt(self.tokenizer, row.prompt)
        self._check_prompt(prompt_ids)
        run = AgentRun(self.config.agent, timeout_s=self.config.agent_timeout_s)
        group = await run.wait(self.agent(row.fields, prompt_ids, run.asks(sample_group), run.asks(self.judge)))
        self._check_group(group)
        return group, make_sample(uid, group, experts=self.client.experts, makes_episodes=self.config.makes_episodes)

    def _check_prompt(self, ids: Sequence[int]) -> None:
        if len(ids) > self.max_prompt_tokens:
            raise PromptTooLongError(
                f"the prompt has {len(ids)} tokens, more than dataset.max_prompt_tokens {self.max_prompt_tokens}"
            )

    def _check_group(self, group: object) -> None:
        """What the trainer relies on; ValueError if an agent of somebody's own does not keep to it."""
        if not isinstance(group, JudgedGroup):
            raise ValueError(f"an agent returns a JudgedGroup, got {type(group).__name__}")
        if not group.answers or len(group.answers) != len(group.rewards):
            raise ValueError(
                f"a group has one reward for each of its answers, got {len(group.rewards)} for {len(group.answers)}"
            )
        if not group.prompt_ids:
            raise ValueError("a prompt has at least one token, got none")
        self._check_prompt(group.prompt_ids)
        for answer, reward in zip(group.answers, group.rewards, strict=True):
            checked_reward(reward)
            if len(answer.output_ids) > self.config.sampling.max_new_tokens:
                raise ValueError(
                    f"an answer has {len(answer.output_ids)} tokens, more than rollout.sampling.max_new_tokens "
                    f"{self.config.sampling.max_new_tokens}"
                )


def _is_being_cancelled() -> bool:
    """Whether the running task was asked to end, and did not just meet a CancelledError of an agent's making."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
