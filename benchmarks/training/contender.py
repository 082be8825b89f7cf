"""One way to train in a process of its own, and what the benchmark's process knows of it.

    Contender ──{"do": "start" | "step" | "end", ...} one JSON line each──► serve ── a line for each ──► Contender

A process of its own, so that peak memory is that way's alone; one line a turn, so that all take turns.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import torch
from transformers.utils import logging as transformers_logging

from benchmarks.process_memory import forget_peak, kernel_count
from benchmarks.training.sizes import SIZES
from benchmarks.training.trainers import WAYS, Trainer, make_trainer

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 600.0
"""For one turn: the longest is the start of a model of a billion weights."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What one optimizer step took."""

    loss: float
    """Mean over the batch, before the step."""
    wall_s: float
    cpu_s: float
    peak_bytes: int
    """Held at most since before the model was there: host memory, or the device's where it computes on one."""


class Contender:
    """A way's process, seen from outside.

    Raises:
        RuntimeError: in any call, if the process has ended, or does not answer within `DEADLINE_S`.
    """

    def __init__(self, way: str, *, device: str, dtype: str) -> None:
        self.way = way
        command = [sys.executable, "-m", "benchmarks.training.contender", way, "--device", device, "--dtype", dtype]
        search_path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        quiet = {"PYTHONWARNINGS": "ignore"}  # of Megatron, which warns of every package that it can do without
        environment = {**os.environ, **quiet, "PYTHONPATH": search_path}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
        )

    def ask_to_start(self, size: str, directory: Path) -> None:
        """Load the model and take one step, so that whatever is made once is made; others may begin meanwhile."""
        self._send({"do": "start", "size": size, "directory": str(directory)})

    def wait_until_started(self) -> bool:
        """Returns whether the device is large enough."""
        return bool(self._answer()["fits"])

    def step(self) -> Turn:
        """Take a turn."""
        self._send({"do": "step"})
        return Turn(**self._answer())

    def end(self) -> None:
        """Give the model back; the process waits for the next size."""
        self._send({"do": "end"})
        self._answer()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _send(self, question: dict[str, str]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(timeout=DEADLINE_S):
                self._process.kill()
                raise RuntimeError(f"{self.way} did not answer within {DEADLINE_S:.0f} s and was ended")
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _ended(self) -> RuntimeError:
        return RuntimeError(f"the process of {self.way} ended with {self._process.wait()}; what it said is above")


# --- inside the process ---------------------------------------------------------------------------------------------


def serve(way: str, *, device: str, dtype: str, questions: Iterable[str], answers: IO[str]) -> None:
    """Answer a line of JSON with one, until there are no more."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    trainer: Trainer | None = None
    place = torch.device("cuda", 0) if device == "cuda" else torch.device(device)
    memory = HostMemory() if device == "cpu" else DeviceMemory(place)
    for line in questions:
        question = json.loads(line)
        answer: dict[str, Any] = {}
        if question["do"] == "start":
            memory.begin()
            kind = {"device": place, "dtype": getattr(torch, dtype)}
            try:
                trainer = make_trainer(WAYS[way], SIZES[question["size"]], Path(question["directory"]), **kind)
                trainer.step()
                answer = {"fits": True}
            except torch.OutOfMemoryError as error:  # which of the ways fit is a result
                print(f"{way}: {error}", flush=True)
                answer = {"fits": False}
        elif question["do"] == "step":
            assert trainer is not None
            answer = asdict(_clocked(trainer, memory))
        else:
            trainer = None
            gc.collect()
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _clocked(trainer: Trainer, memory: HostMemory | DeviceMemory) -> Turn:
    memory.wait()
    cpu, wall = time.process_time(), time.perf_counter()
    loss = trainer.step()
    memory.wait()
    return Turn(loss, time.perf_counter() - wall, time.process_time() - cpu, memory.peak_bytes())


class HostMemory:
    """Of this process, as the kernel counts it."""

    def __init__(self) -> None:
        self._before = 0

    def begin(self) -> None:
        """What is held now does not count."""
        forget_peak()
        self._before = kernel_count("VmRSS")

    def wait(self) -> None:
        """A CPU is never behind."""

    def peak_bytes(self) -> int:
        return kernel_count("VmHWM") - self._before


class DeviceMemory:
    """Of one GPU, as torch's allocator counts it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def begin(self) -> None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def wait(self) -> None:
        """Until the device has done what it was given."""
        torch.cuda.synchronize(self._device)

    def peak_bytes(self) -> int:
        return int(torch.cuda.max_memory_allocated(self._device))


def main() -> None:
    parser = argparse.ArgumentParser(description="one way of benchmarks/train_throughput.py, asked on standard input")
    parser.add_argument("way")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    arguments = parser.parse_args()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    # Libraries print; what they print must not be taken for an answer.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        serve(arguments.way, device=arguments.device, dtype=arguments.dtype, questions=sys.stdin, answers=answers)


if __name__ == "__main__":
    main()
