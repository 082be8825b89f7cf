"""What an attempt is made of, here or on a cluster: from the files of rl-submit to a Supervisor.

plan.json, secrets/, attempt-N.json --make_supervisor--> Supervisor
plan.json, layout.json, the job's environment --make_runner--> runner, extra_jobs, successor, node loss
"""

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from corral.experiments.plan import RunPlan
from corral.experiments.trial.attempt_end_record import failed_nodes
from corral.experiments.trial.attempts import read_attempt
from corral.experiments.trial.directory import TrialDirectory
from corral.experiments.trial.mode import has_jobs
from corral.experiments.trial.secrets import TrialSecrets
from corral.launcher.clusters import cluster_of
from corral.launcher.extra_jobs.extra_jobs import ExtraJobs
from corral.launcher.extra_jobs.specs import FallbackRunner
from corral.launcher.layout.layout import Layout
from corral.launcher.runners.local import LocalRunner, share_gpus, visible_gpus
from corral.launcher.runners.runner import TaskRunner
from corral.launcher.supervisor.end.continuation import Continuation
from corral.launcher.supervisor.node_loss import NodeLoss
from corral.launcher.supervisor.recorder import Recorder
from corral.launcher.supervisor.redis import TrialRedis
from corral.launcher.supervisor.supervisor import Supervisor
from corral.launcher.supervisor.units.specs import WorkerCommand

_CONTINUATION_TIMEOUT_S = 5.0  # it is asked while the cluster is about to kill us


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
        extra_jobs=parts.extra_jobs,
        continuation=parts.continuation,
        node_loss=parts.node_loss,
        signals=signals,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerParts:
    """What an attempt runs with, here or on a cluster."""

    runner: TaskRunner
    redis_host: str
    """The address that Redis listens on."""
    extra_jobs: ExtraJobs | None = None
    """Jobs of the workers that have their own."""
    continuation: Continuation | None = None
    node_loss: NodeLoss | None = None
    """Set if the allocation outlives its nodes."""


def make_runner(plan: RunPlan, directory: TrialDirectory, attempt: int, *, record: Callable[..., None]) -> RunnerParts:
    """What starts the workers, and what of the cluster the attempt deals with."""
    if not has_jobs(plan.mode):
        return _on_this_machine(plan)
    cluster = cluster_of(plan.mode)
    own = cluster.own_job(os.environ)
    if own is None:
        raise ValueError(f"trial {directory.path} runs in jobs, and this supervisor in none; submit it with rl-submit")
    layout = Layout.from_json(directory.layout_path.read_bytes())
    extra_jobs = ExtraJobs(
        cluster=cluster,
        plan=plan,
        layout=layout,
        directory=directory,
        attempt=attempt,
        own=own.allocations,
        record=record,
        exclude_nodes=failed_nodes(directory) if plan.launch.exclude_failed_nodes else (),
    )
    runner = cluster.make_runner(
        plan, layout, directory, allocations=extra_jobs.allocations, why_away=extra_jobs.why_away
    )
    runner.wait_for_cluster(own.host)
    own_address = runner.address_of(own.host)
    return RunnerParts(
        runner=FallbackRunner(runner, layout, extra_jobs.allocations),
        redis_host=own_address if plan.cluster.bind_address == "auto" else plan.cluster.bind_address,
        extra_jobs=extra_jobs,
        continuation=Continuation(
            cluster=cluster_of(plan.mode, timeout_s=_CONTINUATION_TIMEOUT_S),
            plan=plan,
            layout=layout,
            directory=directory,
            own=own,
            record=record,
        ),
        node_loss=NodeLoss(cluster=cluster, layout=layout, head=own.allocations[0], runner=runner)
        if plan.launch.no_kill
        else None,
    )


def _on_this_machine(plan: RunPlan) -> RunnerParts:
    gpus_wanted = {
        f"{worker.kind}/{worker.index}": plan.scheduling[worker.kind].scheduling_of(worker.index).gpu
        for worker in plan.workers
    }
    local = LocalRunner(bind_address=plan.cluster.bind_address, gpus_by_worker=share_gpus(gpus_wanted, visible_gpus()))
    return RunnerParts(runner=local, redis_host=local.bind_address(""))
