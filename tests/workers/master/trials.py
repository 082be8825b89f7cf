"""Workers in this process, and a master with everything real but its model workers: directory, log, checkpoints, names.

trial_of(folder) --run_master(trial, trainers)--> exit code     trainers: what model workers do, and where they die
"""

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import pytest

from corral.experiments.plan import RunPlan, TrialIdentity, make_run_plan
from corral.experiments.registry import load_experiment
from corral.experiments.trial.attempts import record_attempt
from corral.experiments.trial.directory import TrialDirectory
from corral.experiments.trial.log import TrialLog
from corral.experiments.trial.secrets import TrialSecrets
from corral.name_resolve.keys import TrialKeys
from corral.scheduling.policy_version import INITIAL_VERSION
from corral.workers.checkpoint.durable_file import FileEntry, write_durable
from corral.workers.checkpoint.file_delta import DELTA_SUFFIX
from corral.workers.checkpoint.ledger import read_delta
from corral.workers.checkpoint.published_weights import NOTHING_IN_USE, PublishedWeights
from corral.workers.data.held_out import sums_of
from corral.workers.lifecycle.worker import WorkerContext, is_no_room, run_to_exit_code
from corral.workers.master import master_worker
from corral.workers.master.master_worker import MasterWorker
from corral.workers.master.sample_source import BufferedSample
from corral.workers.master.trainer_group import WrittenFiles
from corral.workers.requests.messages import (
    Evaluate,
    HeldOutReply,
    LoadedModel,
    OkReply,
    PiggybackedRequest,
    Rejection,
    ReplyPayload,
    Request,
    StatsReply,
    TrainReply,
    TrainStep,
)
from tests.experiments.broken_yaml import NUM_TRAINING_ROWS, VALID_SFT, write_inputs
from tests.name_services import MemoryNameService
from tests.workers.worker_context import worker_context

UUID = "ab" * 16
BATCH_SIZE = 8
NUM_STEPS = NUM_TRAINING_ROWS // BATCH_SIZE
FINE = TrainReply(stats={"sft/loss": 0.5}, num_updates=1, num_nonfinite=0)
SHAPE = LoadedModel(architecture="qwen2", num_parameters=100, num_layers=2, hidden_size=8, vocab_size=14)
SKIPPED = TrainReply(stats={}, num_updates=0, num_nonfinite=1)


class KilledError(BaseException):
    """Stands for kill -9: nothing of ours catches it."""


