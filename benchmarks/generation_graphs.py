"""Tokens per second of the embedded engine by how it runs its decode steps: what reading later and CUDA graphs gain.

    python benchmarks/generation_graphs.py --device cuda --dtype bfloat16 --model 0.5B

    at once     the tokens of a step are read before the next one is begun
    later       while the next one computes: what the engine does on a GPU
    graphs      later, and steps of rounded shapes are replayed as CUDA graphs

All take turns; a figure is the median of the rounds, and a ratio that of the ratios of the rounds, of wall seconds. On
a CPU nothing is captured: it shows what rounding shapes and reading later cost there.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import torch

from corral.workers.engine.engine import GenerationEngine

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.generation_bounds import NEW_TOKENS, PROMPT_TOKENS  # noqa: E402 - found through the line above
from benchmarks.generation_throughput import (  # noqa: E402 - as above
    BATCH_SIZES,
    measure,
    parse_arguments,
    random_model,
    run_engine,
)


def engines(directory: Path, *, dtype: str, device: str) -> dict[str, GenerationEngine]:
    """By how they run their steps."""
    return {
        "at once": GenerationEngine(directory, dtype=dtype, device=device, read_lag=0),
        "later": GenerationEngine(directory, dtype=dtype, device=device, read_lag=1),
        "graphs": GenerationEngine(directory, dtype=dtype, device=device, read_lag=1, cuda_graphs=True),
    }


def compare(by_name: dict[str, GenerationEngine], *, batch_size: int, num_rounds: int) -> str:
    """One line of the table."""
    vocab_size = by_name["later"].limits.vocab_size
    prompts = torch.randint(0, vocab_size, (batch_size, PROMPT_TOKENS), generator=torch.Generator().manual_seed(1))
    greedy = [run_engine(engine, prompts, temperature=0) for engine in by_name.values()]  # warms up and captures, too
    rounds: dict[str, list[float]] = {name: [] for name in by_name}
    for _ in range(num_rounds):
        for name, engine in by_name.items():
            speed = measure(
                lambda engine=engine: run_engine(engine, prompts, temperature=1.0), num_tokens=batch_size * NEW_TOKENS
            )
            rounds[name].append(speed.wall)
    speeds = " ".join(f"{statistics.median(speeds):10,.0f}" for speeds in rounds.values())
    ratios = " ".join(
        f"{statistics.median(a / b for a, b in zip(rounds[name], rounds['at once'], strict=True)):10.2f}"
        for name in ("later", "graphs")
    )
    return f"{batch_size:5d} | {speeds} | {ratios} | {'yes' if greedy[0] == greedy[1] == greedy[2] else 'NO'}"


def main() -> None:
    arguments = parse_arguments("Tokens per second of the embedded engine by how it runs its steps", num_rounds=3)
    torch.set_num_threads(1)
    with random_model(arguments) as directory:
        by_name = engines(directory, dtype=arguments.dtype, device=arguments.device)
        print("tokens per second of wall time, and divided by those of reading at once")
        print(f"batch | {' '.join(f'{name:>10}' for name in by_name)} | {'later':>10} {'graphs':>10} | same greedy")
        for batch_size in BATCH_SIZES:
            print(compare(by_name, batch_size=batch_size, num_rounds=arguments.rounds), flush=True)


if __name__ == "__main__":
    main()
