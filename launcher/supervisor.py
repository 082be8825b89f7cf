"""The supervisor's program: reads what rl-submit has written, and puts the parts of an attempt together.

python -m corral.launcher.supervisor --trial DIR
      keeper (this process) --starts, again if it breaks--> the same with --kept --attempt N: Supervisor
"""

import argparse
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from corral.experiments.attempt_ends import failed_nodes
from corral.experiments.attempts import read_attempt
from corral.experiments.journal import Journal
from corral.experiments.plan import RunPlan
from corral.experiments.secrets import TrialSecrets
from corral.experiments.trial_directory import TrialDirectory
from corral.experiments.trial_log import CorruptLogError
from corral.launcher.attempt_start import JobStart
from corral.launcher.continuation import Continuation
from corral.launcher.files.file_thread import FileThread
from corral.launcher.keeper import keep, record_failure
from corral.launcher.layout.layout import Layout
from corral.launcher.members.members import Members
from corral.launcher.members.places import FallbackRunner
from corral.launcher.node_loss import NodeLoss
from corral.launcher.plan_units import WorkerCommand, worker_command
from corral.launcher.recorder import Recorder
from corral.launcher.runners.local import LocalRunner, share_gpus, visible_gpus
from corral.launcher.runners.runner import TaskRunner
from corral.launcher.runners.srun import SrunRunner, batch_allocations
from corral.launcher.slurm.client import SlurmClient
from corral.launcher.supervision import Supervisor
from corral.launcher.supervisor_exit import EXIT_BROKEN, SupervisorExit
from corral.launcher.trial.lock import SupervisorRunsError
from corral.launcher.trial_redis import TrialRedis

logger = logging.getLogger(__name__)

_MAX_SUPERVISOR_RESTARTS = 20  # in a row, each before it has run for supervision.healthy_after_s
_TOLD_TIMEOUT_S = 10.0
_CONTINUATION_TIMEOUT_S = 5.0  # it is asked while SLURM is about to kill us


