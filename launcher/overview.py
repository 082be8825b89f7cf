"""What rl-status prints: one page for all trials, or for one. Trials that have ended are read once, then remembered.

fileroot/*/*/  --unchanged since its end was read--> row from $XDG_CACHE_HOME/corral/finished-*.json
               --else--> StatusReader --has it ended--> remembered
squeue         --a job of ours whose directory is gone--> a row from its comment
"""

import contextlib
import hashlib
import os
import secrets as random_tokens
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from corral.experiments.trial_directory import TrialDirectory
from corral.launcher.explain import explain
from corral.launcher.queue_cache import CachedQueue, QueueAnswer, cache_path
from corral.launcher.slurm import QueuedJob, SlurmClient
from corral.launcher.slurm_states import judge_job
from corral.launcher.status import TrialStatus, describe
from corral.launcher.status_reader import StatusReader
from corral.launcher.status_view import render_json, render_names, render_trial, render_trials
from corral.launcher.trial_jobs import find_orphans
from corral.launcher.trials import find_trial, read_facts

_SHOWN_AFTER_END_S = 86400.0


class FinishedTrial(msgspec.Struct, frozen=True, kw_only=True):
    """The row of a trial that has ended, and by what one sees that nothing has changed since."""

    fingerprint: tuple[int, ...]
    uuid: str
    experiment: str
    trial: str
    mode: str
    state: str
    step: int | None
    total_steps: int | None
    age_s: float | None
    nodes: int | None
    job_id: str
    attempt: int | None
    note: str
    ended_at: float

    def status(self, directory: Path) -> TrialStatus:
        """The row, without workers."""
        return TrialStatus(
            experiment=self.experiment,
            trial=self.trial,
            directory=str(directory),
            mode=self.mode,
            state=self.state,
            step=self.step,
            total_steps=self.total_steps,
            age_s=self.age_s,
            nodes=self.nodes,
            job_id=self.job_id,
            attempt=self.attempt,
            note=self.note,
            ended_at=self.ended_at,
        )


class StatusPage:
    """What rl-status prints, again and again with -w."""

    def __init__(
        self, fileroot: Path, *, output: str, show_all: bool, explain: bool, colour: bool, width: int | None = None
    ) -> None:
        client = SlurmClient(timeout_s=10.0)
        self._queue = CachedQueue(client)
        self._reader = StatusReader(client, queue=self._queue)
        self._fileroot = fileroot
        self._output = output
        self._show_all = show_all
        self._explain = explain
        self._colour = colour
        self._width = width

    def all_trials(self) -> str:
        """One row per trial."""
        wants_details = self._output == "json" or self._explain
        statuses, texts = self._read_all(use_memory=not wants_details)
        shown = statuses if self._show_all else [status for status in statuses if not _is_old(status)]
        page = self._render(shown, num_hidden=len(statuses) - len(shown))
        return "\n\n".join([page, *texts]) if self._explain else page

    def one_trial(self, name: str) -> str:
        """One trial in full."""
        facts = find_trial(name, self._fileroot)
        (evidence,), answer = self._reader.gather_with_answer([facts])
        status = describe(evidence)
        if self._output in ("json", "name"):
            return self._render([status], num_hidden=0)
        page = render_trial(status, wide=self._output == "wide", colour=self._colour, width=self._width)
        return f"{page}\n\n{explain(evidence, status, answer)}" if self._explain else page

    def _render(self, statuses: Sequence[TrialStatus], *, num_hidden: int) -> str:
        if self._output == "json":
            return render_json(statuses)
        if self._output == "name":
            return render_names(statuses)
        return render_trials(statuses, colour=self._colour, width=self._width, num_hidden=num_hidden)

    def _read_all(self, *, use_memory: bool) -> tuple[list[TrialStatus], list[str]]:
        memory_path = finished_path(self._fileroot)
        memory = read_finished(memory_path) if use_memory else {}
        paths = _trial_paths(self._fileroot)
        known = {path: memory[str(path)] for path in paths if _is_unchanged(path, memory.get(str(path)))}
        facts = [one for path in paths if path not in known and (one := read_facts(TrialDirectory(path)))]
        evidence, answer = self._reader.gather_with_answer(facts)
        if answer.asked_at is None and not answer.error and shutil.which("squeue"):
            answer = self._queue.look()  # for jobs whose trial directory is gone
        read = {one.facts.directory.path: describe(one) for one in evidence}
        ended = {
            str(one.facts.directory.path): finished_of(read[one.facts.directory.path], one.facts.uuid)
            for one in evidence
            if one.ended is not None and not one.zombies
        }
        kept = {str(path): one for path, one in known.items()} | ended
        if use_memory and kept != memory:
            write_finished(memory_path, kept)
        uuids = [*(one.uuid for one in known.values()), *(one.uuid for one in facts)]
        statuses = [known[path].status(path) if path in known else read[path] for path in paths if path in known | read]
        texts = [explain(one, read[one.facts.directory.path], answer) for one in evidence] if self._explain else []
        return [*statuses, *_orphans(answer, uuids)], texts


