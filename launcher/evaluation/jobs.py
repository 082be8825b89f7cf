"""Evaluations: on the cluster as jobs of submitit, several as one array, or as processes of this machine.

    requests --submit_to_slurm--> array of jobs --squeue--------> QUEUED, RUNNING, FAILED, ... --+--> rows for people
             --run_here---------> one process after the other -----------------------------------+
                                          `--> {trial}/eval/step-*.json, which alone says that an evaluation is done

A job that SLURM takes away and starts again, and one whose time is up, goes on where it was. What a job runs is a
command (`python -m corral.workers.evaluation REQUEST`), so the launcher needs no torch. submitit wraps the command into
a call of its own, which it pickles; that envelope, in a folder of mode 0700 in the trial directory, is the only pickle
that corral ever causes, and nothing but the path of the request is in it.
"""

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import msgspec
import submitit
from submitit.core.utils import DelayedSubmission, FailedJobError

from corral.experiments.errors import ConfigError
from corral.experiments.own_python import own_python, python_path
from corral.experiments.plan import RunPlan
from corral.experiments.trial.directory import TrialDirectory, atomic_write
from corral.experiments.trial.evaluation import EvaluationRequest, read_result
from corral.experiments.trial.tether import die_with_parent
from corral.launcher.evaluation.plan import scheduling_of, write_request
from corral.launcher.evaluation.status import EvaluationStatus, JobRecord, cause_of, jobs_folder, record_path
from corral.launcher.files.patience import wait_until
from corral.launcher.runners.containers import contain
from corral.launcher.runners.guard import guarded
from corral.launcher.runners.local import LocalTask, visible_gpus
from corral.launcher.runners.runner import start_process
from corral.launcher.slurm.client import SlurmClient, SlurmError, SlurmUnreachableError, clean_environment, is_installed
from corral.scheduling.scheduling import AllocationNeeds, Scheduling, option_name

_MAX_CONTINUATIONS = 10
_MAX_PARALLEL = 16
_SIGNAL_BEFORE_END_S = 60
_LOOK_PAUSE_S = 0.1
_GUARD_END_S = 10.0
_PARAMETERS = ("partition", "account", "qos", "constraint", "nodelist", "exclude")  # that SlurmExecutor has


class EvaluationCommand:
    """Runs a command inside a submitit job; when its time is up the same command is started again."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)

    def __call__(self) -> None:
        with subprocess.Popen(self._command, stdin=subprocess.DEVNULL) as process:
            try:
                returncode = process.wait()  # the time limit of the job is its deadline
            finally:
                process.kill()  # a signal may have taken us out of the wait
        if returncode:
            raise RuntimeError(f"the evaluation ended with {returncode}; what it said last is above")

    def checkpoint(self) -> DelayedSubmission:
        """What submitit asks before it puts the job back into the queue; progress is on disk already."""
        return DelayedSubmission(EvaluationCommand(self._command))


@dataclass(frozen=True, slots=True)
class EvaluationResources:
    """What one evaluation job asks SLURM for, where the trial runs."""

    plan: RunPlan
    _: KW_ONLY
    minutes: int
    partition: str | None = None
    """Another one than the trial's."""

    @property
    def scheduling(self) -> Scheduling:
        """See `scheduling_of`; its container included."""
        return scheduling_of(self.plan)

    @property
    def slurm(self) -> dict[str, Any]:
        """Further parameters of submitit's SlurmExecutor: partition, account, ..."""
        launch, scheduling = self.plan.launch, self.scheduling
        needs = {name: getattr(scheduling, name) or getattr(launch, name) for name in AllocationNeeds.model_fields}
        needs["partition"] = self.partition or needs["partition"]
        slurm: dict[str, Any] = {name: value for name, value in needs.items() if value and name in _PARAMETERS}
        if scheduling.gpu:
            option, amount = self.plan.cluster.gpu_option(scheduling.gpu, scheduling.gpu_type)
            slurm[option.replace("-", "_")] = amount or True
        extra = [*launch.extra_sbatch_arguments, *scheduling.extra_sbatch_arguments]
        pairs = {name: value for name, _, value in (argument.lstrip("-").partition("=") for argument in extra)}
        further: dict[str, Any] = {"requeue": True} | {name: value or True for name, value in pairs.items()}
        further |= {option_name(name): value for name, value in needs.items() if value and name not in _PARAMETERS}
        return slurm | {"additional_parameters": further}