def make_supervisor(
    directory: TrialDirectory,
    attempt: int,
    worker_command: WorkerCommand,
    *,
    recorder: Recorder,
    signals: Sequence[signal.Signals] = (),
) -> Supervisor:
    """The supervisor of an attempt that the keeper has opened; `signals` came too early for the one before it."""
    plan = RunPlan.from_json(directory.plan_path.read_bytes())
    secrets = TrialSecrets.load(directory.secrets_path)
    record = read_attempt(directory, attempt)
    parts = make_runner(plan, directory, attempt, record=recorder.event)
    name_server = TrialRedis(
        directory=directory, trial_uuid=plan.trial.uuid, secrets=secrets, attempt=attempt, host=parts.redis_host
    )
    return Supervisor(
        directory=directory,
        plan=plan,
        attempt=record,
        runner=parts.runner,
        name_server=name_server,
        recorder=recorder,
        worker_command=worker_command,
        members=parts.members,
        continuation=parts.continuation,
        node_loss=parts.node_loss,
        signals=signals,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerParts:
    """What an attempt runs with, here or on SLURM."""

    runner: TaskRunner
    redis_host: str
    """The address that Redis listens on."""
    members: Members | None = None
    """Jobs of the workers that have their own."""
    continuation: Continuation | None = None
    node_loss: NodeLoss | None = None
    """Set if the allocation outlives its nodes."""


def make_runner(plan: RunPlan, directory: TrialDirectory, attempt: int, *, record: Callable[..., None]) -> RunnerParts:
    """What starts the workers, and what of SLURM the attempt deals with."""
    if plan.mode == "local":
        gpus_wanted = {
            f"{worker.kind}/{worker.index}": plan.scheduling[worker.kind].scheduling_of(worker.index).gpu
            for worker in plan.workers
        }
        local = LocalRunner(
            bind_address=plan.cluster.bind_address, gpus_by_worker=share_gpus(gpus_wanted, visible_gpus())
        )
        return RunnerParts(runner=local, redis_host=local.bind_address(""))
    client = SlurmClient()
    layout = Layout.from_json(directory.layout_path.read_bytes())
    own = batch_allocations(os.environ)
    members = Members(
        client=client,
        plan=plan,
        layout=layout,
        directory=directory,
        attempt=attempt,
        own=own,
        record=record,
        exclude_nodes=failed_nodes(directory) if plan.launch.exclude_failed_nodes else (),
    )
    steps = SrunRunner(
        client=client,
        plan=plan,
        layout=layout,
        directory=directory,
        allocations=members.allocations,
        why_away=members.why_away,
    )
    own_host = os.environ.get("SLURMD_NODENAME", own[0].hosts[0])
    steps.wait_for_slurm(own_host)
    own_address = steps.address_of(own_host)
    address = own_address if plan.cluster.bind_address == "auto" else plan.cluster.bind_address
    start = JobStart.of_environment(os.environ)
    return RunnerParts(
        runner=FallbackRunner(steps, layout, members.allocations),
        redis_host=address,
        members=members,
        continuation=Continuation(
            client=SlurmClient(timeout_s=_CONTINUATION_TIMEOUT_S),
            plan=plan,
            layout=layout,
            directory=directory,
            job_id=start.job_id,
            restart_count=start.restart_count,
            hosts=[host for allocation in own.values() for host in allocation.hosts],
            record=record,
        ),
        node_loss=NodeLoss(client=client, layout=layout, head=own[0], runner=steps) if plan.launch.no_kill else None,
    )


def main(
    arguments: Sequence[str],
    *,
    own_command: Sequence[str] = (sys.executable, "-m", "corral.launcher.supervisor"),
    worker_command: WorkerCommand = worker_command,
) -> int:
    """`python -m corral.launcher.supervisor --trial DIR`; the keeper adds --kept and the attempt for the real one."""
    parser = argparse.ArgumentParser(prog="corral.launcher.supervisor", description="Supervise one attempt of a trial.")
    parser.add_argument("--trial", type=Path, required=True, help="the trial directory")
    parser.add_argument("--attempt", type=int, default=-1, help="number of the attempt; the keeper finds it out")
    parser.add_argument("--kept", action="store_true", help="a keeper holds the lock and starts this again")
    parser.add_argument("--signalled", action="append", default=[], help="a signal that the one before did not hear")
    options = parser.parse_args(arguments)
    directory = TrialDirectory(options.trial.resolve())
    if not options.kept:
        return keep_supervisor(directory, command=[*own_command, "--trial", str(directory.path), "--kept"])
    signals = [signal.Signals[name] for name in options.signalled]
    recorder = Recorder(FileThread("records"), Journal(directory.journal_path), attempt=options.attempt)

    def make() -> Supervisor:
        return make_supervisor(directory, options.attempt, worker_command, recorder=recorder, signals=signals)

    return run_supervisor(directory, make, recorder)


def keep_supervisor(directory: TrialDirectory, *, command: Sequence[str]) -> int:
    """The keeper's exit code; a second supervisor of a trial is refused with exit 2."""
    try:
        return keep(directory, command=command, max_restarts=_MAX_SUPERVISOR_RESTARTS)
    except SupervisorRunsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def run_supervisor(directory: TrialDirectory, make: Callable[[], Supervisor], recorder: Recorder) -> int:
    """Runs a supervisor. What it cannot survive ends it and what it has started; then the keeper starts another one.

    What would end that one too ends the trial: a plan that cannot be carried out here, a damaged trial log.
    """
    try:
        try:
            supervisor = make()
        except ValueError as error:
            return _fail(directory, recorder, error)
        return supervisor.run()
    except CorruptLogError as error:
        return _fail(directory, recorder, error)
    except Exception as error:
        logger.error("the supervisor breaks; the keeper starts another one", exc_info=True)
        recorder.event("supervisor_failed", cause=f"{type(error).__name__}: {error}")
        recorder.close(timeout_s=_TOLD_TIMEOUT_S)
        return EXIT_BROKEN


def _fail(directory: TrialDirectory, recorder: Recorder, error: Exception) -> SupervisorExit:
    logger.error("the trial has failed", exc_info=True)
    record_failure(directory, recorder, f"supervisor: {error}")
    recorder.close(timeout_s=_TOLD_TIMEOUT_S)
    return SupervisorExit.FAILED


def leave(exit_code: int) -> NoReturn:
    """Ends this process with exactly this code, whatever threads wait for, and though the disk of its log is full."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(exit_code)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
