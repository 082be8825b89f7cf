"""A supervisor, put together: what of plan.json, layout.json and the job's environment is whose.

plan.json, secrets/, attempt-N.json, and on a cluster layout.json and the job's environment
      --make_supervisor--> runner, Redis, extra jobs, successor, node loss --> Supervisor
"""

import logging
import os
import signal
from collections.abc import Sequence
from functools import partial

from corral.experiments.plan import RunPlan
from corral.experiments.trial.attempts import read_attempt
from corral.experiments.trial.directory import TrialDirectory
from corral.experiments.trial.log_state import CorruptLogError
from corral.experiments.trial.mode import has_jobs
from corral.experiments.trial.secrets import SECRETS_FILE, TrialSecrets
from corral.launcher.extra_jobs.extra_jobs import ExtraJobs
from corral.launcher.layout.layout import Layout, PlacedTrial
from corral.launcher.runners.local import LocalRunner, share_gpus, visible_gpus, wanted_gpus
from corral.launcher.slurm.cluster import SlurmCluster
from corral.launcher.slurm.step import own_job
from corral.launcher.supervisor.attempt_tasks import AttemptTasks
from corral.launcher.supervisor.continuation import Continuation
from corral.launcher.supervisor.keeper import fail
from corral.launcher.supervisor.recorder import Recorder
from corral.launcher.supervisor.signs_of_life import EXIT_BROKEN, SupervisorExit
from corral.launcher.supervisor.supervisor import Supervisor
from corral.launcher.supervisor.unit_specs import WorkerCommand
from corral.launcher.trial.rendezvous import redis_of_trial

logger = logging.getLogger(__name__)

_TOLD_TIMEOUT_S = 10.0
_CONTINUATION_TIMEOUT_S = 5.0  # it is asked while the cluster is about to kill us


def run_supervisor(
    directory: TrialDirectory, worker_command: WorkerCommand, recorder: Recorder, signals: Sequence[signal.Signals]
) -> int:
    """Runs a supervisor. What it cannot survive ends it and what it has started; then the keeper starts another one.

    What would end that one too ends the trial: a plan that cannot be carried out here, a damaged trial log.
    """
    try:
        try:
            supervisor = make_supervisor(directory, worker_command, recorder, signals)
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


def make_supervisor(
    directory: TrialDirectory, worker_command: WorkerCommand, recorder: Recorder, signals: Sequence[signal.Signals]
) -> Supervisor:
    """The supervisor of an attempt that the keeper has opened; `signals` came too early for the one before it."""
    attempt = recorder.attempt
    if not (directory.secrets_path / SECRETS_FILE).exists():  # one before this was killed as it handed the trial over
        TrialSecrets.destroy(directory.secrets_path)
        TrialSecrets.create(directory.secrets_path)
    plan = RunPlan.from_json(directory.plan_path.read_bytes())
    tasks = partial(
        AttemptTasks,
        directory=directory,
        plan=plan,
        attempt=read_attempt(directory, attempt),
        recorder=recorder,
        worker_command=worker_command,
    )
    redis_at = partial(redis_of_trial, directory, plan.trial.uuid, attempt=attempt)
    if not has_jobs(plan.mode):
        gpus = share_gpus(wanted_gpus(plan), visible_gpus())
        local = LocalRunner(bind_address=plan.cluster.bind_address, gpus_by_worker=gpus)
        return Supervisor(tasks=tasks(runner=local, redis=redis_at(host=local.bind_address(""))), signals=signals)
    cluster = SlurmCluster()
    own = own_job(os.environ)
    if own is None:
        raise ValueError(f"trial {directory.path} runs in jobs, and this supervisor in none; submit it with rl-submit")
    layout = Layout.from_json(directory.layout_path.read_bytes())
    trial = PlacedTrial(plan=plan, layout=layout, directory=directory)
    extra_jobs = ExtraJobs(
        cluster=cluster,
        trial=trial,
        attempt=attempt,
        own=own.allocations,
        record=recorder.event,
        exclude_nodes=directory.failed_nodes(),
    )
    runner = cluster.make_runner(trial, allocations=extra_jobs.allocations, why_away=extra_jobs.why_away)
    runner.wait_for_cluster(own.host)
    bind_address = plan.cluster.bind_address
    redis = redis_at(host=runner.address_of(own.host) if bind_address == "auto" else bind_address)
    return Supervisor(
        tasks=tasks(runner=runner, redis=redis),
        signals=signals,
        extra_jobs=extra_jobs,
        continuation=Continuation(
            cluster=SlurmCluster(timeout_s=_CONTINUATION_TIMEOUT_S),
            trial=trial,
            own=own,
            record=recorder.event,
        ),
    )


def _fail(directory: TrialDirectory, recorder: Recorder, error: Exception) -> SupervisorExit:
    logger.error("the trial has failed", exc_info=True)
    return fail(directory, recorder, f"supervisor: {error}")
