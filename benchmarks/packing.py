"""What packing gains: rows beside padded batches, prompts once beside once an answer, and how even the ranks' work is.

    python benchmarks/packing.py [--rounds 2] [--sequences 32] [--spread 0.9] [--dtype float32]
                                 [--tables rows prompts balance] [--groups 1] [--mini-batches 1 4]

About a minute of CPU; with all four shapes of groups about ten.

Lengths are log-normal. The first table: real tokens per CPU second of forward and backward passes of the same model on
the same sequences, in one run, one thread, the ways taking turns: the engine's packed rows; sequences one at a time;
padded batches of sequences of like length; padded batches in order of arrival. The gradients are compared with those of
padded batches. The target is 2.5 times padded batches in order of arrival.

The second table: train steps of actor and critic, by the interfaces that a trial has, over answers of one prompt that
are dealt into mini-batches as a trial deals them; `shared_prompts` computes the prompt once for all of them in a
micro-batch. Weights stay as they are: where the optimizer would step, gradients are taken, and compared. `by
operations` is what a 7B model would gain in one mini-batch if all operations took the same time. Answers have half to
one and a half times their mean length. Peak bytes are those that one step allocates.

The third table: floating-point operations of the busiest of 64 data-parallel ranks over those of the mean, by the true
shape of the model. `near owners` is how the master deals samples that lie on ranks at random, beside the share of the
tokens that moves for it; `anew` deals them without regard to where they are; `equal numbers` leaves their work out of
account. The target is 1.05.
"""

import argparse
import logging
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging as transformers_logging

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from corral.experiments.config.algorithm import CriticConfig, PPOConfig  # noqa: E402
from corral.experiments.config.model import OptimizerConfig  # noqa: E402
from corral.experiments.inputs.model_directory import transformer_shape  # noqa: E402
from corral.scheduling.packing import (  # noqa: E402
    TYPICAL_SHAPE,
    MicroBatchSpec,
    TransformerShape,
    forward_flops,
)
from corral.scheduling.redistribution import balanced_partition, partition_near_owners  # noqa: E402
from corral.workers.algorithms.ppo_actor import PPOActorInterface  # noqa: E402
from corral.workers.algorithms.ppo_critic import PPOCriticInterface  # noqa: E402
from corral.workers.backends.base import LossOutput, TokenScores  # noqa: E402
from corral.workers.backends.fsdp.engine import FSDPEngine  # noqa: E402
from corral.workers.backends.micro_batches import MicroBatch  # noqa: E402
from corral.workers.backends.parallel_context import ParallelContext  # noqa: E402
from corral.workers.backends.sharding import local  # noqa: E402
from corral.workers.data.sequence_sample import SequenceSample  # noqa: E402

SEED = 0
MODEL: dict[str, Any] = {  # 3.2 million parameters
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 32768,
}
BATCH = 8  # sequences of a padded batch
MAX_TOKENS = 2048  # of a packed row
MEDIAN_TOKENS = 200.0
SPREAD = 0.9  # standard deviation of the logarithm
LONGEST = 1024
TARGET_RATIO = 2.5
UNCLIPPED = 1e9
TABLES = ("rows", "prompts", "balance")
GROUPS = ((200, 800, 8), (1000, 1000, 4), (1000, 1000, 8), (4000, 500, 8))
"""Tokens of the prompt, of an answer on average, and answers."""
MAX_GROUP_TOKENS = 32768  # of a row
NUM_RANKS = 64
TARGET_BALANCE = 1.05

Gradients = dict[str, Tensor]
Way = Callable[[], Gradients]
"""One pass over all sequences, forward and backward."""


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--spread", type=float, default=SPREAD)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=TABLES)
    parser.add_argument("--groups", type=int, default=1, help="shapes of groups, the smallest first; at most 4")
    parser.add_argument("--mini-batches", type=int, nargs="+", default=[1, 4])
    options = parser.parse_args()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # a critic's layer is new
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    rng = np.random.default_rng(SEED)
    lengths = log_normal(rng, options.sequences, median=MEDIAN_TOKENS, spread=options.spread, longest=LONGEST)
    sequences = [rng.integers(0, MODEL["vocab_size"], length) for length in lengths]
    with tempfile.TemporaryDirectory(prefix="corral-packing-") as folder:
        torch.manual_seed(SEED)
        Qwen2ForCausalLM(Qwen2Config(**MODEL)).save_pretrained(folder)
        dtype = getattr(torch, options.dtype)
        if "rows" in options.tables:
            print_speeds(make_ways(Path(folder), sequences, dtype=dtype), options.rounds, lengths, dtype=options.dtype)
        if "prompts" in options.tables:
            print_prompts(
                Path(folder),
                rng,
                options.rounds,
                groups=GROUPS[: options.groups],
                mini_batches=options.mini_batches,
                dtype=dtype,
            )
        shape = transformer_shape(Path(folder))
    assert shape is not None
    if "balance" in options.tables:
        print_balance(rng, {"7B": (TYPICAL_SHAPE, 2000.0, 32768), "3M": (shape, MEDIAN_TOKENS, LONGEST)})


