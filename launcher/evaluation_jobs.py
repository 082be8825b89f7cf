"""Evaluations as jobs of submitit: on the cluster, several as one array, or on this machine.

    requests --submit_to_slurm--> array of jobs --QueueWatcher--> QUEUED, RUNNING, FAILED, ... --+--> rows for people
             --run_here---------> one process after the other -----------------------------------+
                                          `--> {trial}/eval/step-*.json, which alone says that an evaluation is done

A job that SLURM takes away and starts again, and one whose time is up, goes on where it was. What a job runs is a
command (`python -m corral.workers.evaluate REQUEST`), so the launcher needs no torch. submitit wraps the command into a
call of its own, which it pickles; that envelope, in a folder of mode 0700 in the trial directory, is the only pickle
that corral ever causes, and nothing but the path of the request is in it.
"""

import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import submitit
from submitit.core.utils import DelayedSubmission, FailedJobError
from submitit.slurm.slurm import SlurmJob

from corral.experiments.config import ClusterConfig, LaunchConfig
from corral.experiments.errors import ConfigError
from corral.experiments.evaluation import EvaluationRequest, EvaluationResult, read_result, result_path
from corral.experiments.trial_directory import TrialDirectory, atomic_write
from corral.launcher.evaluation_plan import write_request
from corral.launcher.exits import tail_lines
from corral.launcher.local import visible_gpus
from corral.launcher.queue_watcher import GONE, QueueWatcher
from corral.launcher.slurm import SlurmError, SlurmUnreachableError, clean_environment
from corral.launcher.slurm_states import judge_job
from corral.scheduling.scheduling import Scheduling

logger = logging.getLogger(__name__)

_MAX_CONTINUATIONS = 10
_MAX_PARALLEL = 16
_SIGNAL_BEFORE_END_S = 60
_POLL_INTERVAL_S = 1.0
_RESULT_VISIBLE_S = 3.0  # a file written on a node may appear here a moment after SLURM's word for the job
FINAL_STATES = frozenset({"DONE", "FAILED", "OOM", "TIMED_OUT", "NODE_FAILED", "CANCELLED", "PREEMPTED"})


class EvaluationFailedError(RuntimeError):
    """The command of an evaluation did not succeed."""


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
            raise EvaluationFailedError(f"the evaluation ended with {returncode}; what it said last is above")

    def checkpoint(self) -> DelayedSubmission:
        """What submitit asks before it puts the job back into the queue; progress is on disk already."""
        return DelayedSubmission(EvaluationCommand(self._command))


class JobRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Which job evaluates a step: `eval/jobs/step-*.job.json`."""

    job_id: str
    submitted_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationStatus:
    """How the evaluation of one step stands."""

    step: int
    state: str
    """DONE, RUNNING, or a word of `slurm_states`."""
    job_id: str = ""
    note: str = ""
    result: EvaluationResult | None = None

    @property
    def is_final(self) -> bool:
        """Whether it changes no more by itself."""
        return self.state in FINAL_STATES


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResources:
    """What one evaluation job asks SLURM for."""

    job_name: str
    cpus: int
    mem_mb: int
    gpus: int
    minutes: int
    slurm: Mapping[str, Any]
    """Further parameters of submitit's SlurmExecutor: partition, account, ..."""

    @classmethod
    def of(
        cls,
        trial: str,
        scheduling: Scheduling,
        *,
        launch: LaunchConfig,
        cluster: ClusterConfig,
        minutes: int,
        partition: str | None = None,
    ) -> "EvaluationResources":
        """As much as one training rank gets, on one GPU, where the trial runs."""
        gpus = min(scheduling.gpu, 1)
        fields = ("partition", "account", "qos", "constraint", "exclude", "nodelist")
        slurm = {field: getattr(scheduling, field) or getattr(launch, field) for field in fields}
        slurm["partition"] = partition or slurm["partition"]
        reservation = scheduling.reservation or launch.reservation
        if gpus and cluster.gpu_request != "none":
            kind = f"{scheduling.gpu_type}:" if scheduling.gpu_type else ""
            slurm |= {"gres": f"gpu:{kind}1"} if cluster.gpu_request == "gres" else {"gpus_per_node": 1}
        return cls(
            job_name=f"eval.{trial}",
            cpus=scheduling.cpu,
            mem_mb=scheduling.mem,
            gpus=gpus,
            minutes=minutes,
            slurm={name: value for name, value in slurm.items() if value is not None}
            | {"additional_parameters": {"requeue": True, **({"reservation": reservation} if reservation else {})}},
        )


