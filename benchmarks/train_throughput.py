"""Tokens per second of the training engines, beside a plain loop over transformers on the same batch.

    python benchmarks/train_throughput.py [--sizes tiny small medium] [--rounds 3]
    python benchmarks/train_throughput.py --device cuda --dtype bfloat16 --sizes 0.5B

A step is one AdamW step on a batch of log-normal lengths: forward, backward, clipping, update. Each way has a process
of its own, on one thread of a CPU. All take a turn in each round, so that they see the same machine, and a ratio is the
median of the ratios of the rounds, in CPU seconds. A GPU holds one model at a time: there ways follow each other, and
ratios are of wall seconds. The loss after one step shows that all ways make the same one.

Ways that end in `selective` or `full` recompute so much of each layer in the backward pass (`recompute` of a model).
The yardstick is a plain loop whose padded batches are of sequences of like length: the best without packing.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.training.contender import Contender, Turn  # noqa: E402
from benchmarks.training.sizes import CPU_SIZES, SIZES, make_sequences, save_random_model  # noqa: E402
from benchmarks.training.table import render  # noqa: E402
from benchmarks.training.trainers import WAYS, YARDSTICK, missing_package  # noqa: E402
from benchmarks.training.utilization import TERA, peak_flops, step_flops  # noqa: E402
from corral.experiments.inputs.model_directory import transformer_shape  # noqa: E402


def main() -> None:
    """Prints a table for each size."""
    options = _options()
    os.environ.setdefault("PYTHONWARNINGS", "ignore")  # Megatron warns of every package that it can do without
    ways = [way for way in options.ways if _is_there(way)]
    is_cpu = options.device == "cpu"
    device_name = "one thread of a CPU" if is_cpu else torch.cuda.get_device_name(options.device)
    print(f"{device_name}, torch {torch.__version__}, {options.dtype}, median of {options.rounds} rounds")
    peak = None if is_cpu else _peak(device_name, options.peak_tflops)
    with tempfile.TemporaryDirectory(prefix="corral-train-") as folder, ExitStack() as stack:
        crowd = [stack.enter_context(contender(way, options)) for way in ways] if is_cpu else []
        for name in options.sizes:
            directory = Path(folder) / name
            save_random_model(SIZES[name], directory, dtype=getattr(torch, options.dtype))
            if is_cpu:
                turns = take_turns(crowd, name, directory, rounds=options.rounds)
            else:
                turns = one_by_one(ways, name, directory, options)
            print_size(name, directory, turns, by_cpu=is_cpu, peak=peak)


@contextmanager
def contender(way: str, options: argparse.Namespace) -> Iterator[Contender]:
    """The process of a way, ended afterwards."""
    process = Contender(way, device=options.device, dtype=options.dtype)
    try:
        yield process
    finally:
        process.close()


def one_by_one(ways: Sequence[str], size: str, directory: Path, options: argparse.Namespace) -> dict[str, list[Turn]]:
    """Each way alone on the device, from the first turn to the last."""
    turns = {}
    for way in ways:
        with contender(way, options) as alone:
            turns |= take_turns([alone], size, directory, rounds=options.rounds)
    return turns


def take_turns(crowd: Sequence[Contender], size: str, directory: Path, *, rounds: int) -> dict[str, list[Turn]]:
    """One turn of each a round; none of a way that the device is too small for."""
    for one in crowd:
        one.ask_to_start(size, directory)
    fits = [one.wait_until_started() for one in crowd]
    running = [one for one, does_fit in zip(crowd, fits, strict=True) if does_fit]
    turns: dict[str, list[Turn]] = {one.way: [] for one in crowd}
    for _ in range(rounds):
        for one in running:
            turns[one.way].append(one.step())
    for one in crowd:
        one.end()
    return turns


def print_size(
    name: str, directory: Path, turns: Mapping[str, Sequence[Turn]], *, by_cpu: bool, peak: float | None
) -> None:
    """A line about model and batch, the table, and how far the losses are apart."""
    lengths = [len(ids) for ids in make_sequences(SIZES[name])]
    shape = transformer_shape(directory)
    assert shape is not None
    flops = step_flops(lengths, shape)
    print(
        f"\n{name}: {SIZES[name].num_parameters / 1e6:,.1f} M weights; {len(lengths)} sequences, {sum(lengths):,} "
        f"tokens, longest {max(lengths):,}; {flops / TERA:,.3g} TFLOP a step"
    )
    print(
        render(turns, num_tokens=sum(lengths), yardstick=YARDSTICK, by_cpu=by_cpu, flops=flops, peak=peak), flush=True
    )
    losses = [taken[0].loss for taken in turns.values() if taken]
    print(f"loss after one step: {min(losses):.5f} to {max(losses):.5f}")


def _is_there(way: str) -> bool:
    """Says what is missing."""
    missing = missing_package(WAYS[way])
    if missing is not None:
        print(f"without {way}: {missing} is not installed")
    return missing is None


def _peak(device_name: str, given_tflops: float | None) -> float | None:
    """Operations per second in bfloat16; says so where it is not known."""
    if given_tflops is not None:
        return given_tflops * TERA
    peak = peak_flops(device_name)
    if peak is None:
        print(f"the peak of {device_name} is not in the table, so there is no MFU; give it by --peak-tflops")
    return peak


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sizes", nargs="+", choices=SIZES, default=list(CPU_SIZES), metavar="SIZE", help=", ".join(SIZES)
    )
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY", help=", ".join(WAYS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu", help="cpu, or cuda")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the products")
    parser.add_argument("--peak-tflops", type=float, help="of the device in bfloat16, where the table lacks it")
    return parser.parse_args()


if __name__ == "__main__":
    main()