def log_normal(rng: np.random.Generator, count: int, *, median: float, spread: float, longest: int) -> list[int]:
    """Lengths in tokens, at least 2."""
    return [int(length) for length in np.clip(rng.lognormal(math.log(median), spread, count), 2, longest)]


def make_ways(folder: Path, sequences: Sequence[npt.NDArray[np.int64]], *, dtype: torch.dtype) -> dict[str, Way]:
    """The engine, and three plain loops over a model of transformers."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")

    def padded(order: Sequence[int], size: int) -> Way:
        batches = [[sequences[number] for number in order[at : at + size]] for at in range(0, len(order), size)]
        return lambda: padded_pass(model, batches, dtype=dtype)

    arrival = range(len(sequences))
    by_length = sorted(arrival, key=lambda number: len(sequences[number]))
    return {
        "packed": packed_way(folder, sequences, dtype=dtype),
        "one at a time": padded(arrival, 1),
        "padded, like lengths together": padded(by_length, BATCH),
        "padded, in order of arrival": padded(arrival, BATCH),
    }


class Stopped(FSDPEngine):
    """An engine that takes the gradients of each mini-batch where it would step, so that weights stay as they are."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.gradients: list[Gradients] = []

    def _make_step(self, rate: float) -> None:
        named = self._trained().items()
        self.gradients.append({name: local(p.grad).clone() for name, p in named if p.grad is not None})


def packed_way(folder: Path, sequences: Sequence[npt.NDArray[np.int64]], *, dtype: torch.dtype) -> Way:
    """The engine's own train step, and the sequences as answers of one prompt."""
    engine = Stopped(
        folder,
        context=ParallelContext(),
        optimizer=OptimizerConfig(gradient_clipping=UNCLIPPED),
        micro_batches=MicroBatchSpec(max_tokens_per_micro_batch=MAX_TOKENS),
        compute_dtype=dtype,
    )
    answers = {"input_ids": list(sequences), "loss_mask": [np.ones(len(ids) - 1, np.bool_) for ids in sequences]}
    sample = SequenceSample.from_group("0:all", answers)

    def run() -> Gradients:
        engine.gradients.clear()
        engine.train_batch(sample, loss_fn=negative_logprobs)
        return engine.gradients[0]

    return run


def step_way(
    folder: Path, role: str, sample: SequenceSample, *, shares_prompts: bool, n_minibatches: int, dtype: torch.dtype
) -> Way:
    """The train step of a role, whose gradients are those of all mini-batches."""
    engine = Stopped(
        folder,
        context=ParallelContext(),
        head="lm" if role == "actor" else "value",
        optimizer=OptimizerConfig(gradient_clipping=UNCLIPPED),
        micro_batches=MicroBatchSpec(max_tokens_per_micro_batch=MAX_GROUP_TOKENS, shares_prompts=shares_prompts),
        compute_dtype=dtype,
    )
    if role == "critic":  # a new score layer is zero, and so would be all gradients but its own
        torch.manual_seed(SEED)
        torch.nn.init.normal_(engine.model.get_submodule("score").get_parameter("weight"), std=0.02)
    config = PPOConfig(n_minibatches=n_minibatches, use_decoupled_loss=False)
    interface: PPOActorInterface | PPOCriticInterface = PPOActorInterface(config)
    if role == "critic":
        interface = PPOCriticInterface(config, CriticConfig())
        # Its own values, as in a trial: others are clipped, and a mini-batch of these has no gradient at all.
        sample = sample.with_key("values", interface.inference(engine, sample)["values"])

    def run() -> Gradients:
        engine.gradients.clear()
        interface.train_step(engine, sample, version=0)
        assert len(engine.gradients) == n_minibatches
        return {
            f"{number}/{name}": gradient
            for number, gradients in enumerate(engine.gradients)
            for name, gradient in gradients.items()
        }

    return run