def submit_to_slurm(
    directory: TrialDirectory, requests: Sequence[EvaluationRequest], resources: EvaluationResources
) -> dict[int, str]:
    """Puts evaluations into the queue, several as one array; returns job ids by step.

    Raises:
        SlurmUnreachableError: if there is no SLURM here.
        SlurmError: if sbatch refuses.
    """
    if not is_installed("sbatch", "srun"):
        raise SlurmUnreachableError("sbatch was not found on PATH; add --local to evaluate on this machine")
    folder = requests[0].result.parent
    commands = [
        EvaluationCommand(evaluation_command(write_request(directory, request), resources, directory))
        for request in requests
    ]
    executor = submitit.AutoExecutor(
        folder=_private(jobs_folder(folder)), cluster="slurm", slurm_max_num_timeout=_MAX_CONTINUATIONS
    )
    plan, parameters = resources.plan, resources.slurm
    mem_mb, rules = resources.scheduling.mem, SlurmClient().memory_rules(parameters.get("partition"))
    cpus = rules.cpus(resources.scheduling.cpu, mem_mb)
    memory = plan.cluster.memory_option(mem_mb=mem_mb, cpus=cpus, rules=rules)
    executor.update_parameters(
        name=f"eval.{plan.trial.trial}",
        timeout_min=resources.minutes,
        cpus_per_task=cpus,
        tasks_per_node=1,
        slurm_signal_delay_s=min(_SIGNAL_BEFORE_END_S, resources.minutes * 15),
        slurm_array_parallelism=_MAX_PARALLEL,
        slurm_comment=f"evaluation of {directory.path}",
        **{f"slurm_{name.replace('-', '_')}": value for name, value in {**memory, **parameters}.items()},
    )
    with _outside_of_any_job():
        try:
            jobs: list[submitit.Job[None]] = executor.submit_array(commands)
        except FailedJobError as error:
            raise SlurmError(f"sbatch refuses the evaluation: {' '.join(str(error).split())}") from error
    job_by_step = {request.step: job.job_id for request, job in zip(requests, jobs, strict=True)}
    for step, job_id in job_by_step.items():
        atomic_write(record_path(folder, step), msgspec.json.encode(JobRecord(job_id=job_id)))
    return job_by_step


def run_here(directory: TrialDirectory, request: EvaluationRequest, resources: EvaluationResources) -> EvaluationStatus:
    """One evaluation on this machine; comes back when it has ended.

    Raises:
        TimeoutError: if it takes longer than `resources.minutes`.
    """
    folder = request.result.parent
    record_path(folder, request.step).unlink(missing_ok=True)
    gpus = visible_gpus()[: resources.scheduling.gpu]  # whoever says "here" takes what there is
    log_path = _private(jobs_folder(folder)) / f"step-{request.step:08d}.log"
    process = start_process(
        guarded(_command(write_request(directory, request), gpus=len(gpus))),
        environment=os.environ | python_path(os.environ) | {"CUDA_VISIBLE_DEVICES": ",".join(gpus)},
        log_path=log_path,
        preexec_fn=die_with_parent(signal.SIGTERM),
    )
    task = LocalTask(process)
    try:
        if not wait_until(lambda: task.poll() is not None, timeout_s=resources.minutes * 60, pause_s=_LOOK_PAUSE_S):
            raise TimeoutError(f"the evaluation of step {request.step} took more than {resources.minutes} min")
    finally:
        task.end(kill=True)
        wait_until(lambda: task.poll() is not None, timeout_s=_GUARD_END_S)  # it ends what the evaluation has started
    returncode = task.poll()
    result = read_result(request.result)
    if result is not None:
        return EvaluationStatus(step=request.step, state="DONE", result=result)
    note = f"the evaluation ended with {returncode}: {cause_of(folder, log_path)}"
    return EvaluationStatus(step=request.step, state="FAILED", note=note)


def _command(request: Path, *, gpus: int) -> list[str]:
    return own_python("-u", "-m", "corral.workers.evaluation", str(request), "--gpus", str(gpus))


def evaluation_command(request: Path, resources: EvaluationResources, directory: TrialDirectory) -> tuple[str, ...]:
    """What a job runs: an evaluation, inside the image of the training ranks if they have one.

    Raises:
        ConfigError: if the site's container runtime cannot be started from inside a job.
    """
    scheduling, cluster = resources.scheduling, resources.plan.cluster
    if scheduling.container_image is not None and cluster.container_runtime == "pyxis":
        hint = "evaluate on a node by hand with --local, inside a container of your own"
        raise ConfigError.of("pyxis would put submitit itself into the container, where it is not installed", hint=hint)
    command = _command(request, gpus=scheduling.gpu)
    return contain(command, {}, scheduling=scheduling, cluster=cluster, directory=directory.path).command


def _private(folder: Path) -> Path:
    """The folder, which nobody else may write to: submitit unpickles what it finds in it.

    Raises:
        ConfigError: if submitit would take part of its path for one of its placeholders.
    """
    if "%" in str(folder):
        hint = "evaluate on this machine with --local, or move the trial to a path without %"
        raise ConfigError.of(f"submitit takes the % in {folder} for a placeholder", hint=hint)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    before = folder.stat().st_mode
    if before & 0o077:  # made by others; a folder's other bits say whose group has what is put into it
        folder.chmod(before & ~0o077)
    return folder


@contextmanager
def _outside_of_any_job() -> Iterator[None]:
    """submitit hands its own environment on to sbatch, which would take an enclosing job's for options."""
    before = dict(os.environ)
    clean = {name: value for name, value in clean_environment(before).items() if not name.startswith("SUBMITIT_")}
    try:
        os.environ.clear()
        os.environ.update(clean)
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
