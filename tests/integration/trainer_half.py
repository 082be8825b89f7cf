"""The trainer's half of a trial, real but for those who generate: a master here, model workers in processes.

    given answers ──TrajectorySender──► ModelWorker, a process for each rank ◄──requests── MasterWorker, in this process
          ▲                                                                                      │
          └──── the batch of each step, once the version before it is published ◄───names────────┘

An attempt of a trial may have another allocation than the one before: the plan is made anew for each. What batch a step
gets does not depend on time, so that two trials of the same answers train the same steps.
"""

import asyncio
import json
import multiprocessing
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from corral.experiments.async_ppo import AsyncPPOExperiment
from corral.experiments.datasets.dataset import Dataset
from corral.experiments.exit_codes import WorkerExit
from corral.experiments.plan import RunPlan, TrialIdentity, make_run_plan
from corral.experiments.registry import load_experiment
from corral.experiments.trial.attempts import read_attempts, record_attempt
from corral.experiments.trial.directory import StopRequest, TrialDirectory
from corral.experiments.trial.log import TrialLog
from corral.experiments.trial.log_state import Commit
from corral.experiments.trial.secrets import TrialSecrets
from corral.experiments.trial.worker_record import WorkerRecord
from corral.experiments.worker_specs import RolloutWorkerSpec
from corral.name_resolve.base import NameNotFoundError, NameService
from corral.name_resolve.keys import TrialKeys
from corral.scheduling.policy_version import INITIAL_VERSION, PolicyVersion, VersionSpan
from corral.workers.checkpoint.checkpoint import committed_ledger
from corral.workers.checkpoint.ledger import DROPPED, TRAINED, Ledger, numbers_of
from corral.workers.checkpoint.published_weights import NOTHING_IN_USE
from corral.workers.delivery.messages import TrajectoryHeader, VerdictKind, delivery_id, uid_of_delivery
from corral.workers.delivery.sender import TrajectorySender
from corral.workers.delivery.spool import Spool
from corral.workers.lifecycle.presence import Presence
from corral.workers.lifecycle.worker import WorkerContext, install_signal_handlers, run_to_exit_code
from corral.workers.master.master_worker import MasterWorker
from corral.workers.model.model_worker import ModelWorker
from corral.workers.streams.security import StreamSecurity
from tests.integration.four_roles import Group, sample_of
from tests.name_services import NamesAddress, running_names
from tests.workers.backends.training_helpers import read_weights

UUID = "cd" * 16
_DEADLINE_S = 120.0
_POLL_S = 0.01


