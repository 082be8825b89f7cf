"""What a batch of answers of all lengths costs with attention in spans of like length, and in one rectangle.

    OMP_NUM_THREADS=1 python benchmarks/ragged_batch.py

The model of generation_throughput.py, prompts of 32 tokens, answers of 16 to 512, 64 at a time: as they end others
begin, as in asynchronous rollouts. `spans` is the engine, `rectangle` the same with one call of attention for all rows,
which reads each as far as the longest. Both take turns; a ratio is the median of the ratios of the rounds.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import torch

from corral.workers.engine import batch
from corral.workers.engine.attention import RowSpan, RowSpans
from corral.workers.engine.engine import GenerationEngine
from corral.workers.engine.requests import GenerationRequest
from corral.workers.engine.sampling import SamplingParams

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.engine_parts import clocked_parts  # noqa: E402 - found through the line above
from benchmarks.generation_throughput import VOCAB_SIZE, measure, save_random_model  # noqa: E402 - as above

PROMPT_TOKENS = 32
SHORTEST, LONGEST = 16, 512
ROWS = 64


def ragged_requests(num_requests: int) -> list[GenerationRequest]:
    numbers = random.Random(1)
    return [
        GenerationRequest(
            request_id=str(index),
            prompt=tuple(numbers.randrange(VOCAB_SIZE) for _ in range(PROMPT_TOKENS)),
            sampling=SamplingParams(
                max_new_tokens=numbers.randint(SHORTEST, LONGEST), ignore_eos=True, sampling_seed=index
            ),
        )
        for index in range(num_requests)
    ]


class CountedSpans(RowSpans):
    """Counts what calls of attention read, over all steps."""

    def __init__(self, *, call_cost: int | None) -> None:
        super().__init__(call_cost=call_cost)
        self.steps = self.calls = self.positions = self.needed_positions = 0

    def of(self, lengths: Sequence[int]) -> list[RowSpan]:
        spans = super().of(lengths)
        self.steps += 1
        self.calls += len(spans)
        self.positions += sum((span.stop - span.start) * span.longest for span in spans)
        self.needed_positions += sum(lengths)
        return spans


def make_engine(directory: Path, *, in_spans: bool) -> tuple[GenerationEngine, CountedSpans]:
    made: list[CountedSpans] = []

    def make_spans(*, call_cost: int | None) -> CountedSpans:
        made.append(CountedSpans(call_cost=call_cost if in_spans else None))
        return made[-1]

    with patch.object(batch, "RowSpans", make_spans):
        engine = GenerationEngine(directory, max_running_requests=ROWS)
    return engine, made[0]


def main() -> None:
    parser = argparse.ArgumentParser(description="A batch of many lengths, its attention in spans and in a rectangle")
    parser.add_argument("--rounds", type=int, default=3, help="turns that both take")
    parser.add_argument("--requests", type=int, default=128)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        save_random_model(Path(directory))
        engines = {name: make_engine(Path(directory), in_spans=name == "spans") for name in ("spans", "rectangle")}
    requests = ragged_requests(arguments.requests)
    num_tokens = sum(request.sampling.max_new_tokens for request in requests)
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    attention: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(arguments.rounds):
        for name, (engine, _) in engines.items():
            with clocked_parts() as seconds:
                speeds[name].append(measure(lambda engine=engine: engine.generate(requests), num_tokens=num_tokens).cpu)
            attention[name].append(seconds["attention"])
    print("          | tokens / CPU s | attention, us a token | positions read / needed | calls a step")
    for name, (_, spans) in engines.items():
        per_token = statistics.median(attention[name]) / num_tokens * 1e6
        print(
            f"{name:9} | {statistics.median(speeds[name]):14,.0f} | {per_token:21.1f} | "
            f"{spans.positions / spans.needed_positions:23.2f} | {spans.calls / spans.steps:12.1f}"
        )
    for what, values, power in (("tokens / CPU s", speeds, 1), ("attention", attention, -1)):
        ratios = [(a / b) ** power for a, b in zip(values["spans"], values["rectangle"], strict=True)]
        print(f"spans / rectangle, {what}: {statistics.median(ratios):.2f} times as fast")


if __name__ == "__main__":
    main()
