"""Evaluations: on the cluster as jobs of submitit, several as one array, or as processes of this machine.

    requests --submit_to_slurm--> array of jobs --squeue--------> QUEUED, RUNNING, FAILED, ... --+--> rows for people
             --run_here---------> one process after the other -----------------------------------+
                                          `--> {trial}/eval/step-*.json, which alone says that an evaluation is done

A job that SLURM takes away and starts again, and one whose time is up, goes on where it was. What a job runs is a
command (`python -m corral.workers.evaluation REQUEST`), so the launcher needs no torch. submitit wraps the command into
a call of its own, which it pickles; that envelope, in a folder of mode 0700 in the trial directory, is the only pickle
that corral ever causes, and nothing but the path of the request is in it.

How evaluations stand: from their results, and from one squeue call for all those that have none yet.

eval/step-*.json            -> DONE
eval/jobs/step-*.job.json   -> job id --squeue--> QUEUED, RUNNING, FAILED, CANCELLED, ...
"""

import logging
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import msgspec
import submitit
from submitit.core.utils import DelayedSubmission, FailedJobError, JobPaths

from corral.experiments.errors import ConfigError
from corral.experiments.own_python import own_python, python_path
from corral.experiments.plan import RunPlan
from corral.experiments.trial.directory import TrialDirectory, atomic_write
from corral.experiments.trial.evaluation import EvaluationRequest, EvaluationResult, read_result, result_path
from corral.experiments.trial.tether import die_with_parent
from corral.launcher.evaluation.plan import scheduling_of, write_request
from corral.launcher.files.patience import wait_until
from corral.launcher.runners.guard import guarded
from corral.launcher.runners.runner import LocalTask, contain, start_process, visible_gpus
from corral.launcher.slurm.client import SlurmClient, SlurmError, SlurmUnreachableError, clean_environment, is_installed
from corral.launcher.slurm.verdict import JobPhase, judge_job, meaning_of, phase_of, state_word
from corral.launcher.trial.ends import tail_lines
from corral.launcher.trial.metrics import NONE_IS_CORRECT
from corral.launcher.trial.words import TrialState
from corral.scheduling.scheduling import AllocationNeeds, Scheduling, option_name

logger = logging.getLogger(__name__)

_POLL_INTERVAL_S = 2.0
_GONE = "GONE"
_LOOKS_BEFORE_GONE = 2  # a controller that was just restarted may know a new job only a moment later
_RESULT_VISIBLE_S = 3.0  # a file written on a node may appear here a moment after SLURM's word for the job
FINAL_STATES = frozenset({"DONE", "FAILED", "OOM", "TIMED_OUT", "NODE_FAILED", "CANCELLED", "PREEMPTED"})


class JobRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Which job evaluates a step: `eval/jobs/step-*.job.json`."""

    job_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationStatus:
    """How the evaluation of one step stands."""

    step: int
    state: str
    """DONE, RUNNING, or a state that slurm/verdict.py gives."""
    job_id: str = ""
    note: str = ""
    result: EvaluationResult | None = None

    @property
    def is_final(self) -> bool:
        """Whether it changes no more by itself."""
        return self.state in FINAL_STATES


def is_wanted(request: EvaluationRequest, status: EvaluationStatus, *, again: bool) -> bool:
    """Whether a request has to become a job: not while one runs, nor where its result is there already."""
    if not status.is_final:
        return False
    if status.result is None or again:
        return True
    asked, done = request.evaluation, status.result
    return (done.dataset_sha256, done.sampling, done.answers_per_problem) != (
        request.dataset_sha256,
        asked.sampling,
        asked.answers_per_problem,
    )


def jobs_folder(folder: Path) -> Path:
    """Scripts, logs and envelopes of submitit; private, because what lies in it is run."""
    return folder / "jobs"


def record_path(folder: Path, step: int) -> Path:
    """Where the job of a step is written down."""
    return jobs_folder(folder) / f"step-{step:08d}.job.json"


class EvaluationReader:
    """How evaluations stand; squeue is asked for all those without a result at once.

                  sbatch
                    |          squeue shows it            a final word, or gone from squeue
        (nothing) --+--> new ---------------> its word ---------------------------------> ended
                          `--- twice not there (asked about after SLURM has forgotten it) --> ended: GONE

    Nothing changes while the controller does not answer: no news is not the end of a job. submitit itself asks sacct
    and nobody else, so that without accounting a job that crashed hard is UNKNOWN to it for ever.
    """

    def __init__(self, folder: Path, *, client: SlurmClient | None = None) -> None:
        self._folder = folder
        self._client = client or SlurmClient()
        self._words: dict[str, tuple[str, str]] = {}
        """State and reason by job, as squeue said last."""
        self._misses: Counter[str] = Counter()
        self._last_running: dict[int, float] = {}

    def read(self, steps: Sequence[int]) -> list[EvaluationStatus]:
        """One status per step, in this order."""
        jobs = {step: self._job(step) for step in steps}
        results = {step: read_result(result_path(self._folder, step)) for step in steps}
        self._ask([job for step, job in jobs.items() if job and results[step] is None])
        return [self._status(step, jobs[step], results[step]) for step in steps]

    def known_steps(self) -> list[int]:
        """Every step that was ever asked for."""
        found = {path.name.split(".")[0] for path in self._folder.glob("step-*.request.json")}
        return sorted(int(name.removeprefix("step-")) for name in found)

    def _status(self, step: int, job_id: str, result: EvaluationResult | None) -> EvaluationStatus:
        if result is not None:
            unjudged = f"{result.num_unjudged} answers have no reward: {result.failure}" if result.num_unjudged else ""
            doubt = NONE_IS_CORRECT if result.accuracy == 0 and result.mean_reward > 0 else ""
            note = "; ".join(filter(None, (doubt, unjudged)))
            return EvaluationStatus(step=step, state="DONE", job_id=job_id, note=note, result=result)
        if not job_id:
            return EvaluationStatus(step=step, state="FAILED", note="it ended without a result; ask for it again")
        paths = JobPaths(jobs_folder(self._folder), job_id)
        word, reason = self._words.get(job_id, ("UNKNOWN", ""))
        if not (paths.result_pickle.exists() or self._has_ended(job_id)):
            self._last_running[step] = time.monotonic()
            state, note = judge_job(word, reason)
            return EvaluationStatus(step=step, state=state, job_id=job_id, note=note)
        if time.monotonic() - self._last_running.get(step, float("-inf")) < _RESULT_VISIBLE_S:
            return EvaluationStatus(step=step, state="STOPPING", job_id=job_id, note="its result may be on its way")
        state = meaning_of(word)[0] if phase_of(word) is JobPhase.ENDED else TrialState.FAILED
        return EvaluationStatus(
            step=step, state=state, job_id=job_id, note=cause_of(self._folder, paths.stderr, paths.stdout)
        )

    def _job(self, step: int) -> str:
        """The job that a step was given to, "" if there is none."""
        try:
            return msgspec.json.decode(record_path(self._folder, step).read_bytes(), type=JobRecord).job_id
        except FileNotFoundError:
            return ""

    def _has_ended(self, job_id: str) -> bool:
        """A word that is not known is no end."""
        word, _ = self._words.get(job_id, ("", ""))
        return word == _GONE or phase_of(word) is JobPhase.ENDED

    def _ask(self, jobs: Sequence[str]) -> None:
        waiting_for = [job_id for job_id in jobs if not self._has_ended(job_id)]
        if not waiting_for:
            return
        try:
            shown = self._client.states()
        except SlurmError as error:
            logger.warning("SLURM does not answer, so the last known states stay: %s", error)
            return
        for job_id in waiting_for:
            if job_id in shown:
                word, reason = shown[job_id]
                self._words[job_id] = (state_word(word) or "UNKNOWN", reason)
            else:
                self._misses[job_id] += 1
                if job_id in self._words or self._misses[job_id] >= _LOOKS_BEFORE_GONE:
                    self._words[job_id] = (_GONE, "SLURM has forgotten it")


def wait_for(
    reader: EvaluationReader,
    steps: Sequence[int],
    *,
    timeout_s: float,
    on_change: Callable[[EvaluationStatus], None] = lambda status: None,
) -> list[EvaluationStatus]:
    """Until all of them have ended; `on_change` is called with each new state.

    Raises:
        TimeoutError: naming those that have not.
    """
    deadline = time.monotonic() + timeout_s
    shown: dict[int, str] = {}
    while True:
        statuses = reader.read(steps)
        for status in statuses:
            if shown.get(status.step) != status.state:
                shown[status.step] = status.state
                on_change(status)
        running = [f"step {status.step} ({status.state})" for status in statuses if not status.is_final]
        if not running:
            return statuses
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout_s:.0f} s for the evaluation of {', '.join(running)}")
        time.sleep(_POLL_INTERVAL_S)


def cause_of(folder: Path, *logs: Path) -> str:
    """The last line of a job's output, and where the rest is."""
    for path in logs:
        lines = [line.strip() for line in tail_lines(path, 40) if line.strip()] if path.exists() else []
        own = [line for line in lines if not line.startswith(("srun:", "slurmstepd:"))] or lines
        wanted = [line for line in own if "Error" in line or "error:" in line] or own
        if wanted:
            return f"{wanted[-1]} (see {path})"
    return f"it left no log in {jobs_folder(folder)}; the job's folder must be visible from the nodes (rl-doctor)"


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
    gpus = visible_gpus()[: resources.scheduling.gpu]  # `here` takes the GPUs of this machine
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
