"""Tokens per CPU second of the embedded engine, beside transformers.generate, SGLang, and what none goes below.

    OMP_NUM_THREADS=1 python benchmarks/generation_throughput.py
    python benchmarks/generation_throughput.py --device cuda --dtype bfloat16 --model 0.5B

One thread, one random Qwen2 of 3.4 M parameters, prompts of 32 tokens, 128 new tokens each, sampled at temperature 1.
The engine and transformers run in this process; SGLang, where it is installed, is a server as a trial starts it, asked
over HTTP. All take turns, so that they see the same machine; a ratio is the median of the ratios of the rounds. CPU
seconds are steady on a busy machine, wall seconds are what a user waits for. All answers have one length here: with
answers of several lengths generate() would go on computing rows that have ended. On a GPU ratios are of wall seconds,
and greedy answers may differ: products of another shape are rounded otherwise.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from corral.experiments.config.rollout import SglangConfig
from corral.experiments.inputs.other_pythons import sglang_python, sglang_version
from corral.workers.engine.engine import DTYPES, GenerationEngine
from corral.workers.engine.requests import GenerationRequest
from corral.workers.engine.sampling import SamplingParams

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.engine_parts import PARTS, clocked_parts  # noqa: E402 - found through the line above
from benchmarks.generation_bounds import (  # noqa: E402 - as above
    NEW_TOKENS,
    PROMPT_TOKENS,
    run_necessary,
    run_products,
    run_reads,
)
from benchmarks.sglang_server import MeasuredSglang, serving_sglang  # noqa: E402 - as above
from benchmarks.training import sizes  # noqa: E402 - as above

VOCAB_SIZE = 1024
BATCH_SIZES = (1, 16, 64)
COLUMNS = ("engine", "transformers", "SGLang", "products", "reads", "necessary")


@dataclass(frozen=True)
class Speed:
    """Tokens per second of one run."""

    cpu: float
    wall: float


def save_random_model(directory: Path, *, context_length: int = 2048) -> None:
    config = Qwen2Config(
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=context_length,
        tie_word_embeddings=True,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    auto_class: Any = AutoModelForCausalLM
    auto_class.from_config(config).save_pretrained(directory)


def measure(
    run: Callable[[], object], *, num_tokens: int, cpu_seconds: Callable[[], float] = time.process_time
) -> Speed:
    """cpu_seconds: used so far by the process that computes."""
    cpu, wall = cpu_seconds(), time.perf_counter()
    run()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return Speed(cpu=num_tokens / (cpu_seconds() - cpu), wall=num_tokens / (time.perf_counter() - wall))


def run_engine(engine: GenerationEngine, prompts: torch.Tensor, *, temperature: float) -> list[list[int]]:
    engine.forget_prefixes()  # else the prompts of a second round cost it nothing
    sampling = SamplingParams(max_new_tokens=NEW_TOKENS, temperature=temperature)
    outputs = engine.generate(
        GenerationRequest(request_id=str(row), prompt=tuple(prompt), sampling=sampling)
        for row, prompt in enumerate(prompts.tolist())
    )
    return [list(output.output_ids) for output in outputs]


def run_transformers(model: Any, prompts: torch.Tensor, *, temperature: float) -> list[list[int]]:
    output = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=NEW_TOKENS,
        do_sample=temperature > 0,
        top_k=0,
        eos_token_id=None,
    )
    generated: list[list[int]] = output[:, PROMPT_TOKENS:].tolist()
    return generated


def compare(
    engine: GenerationEngine, model: Any, sglang: MeasuredSglang | None, *, batch_size: int, num_rounds: int
) -> tuple[str, str]:
    """One line of each of the two tables."""
    is_cpu = model.device.type == "cpu"
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(0, model.config.vocab_size, (batch_size, PROMPT_TOKENS), generator=generator)
    prompts = prompts.to(model.device)
    greedy = run_engine(engine, prompts, temperature=0)  # warms up too
    is_same = greedy == run_transformers(model, prompts, temperature=0)
    if sglang is not None:
        sglang.generate(prompts.tolist(), max_new_tokens=NEW_TOKENS, temperature=1.0)
    runs: dict[str, Callable[[], object]] = {
        "engine": lambda: run_engine(engine, prompts, temperature=1.0),
        "transformers": lambda: run_transformers(model, prompts, temperature=1.0),
        "products": lambda: run_products(model, batch_size),
        "reads": lambda: run_reads(model, batch_size),
        "necessary": lambda: run_necessary(model, batch_size),
    }
    rounds: dict[str, list[Speed]] = {name: [] for name in COLUMNS}
    shares: dict[str, list[float]] = {part: [] for part in PARTS}
    for _ in range(num_rounds):
        for name, run in runs.items():
            rounds[name].append(measure(run, num_tokens=batch_size * NEW_TOKENS))
        if sglang is not None:
            rounds["SGLang"].append(measure_sglang(sglang, prompts))
        for part, share in measure_shares(runs["engine"]).items():
            shares[part].append(share)
    line = table_line(rounds, batch_size=batch_size, is_same=is_same, clock="cpu" if is_cpu else "wall")
    return line, shares_line(shares, batch_size=batch_size)


def measure_shares(run: Callable[[], object]) -> dict[str, float]:
    """What each part of the engine takes of the CPU seconds of `run`."""
    start = time.process_time()
    with clocked_parts() as seconds:
        run()
    total = time.process_time() - start
    return {part: value / total for part, value in seconds.items()}


def measure_sglang(sglang: MeasuredSglang, prompts: torch.Tensor) -> Speed:
    return measure(
        lambda: sglang.generate(prompts.tolist(), max_new_tokens=NEW_TOKENS, temperature=1.0),
        num_tokens=len(prompts) * NEW_TOKENS,
        cpu_seconds=sglang.cpu_seconds,
    )


def table_line(rounds: dict[str, list[Speed]], *, batch_size: int, is_same: bool, clock: str) -> str:
    """clock: the one that ratios are of."""

    def median(name: str, clock: str) -> str:
        values = [getattr(speed, clock) for speed in rounds[name]]
        return f"{statistics.median(values):8,.0f}" if values else f"{'-':>8}"

    def ratio(name: str) -> str:
        pairs = zip(rounds["engine"], rounds[name], strict=False)
        ratios = [getattr(engine, clock) / getattr(other, clock) for engine, other in pairs]
        return f"{statistics.median(ratios):12.2f}" if ratios else f"{'-':>12}"

    speeds = " | ".join(f"{median(name, 'cpu')} {median(name, 'wall')}" for name in rounds)
    ratios = " ".join(ratio(name) for name in COLUMNS[1:])
    return f"{batch_size:5d} | {speeds} | {ratios} | {'yes' if is_same else 'NO'}"


def shares_line(shares: dict[str, list[float]], *, batch_size: int) -> str:
    medians = [statistics.median(values) for values in shares.values()]
    return f"{batch_size:5d} | " + " ".join(f"{share:9.0%}" for share in (*medians, 1 - sum(medians)))


def print_head() -> None:
    print("tokens per second of CPU time and of wall time; the engine's divided by that of the others")
    print("products: a step's matrix products; reads: and one read of keys and values; necessary: with attention and")
    print("prompts (generation_bounds.py)")
    divided = "engine divided by that of".center(13 * len(COLUMNS[1:]) - 1)
    print("      | " + " | ".join(f"{name:>17}" for name in COLUMNS) + f" | {divided} | same")
    columns = " | ".join(f"{'CPU':>8} {'wall':>8}" for _ in COLUMNS)
    print(f"batch | {columns} | " + " ".join(f"{name:>12}" for name in COLUMNS[1:]) + " | greedy")


def print_shares(lines: Sequence[str]) -> None:
    print("where the engine's CPU seconds go (engine_parts.py)")
    print("batch | " + " ".join(f"{name:>9}" for name in (*PARTS, "rest")))
    print("\n".join(lines))


@contextmanager
def sglang_if_installed(model: Path, *, dtype: str, device: str) -> Iterator[MeasuredSglang | None]:
    """None, and a line that says why, where there is no SGLang."""
    if device != "cpu":
        print("without SGLang: its scheduler's CPU seconds are what is measured of it")
        yield None
        return
    try:
        version = sglang_version(sglang_python(SglangConfig()))
    except ValueError as error:
        print(f"without SGLang: {error}")
        yield None
        return
    print(f"SGLang {version}: its scheduler alone is counted, not its processes that speak HTTP")
    with serving_sglang(model, model, dtype=dtype, max_running_requests=max(BATCH_SIZES)) as server:
        yield server


def parse_arguments(description: str, *, num_rounds: int = 5) -> argparse.Namespace:
    """What benchmarks of the engine's speed are told."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=num_rounds, help="turns that all of them take per batch size")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32", help="of weights, cache and activations")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", choices=sizes.SIZES, metavar="SIZE", help=f"random, of {', '.join(sizes.SIZES)}")
    return parser.parse_args()


@contextmanager
def random_model(arguments: argparse.Namespace) -> Iterator[Path]:
    """The directory of the model that was asked for."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        if arguments.model is None:
            save_random_model(directory)
        else:
            sizes.save_random_model(sizes.SIZES[arguments.model], directory, dtype=DTYPES[arguments.dtype])
        yield directory


def main() -> None:
    arguments = parse_arguments("Tokens per second of the embedded engine beside transformers.generate and SGLang")
    torch.set_num_threads(1)
    with random_model(arguments) as directory:
        engine = GenerationEngine(directory, dtype=arguments.dtype, device=arguments.device)
        model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=DTYPES[arguments.dtype])
        model.to(arguments.device).eval()
        with sglang_if_installed(directory, dtype=arguments.dtype, device=arguments.device) as sglang:
            print_head()
            shares = []
            for batch_size in BATCH_SIZES:
                line, share = compare(engine, model, sglang, batch_size=batch_size, num_rounds=arguments.rounds)
                print(line, flush=True)
                shares.append(share)
            print_shares(shares)


if __name__ == "__main__":
    main()