def is_wanted(request: EvaluationRequest, status: EvaluationStatus, *, again: bool) -> bool:
    """Whether a request has to become a job: not while one runs, nor where its result is there already."""
    if not status.is_final:
        return False
    if status.result is None or again:
        return True
    asked = (request.dataset_sha256, request.evaluation.max_new_tokens)
    return (status.result.dataset_sha256, status.result.max_new_tokens) != asked


def jobs_folder(folder: Path) -> Path:
    """Scripts, logs and envelopes of submitit; private, because what lies in it is run."""
    return folder / "jobs"


def submit_to_slurm(
    directory: TrialDirectory, requests: Sequence[EvaluationRequest], resources: EvaluationResources
) -> dict[int, str]:
    """Puts evaluations into the queue, several as one array; returns job ids by step.

    Raises:
        SlurmUnreachableError: if there is no SLURM here.
        SlurmError: if sbatch refuses.
    """
    if shutil.which("sbatch") is None or shutil.which("srun") is None:
        raise SlurmUnreachableError("sbatch was not found on PATH; add --local to evaluate on this machine")
    folder = requests[0].result.parent
    commands = [_command(write_request(directory, request)) for request in requests]
    executor = submitit.AutoExecutor(
        folder=_private(jobs_folder(folder)), cluster="slurm", slurm_max_num_timeout=_MAX_CONTINUATIONS
    )
    executor.update_parameters(
        name=resources.job_name,
        timeout_min=resources.minutes,
        cpus_per_task=resources.cpus,
        tasks_per_node=1,
        slurm_mem=f"{resources.mem_mb}MB",
        slurm_signal_delay_s=min(_SIGNAL_BEFORE_END_S, resources.minutes * 15),
        slurm_array_parallelism=_MAX_PARALLEL,
        slurm_comment=f"evaluation of {directory.path}",
        **{f"slurm_{name}": value for name, value in resources.slurm.items()},
    )
    with _outside_of_any_job():
        try:
            jobs: list[submitit.Job[None]] = executor.submit_array(commands)
        except FailedJobError as error:
            raise SlurmError(f"sbatch refuses the evaluation: {' '.join(str(error).split())}") from error
    job_by_step = {request.step: job.job_id for request, job in zip(requests, jobs, strict=True)}
    for step, job_id in job_by_step.items():
        record = JobRecord(job_id=job_id, submitted_at=time.time())
        atomic_write(_record_path(folder, step), msgspec.json.encode(record))
    return job_by_step


def run_here(directory: TrialDirectory, request: EvaluationRequest, resources: EvaluationResources) -> EvaluationStatus:
    """One evaluation on this machine; comes back when it has ended.

    Raises:
        TimeoutError: if it takes longer than `resources.minutes`.
    """
    folder = request.result.parent
    _record_path(folder, request.step).unlink(missing_ok=True)
    command = _command(write_request(directory, request))
    executor = submitit.AutoExecutor(folder=_private(jobs_folder(folder)), cluster="local")
    executor.update_parameters(
        timeout_min=resources.minutes, gpus_per_node=min(resources.gpus, len(visible_gpus())), tasks_per_node=1
    )
    job: submitit.Job[None] = executor.submit(command)
    deadline = time.monotonic() + resources.minutes * 60
    try:
        while not job.done():
            if time.monotonic() > deadline:
                raise TimeoutError(f"the evaluation of step {request.step} took more than {resources.minutes} min")
            time.sleep(0.1)
    finally:
        if not job.done():
            job.cancel()
    result = read_result(request.result)
    if result is not None:
        return EvaluationStatus(step=request.step, state="DONE", result=result)
    return EvaluationStatus(step=request.step, state="FAILED", note=_cause(job))


