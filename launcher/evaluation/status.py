"""How evaluations stand: from their results, and from one squeue call for all those that have none yet.

eval/step-*.json            -> DONE
eval/jobs/step-*.job.json   -> job id --QueueWatcher--> QUEUED, RUNNING, FAILED, CANCELLED, ...
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import submitit
from submitit.slurm.slurm import SlurmJob

from corral.experiments.trial.evaluation import EvaluationRequest, EvaluationResult, read_result, result_path
from corral.launcher.cluster.jobs import JobPhase
from corral.launcher.evaluation.watcher import QueueWatcher
from corral.launcher.slurm.verdict import judge_job
from corral.launcher.slurm.words import meaning_of, phase_of
from corral.launcher.trial.exits import tail_lines

_POLL_INTERVAL_S = 1.0
_RESULT_VISIBLE_S = 3.0  # a file written on a node may appear here a moment after SLURM's word for the job
FINAL_STATES = frozenset({"DONE", "FAILED", "OOM", "TIMED_OUT", "NODE_FAILED", "CANCELLED", "PREEMPTED"})


class JobRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Which job evaluates a step: `eval/jobs/step-*.job.json`."""

    job_id: str
    submitted_at: float


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
    asked = (request.dataset_sha256, request.evaluation.max_new_tokens)
    return (status.result.dataset_sha256, status.result.max_new_tokens) != asked


def jobs_folder(folder: Path) -> Path:
    """Scripts, logs and envelopes of submitit; private, because what lies in it is run."""
    return folder / "jobs"


def record_path(folder: Path, step: int) -> Path:
    """Where the job of a step is written down."""
    return jobs_folder(folder) / f"step-{step:08d}.job.json"


class EvaluationReader:
    """How evaluations stand: from their results, and from one squeue call for all those that have none."""

    def __init__(self, folder: Path, *, watcher: QueueWatcher | None = None) -> None:
        self._folder = folder
        self._watcher = watcher or QueueWatcher()
        self._jobs: dict[int, SlurmJob[None]] = {}
        self._last_running: dict[int, float] = {}

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
            note = f"the reward failed on {result.num_unjudged} of the answers" if result.num_unjudged else ""
            return EvaluationStatus(step=step, state="DONE", job_id=job_id, note=note, result=result)
        if job is None:
            return EvaluationStatus(step=step, state="FAILED", note="it ended without a result; ask for it again")
        info = self._watcher.get_info(job.job_id)
        word, reason = info.get("State", "UNKNOWN"), info.get("Reason", "")
        if not (job.done() or self._watcher.is_done(job.job_id, mode="cache")):
            self._last_running[step] = time.monotonic()
            verdict = judge_job(word, reason)
            return EvaluationStatus(step=step, state=verdict.state, job_id=job_id, note=verdict.note)
        if time.monotonic() - self._last_running.get(step, float("-inf")) < _RESULT_VISIBLE_S:
            return EvaluationStatus(step=step, state="STOPPING", job_id=job_id, note="its result may be on its way")
        state = meaning_of(word)[0] if phase_of(word) is JobPhase.ENDED else "FAILED"
        return EvaluationStatus(step=step, state=state, job_id=job_id, note=cause_of(job))

    def _job(self, step: int) -> "SlurmJob[None] | None":
        if step not in self._jobs:
            try:
                record = msgspec.json.decode(record_path(self._folder, step).read_bytes(), type=JobRecord)
            except FileNotFoundError:
                return None
            job: SlurmJob[None] = SlurmJob(folder=jobs_folder(self._folder), job_id=record.job_id)
            # On this one job, not on the class: others of submitit's users in this process keep theirs.
            job.watcher = self._watcher
            self._watcher.register_job(job.job_id)
            self._jobs[step] = job
        return self._jobs[step]


def wait_for(
    reader: EvaluationReader,
    steps: Sequence[int],
    *,
    timeout_s: float,
    on_change: Callable[[EvaluationStatus], None] = lambda status: None,
) -> list[EvaluationStatus]:
    """Until all of them have ended; `on_change` is told each new state.

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


def cause_of(job: "submitit.Job[Any]") -> str:
    """The last thing that the job said, and where the rest is."""
    for path in (job.paths.stderr, job.paths.stdout):
        said = [line.strip() for line in tail_lines(path, 40) if line.strip()] if path.exists() else []
        own = [line for line in said if not line.startswith(("srun:", "slurmstepd:"))] or said
        wanted = [line for line in own if "Error" in line or "error:" in line] or own
        if wanted:
            return f"{wanted[-1]} (see {path})"
    return f"it left no log in {job.paths.folder}; the job's folder must be visible from the nodes (rl-doctor)"
