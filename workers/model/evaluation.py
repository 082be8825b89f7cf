"""Held-out problems, answered greedily by the weights under training and judged by the trial's reward.

rows ──share of this rank──► generate_greedily ──► decode ──► reward ──► sums over all ranks ──► accuracy, reward
"""

from collections.abc import Mapping
from pathlib import Path

from torch import nn

from corral.experiments.config import EvaluationConfig
from corral.workers.data.prompts import eos_token_id, load_held_out_rows, load_tokenizer
from corral.workers.generation.engine_batch import generate_greedily
from corral.workers.parallel_context import ParallelContext
from corral.workers.rollout.rewards import RewardFunction, exact_match, load_function

_CORRECT_FROM = 1.0  # rewards of correct answers reach it; what lies below is partial credit


class HeldOutProblems:
    """Problems that can be put to a model, and the judge of its answers.

    Args:
        model: directory with the tokenizer.
        share: which of the rows, in file order.
    """

    def __init__(
        self, config: EvaluationConfig, model: Path, *, reward: str | None, share: slice = slice(None)
    ) -> None:
        self._rows = list(load_held_out_rows(config.dataset).values())[share]
        self._tokenizer = load_tokenizer(model)
        self._eos = eos_token_id(model)
        self._prompts = [self._tokenizer.encode(row.prompt).ids for row in self._rows]
        self._reward: RewardFunction = load_function(reward) if reward else exact_match
        self._max_new_tokens = config.max_new_tokens

    def __len__(self) -> int:
        return len(self._rows)

    def put_to(self, model: nn.Module, part: slice = slice(None)) -> dict[str, float]:
        """Sums over the answers to a part of the problems: `correct`, `reward`, `tokens`, `count`."""
        outputs = generate_greedily(
            model, self._prompts[part], max_new_tokens=self._max_new_tokens, stop_token_ids={self._eos}
        )
        indices = range(len(self._rows))[part]
        rewards = [self._judge(index, output) for index, output in zip(indices, outputs, strict=True)]
        return {
            "correct": float(sum(reward >= _CORRECT_FROM for reward in rewards)),
            "reward": float(sum(rewards)),
            "tokens": float(sum(len(output) for output in outputs)),
            "count": float(len(rewards)),
        }

    def _judge(self, index: int, output: list[int]) -> float:
        answer = output[:-1] if output and output[-1] == self._eos else output
        return float(self._reward(self._rows[index].fields, self._tokenizer.decode(answer)))


def means(sums: Mapping[str, float]) -> dict[str, float]:
    """`accuracy` (share of answers with full reward), `reward/mean` and `response_length/mean`."""
    count = max(sums["count"], 1.0)
    return {
        "accuracy": sums["correct"] / count,
        "reward/mean": sums["reward"] / count,
        "response_length/mean": sums["tokens"] / count,
    }


class Evaluator:
    """Evaluates a model on this rank's share of the held-out problems."""

    def __init__(self, config: EvaluationConfig, model: Path, *, reward: str | None, context: ParallelContext) -> None:
        share = slice(context.dp_rank, None, context.dp_size)
        self._problems = HeldOutProblems(config, model, reward=reward, share=share)
        self._context = context

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """The `means` over the answers of all ranks."""
        was_training = model.training
        model.eval()
        try:
            sums = self._problems.put_to(model)
        finally:
            model.train(was_training)
        return means(self._context.sum_over_ranks(sums))
