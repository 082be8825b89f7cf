"""Held-out problems where no server generates: answered greedily by weights in this process, judged by the reward.

rows ──share of this rank──► generate_greedily ──► RewardJudge ──► sums over all ranks ──► accuracy, reward
                                                        └── failed on every try: counted, left out of the means, told
"""

import asyncio
import functools
import logging
from pathlib import Path

from torch import nn

from corral.experiments.config.data import EvaluationConfig
from corral.experiments.datasets.dataset import Dataset
from corral.experiments.datasets.row_parser import DatasetRow
from corral.experiments.prompts.row_prompts import PromptEncoder
from corral.experiments.prompts.tokens import eos_token_ids
from corral.workers.backends.parallel_context import ParallelContext
from corral.workers.data.held_out import added, means_by_set, sums_of, unjudged_text
from corral.workers.data.prompts import checked_prompts
from corral.workers.engine.batch import generate_greedily
from corral.workers.episodes.trajectories import reward_parts_of
from corral.workers.requests.messages import StatsReply
from corral.workers.rollout.judging import RewardFailedError, RewardJudge
from corral.workers.streams.closing import all_or_first_error
from corral.workers.user_code.trials import Judged

logger = logging.getLogger(__name__)


class HeldOutProblems:
    """The `share` of the problems of one file, in its order, that can be put to `model`, and the judge of its answers.

    Raises:
        ValueError: if a prompt is longer than the limit of its dataset.
    """

    def __init__(
        self, config: EvaluationConfig, model: Path, judge: RewardJudge, *, share: slice = slice(None)
    ) -> None:
        self._rows = list(Dataset.open(config.dataset, kind="prompts").values())[share]
        encoder = PromptEncoder(model, config.dataset.chat_template_kwargs)
        self._prompts = checked_prompts(self._rows, encoder, config.dataset)
        self._stop_token_ids = eos_token_ids(model)
        self._judge, self._config = judge, config
        self._max_new_tokens = config.sampling.max_new_tokens

    def __len__(self) -> int:
        return len(self._rows)

    def put_to(self, model: nn.Module, *, batch_size: int) -> tuple[dict[str, float], str]:
        """Sums over the answers to the problems, `batch_size` of them at a time; the first failure of the reward."""
        outputs = generate_greedily(
            model,
            self._prompts,
            max_new_tokens=self._max_new_tokens,
            stop_token_ids=self._stop_token_ids,
            batch_size=batch_size,
        )
        judged = asyncio.run(all_or_first_error(*map(self._judged, self._rows, outputs)))
        by_problem = (
            sums_of(
                [one.reward for one in each],
                [len(output)],
                are_correct=[self._config.is_correct(one.reward, reward_parts_of(one.statistics)) for one in each],
            )
            for (each, _), output in zip(judged, outputs, strict=True)
        )
        sums = functools.reduce(added, by_problem, dict.fromkeys(sums_of([], []), 0.0))
        return sums, next((failure for _, failure in judged if failure), "")

    async def _judged(self, row: DatasetRow, output: list[int]) -> tuple[list[Judged], str]:
        """The reward of an answer; none, and the failure, if the reward failed on every try."""
        try:
            return await self._judge.judge(row.fields, [output]), ""
        except RewardFailedError as error:
            logger.warning("the answer to held-out problem %s is left out of the means: %s", row.row_id, error)
            return [], f"reward_error: {error}"


class Evaluator:
    """Evaluates a model on this rank's share of the held-out problems."""

    def __init__(self, config: EvaluationConfig, model: Path, judge: RewardJudge, *, context: ParallelContext) -> None:
        share = slice(context.dp_rank, None, context.mesh.dims.dp)
        self._problems = {
            name: HeldOutProblems(config.model_copy(update={"dataset": dataset}), model, judge, share=share)
            for name, dataset in config.datasets.items()
        }
        self._context = context

    def evaluate(self, model: nn.Module, *, batch_size: int) -> StatsReply:
        """The `means` over the answers of all ranks, which answer `batch_size` problems at a time together."""
        was_training = model.training
        model.eval()
        own = -(-batch_size // self._context.mesh.dims.dp)
        try:
            put = {name: problems.put_to(model, batch_size=own) for name, problems in self._problems.items()}
        finally:
            model.train(was_training)
        sums = {name: self._context.sum_over_ranks(of_rank) for name, (of_rank, _) in put.items()}
        return StatsReply(
            stats=means_by_set(sums),
            unjudged={name: unjudged_text(name, sums[name], failure) for name, (_, failure) in put.items() if failure},
        )