def judged(sequences: Sequence[npt.NDArray[np.int64]], prompt: int, rng: np.random.Generator) -> SequenceSample:
    """Answers of one prompt with all that actor and critic train on."""
    chance = math.log(MODEL["vocab_size"])
    return SequenceSample.from_group(
        "0:all",
        {
            "input_ids": list(sequences),
            "prompt_mask": [np.arange(len(ids)) < prompt for ids in sequences],
            "old_logprobs": [rng.normal(-chance, 0.1, len(ids) - 1) for ids in sequences],
            "values": [np.zeros(len(ids)) for ids in sequences],
            "rewards": [float(number % 2) for number in range(len(sequences))],
            "seq_no_eos_mask": [False for _ in sequences],
        },
    )


def negative_logprobs(scores: TokenScores, micro_batch: MicroBatch) -> LossOutput:
    """Sum over the micro-batch."""
    return LossOutput(-(scores.logprobs * micro_batch.tensors["loss_mask"]).sum())


def padded_pass(model: Any, batches: Sequence[Sequence[npt.NDArray[np.int64]]], *, dtype: torch.dtype) -> Gradients:
    """Batches of [size, longest of the batch] with an attention mask; the mean over all real tokens."""
    model.train()
    model.zero_grad(set_to_none=True)
    count = sum(len(ids) - 1 for batch in batches for ids in batch)
    for batch in batches:
        rows = torch.zeros(len(batch), max(map(len, batch)), dtype=torch.long)
        mask = torch.zeros_like(rows)
        for row, ids in enumerate(batch):
            rows[row, : len(ids)] = torch.as_tensor(ids)
            mask[row, : len(ids)] = 1
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            logits = model(input_ids=rows, attention_mask=mask, use_cache=False).logits
        losses = torch.nn.functional.cross_entropy(
            logits[:, :-1].float().transpose(1, 2), rows[:, 1:], reduction="none"
        )
        torch.autograd.backward((losses * mask[:, 1:]).sum() / count)
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def print_speeds(ways: Mapping[str, Way], rounds: int, lengths: Sequence[int], *, dtype: str) -> None:
    """Each way in turn, `rounds` times."""
    expected = {name: gradient.clone() for name, gradient in ways["padded, in order of arrival"]().items()}
    difference = largest_difference(ways["packed"](), expected)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, run in ways.items():
            started = time.process_time()
            run()
            seconds[name].append(time.process_time() - started)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    print(
        f"{len(lengths)} sequences, {sum(lengths)} tokens, mean {statistics.mean(lengths):.0f}, "
        f"longest {max(lengths)}; {dtype}, one thread, median of {rounds} rounds"
    )
    print(f"{'':32}{'tokens / CPU s':>16}{'packed is':>12}")
    for name, median_s in medians.items():
        print(f"{name:32}{sum(lengths) / median_s:16,.0f}{median_s / medians['packed']:11.2f}x")
    print(f"gradients of packed rows beside padded batches: relative difference {difference:.1e}")
    ratio = medians["padded, in order of arrival"] / medians["packed"]
    print(f"packed / padded {ratio:.2f} (target >= {TARGET_RATIO})\n")


def largest_difference(actual: Gradients, expected: Gradients) -> float:
    """|actual - expected| / |expected| of the parameter that differs most."""
    return max(float((actual[name] - wanted).norm() / wanted.norm()) for name, wanted in expected.items())


def print_prompts(
    folder: Path,
    rng: np.random.Generator,
    rounds: int,
    *,
    groups: Sequence[tuple[int, int, int]],
    mini_batches: Sequence[int],
    dtype: torch.dtype,
) -> None:
    """Train steps on groups of several shapes, whose prompts are computed once, and once for each answer."""
    print(f"groups of one prompt, {MAX_GROUP_TOKENS} tokens a micro-batch; answers' tokens / CPU s, median of {rounds}")
    print(
        f"{'prompt':>7}{'answer':>7}{'answers':>8}{'role':>8}{'parts':>6}{'each':>9}{'once':>9}{'gain':>7}"
        f"{'by operations':>15}{'peak each':>11}{'once':>9}{'gradients':>11}"
    )
    for prompt, answer, count in groups:
        lengths = [int(length) for length in rng.uniform(0.5 * answer, 1.5 * answer, count)]
        beginning = rng.integers(0, MODEL["vocab_size"], prompt)
        sequences = [np.concatenate([beginning, rng.integers(0, MODEL["vocab_size"], length)]) for length in lengths]
        sample = judged(sequences, prompt, rng)
        for role in ("actor", "critic"):
            for parts in mini_batches:
                ways = {
                    shares: step_way(folder, role, sample, shares_prompts=shares, n_minibatches=parts, dtype=dtype)
                    for shares in (False, True)
                }
                known = f"{prompt:7}{answer:7}{count:8}{role:>8}{parts:6}"
                operations = gain_by_operations(prompt, lengths)
                print(known + compared(ways, sum(lengths), rounds, operations=operations), flush=True)
    print()


