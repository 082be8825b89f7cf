"""The output of rl-status: one page for all trials, or for one.

fileroot --list_trials--> trials that ended long ago: counted -----------------------+
                          the others --StatusReader--> what is known of each --------+--> rows --> page
queue --a job of ours whose directory is gone, or does not answer--> a row of its own --+

With --explain the facts behind each word, and the command that shows them (`explain`, pure).
"""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from corral.experiments.trial.attempts import AttemptEnd, last_attempt, read_end
from corral.experiments.trial.directory import TrialDirectory
from corral.experiments.trial.mode import has_jobs
from corral.launcher.files.lookout import Lookout, Unanswered
from corral.launcher.slurm.job_queue import LOOK_TIMEOUT_S, CachedQueue, QueueAnswer, SlurmQueue
from corral.launcher.slurm.verdict import Job
from corral.launcher.status.evidence import Evidence, find_strays, is_of_trial
from corral.launcher.status.judge import TrialStatus, unreadable
from corral.launcher.status.reader import StatusReader
from corral.launcher.status.text import render_json, render_trial, render_trials
from corral.launcher.terminal import format_moment, printable
from corral.launcher.trial.view import PlanDamagedError, TrialFacts, load_facts

_INDENT = "  "
SHOWN_AFTER_END_S = 86400.0
Found = TrialFacts | str | None
"""A trial that is to be read, what is wrong, or None for one that ended long ago."""


def explain(evidence: Evidence, status: TrialStatus) -> str:
    """Several lines: the word, then what the trial recorded, what the cluster said, and what Redis holds."""
    lines = [f"why {status.state}" + (f": {status.note}" if status.note else "")]
    lines += [f"{_INDENT}{line}" for line in _own_records(evidence)]
    if has_jobs(evidence.facts.mode):
        lines += [f"{_INDENT}{line}" for line in _cluster(evidence)]
    lines += [f"{_INDENT}{line}" for line in _redis(evidence, status)]
    return "\n".join(printable(line) for line in lines)


def _own_records(evidence: Evidence) -> Iterator[str]:
    directory = evidence.facts.directory
    if (ended := evidence.ended) is not None:
        yield f"{_end_path(ended, directory)}: {ended.state}, {format_moment(ended.ended_at)}"
        if (failed := evidence.failure) is not None:
            yield f"{directory.journal_path}: {failed.who} {failed.why}, which ended the attempt"
        return
    if evidence.attempt is not None:
        yield f"attempt {evidence.attempt.attempt} was submitted {format_moment(evidence.attempt.submitted_at)}"
    if (ended := evidence.attempt_ended) is not None:
        yield f"{_end_path(ended, directory)}: {ended.state} {ended.cause}".rstrip()
    if evidence.is_done or evidence.is_stopped:
        yield f"{directory.log_path}: the trial log ends with {'Done' if evidence.is_done else 'Stop'}"
    if evidence.stop_request is not None:
        yield f"{directory.stop_request_path}: asked to stop by {evidence.stop_request.by}"
    if evidence.is_supervised is not None:
        yield f"the supervisor's lock is {'held: it runs' if evidence.is_supervised else 'free: it does not run'}"


def _end_path(end: AttemptEnd, directory: TrialDirectory) -> Path:
    return directory.control_path / f"end-{end.attempt}.json"


def _cluster(evidence: Evidence) -> Iterator[str]:
    answer = evidence.queue
    if answer.question:
        yield f"$ {answer.question}"
    if answer.error:
        yield f"{_INDENT}no answer: {answer.error}"
    if answer.asked_at is not None:
        jobs = "1 job" if len(answer.jobs) == 1 else f"{len(answer.jobs)} jobs"
        yield f"{_INDENT}asked {format_moment(answer.asked_at)}, {jobs}"
    elif not answer.error:
        yield f"{_INDENT}not asked: the trial's own record of its end is enough"
    job = evidence.job
    if job is not None:
        yield f"{_INDENT}{job.line}"
        yield f"{_INDENT}state {job.word}, reason {job.reason}; see: scontrol show job {job.job_id}"
    elif answer.asked_at is not None and evidence.job_id:
        yield f"{_INDENT}job {evidence.job_id} is not among them, nor known any more"
    for found in job.findings if job else ():
        yield f"{_INDENT}{found}"
    if evidence.accounted is not None:
        yield f"{_INDENT}sacct says {evidence.accounted.word}"
    for extra_job in evidence.extra_jobs:
        if extra_job.job is not None:
            yield f"{_INDENT}{extra_job.allocation}: {extra_job.job.line}"