class TrainerTrial:
    """A trial of given answers.

    Example:
        trial = TrainerTrial(folder, "elsewhere")      # trains folder/experiment.yaml
        trial.run(batches, "fsdp:d2", stop_after=2)
        trial.run(batches, "fsdp:d1")                  # goes on from there
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self.directory = TrialDirectory(folder / "runs" / "four-roles" / name)
        self.directory.create()

    def run(
        self,
        batches: Sequence[Sequence[Group]],
        allocation: str,
        *overrides: str,
        stop_after: int | None = None,
    ) -> WorkerExit:
        """One attempt, to its end; how the master left.

        Args:
            batches: the samples of each train step from the first one on; those that a commit has are delivered, too.
            allocation: of the roles.
            stop_after: ask for a stop when this step is published, as rl-stop does.
        """
        self.directory.clear_stop_request()
        attempt = len(read_attempts(self.directory))
        record_attempt(self.directory, attempt=attempt, resume=attempt > 0, mode="local")
        plan = self._plan(allocation, overrides)
        if not self.directory.secrets_path.exists():
            TrialSecrets.create(self.directory.secrets_path)
        with ExitStack() as stack:
            place = _Place(stack.enter_context(running_names()), attempt)
            stack.enter_context(_ranks(plan, place))
            context = stack.enter_context(place.context(plan, "master_worker", 0))
            context.names.add(context.keys.weights_in_use(), NOTHING_IN_USE)
            stack.enter_context(_Answering(plan, place, batches, stop_after=stop_after))
            return run_to_exit_code(MasterWorker, context)

    def metrics(self) -> list[dict[str, Any]]:
        """A line per train step."""
        return _lines(self.directory.metrics_path)

    def trained(self) -> dict[int, list[str]]:
        """The uids of each step."""
        by_step: dict[int, list[str]] = {}
        for sample in _lines(self.directory.trajectories_path):
            by_step.setdefault(sample["step"], []).append(sample["uid"])
        return by_step

    def events(self, name: str) -> list[dict[str, Any]]:
        """Events of the journal of this name."""
        return [event for event in _lines(self.directory.journal_path) if event["event"] == name]

    def commits(self) -> list[Commit]:
        """What counts, oldest first."""
        return [logged.commit for logged in TrialLog(self.directory.log_path).read().lineage]

    def consumed(self, commit: Commit) -> tuple[set[str], set[str]]:
        """What was trained on and what was dropped by then, as its checkpoint says."""
        rows = numbers_of(list(Dataset.planned(self._plan("fsdp:d1", ()).all_of(RolloutWorkerSpec)[0].dataset)))
        ledger = committed_ledger(self.directory, commit, rows)
        return set(ledger.beyond(Ledger(rows), TRAINED)), set(ledger.beyond(Ledger(rows), DROPPED))

    def weights(self, role: str) -> dict[str, torch.Tensor]:
        """A role's weights in the newest commit."""
        checkpoint = self.directory.inside(self.commits()[-1].directory)
        return read_weights(checkpoint / ("weights" if role == "actor" else f"weights_of/{role}"))

    def _plan(self, allocation: str, overrides: Sequence[str]) -> RunPlan:
        experiment = load_four_roles(self._folder, f"allocation=hf:d1+{allocation}", *overrides)
        identity = TrialIdentity(
            experiment=experiment.name, trial=self.directory.path.name, uuid=UUID, directory=self.directory.path
        )
        return make_run_plan(experiment, identity, "local")


def load_four_roles(folder: Path, *overrides: str) -> AsyncPPOExperiment:
    """The folder's experiment."""
    experiment = load_experiment(folder / "experiment.yaml", overrides)
    assert isinstance(experiment, AsyncPPOExperiment)
    return experiment


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# --- its processes --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Place:
    """Where the workers of one attempt meet."""

    names: NamesAddress
    attempt: int

    @contextmanager
    def context(self, plan: RunPlan, kind: str, index: int) -> Iterator[WorkerContext]:
        """What a worker is given."""
        trial, keys = TrialDirectory(plan.trial.directory), TrialKeys(UUID)
        secrets = TrialSecrets.load(trial.secrets_path)
        with (
            self.names.connect() as names,
            StreamSecurity(secrets, kind, trial_uuid=UUID) as security,
            Presence(names, keys.worker(kind, index), owner=f"{kind}/{index}", ttl_s=60.0, identity=WorkerRecord()) as (
                presence
            ),
        ):
            yield WorkerContext(
                plan=plan,
                kind=kind,
                index=index,
                attempt=self.attempt,
                incarnation="first",
                address="127.0.0.1",
                trial=trial,
                names=names,
                keys=keys,
                secrets=secrets,
                security=security,
                presence=presence,
            )


@contextmanager
def _ranks(plan: RunPlan, place: _Place) -> Iterator[None]:
    """Model workers, each in a process; they leave when the block ends.

    Raises:
        AssertionError: if one of them failed.
    """
    processes = multiprocessing.get_context("forkserver")
    # The server pays once for the imports.
    processes.set_forkserver_preload(["tests.workers.backends.imports_of_a_rank", "tests.integration.trainer_half"])
    world_size = plan.master.num_model_workers
    ranks: list[BaseProcess] = [
        processes.Process(target=_be_rank, args=(plan.to_json(), place, rank)) for rank in range(world_size)
    ]
    try:
        for process in ranks:
            process.start()
        yield
        for process in ranks:
            process.terminate()
            process.join(_DEADLINE_S)
        assert [process.exitcode for process in ranks] == [WorkerExit.DONE] * world_size
    finally:
        for process in ranks:
            if process.is_alive():
                process.kill()
                process.join()


