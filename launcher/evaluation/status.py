"""How evaluations stand: from their results, and from one squeue call for all those that have none yet.

eval/step-*.json            -> DONE
eval/jobs/step-*.job.json   -> job id --squeue--> QUEUED, RUNNING, FAILED, CANCELLED, ...
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from submitit.core.utils import JobPaths

from corral.experiments.trial.evaluation import EvaluationRequest, EvaluationResult, read_result, result_path
from corral.launcher.cluster.jobs import JobPhase
from corral.launcher.slurm.client import SlurmClient, SlurmError
from corral.launcher.slurm.verdict import judge_job, meaning_of, phase_of, state_word
from corral.launcher.trial.ends import tail_lines
from corral.launcher.trial.metrics import NONE_IS_CORRECT
from corral.launcher.trial.words import TrialState

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


def cause_of(folder: Path, *logs: Path) -> str:
    """The last thing that a job said, and where the rest is."""
    for path in logs:
        said = [line.strip() for line in tail_lines(path, 40) if line.strip()] if path.exists() else []
        own = [line for line in said if not line.startswith(("srun:", "slurmstepd:"))] or said
        wanted = [line for line in own if "Error" in line or "error:" in line] or own
        if wanted:
            return f"{wanted[-1]} (see {path})"
    return f"it left no log in {jobs_folder(folder)}; the job's folder must be visible from the nodes (rl-doctor)"