def _redis(evidence: Evidence, status: TrialStatus) -> Iterator[str]:
    if evidence.ended is not None:
        return
    if evidence.records is None:
        yield "Redis: not there, or not asked"
        return
    yield f"Redis: {len(evidence.records)} of {len(status.workers)} workers hold a lease"
    for row in status.workers:
        beat = "never seen" if row.last_seen_s is None else f"last beat {row.last_seen_s:.1f}s ago"
        lease = "leased" if row.worker in evidence.records else "no lease"
        yield f"{_INDENT}{row.worker} {row.state}: {lease}, {beat}, {row.restarts} restarts"


class StatusPage:
    """The output of rl-status, printed repeatedly with -w."""

    def __init__(
        self,
        fileroot: Path,
        *,
        experiment: str | None = None,
        output: str,
        show_all: bool,
        explain: bool,
        colour: bool,
        width: int | None = None,
    ) -> None:
        """
        Args:
            experiment: the only one whose trials are listed; None lists all.
        """
        self._cluster = SlurmQueue(timeout_s=LOOK_TIMEOUT_S)
        self._queue = CachedQueue(self._cluster)
        self._lookout: Lookout[Path] = Lookout()
        self._reader = StatusReader(self._cluster, queue=self._queue, lookout=self._lookout)
        self._fileroot, self._experiment = fileroot, experiment
        self._output = output
        self._show_all = show_all
        self._explain = explain
        self._colour = colour
        self._width = width

    def all_trials(self) -> str:
        """One row per trial.

        Raises:
            TimeoutError: if the file system of the fileroot does not answer.
        """
        trials = list_trials(self._fileroot, self._lookout, experiment=self._experiment, with_old=self._show_all)
        statuses, texts = self._read_all(trials)
        shown = statuses if self._show_all else [status for status in statuses if not _is_old(status)]
        num_hidden = len(statuses) - len(shown) + sum(one is None for one in trials.values())
        page = self._render(shown, num_hidden=num_hidden)
        return "\n\n".join([page, *texts]) if self._explain else page

    def one_trial(self, facts: TrialFacts) -> str:
        """One trial in full."""
        ((status, evidence),), _ = self._reader.read_with_answer([facts])
        if self._output in ("json", "name"):
            return self._render([status], num_hidden=0)
        page = render_trial(status, wide=self._output == "wide", colour=self._colour, width=self._width)
        return f"{page}\n\n{explain(evidence, status)}" if self._explain and evidence is not None else page

    def trial_without_folder(self, name: str) -> str:
        """The rows of jobs that say that they are of this trial, whose folder is not there; "" if there are none."""
        answer = self._queue.look() if self._cluster.is_here() else QueueAnswer()
        rows = self._orphans([job for job in answer.jobs if is_of_trial(job, name, self._fileroot)], {})
        return self._render(rows, num_hidden=0) if rows else ""

    def _render(self, statuses: Sequence[TrialStatus], *, num_hidden: int) -> str:
        if self._output == "json":
            return render_json(statuses)
        if self._output == "name":
            return "\n".join(f"{status.experiment}/{status.trial}" for status in statuses)
        folder = self._fileroot / (self._experiment or "")
        return render_trials(statuses, colour=self._colour, width=self._width, num_hidden=num_hidden, folder=folder)

    def _read_all(self, trials: Mapping[Path, Found]) -> tuple[list[TrialStatus], list[str]]:
        """Of those that are to be read, and of jobs without one, the statuses, and the facts behind them."""
        reads, answer = self._reader.read_with_answer([one for one in trials.values() if isinstance(one, TrialFacts)])
        if answer.asked_at is None and not answer.error and self._cluster.is_here():
            answer = self._queue.look()  # for jobs whose trial directory is gone
        statuses = {path: unreadable(path, one) for path, one in trials.items() if isinstance(one, str)}
        statuses |= {Path(status.directory): status for status, _ in reads}
        texts = [explain(evidence, status) for status, evidence in reads if evidence is not None]
        orphans = [] if self._experiment else self._orphans(answer.jobs, trials)
        return [*(statuses[path] for path in trials if path in statuses), *orphans], texts

    def _orphans(self, jobs: Sequence[Job], trials: Mapping[Path, Found]) -> list[TrialStatus]:
        """Rows for jobs whose trial directory is gone, or does not answer."""
        strays = find_strays(jobs, {one.uuid for one in trials.values() if isinstance(one, TrialFacts)})
        found = self._lookout.look({path: path.is_dir for _, path in strays if not isinstance(trials.get(path), str)})
        return [
            _orphan(job, path, does_answer=found[path] is False)
            for job, path in strays
            if path in found and found[path] is not True
        ]