def compared(ways: Mapping[bool, Way], num_tokens: int, rounds: int, *, operations: float) -> str:
    """The figures of a row."""
    difference = largest_difference(ways[True](), ways[False]())
    peaks = {shares_prompts: peak_bytes(run) for shares_prompts, run in ways.items()}
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(rounds):
        for shares_prompts, run in ways.items():
            started = time.process_time()
            run()
            seconds[shares_prompts].append(time.process_time() - started)
    each, once = (statistics.median(seconds[shares_prompts]) for shares_prompts in (False, True))
    gain = statistics.median(a / b for a, b in zip(seconds[False], seconds[True], strict=True))
    return (
        f"{num_tokens / each:9,.0f}{num_tokens / once:9,.0f}{gain:6.2f}x{operations:14.2f}x"
        f"{peaks[False] / 1e6:8,.0f} MB{peaks[True] / 1e6:6,.0f} MB{difference:11.1e}"
    )


def gain_by_operations(prompt: int, answers: Sequence[int]) -> float:
    """Operations of a 7B model with the prompt before each answer, over those with the prompt once."""
    (alone,), (each,) = (
        forward_flops([group], [TYPICAL_SHAPE]) for group in ([prompt], [prompt + answer for answer in answers])
    )
    return each / (each - (len(answers) - 1) * alone)


def peak_bytes(run: Callable[[], object]) -> int:
    """The most that one call had at a time, of what it allocated."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


def print_balance(rng: np.random.Generator, models: Mapping[str, tuple[TransformerShape, float, int]]) -> None:
    """For prompts with groups of answers and for single sequences.

    Args:
        models: shape, median and largest number of tokens, by name.
    """
    print(f"{NUM_RANKS} data-parallel ranks, log-normal answers: operations of the busiest rank / of the mean")
    print(
        f"{'model':8}{'samples':>8}{'answers each':>14}{'near owners':>13}{'moved':>8}{'anew':>9}{'equal numbers':>15}"
    )
    worst = 0.0
    for name, (shape, median, longest) in models.items():
        for num_samples, group_size in ((512, 8), (1024, 8), (8192, 8), (1024, 1), (8192, 1)):
            groups = [
                log_normal(rng, group_size, median=median, spread=SPREAD, longest=longest) for _ in range(num_samples)
            ]
            costs = forward_flops(groups, [shape])
            owners: list[int | None] = [int(rank) for rank in rng.integers(0, NUM_RANKS, num_samples)]
            near = partition_near_owners(costs, owners, num_parts=NUM_RANKS)
            worst = max(worst, imbalance(costs, near))
            equal = [list(range(rank, num_samples, NUM_RANKS)) for rank in range(NUM_RANKS)]
            anew = balanced_partition(costs, num_parts=NUM_RANKS)
            print(
                f"{name:8}{num_samples:8}{group_size:14}{imbalance(costs, near):13.4f}"
                f"{moved_share(near, owners, groups):8.1%}{imbalance(costs, anew):9.4f}{imbalance(costs, equal):15.4f}"
            )
    print(f"worst {worst:.4f} (target <= {TARGET_BALANCE})")


def moved_share(parts: Sequence[Sequence[int]], owners: Sequence[int | None], groups: Sequence[Sequence[int]]) -> float:
    """Tokens of the samples that another rank than their owner works on, of all tokens."""
    moved = sum(sum(groups[index]) for rank, part in enumerate(parts) for index in part if owners[index] != rank)
    return moved / sum(map(sum, groups))


def imbalance(costs: Sequence[float], parts: Sequence[Sequence[int]]) -> float:
    """Cost of the most expensive part over that of the mean."""
    loads = [sum(costs[index] for index in part) for part in parts]
    return max(loads) / (sum(loads) / len(loads))


if __name__ == "__main__":
    main()
