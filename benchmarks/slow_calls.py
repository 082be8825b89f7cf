"""Interfaces that take as long as somebody says and write down when: what ran side by side is seen in their records.

    slow_calls.json  {"ref_inf": {"seconds": 0.4, "until": ["critic_inf.begun"]}}
          │ read in the current directory
          ▼
    one call of PPO's graph ──► calls/ref_inf-0.begun ──waits──► calls/ref_inf-0.ended ──► keys of zeros, or nothing

Each is named by its import path, as an interface of a user's own is: `benchmarks.slow_calls:ref_inf`.
"""

import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from corral.scheduling.keys import built_in
from corral.scheduling.model_function_call import CallType
from corral.workers.algorithms.base import CallKeys, ModelInterface
from corral.workers.algorithms.interfaces import InterfaceSettings
from corral.workers.backends.base import AnyEngine
from corral.workers.data.sequence_sample import SequenceSample

SETTINGS = Path("slow_calls.json")
RECORDS = Path("calls")
_MADE = built_in("logprobs", "values", "rewards")
_DEADLINE_S = 60.0
_POLL_S = 0.002


class Pace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long one call takes, on every rank and every time."""

    seconds: float = 0.0
    until: list[str] = []
    """What must have happened, on any rank, in the same step: "critic_inf.begun", "critic_inf.ended"."""


def write_paces(folder: Path, paces: dict[str, Pace]) -> None:
    """Say how long calls take in the processes whose current directory is this one."""
    (folder / RECORDS).mkdir(exist_ok=True)
    (folder / SETTINGS).write_bytes(msgspec.json.encode(paces))


class Interval(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When a rank worked for a call, in seconds of the machine's one monotonic clock."""

    call: str
    number: int
    """Times that the rank has run this call before: the step, where a call has one slice."""
    begun_s: float
    ended_s: float

    def overlaps(self, other: "Interval") -> bool:
        return self.begun_s < other.ended_s and other.begun_s < self.ended_s


def read_intervals(folder: Path) -> list[Interval]:
    """What all ranks have written down, in the order of their beginnings."""
    lines = [line for file in (folder / RECORDS).glob("*.jsonl") for line in file.read_bytes().splitlines()]
    return sorted((msgspec.json.decode(line, type=Interval) for line in lines), key=lambda interval: interval.begun_s)


class SlowCall(ModelInterface):
    """One call of the graph, on one rank."""

    def __init__(self, name: str, settings: InterfaceSettings) -> None:
        paces = msgspec.json.decode(SETTINGS.read_bytes(), type=dict[str, Pace])
        self._name = name
        self._pace = paces[name]
        self._number = 0

    @property
    def inputs(self) -> CallKeys:
        return dict.fromkeys((CallType.INFERENCE, CallType.TRAIN_STEP), built_in("input_ids"))

    @property
    def outputs(self) -> CallKeys:
        return {CallType.INFERENCE: _MADE}

    def inference(self, engine: AnyEngine, sample: SequenceSample) -> dict[str, npt.NDArray[Any]]:
        self._last()
        lengths = sample.answer_lengths("input_ids")
        return {key.name: np.zeros(sum(map(key.layout.length, lengths)), key.dtype) for key in _MADE}

    def train_step(self, engine: AnyEngine, sample: SequenceSample, *, version: int) -> dict[str, float]:
        self._last()
        return {}

    def _last(self) -> None:
        begun_s = time.monotonic()
        self._note("begun")
        time.sleep(self._pace.seconds)
        for event in self._pace.until:
            self._wait_for(event, deadline_s=begun_s + _DEADLINE_S)
        self._note("ended")
        interval = Interval(self._name, self._number, begun_s, time.monotonic())
        with (RECORDS / f"{self._name}-{os.getpid()}.jsonl").open("ab") as file:
            file.write(msgspec.json.encode(interval) + b"\n")
        self._number += 1

    def _note(self, event: str) -> None:
        (RECORDS / f"{self._name}-{self._number}.{event}").touch()

    def _wait_for(self, event: str, *, deadline_s: float) -> None:
        call, _, kind = event.partition(".")
        while not (RECORDS / f"{call}-{self._number}.{kind}").exists():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{self._name} has waited {_DEADLINE_S:.0f} s for {event} of step {self._number}")
            time.sleep(_POLL_S)


actor_inf = partial(SlowCall, "actor_inf")
ref_inf = partial(SlowCall, "ref_inf")
rew_inf = partial(SlowCall, "rew_inf")
critic_inf = partial(SlowCall, "critic_inf")
actor_train = partial(SlowCall, "actor_train")
critic_train = partial(SlowCall, "critic_train")
