"""The supervisor's program: reads what rl-submit has written, and puts the parts of an attempt together.

python -m corral.launcher.supervisor --trial DIR --attempt N
      keeper (this process) --starts, again if it is killed--> the same with --kept: Supervisor
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from corral.experiments.attempts import read_attempt
from corral.experiments.journal import Journal
from corral.experiments.plan import RunPlan
from corral.experiments.secrets import TrialSecrets
from corral.experiments.trial_directory import TrialDirectory
from corral.launcher.keeper import keep
from corral.launcher.layout import Layout
from corral.launcher.local import LocalRunner, share_gpus, visible_gpus
from corral.launcher.lock import SupervisorRunsError
from corral.launcher.member_places import FallbackRunner
from corral.launcher.members import Members
from corral.launcher.runner import TaskRunner
from corral.launcher.slurm import SlurmClient
from corral.launcher.srun import SrunRunner, batch_allocations
from corral.launcher.supervision import Supervisor, WorkerCommand, worker_command
from corral.launcher.trial_redis import TrialRedis
from corral.launcher.units import Outcome

_MAX_SUPERVISOR_RESTARTS = 20


def make_supervisor(directory: TrialDirectory, attempt: int, worker_command: WorkerCommand) -> Supervisor:
    """The supervisor of an attempt whose files rl-submit has written."""
    plan = RunPlan.from_json(directory.plan_path.read_bytes())
    secrets = TrialSecrets.load(directory.secrets_path)
    record = read_attempt(directory, attempt)
    directory.start_attempt_logs(attempt)
    runner, host, members = make_runner(plan, directory, attempt)
    name_server = TrialRedis(
        directory=directory, trial_uuid=plan.trial.uuid, secrets=secrets, attempt=attempt, host=host
    )
    return Supervisor(
        directory=directory,
        plan=plan,
        attempt=record,
        runner=runner,
        name_server=name_server,
        worker_command=worker_command,
        members=members,
    )


def make_runner(plan: RunPlan, directory: TrialDirectory, attempt: int) -> tuple[TaskRunner, str, Members | None]:
    """What starts the workers, the address that Redis listens on, and the jobs of workers that have their own."""
    if plan.mode == "local":
        gpus_wanted = {
            f"{worker.kind}/{worker.index}": plan.scheduling[worker.kind].scheduling.gpu for worker in plan.workers
        }
        local = LocalRunner(
            bind_address=plan.cluster.bind_address, gpus_by_worker=share_gpus(gpus_wanted, visible_gpus())
        )
        return local, local.bind_address(""), None
    client = SlurmClient()
    layout = Layout.from_json(directory.layout_path.read_bytes())
    own = batch_allocations(os.environ, client)
    members = Members(
        client=client,
        plan=plan,
        layout=layout,
        directory=directory,
        attempt=attempt,
        own=own,
        record=partial(Journal(directory.journal_path).append, attempt=attempt),
    )
    steps = SrunRunner(
        client=client,
        plan=plan,
        layout=layout,
        directory=directory,
        allocations=members.allocations,
        why_away=members.why_away,
    )
    own_address = steps.address_of(os.environ.get("SLURMD_NODENAME", own[0].hosts[0]))
    address = own_address if plan.cluster.bind_address == "auto" else plan.cluster.bind_address
    return FallbackRunner(steps, layout, members.allocations), address, members


def main(
    arguments: Sequence[str],
    *,
    own_command: Sequence[str] = (sys.executable, "-m", "corral.launcher.supervisor"),
    worker_command: WorkerCommand = worker_command,
) -> int:
    """`python -m corral.launcher.supervisor --trial DIR --attempt N`; the keeper adds --kept to start the real one."""
    parser = argparse.ArgumentParser(prog="corral.launcher.supervisor", description="Supervise one attempt of a trial.")
    parser.add_argument("--trial", type=Path, required=True, help="the trial directory")
    parser.add_argument("--attempt", type=int, required=True, help="number of the attempt")
    parser.add_argument("--kept", action="store_true", help="a keeper holds the lock and starts this again")
    options = parser.parse_args(arguments)
    directory = TrialDirectory(options.trial.resolve())
    if not options.kept:
        command = [*own_command, *arguments, "--kept"]
        return keep_supervisor(directory, attempt=options.attempt, command=command)
    return run_supervisor(
        directory, options.attempt, lambda: make_supervisor(directory, options.attempt, worker_command)
    )


def keep_supervisor(directory: TrialDirectory, *, attempt: int, command: Sequence[str]) -> int:
    """The keeper's exit code; a second supervisor of a trial is refused with exit 2."""
    try:
        return keep(directory, attempt=attempt, command=command, max_restarts=_MAX_SUPERVISOR_RESTARTS)
    except SupervisorRunsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def run_supervisor(directory: TrialDirectory, attempt: int, make: Callable[[], Supervisor]) -> int:
    """Runs a supervisor; whatever it cannot survive is in the journal, where rl-status and rl-logs show it."""
    try:
        return make().run()
    except Exception as error:
        Journal(directory.journal_path).append(
            "trial_ended", attempt=attempt, state=Outcome.FAILED.value, cause=f"supervisor: {error}"
        )
        TrialSecrets.destroy(directory.secrets_path)
        raise


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