class EvaluationReader:
    """How evaluations stand: from their results, and from one squeue call for all those that have none."""

    def __init__(self, folder: Path, *, watcher: QueueWatcher | None = None) -> None:
        self._folder = folder
        self._watcher = watcher or QueueWatcher()
        self._jobs: dict[int, SlurmJob[None]] = {}
        self._ended_at: dict[int, float] = {}

    def read(self, steps: Sequence[int]) -> list[EvaluationStatus]:
        """One status per step, in this order."""
        return [self._read(step) for step in steps]

    def known_steps(self) -> list[int]:
        """Every step that was ever asked for."""
        found = {path.name.split(".")[0] for path in self._folder.glob("step-*.request.json")}
        return sorted(int(name.removeprefix("step-")) for name in found)

    def _read(self, step: int) -> EvaluationStatus:
        job = self._job(step)
        result = read_result(result_path(self._folder, step))
        job_id = job.job_id if job is not None else ""
        if result is not None:
            return EvaluationStatus(step=step, state="DONE", job_id=job_id, result=result)
        if job is None:
            return EvaluationStatus(step=step, state="FAILED", note="it ended without a result; ask for it again")
        info = self._watcher.get_info(job.job_id)
        word, reason = info.get("State", "UNKNOWN"), info.get("Reason", "")
        if not (job.done() or self._watcher.is_done(job.job_id, mode="cache")):
            verdict = judge_job(word, reason)
            return EvaluationStatus(step=step, state=verdict.state, job_id=job_id, note=verdict.note)
        ended_at = self._ended_at.setdefault(step, time.monotonic())
        if time.monotonic() - ended_at < _RESULT_VISIBLE_S:
            return EvaluationStatus(step=step, state="STOPPING", job_id=job_id, note="its result may be on its way")
        state = "FAILED" if word == GONE or word not in _ENDED_WORDS else judge_job(word, reason).state
        return EvaluationStatus(step=step, state=state, job_id=job_id, note=_cause(job))

    def _job(self, step: int) -> "SlurmJob[None] | None":
        if step not in self._jobs:
            try:
                record = msgspec.json.decode(_record_path(self._folder, step).read_bytes(), type=JobRecord)
            except FileNotFoundError:
                return None
            job: SlurmJob[None] = SlurmJob(folder=jobs_folder(self._folder), job_id=record.job_id)
            # On this one job, not on the class: others of submitit's users in this process keep theirs.
            job.watcher = self._watcher
            self._watcher.register_job(job.job_id)
            self._jobs[step] = job
        return self._jobs[step]


_ENDED_WORDS = frozenset({"CANCELLED", "TIMEOUT", "DEADLINE", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY", "PREEMPTED"})


def wait_for(reader: EvaluationReader, steps: Sequence[int], *, timeout_s: float) -> list[EvaluationStatus]:
    """Until all of them have ended.

    Raises:
        TimeoutError: naming those that have not.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        statuses = reader.read(steps)
        running = [f"step {status.step} ({status.state})" for status in statuses if not status.is_final]
        if not running:
            return statuses
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout_s:.0f} s for the evaluation of {', '.join(running)}")
        time.sleep(_POLL_INTERVAL_S)


def _command(request: Path) -> EvaluationCommand:
    return EvaluationCommand([sys.executable, "-u", "-m", "corral.workers.evaluate", str(request)])


def _record_path(folder: Path, step: int) -> Path:
    return jobs_folder(folder) / f"step-{step:08d}.job.json"


def _private(folder: Path) -> Path:
    """The folder, which nobody else may write to: submitit unpickles what it finds in it.

    Raises:
        ConfigError: if submitit would take part of its path for one of its placeholders.
    """
    if "%" in str(folder):
        hint = "evaluate on this machine with --local, or move the trial to a path without %"
        raise ConfigError.of(f"submitit takes the % in {folder} for a placeholder", hint=hint)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    return folder


def _cause(job: "submitit.Job[Any]") -> str:
    """The last thing that the job said, and where the rest is."""
    for path in (job.paths.stderr, job.paths.stdout):
        said = [line.strip() for line in tail_lines(path, 40) if line.strip()] if path.exists() else []
        own = [line for line in said if not line.startswith(("srun:", "slurmstepd:"))] or said
        wanted = [line for line in own if "Error" in line or "error:" in line] or own
        if wanted:
            return f"{wanted[-1]} (see {path})"
    return f"it left no log in {job.paths.folder}; the job's folder must be visible from the nodes (rl-doctor)"


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
