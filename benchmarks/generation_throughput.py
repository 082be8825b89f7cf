"""Tokens per CPU second of the embedded engine, beside transformers.generate and the model's matrix products alone.

    OMP_NUM_THREADS=1 python benchmarks/generation_throughput.py

One process, one thread, one random Qwen2 of 3.4 M parameters, prompts of 32 tokens, 128 new tokens each, sampled at
temperature 1. Engine and transformers take turns, so that both see the same machine; a ratio is the median of the
ratios of the rounds. CPU seconds are steady on a busy machine, wall seconds are what a user waits for. All answers
have one length here: with answers of several lengths generate() would go on computing rows that have ended.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from corral.workers.engine.engine import DTYPES, GenerationEngine, GenerationRequest, SamplingParams

PROMPT_TOKENS = 32
NEW_TOKENS = 128
VOCAB_SIZE = 1024
BATCH_SIZES = (1, 16, 64)


@dataclass(frozen=True)
class Speed:
    """Tokens per second of one run."""

    cpu: float
    wall: float


def save_random_model(directory: Path) -> None:
    config = Qwen2Config(
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    auto_class: Any = AutoModelForCausalLM
    auto_class.from_config(config).save_pretrained(directory)


def measure(run: Callable[[], object], *, num_tokens: int) -> Speed:
    cpu, wall = time.process_time(), time.perf_counter()
    run()
    return Speed(cpu=num_tokens / (time.process_time() - cpu), wall=num_tokens / (time.perf_counter() - wall))


def run_engine(engine: GenerationEngine, prompts: torch.Tensor, *, temperature: float) -> list[list[int]]:
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


def run_linears(model: Any, batch_size: int) -> None:
    """The matrix products of NEW_TOKENS decode steps by torch's own linear layers, nothing between them."""
    linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    inputs = {
        linear.in_features: torch.randn(batch_size, linear.in_features, dtype=linear.weight.dtype) for linear in linears
    }
    with torch.inference_mode():
        for _ in range(NEW_TOKENS):
            for linear in linears:
                linear(inputs[linear.in_features])


def compare(engine: GenerationEngine, model: Any, *, batch_size: int, num_rounds: int) -> str:
    """One line of the table."""
    prompts = torch.randint(0, VOCAB_SIZE, (batch_size, PROMPT_TOKENS), generator=torch.Generator().manual_seed(1))
    is_same = run_engine(engine, prompts, temperature=0) == run_transformers(
        model, prompts, temperature=0
    )  # warms up too
    num_tokens = batch_size * NEW_TOKENS
    rounds = []
    for _ in range(num_rounds):
        rounds.append(
            (
                measure(lambda: run_engine(engine, prompts, temperature=1.0), num_tokens=num_tokens),
                measure(lambda: run_transformers(model, prompts, temperature=1.0), num_tokens=num_tokens),
                measure(lambda: run_linears(model, batch_size), num_tokens=num_tokens),
            )
        )

    def median(value: Callable[[Speed, Speed, Speed], float]) -> float:
        return statistics.median(value(*one) for one in rounds)

    return (
        f"{batch_size:5d} | {median(lambda e, t, g: e.cpu):11,.0f} {median(lambda e, t, g: e.wall):11,.0f} | "
        f"{median(lambda e, t, g: t.cpu):11,.0f} {median(lambda e, t, g: t.wall):11,.0f} | "
        f"{median(lambda e, t, g: e.cpu / t.cpu):9.2f} {median(lambda e, t, g: e.wall / t.wall):9.2f} | "
        f"{median(lambda e, t, g: e.cpu / g.cpu):12.2f} | {'yes' if is_same else 'NO'}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Tokens per second of the embedded engine beside transformers.generate"
    )
    parser.add_argument("--rounds", type=int, default=5, help="turns that engine and transformers take per batch size")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32", help="of weights, cache and activations")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        save_random_model(Path(directory))
        engine = GenerationEngine(Path(directory), dtype=arguments.dtype)
        model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=DTYPES[arguments.dtype])
        model.eval()
    print("      |    engine, tokens per s |  transformers, tokens/s |   engine/transformers | engine/      | same")
    print("batch |   CPU second        wall |   CPU second        wall |       CPU      wall | linears, CPU | greedy")
    for batch_size in BATCH_SIZES:
        print(compare(engine, model, batch_size=batch_size, num_rounds=arguments.rounds), flush=True)


if __name__ == "__main__":
    main()