def _is_old(status: TrialStatus) -> bool:
    return status.is_final and status.ended_at is not None and time.time() - status.ended_at > SHOWN_AFTER_END_S


def _orphan(job: Job, directory: Path, *, does_answer: bool) -> TrialStatus:
    if does_answer:
        advice = f"directory missing: {directory}; rl-stop {job.job_id} or scancel {job.job_id} ends it"
    else:
        advice = f"directory does not answer: {directory}; is its file system there?"
    return replace(
        unreadable(directory, f"{job.note}; {advice}" if job.note else advice),
        mode="slurm",
        state=job.state,
        nodes=job.num_nodes,
        job_id=job.job_id,
        time_left=job.time_left,
        node_list=job.nodes,
    )


def list_trials(
    fileroot: Path, lookout: Lookout[Path], *, with_old: bool, experiment: str | None = None
) -> dict[Path, Found]:
    """The trials below a fileroot, the newest last; folders that do not answer come first.

    Args:
        experiment: the only one that is looked at; None is all.
        with_old: whether those are to be read that ended long ago.

    Raises:
        OSError: if the fileroot cannot be read; a TimeoutError if its file system does not answer.
    """
    experiments = lookout.look({fileroot: partial(_folders, fileroot)})[fileroot]
    if isinstance(experiments, Unanswered):
        raise experiments.error or TimeoutError(experiments.about(fileroot))
    found: dict[Path, tuple[float, Found]] = {}
    paths: list[Path] = []
    wanted = [path for path in experiments if experiment in (None, path.name)]
    for place, folders in lookout.look({path: partial(_folders, path) for path in wanted}).items():
        if isinstance(folders, Unanswered):
            found[place] = 0.0, folders.about(place)
        else:
            paths += folders
    for path, look in lookout.look({path: partial(_look_at, path, with_old=with_old) for path in paths}).items():
        if look is not None:
            found[path] = (0.0, look.about(path)) if isinstance(look, Unanswered) else look
    return {path: found[path][1] for path in sorted(found, key=lambda path: (found[path][0], path))}


def _folders(path: Path) -> list[Path]:
    """What is in a folder; nothing if it is none. Whether these are folders is not asked: that may hang."""
    try:
        return [path / name for name in sorted(os.listdir(path))]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _look_at(path: Path, *, with_old: bool) -> tuple[float, Found] | None:
    """When the plan was written, and what a first look finds; None if there is no plan."""
    directory = TrialDirectory(path)
    try:
        created_at = directory.plan_path.stat().st_mtime
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not with_old and _ended_long_ago(directory):
        return created_at, None
    try:
        facts = load_facts(directory)
    except PlanDamagedError:
        return created_at, f"its plan.json is damaged; rl-status {path.parent.name}/{path.name} says what to do"
    return None if facts is None else (created_at, facts)


def _ended_long_ago(directory: TrialDirectory) -> bool:
    """Whether its end is on record, and nothing has happened since for a long time."""
    try:
        silent_s = time.time() - directory.journal_path.stat().st_mtime
    except FileNotFoundError:
        return False
    attempt = last_attempt(directory) if silent_s > SHOWN_AFTER_END_S else None
    end = read_end(directory, attempt.attempt) if attempt else None
    return end is not None and end.is_final