@dataclass
class Trainers:
    """Model workers that hold no tensors.

    Args:
        train: the reply to the train step of this number; `FINE` if left out.
        at_call: told the name of every call before it is answered; raises where the master dies.
    """

    train: Callable[[int], TrainReply] = lambda step: FINE
    at_call: Callable[[str], None] = lambda name: None
    evaluate: Callable[[Evaluate], dict[str, float]] = lambda request: {} if request.uids else {"accuracy": 0.25}
    failures: Callable[[], dict[str, str]] = lambda: {}
    """Why no held-out problem has a reward, of each evaluation; empty where all have."""
    evaluated: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    """Every call that evaluated, with its rows."""
    trained: list[tuple[str, ...]] = field(default_factory=list)
    """Every batch that was tried, in order."""
    bases: list[Path | None] = field(default_factory=list)
    """What deltas of each version of the weights were to lead from."""
    loaded: list[Path] = field(default_factory=list)
    """Weights that each epoch started from."""
    workers: tuple[str, ...] = ("model_worker/0",)
    models: dict[str, LoadedModel] = field(default_factory=lambda: {"actor/0": SHAPE})
    news: asyncio.Event = field(default_factory=asyncio.Event)
    until_written: Callable[[], Awaitable[None]] = lambda: _at_once()
    """What the ranks' disks take their time for."""
    saves_with_copies: list[bool] = field(default_factory=list)
    """Of every commit, whether the ranks were to copy."""
    _states: dict[str, Path] = field(default_factory=dict)
    """The file that each role's copy is written to."""

    def __call__(self, context: WorkerContext, spec: object, *, epoch: int) -> Self:
        self.context = context
        return self

    def published(self) -> str:
        """The version that the manager sees."""
        return self.published_weights().version

    def published_weights(self) -> PublishedWeights:
        """All that the manager sees of them."""
        return PublishedWeights.from_json(self.context.names.get(self.context.keys.policy_version()))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        pass

    def check_alive(self) -> None:
        pass

    async def initialize(
        self, *, step: int, weights: Mapping[str, Path], states: Mapping[str, Path]
    ) -> dict[str, LoadedModel]:
        self.at_call("initialize")
        self.loaded.append(weights["actor"])
        return self.models

    async def load_rows(self, uids: Sequence[str]) -> list[BufferedSample]:
        self.at_call("load_rows")
        return [
            BufferedSample(
                uid=uid,
                order=0,
                owner=0,
                num_tokens=[3],
                versions=frozenset({INITIAL_VERSION}),
                keys=frozenset({"input_ids", "prompt_mask"}),
            )
            for uid in uids
        ]

    async def reject(self, uids_by_rank: Mapping[int, Sequence[str]], rejection: Rejection) -> None:
        self.at_call("reject")

    def clear(self, uids_by_rank: Mapping[int, list[str]]) -> None:
        self.at_call("clear")

    def attach(self, requests: Mapping[int, PiggybackedRequest]) -> None:
        pass

    async def tell(self, requests: Mapping[int, Request]) -> dict[int, ReplyPayload]:
        return dict.fromkeys(requests, OkReply())

    async def start(self, requests: Mapping[int, Request], **hooks: object) -> dict[int, ReplyPayload]:
        (request,) = requests.values()
        if isinstance(request, Evaluate):
            self.at_call("evaluate")
            self.evaluated.append((request.mfc, tuple(request.uids)))
            if request.uids:
                return dict.fromkeys(requests, StatsReply(stats=self.evaluate(request)))
            failures, accuracy = self.failures(), self.evaluate(request).get("accuracy")
            rewards = [] if failures or accuracy is None else [accuracy]
            sums = sums_of(rewards, [1] * len(rewards)) | {"correct": math.fsum(rewards)}
            return dict.fromkeys(requests, HeldOutReply(sums={"": sums}, failures=failures))
        assert isinstance(request, TrainStep)
        self.at_call("train_step")
        self.trained.append(tuple(request.uids))
        return dict.fromkeys(requests, self.train(request.version + 1))

    def host_by_rank(self) -> dict[int, str]:
        return {0: "here"}

    async def save_weights(self, role: str, directory: Path, *, base: Path | None = None) -> dict[str, FileEntry]:
        self.at_call("save_weights")
        self.bases.append(base)
        names = ["model.safetensors"] if base is None else ["model.safetensors", f"model.safetensors{DELTA_SUFFIX}"]
        return {name: await asyncio.to_thread(write_durable, directory / name, [b"weights"]) for name in names}

    async def begin_save(self, role: str, state: Path, weights: Path | None, *, copies: bool) -> None:
        self.at_call("begin_save")
        self.saves_with_copies.append(copies)
        self._states[role] = state / "train_state.json"

    async def written(self, role: str) -> WrittenFiles:
        self.at_call("written")
        path = self._states[role]
        try:
            await self.until_written()
            entry = await asyncio.to_thread(write_durable, path, [b"{}"])
        except OSError as error:
            problems = {"model_worker/0": str(error)}
            return WrittenFiles(state={}, weights={}, problems=problems, lacks_room=is_no_room(error))
        return WrittenFiles(state={path.name: entry}, weights={}, problems={})

    def still_writing(self) -> list[str]:
        return list(self.workers)


async def _at_once() -> None: ...


def trial_of(folder: Path, *overrides: str) -> tuple[RunPlan, TrialDirectory]:
    """An SFT trial of five steps."""
    write_inputs(folder)
    (folder / "sft.yaml").write_text(VALID_SFT)
    experiment = load_experiment(folder / "sft.yaml", overrides)
    trial = TrialDirectory(folder / "runs" / "small-sft" / "t")
    trial.create()
    record_attempt(trial, attempt=0, resume=False, mode="local")
    identity = TrialIdentity(experiment=experiment.name, trial="t", uuid=UUID, directory=trial.path)
    return make_run_plan(experiment, identity, "local"), trial


def run_master(plan: RunPlan, trial: TrialDirectory, trainers: Trainers, monkeypatch: pytest.MonkeyPatch) -> int:
    """A start of the master, until it leaves; its exit code."""
    monkeypatch.setattr(master_worker, "TrainerGroup", trainers)
    with context_of(plan, trial, "master_worker") as context:
        return run_to_exit_code(MasterWorker, context)


Begin = Callable[..., tuple[TrialDirectory, Callable[[Trainers], int]]]
"""What the fixture `begin` is: overrides -> (a new trial, a start of its master with some trainers: its exit code)."""


@contextmanager
def context_of(plan: RunPlan, trial: TrialDirectory, kind: str) -> Iterator[WorkerContext]:
    """What the first worker of a kind is given; it talks to nobody."""
    names = MemoryNameService()
    names.add(TrialKeys(UUID).weights_in_use(), NOTHING_IN_USE)
    with TemporaryDirectory() as folder:
        secrets = TrialSecrets.create(Path(folder))
        with worker_context(plan, kind, names=names, secrets=secrets, incarnation="o") as context:
            yield context


def step_by_uid(trial: TrialDirectory) -> dict[str, int]:
    """What was trained in which step, as the deltas of all commits say."""
    trained: list[tuple[str, int]] = []
    for logged in TrialLog(trial.log_path).read().lineage:
        for step, uids in read_delta(trial, logged.commit).trained.items():
            trained += [(uid, step) for uid in uids]
    assert len(trained) == len(dict(trained)), "a sample was trained twice"
    return dict(trained)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
