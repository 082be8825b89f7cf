"""From a checked submission to a running trial: makes the trial directory, then starts jobs or processes.

    Submission --create--> trial directory: config.yaml, plan.json
               --start, local-->  secrets, control/attempt-0.json, keeper and supervisor, set free from the terminal
               --start, jobs-->   the same, layout.json, scripts; the cluster --> job id

An error in `create`, and one in the first `start`, remove what was made.
"""

import contextlib
import logging
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from corral.experiments.own_python import own_python
from corral.experiments.trial.attempts import last_attempt, read_end, record_attempt
from corral.experiments.trial.directory import TrialDirectory, TrialExistsError, atomic_write, read_tail
from corral.experiments.trial.journal import Journal, read_journal
from corral.experiments.trial.secrets import TrialSecrets
from corral.launcher.files.patience import wait_until
from corral.launcher.layout.layout import Layout, PlacedTrial
from corral.launcher.runners.runner import start_process
from corral.launcher.slurm.client import SubmissionUnknownError, clean_environment
from corral.launcher.slurm.cluster import SlurmCluster
from corral.launcher.slurm.job_queue import is_head_of, submit_once
from corral.launcher.slurm.own_jobs import OwnJobs
from corral.launcher.submit.prepare import NameTakenError, Submission, SubmissionError, refuse_living
from corral.launcher.trial.ends import ends_of
from corral.launcher.trial.lock import SubmissionRunsError, is_locked, submitting

logger = logging.getLogger(__name__)

SUPERVISOR_COMMAND = tuple(own_python("-m", "corral.launcher.supervisor"))
_SUPERVISOR_START_TIMEOUT_S = 600.0  # a process that lives is believed to be starting: a loaded machine takes its time
_START_LOOK_PAUSE_S = 0.1
_SUPERVISOR_END_TIMEOUT_S = 30.0


def create(submission: Submission) -> None:
    """Makes the trial directory.

    Raises:
        NameTakenError: if the name was taken in the meantime.
        SubmissionError: if the disk refuses; nothing is left behind.
    """
    directory = submission.directory
    try:
        directory.create()
    except TrialExistsError as error:
        raise NameTakenError(str(error)) from error
    except OSError as error:
        raise SubmissionError(str(error)) from error
    try:
        write_plan(submission)
    except BaseException:
        shutil.rmtree(directory.path, ignore_errors=True)
        raise


def start(submission: Submission, *, resume: bool = False) -> str:
    """Starts the next attempt; returns the id of its job, or the supervisor's process id as text.

    Raises:
        SubmissionError, SlurmError: if it does not start. A first attempt then leaves no trial directory.
    """
    if not resume:  # of two that make the same directory, one is through
        return _start(submission, resume=False)
    try:
        with submitting(submission.directory):
            # It was looked at before, but of two who look at the same time both see that nobody is there.
            refuse_living(submission.plan, submission.directory)
            return _start(submission, resume=True)
    except SubmissionRunsError as error:
        raise SubmissionError(str(error)) from error


def write_plan(submission: Submission) -> None:
    """Puts down what the trial is planned to be, and what the user has written of it."""
    submission.code.write(submission.directory)
    for path, rows in submission.listed_rows.items():
        atomic_write(path, rows)
    # The plan first: a reader between the two writes finds only the files for people out of date.
    atomic_write(submission.directory.plan_path, submission.plan.to_json())
    if submission.written:
        atomic_write(submission.directory.config_path, _config_text(submission.written))


def _start(submission: Submission, *, resume: bool) -> str:
    directory, plan = submission.directory, submission.plan
    previous = last_attempt(directory)
    attempt = previous.attempt + 1 if previous else 0
    before = _small_files(directory)
    try:
        if resume and directory.plan_path.read_bytes() != plan.to_json():  # another allocation
            write_plan(submission)
        TrialSecrets.destroy(directory.secrets_path)
        TrialSecrets.create(directory.secrets_path)
        directory.clear_stop_request()
        directory.start_attempt_logs(attempt)
        record_attempt(directory, attempt=attempt, resume=resume, mode=plan.mode)
        if submission.layout is None:
            return _start_local(directory, attempt)
        return _start_on_cluster(submission, submission.layout, attempt)
    except SubmissionUnknownError as error:
        # The job, if there is one, needs its directory.
        name = f"{plan.trial.experiment}/{plan.trial.trial}"
        raise SubmissionUnknownError(
            f"{error}\n  hint: once the cluster answers, rl-status {name} shows the job, or rl-submit --resume {name} "
            "submits it"
        ) from error
    except BaseException:
        if previous is None and not is_locked(directory):
            shutil.rmtree(directory.path, ignore_errors=True)
        elif previous is not None and read_end(directory, attempt) is None:
            _take_back(directory, attempt, before)
        raise


