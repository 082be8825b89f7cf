"""Held-out problems, answered greedily by the weights under training and judged by the trial's reward.

rows ──share of this rank──► generate_greedily ──► RewardJudge ──► sums over all ranks ──► accuracy, reward
                                                        └── failed on every try: counted, and left out of the means
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import nn

from corral.experiments.config.data import EvaluationConfig
from corral.experiments.inputs.dataset_file import DatasetRow
from corral.experiments.inputs.tokens import encode_prompt, eos_token_ids, load_tokenizer
from corral.experiments.worker_specs import RewardSpec
from corral.workers.backends.parallel_context import ParallelContext
from corral.workers.data.prompts import load_held_out_rows
from corral.workers.engine.batch import generate_greedily
from corral.workers.rollout.judging import RewardFailedError, RewardJudge

logger = logging.getLogger(__name__)

SUMS = ("correct", "reward", "tokens", "count", "unjudged")
"""Answers with full reward, rewards, tokens, answers, and answers that the reward failed on."""

_CORRECT_FROM = 1.0  # rewards of correct answers reach it; what lies below is partial credit


class HeldOutProblems:
    """The `share` of the problems, in file order, that can be put to `model`, and the judge of its answers.

    Raises:
        ValueError: if a prompt is longer than the limit of its dataset.
    """

    def __init__(
        self, config: EvaluationConfig, model: Path, *, reward: RewardSpec, share: slice = slice(None)
    ) -> None:
        self._rows = list(load_held_out_rows(config.dataset).values())[share]
        tokenizer = load_tokenizer(model)
        self._prompts = [encode_prompt(tokenizer, row.prompt) for row in self._rows]
        for row, prompt in zip(self._rows, self._prompts, strict=True):
            if len(prompt) > config.dataset.max_prompt_tokens:
                raise ValueError(
                    f"the prompt in line {row.line} of {config.dataset.path} has {len(prompt)} tokens, more than "
                    f"max_prompt_tokens {config.dataset.max_prompt_tokens}; shorten it"
                )
        self._stop_token_ids = eos_token_ids(model)
        self._judge = RewardJudge(reward, tokenizer, stop_token_ids=self._stop_token_ids)
        self._max_new_tokens = config.max_new_tokens

    def __len__(self) -> int:
        return len(self._rows)

    def put_to(self, model: nn.Module, part: slice = slice(None), *, batch_size: int) -> dict[str, float]:
        """Sums over the answers to a part of the problems, `batch_size` of them at a time, named by `SUMS`."""
        outputs = generate_greedily(
            model,
            self._prompts[part],
            max_new_tokens=self._max_new_tokens,
            stop_token_ids=self._stop_token_ids,
            batch_size=batch_size,
        )
        rewards = asyncio.run(self._judge_all(self._rows[part], outputs))
        judged = [reward for reward in rewards if reward is not None]
        return {
            "correct": float(sum(reward >= _CORRECT_FROM for reward in judged)),
            "reward": float(sum(judged)),
            "tokens": float(sum(len(output) for output in outputs)),
            "count": float(len(outputs)),
            "unjudged": float(len(outputs) - len(judged)),
        }

    async def _judge_all(self, rows: Sequence[DatasetRow], outputs: Sequence[list[int]]) -> list[float | None]:
        """The reward of each answer, None where the reward function failed on every try."""
        async with asyncio.TaskGroup() as tasks:
            judging = [
                tasks.create_task(self._reward_of(row, output)) for row, output in zip(rows, outputs, strict=True)
            ]
        return [task.result() for task in judging]

    async def _reward_of(self, row: DatasetRow, output: list[int]) -> float | None:
        try:
            return (await self._judge.judge(row.fields, [output]))[0]
        except RewardFailedError as error:
            logger.warning("the answer to held-out problem %s is left out of the means: %s", row.row_id, error)
            return None


def means(sums: Mapping[str, float]) -> dict[str, float]:
    """`accuracy` (share of judged answers with full reward), `reward/mean`, `response_length/mean`, `unjudged`.

    Those of rewards are missing where no answer could be judged.
    """
    values = {"response_length/mean": sums["tokens"] / max(sums["count"], 1.0), "unjudged": sums["unjudged"]}
    judged = sums["count"] - sums["unjudged"]
    if judged > 0:
        values |= {"accuracy": sums["correct"] / judged, "reward/mean": sums["reward"] / judged}
    return values


class Evaluator:
    """Evaluates a model on this rank's share of the held-out problems."""

    def __init__(self, config: EvaluationConfig, model: Path, *, reward: RewardSpec, context: ParallelContext) -> None:
        share = slice(context.dp_rank, None, context.mesh.dims.dp)
        self._problems = HeldOutProblems(config, model, reward=reward, share=share)
        self._context = context

    def evaluate(self, model: nn.Module, *, batch_size: int) -> dict[str, float]:
        """The `means` over the answers of all ranks, which answer `batch_size` problems at a time together."""
        was_training = model.training
        model.eval()
        try:
            sums = self._problems.put_to(model, batch_size=-(-batch_size // self._context.mesh.dims.dp))
        finally:
            model.train(was_training)
        return means(self._context.sum_over_ranks(sums))
