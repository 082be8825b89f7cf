"""Held-out problems, answered greedily by the weights under training and judged by the trial's reward.

rows ──share of this rank──► generate_greedily ──► decode ──► reward ──► sums over all ranks ──► accuracy, reward
"""

from pathlib import Path

from torch import nn

from corral.experiments.config import EvaluationConfig
from corral.workers.data.prompts import eos_token_id, load_held_out_rows, load_tokenizer
from corral.workers.generation.engine_batch import generate_greedily
from corral.workers.parallel_context import ParallelContext
from corral.workers.rollout.rewards import RewardFunction, exact_match, load_function

_CORRECT_FROM = 1.0  # rewards of correct answers reach it; what lies below is partial credit


class Evaluator:
    """Evaluates a model on this rank's share of the held-out problems."""

    def __init__(self, config: EvaluationConfig, model: Path, *, reward: str | None, context: ParallelContext) -> None:
        rows = list(load_held_out_rows(config.dataset).values())
        self._rows = rows[context.dp_rank :: context.dp_size]
        self._tokenizer = load_tokenizer(model)
        self._eos = eos_token_id(model)
        self._prompts = [self._tokenizer.encode(row.prompt).ids for row in self._rows]
        self._reward: RewardFunction = load_function(reward) if reward else exact_match
        self._max_new_tokens = config.max_new_tokens
        self._context = context

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """`accuracy` (share of answers with full reward), `reward/mean` and `response_length/mean` over all ranks."""
        was_training = model.training
        model.eval()
        try:
            outputs = generate_greedily(
                model, self._prompts, max_new_tokens=self._max_new_tokens, stop_token_ids={self._eos}
            )
        finally:
            model.train(was_training)
        rewards = [self._judge(index, output) for index, output in enumerate(outputs)]
        sums = self._context.sum_over_ranks(
            {
                "correct": float(sum(reward >= _CORRECT_FROM for reward in rewards)),
                "reward": float(sum(rewards)),
                "tokens": float(sum(len(output) for output in outputs)),
                "count": float(len(rewards)),
            }
        )
        count = max(sums["count"], 1.0)
        return {
            "accuracy": sums["correct"] / count,
            "reward/mean": sums["reward"] / count,
            "response_length/mean": sums["tokens"] / count,
        }

    def _judge(self, index: int, output: list[int]) -> float:
        answer = output[:-1] if output and output[-1] == self._eos else output
        return float(self._reward(self._rows[index].fields, self._tokenizer.decode(answer)))