def _small_files(directory: TrialDirectory) -> dict[Path, bytes]:
    """The files that a submission may write anew: none that grows."""
    found = [
        path for pattern in ("*.json", "*.yaml", "*.sbatch", "control/*.json") for path in directory.path.glob(pattern)
    ]
    return {path: path.read_bytes() for path in found}


def _take_back(directory: TrialDirectory, attempt: int, before: Mapping[Path, bytes]) -> None:
    """An attempt that was not accepted has never been: the trial is what it was before."""
    for path in _small_files(directory).keys() - before.keys():
        path.unlink()
    for path, content in before.items():
        atomic_write(path, content)
    directory.remove_attempt_logs(attempt)
    TrialSecrets.destroy(directory.secrets_path)


def _start_local(directory: TrialDirectory, attempt: int) -> str:
    log_path = directory.attempt_logs(attempt) / "supervisor.log"
    command = [*SUPERVISOR_COMMAND, "--trial", str(directory.path), "--attempt", str(attempt)]
    supervisor: subprocess.Popen[bytes] | None = None
    try:
        began_at = time.time()
        with _interrupts_held():  # or one could come when it is started and nobody knows it yet
            supervisor = start_process(command, environment=clean_environment(), log_path=log_path)
        _wait_until_it_supervises(directory, supervisor, log_path, began_at=began_at)
    except BaseException:
        if supervisor is not None:
            supervisor.kill()
            # The caller removes the folder: neither it nor a process that it has started may hold the trial then.
            has_ended = lambda: supervisor.poll() is not None and not is_locked(directory)  # noqa: E731
            wait_until(has_ended, timeout_s=_SUPERVISOR_END_TIMEOUT_S)
        raise
    _note(directory, attempt=attempt, pid=supervisor.pid)
    return str(supervisor.pid)


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """A Ctrl-C is noted, and raised at the end; elsewhere than in the main thread there is none."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    noted: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: noted.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if noted:
            signal.raise_signal(signal.SIGINT)


def _wait_until_it_supervises(
    directory: TrialDirectory, supervisor: subprocess.Popen[bytes], log_path: Path, *, began_at: float
) -> None:
    """Until the first supervisor has recorded its start, however long that takes: what counts is whether it lives."""
    has_started = has_ended = False

    def is_known() -> bool:
        nonlocal has_started, has_ended
        has_ended = supervisor.poll() is not None  # before the look: its last words count
        try:
            news = [event for event in read_journal(directory.journal_path) if event["time"] >= began_at]
        except OSError:  # what it has to say cannot be read: that it has the trial is the best sign that there is
            has_started = is_locked(directory)
        else:
            has_started = any(event["event"] == "supervisor_started" for event in news)
            has_ended |= any(end.who == "supervisor" for end in ends_of(news))
        return has_started or has_ended

    wait_until(is_known, timeout_s=_SUPERVISOR_START_TIMEOUT_S, pause_s=_START_LOOK_PAUSE_S)
    if has_started:
        return
    said = read_tail(log_path, 2000).decode(errors="replace") or "it said nothing"
    why = "ended at once" if has_ended else f"did not start within {_SUPERVISOR_START_TIMEOUT_S:.0f} s"
    raise SubmissionError(f"the supervisor {why}: {said}")


def _start_on_cluster(submission: Submission, layout: Layout, attempt: int) -> str:
    plan, directory = submission.plan, submission.directory
    cluster, own = SlurmCluster(), OwnJobs(directory, plan.trial)
    atomic_write(directory.layout_path, layout.to_json())
    cluster.write_scripts(PlacedTrial(plan=plan, layout=layout, directory=directory))
    job_id = submit_once(cluster, lambda: cluster.submit_trial(directory), is_it=is_head_of(own))
    with contextlib.suppress(OSError):  # the job has been taken; its comment names it, and so will its claim
        own.note(job_id, attempt=attempt)
    _note(directory, attempt=attempt, job_id=job_id)
    return job_id


def _note(directory: TrialDirectory, **fields: object) -> None:
    """Tells the journal what has been started; that it cannot be written changes nothing about that."""
    try:
        Journal(directory.journal_path).append("submitted", **fields)
    except OSError as error:
        logger.warning("%s could not be written: %s", directory.journal_path, error)


def script_of(submission: Submission) -> bytes | None:
    """What this submission would hand to the cluster; None for a local trial."""
    if submission.layout is None:
        return None
    trial = PlacedTrial(plan=submission.plan, layout=submission.layout, directory=submission.directory)
    return SlurmCluster().script(trial)


def _config_text(written: Mapping[str, Any]) -> bytes:
    # Not at the top: only a submission writes YAML.
    import yaml

    return yaml.safe_dump(dict(written), sort_keys=False, allow_unicode=True).encode()