def _be_rank(plan_json: bytes, place: _Place, rank: int) -> None:
    torch.set_num_threads(1)
    with place.context(RunPlan.from_json(plan_json), "model_worker", rank) as context:
        install_signal_handlers(context.stopping)
        exit_code = run_to_exit_code(ModelWorker, context)
    raise SystemExit(int(exit_code))


class _Answering:
    """Rollout workers, as far as the trainer can tell: a thread that has each step's batch ready, and no sooner.

    What is rejected as stale is delivered again, the same answers under the next admission number. A master that has
    not ended by the deadline is asked to stop, and the test fails.
    """

    def __init__(
        self, plan: RunPlan, place: _Place, batches: Sequence[Sequence[Group]], *, stop_after: int | None
    ) -> None:
        self._trial = TrialDirectory(plan.trial.directory)
        self._place = place
        self._batches = batches
        self._stop_after = stop_after
        self._groups = {group.uid: group for batch in batches for group in batch}
        self._num_orders = 0
        self._rejected: list[str] = []
        self._num_given = 0
        self._deadline = time.monotonic() + _DEADLINE_S
        self._is_over = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="answers")

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *exception: object) -> None:
        self._is_over.set()
        self._thread.join(_DEADLINE_S)
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except Exception as error:  # it is raised again where the test waits
            self._failure = error

    async def _main(self) -> None:
        keys, secrets = TrialKeys(UUID), TrialSecrets.load(self._trial.secrets_path)
        with (
            self._place.names.connect() as names,
            StreamSecurity(secrets, "rollout_worker", trial_uuid=UUID) as security,
            tempfile.TemporaryDirectory() as folder,
            Spool(Path(folder)) as spool,
        ):
            async with TrajectorySender(security, spool, on_verdict=self._on_verdict) as self._sender:
                while not self._is_over.is_set():
                    await self._look(names, keys)
                    if time.monotonic() > self._deadline:
                        self._ask_for_stop()
                        raise TimeoutError(f"the master did not end within {_DEADLINE_S:.0f} s; it was asked to stop")
                    await asyncio.sleep(_POLL_S)

    async def _look(self, names: NameService, keys: TrialKeys) -> None:
        receivers = names.get_subtree(keys.trajectory_receivers_root())
        self._sender.set_receivers({int(name.rpartition("/")[2]): address for name, address in receivers.items()})
        self._sender.raise_failure()
        while self._rejected:
            uid = self._rejected.pop()
            await self._sender.remove([uid])
            await self._offer(self._groups[uid])
        try:
            step = PolicyVersion.parse(json.loads(names.get(keys.policy_version()))["version"]).step
        except NameNotFoundError:
            return
        wanted = step + 1 if self._stop_after is None else min(step + 1, self._stop_after)
        for batch in self._batches[self._num_given : wanted]:
            for group in batch:
                await self._offer(group)
            self._num_given += 1
        if step == self._stop_after:
            self._ask_for_stop()

    def _ask_for_stop(self) -> None:
        if self._trial.read_stop_request() is None:
            self._trial.write_stop_request(StopRequest(requested_at=0.0, by="test", now=False, grace_s=60.0))

    async def _offer(self, group: Group) -> None:
        self._num_orders += 1
        order = self._num_orders
        header = partial(TrajectoryHeader, uid=delivery_id(group.uid, order), dataset_epoch=0, order=order)
        if group.dropped_because:
            dropped = header(num_answers=0, status="dropped", reason=group.dropped_because)
            await self._sender.put(dropped, {})
            return
        sample = sample_of(group)
        finished = header(
            num_answers=len(group.answers),
            status="finished",
            seqlens={key: lengths[0] for key, lengths in sample.seqlens.items()},
            version_spans=[
                [VersionSpan(str(INITIAL_VERSION), 0, len(answer.old_logprobs))] for answer in group.answers
            ],
        )
        await self._sender.put(finished, sample.data)

    def _on_verdict(self, delivery: str, kind: VerdictKind) -> None:
        if kind in ("stale", "not_finite"):
            self._rejected.append(uid_of_delivery(delivery))
