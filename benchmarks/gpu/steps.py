"""What is run on a GPU, what is worth most first: machines with one are often lent for minutes.

A step is a command of its own, with a report of its own: one that fails or hangs leaves the others to be run.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

STEP_TIMEOUT_S: Final = 480.0
"""Longest time of any step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One command of the report."""

    name: str
    shows: str
    command: Sequence[str]
    """Run in the repository's root; the first word is a Python."""
    timeout_s: float = STEP_TIMEOUT_S
    environment: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """In place of what the driver's own process has."""


def steps(*, device: str, sizes: Sequence[str], visible: Sequence[str], fileroot: str) -> list[Step]:
    """All steps.

    Args:
        device: "cuda", or "cpu" to try the steps out, which then take the sizes of a CPU.
        sizes: of the models that are trained, see `benchmarks.training.sizes`; the first one generates, too.
        visible: GPUs, as CUDA_VISIBLE_DEVICES names them.
        fileroot: where the trial goes.
    """
    has_gpu = device != "cpu"
    dtype = "bfloat16" if has_gpu else "float32"
    # Trainer and generation server want a GPU each; where there is one only, both are told that theirs is that one.
    pair = {"CUDA_VISIBLE_DEVICES": ",".join((*visible, visible[0])[:2])} if has_gpu else {}
    steps = [
        Step(
            name="tests",
            shows="device placement, NCCL, bfloat16, parity with the CPU, generation and new weights",
            command=[sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "--device", device]
            + ["tests/gpu", "tests/workers/backends/test_chunked_head.py", "-m", "gpu"],
        )
    ]
    steps += [
        Step(
            name=f"training-{size}",
            shows="tokens per second, MFU and peak memory of the training engines, on a model of random weights",
            command=[sys.executable, "benchmarks/train_throughput.py", "--device", device, "--dtype", dtype]
            + ["--rounds", "5", "--sizes", size],
        )
        for size in sizes
    ]
    return [
        *steps,
        Step(
            name="sglang",
            shows="a server of SGLang that takes over new weights while it answers",
            command=[sys.executable, "benchmarks/weight_update.py", "--sglang", "--rounds", "3", "--megabytes", "52"]
            + ["--transports", "disk", "shared_memory"],
            environment={"CUDA_VISIBLE_DEVICES": visible[0]} if has_gpu else {},
        ),
        Step(
            name="trial",
            shows="the arithmetic trial: SFT, then asynchronous GRPO",
            command=[sys.executable, "benchmarks/run_recipes.py", "arithmetic_grpo"]
            + ["--fileroot", fileroot, *(["--gpu"] if has_gpu else [])],
            environment=pair,
        ),
        Step(
            name="generation",
            shows="tokens per second of the embedded engine",
            command=[sys.executable, "benchmarks/generation_throughput.py", "--device", device, "--dtype", dtype]
            + ["--rounds", "3", "--model", sizes[0]],
        ),
    ]