def finished_of(status: TrialStatus, uuid: str) -> FinishedTrial:
    """What is remembered of a trial that has ended."""
    return FinishedTrial(
        fingerprint=_fingerprint(Path(status.directory)),
        uuid=uuid,
        experiment=status.experiment,
        trial=status.trial,
        mode=status.mode,
        state=status.state,
        step=status.step,
        total_steps=status.total_steps,
        age_s=status.age_s,
        nodes=status.nodes,
        job_id=status.job_id,
        attempt=status.attempt,
        note=status.note,
        ended_at=status.ended_at or 0.0,
    )


def finished_path(fileroot: Path) -> Path:
    """The file that remembers the trials below a fileroot."""
    name = hashlib.sha256(os.fsencode(fileroot.absolute())).hexdigest()[:12]
    return cache_path().with_name(f"finished-{name}.json")


def read_finished(path: Path) -> dict[str, FinishedTrial]:
    """By trial directory; a file that cannot be read is as good as none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, FinishedTrial])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return {}


def write_finished(path: Path, trials: dict[str, FinishedTrial]) -> None:
    """Remembers; where that is not possible the trials are read again the next time."""
    temporary = path.with_name(f".{path.name}.{random_tokens.token_hex(4)}.tmp")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(trials))
        temporary.rename(path)


def _trial_paths(fileroot: Path) -> list[Path]:
    """All trial directories, the newest last."""

    def found() -> Iterator[tuple[float, Path]]:
        for plan in fileroot.glob("*/*/plan.json"):
            with contextlib.suppress(FileNotFoundError):
                yield plan.stat().st_mtime, plan.parent

    return [path for _, path in sorted(found())]


def _is_unchanged(path: Path, one: FinishedTrial | None) -> bool:
    return one is not None and _fingerprint(path) == one.fingerprint


def _fingerprint(path: Path) -> tuple[int, ...]:
    """A new attempt makes a file in control/; everything that happens is in the journal."""
    directory = TrialDirectory(path)
    try:
        journal, control = directory.journal_path.stat(), directory.control_path.stat()
    except FileNotFoundError:
        return ()
    return journal.st_size, journal.st_mtime_ns, control.st_mtime_ns


def _is_old(status: TrialStatus) -> bool:
    return status.is_final and status.ended_at is not None and time.time() - status.ended_at > _SHOWN_AFTER_END_S


def _orphans(answer: QueueAnswer, uuids: Sequence[str]) -> list[TrialStatus]:
    """Rows for jobs whose trial directory is gone."""
    directories = {str(job.tag.get("directory")) for job in answer.jobs if job.tag}
    exists = {directory: Path(directory).is_dir() for directory in directories}
    return [_orphan(job) for job in find_orphans(answer.jobs, uuids, exists)]


def _orphan(job: QueuedJob) -> TrialStatus:
    directory = Path(str(job.tag.get("directory")))
    verdict = judge_job(job.state, job.reason, start=job.start, job_id=job.job_id)
    advice = f"directory missing: {directory}; rl-stop {job.job_id} or scancel {job.job_id} ends it"
    return TrialStatus(
        experiment=directory.parent.name,
        trial=directory.name,
        directory=str(directory),
        mode="slurm",
        state=verdict.state,
        step=None,
        total_steps=None,
        age_s=None,
        nodes=int(job.num_nodes) if job.num_nodes.isdigit() else None,
        job_id=job.job_id,
        attempt=None,
        note=f"{verdict.note}; {advice}" if verdict.note else advice,
        time_left=job.time_left,
        node_list=job.nodes,
    )
