"""One way to train in a process of its own, and what the benchmark's process knows of it.

    Contender ──{"do": "start" | "step" | "end", ...} as JSON──► serve ── an answer for each ──► Contender

A process of its own, so that peak memory is that way's alone; one answer a turn, so that all take turns. Processes are
forked from one that has imported what they share, and has touched no device.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import time
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from benchmarks.process_memory import forget_peak, kernel_count
from benchmarks.training.sizes import SIZES
from benchmarks.training.trainers import WAYS, Trainer, make_trainer

DEADLINE_S = 600.0
"""For one turn: the longest is the start of a model of a billion weights."""
_SHARED = ("benchmarks.training.contender", "transformers.models.qwen2.modeling_qwen2")
_SHARED_WITH_MEGATRON = (*_SHARED, "corral.workers.backends.megatron.engine")


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
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(_SHARED if find_spec("megatron") is None else _SHARED_WITH_MEGATRON))
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(way, device, dtype, theirs), daemon=True)
        self._process.start()
        theirs.close()  # so that the end of the process is the end of what it says

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
        """End the process, which holds nothing that is worth waiting for."""
        self._connection.close()
        self._process.kill()
        self._process.join()

    def _send(self, question: dict[str, str]) -> None:
        try:
            self._connection.send_bytes(json.dumps(question).encode())
        except BrokenPipeError:
            raise self._ended() from None

    def _answer(self) -> dict[str, Any]:
        try:
            if not self._connection.poll(DEADLINE_S):
                raise RuntimeError(f"the process of {self.way} did not answer within {DEADLINE_S:.0f} s")
            answer: dict[str, Any] = json.loads(self._connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            raise self._ended() from None
        return answer

    def _ended(self) -> RuntimeError:
        self._process.join(DEADLINE_S)
        return RuntimeError(f"the process of {self.way} ended with {self._process.exitcode}; what it said is above")


# --- inside the process ---------------------------------------------------------------------------------------------


def serve(way: str, device: str, dtype: str, connection: Connection) -> None:
    """Answer each question with one message, until there are no more."""
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    trainer: Trainer | None = None
    place = torch.device("cuda", 0) if device == "cuda" else torch.device(device)
    memory = HostMemory() if device == "cpu" else DeviceMemory(place)
    while (question := _received(connection)) is not None:
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
        connection.send_bytes(json.dumps(answer).encode())


def _received(connection: Connection) -> dict[str, str] | None:
    """The next question; None where nobody asks any more."""
    try:
        question: dict[str, str] = json.loads(connection.recv_bytes())
    except EOFError:
        return None
    return question


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
