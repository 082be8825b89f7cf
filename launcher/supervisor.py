"""The supervisor's program: reads what rl-submit has written, and puts the parts of an attempt together.

python -m corral.launcher.supervisor --trial DIR
      keeper (this process) --starts, again if it is killed--> the same with --kept --attempt N: Supervisor
"""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from corral.experiments.attempt_ends import failed_nodes
from corral.experiments.attempts import read_attempt
from corral.experiments.journal import Journal
from corral.experiments.plan import RunPlan
from corral.experiments.secrets import TrialSecrets
from corral.experiments.trial_directory import TrialDirectory
from corral.launcher.attempt_start import JobStart
from corral.launcher.continuation import Continuation
from corral.launcher.keeper import keep
from corral.launcher.layout import Layout
from corral.launcher.local import LocalRunner, share_gpus, visible_gpus
from corral.launcher.lock import SupervisorRunsError
from corral.launcher.member_places import FallbackRunner
from corral.launcher.members import Members
from corral.launcher.node_loss import NodeLoss
from corral.launcher.runner import TaskRunner
from corral.launcher.slurm import SlurmClient
from corral.launcher.srun import SrunRunner, batch_allocations
from corral.launcher.supervision import Supervisor, WorkerCommand, worker_command
from corral.launcher.trial_redis import TrialRedis
from corral.launcher.unit_actions import Outcome

_MAX_SUPERVISOR_RESTARTS = 20
_CONTINUATION_TIMEOUT_S = 5.0  # it is asked while SLURM is about to kill us


def make_supervisor(
    directory: TrialDirectory,
    attempt: int,
    worker_command: WorkerCommand,
    signals: Sequence[signal.Signals] = (),
) -> Supervisor:
    """The supervisor of an attempt that the keeper has opened; `signals` came too early for the one before it."""
    plan = RunPlan.from_json(directory.plan_path.read_bytes())
    secrets = TrialSecrets.load(directory.secrets_path)
    record = read_attempt(directory, attempt)
    parts = make_runner(plan, directory, attempt)
    name_server = TrialRedis(
        directory=directory, trial_uuid=plan.trial.uuid, secrets=secrets, attempt=attempt, host=parts.redis_host
    )
    return Supervisor(
        directory=directory,
        plan=plan,
        attempt=record,
        runner=parts.runner,
        name_server=name_server,
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


def make_runner(plan: RunPlan, directory: TrialDirectory, attempt: int) -> RunnerParts:
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
    record = partial(Journal(directory.journal_path).append, attempt=attempt)
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
    return run_supervisor(
        directory, options.attempt, lambda: make_supervisor(directory, options.attempt, worker_command, signals)
    )


def keep_supervisor(directory: TrialDirectory, *, command: Sequence[str]) -> int:
    """The keeper's exit code; a second supervisor of a trial is refused with exit 2."""
    try:
        return keep(directory, command=command, max_restarts=_MAX_SUPERVISOR_RESTARTS)
    except SupervisorRunsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def run_supervisor(directory: TrialDirectory, attempt: int, make: Callable[[], Supervisor]) -> int:
    """Runs a supervisor; whatever it cannot survive is in the journal, where rl-status and rl-logs show it."""
    try:
        return make().run()
    except Exception as error:
        Journal(directory.journal_path).append(
            "trial_ended",
            attempt=attempt,
            state=Outcome.FAILED.value,
            cause=f"supervisor: {error}",
            failed="supervisor",
        )
        TrialSecrets.destroy(directory.secrets_path)
        raise


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
