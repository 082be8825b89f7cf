"""rl-stop: a last checkpoint, then the end; or only a group's; or the next attempt.

rl-stop: a request in the trial directory, answered by the master with a last commit, seen through by the supervisor.

stop.json --> master: checkpoint, Stop in the trial log --> supervisor: ends the workers, then itself
              no answer within the grace period ---------> supervisor: Stop in the trial log, ends the workers
--now: Stop in the trial log, ends the workers
--requeue: the same as without it, and then the next attempt in a new job
--group: control/kept-down/GROUP --> supervisor: ends the group's workers and keeps them down, until --undo
nobody is there any more: Stop in the trial log from here, and the end of the jobs that wait in the queue
"""

import contextlib
import socket
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from corral.experiments.exit_codes import CommandExit, UserError
from corral.experiments.trial.attempts import read_end
from corral.experiments.trial.directory import StopRequest, TrialDirectory
from corral.experiments.trial.log import TrialLog
from corral.experiments.trial.log_state import DoneError
from corral.experiments.trial.mode import has_jobs
from corral.launcher.commands.common import TRIAL_HELP, Fileroot, complete_group, complete_trial, find_in_time, run
from corral.launcher.files.file_thread import PatientFiles
from corral.launcher.files.patience import wait_until
from corral.launcher.slurm.client import answer_or
from corral.launcher.slurm.job_queue import CachedQueue, SlurmQueue
from corral.launcher.slurm.own_jobs import HEAD, OwnJobs
from corral.launcher.slurm.verdict import Job, JobPhase
from corral.launcher.status.evidence import WorkerRow, is_of_trial
from corral.launcher.status.judge import TrialStatus
from corral.launcher.status.reader import StatusReader
from corral.launcher.status.waits import render_chain
from corral.launcher.trial.lock import LEAVING_TIMEOUT_S, is_locked
from corral.launcher.trial.processes import user_name
from corral.launcher.trial.view import TrialFacts, TrialNotFoundError, default_fileroot, read_facts
from corral.launcher.trial.words import FINAL_STATES, NOT_STARTED, WorkerState

SCALABLE_GROUPS = ("generation_server", "rollout_worker")
_TEARDOWN_S = 40.0  # SIGTERM, SIGKILL, the cluster's own epilogue, the report
_DOWN_TIMEOUT_S = 30.0
_DOWN = (WorkerState.KEPT_DOWN, WorkerState.AWAY, WorkerState.GIVEN_UP, WorkerState.NOT_STARTED)
_WHY_NOT = {
    "master_worker": "the trial is nothing without its master",
    "model_worker": "its ranks hold the model that is trained",
    "gserver_manager": "the generation servers and the rollout workers meet at it",
}


class StopRefusedError(UserError):
    """What was asked for cannot be done to this trial; the text says why, and what can."""

    exit_code = CommandExit.BAD_CONFIGURATION


Ending = Generator[None, TrialStatus, TrialStatus]
"""What is done to a trial until it has ended: is sent what each look saw, and returns the last."""


def see_through(
    endings: Mapping[TrialFacts, Ending], reader: StatusReader
) -> dict[TrialFacts, TrialStatus | Exception]:
    """Looks at all trials at once, again and again, until each has ended: how, or why nobody can say so."""
    left, ends = dict(endings), dict[TrialFacts, TrialStatus | Exception]()
    for ending in left.values():
        next(ending)
    while left:
        for facts, status in zip(tuple(left), reader.read(tuple(left)), strict=True):
            try:
                left[facts].send(status)
                continue
            except StopIteration as ended:
                ends[facts] = ended.value
            except Exception as error:
                ends[facts] = error
            del left[facts]
        if left:
            time.sleep(max(map(_pause_s, left)))
    for facts in (facts for facts, end in ends.items() if isinstance(end, TrialStatus)):
        with contextlib.suppress(OSError):  # the end is recorded: the supervisor draws the page and leaves
            wait_until(partial(_has_left, facts.directory), timeout_s=LEAVING_TIMEOUT_S)
    return ends


def _has_left(directory: TrialDirectory) -> bool:
    return not is_locked(directory)


def stop_trial(facts: TrialFacts, cluster: SlurmQueue, *, now: bool = False, grace_s: float | None = None) -> Ending:
    """Stops a trial; one that has ended already is left as it is.

    Args:
        cluster: ends its jobs.
        now: do not wait for a checkpoint.
        grace_s: how long it may take to checkpoint; None is the trial's own.

    Raises:
        TimeoutError: if it is still there after the grace period and a bounded teardown, or if its file system does not
            answer.
    """
    files, status = PatientFiles(), (yield)
    grace_s = facts.stop_grace_s if grace_s is None else grace_s
    if status.is_final and status.state != "LOST":
        _cancel_rest(facts, cluster, files)
        return status
    files.run(partial(_request_stop, facts, now=now, grace_s=grace_s), facts.directory.path)
    if status.state == "LOST" or status.state in NOT_STARTED:
        files.run(lambda: _append_stop(facts), facts.directory.log_path)
        if status.job_id and status.state in NOT_STARTED:
            cluster.cancel(status.job_id)
        _cancel_rest(facts, cluster, files)
        grace_s = 0.0
    deadline = time.monotonic() + (0.0 if now else grace_s) + _TEARDOWN_S
    while (status := (yield)).state not in FINAL_STATES:
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"trial {facts.name} is still {status.state}{_because(status)} after {grace_s:.0f} s of grace; "
                f"rl-stop --now {facts.name} does not wait"
                + (f", scancel {status.job_id} ends its job" * bool(status.job_id))
            )
    return status


def requeue_trial(facts: TrialFacts, *, grace_s: float | None = None) -> Ending:
    """Lets a trial checkpoint and go on in a new job; over once the present attempt has ended.

    Raises:
        StopRefusedError: if it is on no cluster, or does not run.
        TimeoutError: if the attempt does not end in time, or if its file system does not answer.
    """
    files, status = PatientFiles(), (yield)
    if not has_jobs(facts.mode):
        raise StopRefusedError(
            f"trial {facts.name} runs on this machine, where there is no queue; "
            f"rl-stop {facts.name} and rl-submit --resume {facts.name} start it again"
        )
    if status.is_final:
        hint = "" if status.state == "COMPLETE" else f"; rl-submit --resume {facts.name} continues it"
        raise StopRefusedError(f"trial {facts.name} is {status.state}, it has no job to put back{hint}")
    if status.state in NOT_STARTED:
        return status  # it waits in the queue as it is
    attempt, grace_s = status.attempt, facts.stop_grace_s if grace_s is None else grace_s
    files.run(partial(_request_stop, facts, now=False, grace_s=grace_s, then="requeue"), facts.directory.path)
    deadline = time.monotonic() + grace_s + _TEARDOWN_S
    while attempt is not None and files.run(lambda: read_end(facts.directory, attempt), facts.directory.path) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"attempt {attempt} of trial {facts.name} did not end within {grace_s + _TEARDOWN_S:.0f} s of "
                f"rl-stop --requeue; rl-status {facts.name} shows what it does"
            )
        yield
    return (yield)


def _request_stop(facts: TrialFacts, *, now: bool, grace_s: float, then: Literal["", "requeue"] = "") -> None:
    """Leaves the request where master and supervisor find it."""
    request = StopRequest(requested_at=time.time(), by=_who(), now=now, grace_s=grace_s, then=then)
    facts.directory.write_stop_request(request)


def _pause_s(facts: TrialFacts) -> float:
    """Between two looks."""
    return 1.0 if has_jobs(facts.mode) else 0.2


def keep_group_down(facts: TrialFacts, group: str, *, undo: bool = False) -> str:
    """Asks the supervisor to end a group's workers and to keep them down, or to start them again; what was done.

    Raises:
        StopRefusedError: if the trial cannot do without the group, has no such group, or has ended.
        TimeoutError: if its file system does not answer.
    """
    kinds = list(dict.fromkeys(worker.partition("/")[0] for worker in facts.workers))
    if group not in kinds:
        raise StopRefusedError(f"trial {facts.name} has no group {group!r}; it has {', '.join(kinds)}")
    if group not in SCALABLE_GROUPS:
        raise StopRefusedError(
            f"group {group} cannot be stopped by itself: {_WHY_NOT.get(group, 'the trial needs it')}; "
            f"rl-stop {facts.name} stops the trial, and --group takes {' or '.join(SCALABLE_GROUPS)}"
        )
    (status,) = StatusReader().read([facts])
    if status.is_final:
        raise StopRefusedError(f"trial {facts.name} is {status.state}; its groups do not run")
    PatientFiles().run(lambda: facts.directory.keep_group_down(group, undo=undo), facts.directory.path)
    if undo:
        return f"{group} of {facts.name} is started again"
    return f"{group} of {facts.name} is ended and kept down; rl-stop {facts.name} --group {group} --undo brings it back"


def wait_until_down(facts: TrialFacts, group: str) -> bool:
    """Waits until no worker of the group runs; False if some still do after a while."""
    reader = StatusReader()

    def is_down() -> bool:
        (status,) = reader.read([facts])
        return status.is_final or not any(row.kind == group and _may_run(row) for row in status.workers)

    return wait_until(is_down, timeout_s=_DOWN_TIMEOUT_S, pause_s=_pause_s(facts))


def _may_run(row: WorkerRow) -> bool:
    """Whether a process of the worker may still be there: its lease goes first, its exit is recorded last."""
    return row.state not in _DOWN or (row.state is WorkerState.KEPT_DOWN and row.pid is not None)


def find_job(argument: str, cluster: SlurmQueue, fileroot: Path) -> Job | None:
    """The job with this id, or else the newest that says that it is of this trial.

    None if the cluster knows no such job, does not answer, or is not here.
    """
    jobs = answer_or([], cluster.jobs)
    if argument.isdecimal():
        return next((job for job in jobs if job.job_id == argument), None)
    own = [job for job in jobs if is_of_trial(job, argument, fileroot) and job.is_active]
    return max(own, key=lambda job: job.number, default=None)


def trial_of_job(job: Job, fileroot: Path, *, files: PatientFiles) -> TrialFacts | None:
    """The trial that a job is of, if it is there."""
    if "directory" in job.tag:
        directory = Path(str(job.tag["directory"]))
        return files.run(lambda: read_facts(TrialDirectory(directory)), directory)
    return files.run(lambda: _trial_that_noted(job, fileroot), fileroot)


def _trial_that_noted(job: Job, fileroot: Path) -> TrialFacts | None:
    noted = (path.parents[2] for path in fileroot.glob(f"*/*/control/jobs/{job.job_id}.json"))
    found = (facts for path in noted if (facts := read_facts(TrialDirectory(path))) is not None)
    return next((facts for facts in found if OwnJobs(facts.directory, facts).identify(job) is not None), None)


def is_orphan(job: Job, *, now: bool, files: PatientFiles) -> bool:
    """Whether a job lives, and is of a trial whose directory is gone.

    Args:
        now: whether a trial may be ended without a checkpoint, so that a folder that is only out of sight may be gone.

    Raises:
        StopRefusedError: if this machine cannot tell whether the directory is gone: it does not see the one above.
    """
    directory = Path(str(job.tag.get("directory", "/")))
    if not job.is_active or files.run(directory.is_dir, directory):
        return False
    if not now and not files.run(directory.parent.is_dir, directory.parent):
        raise StopRefusedError(
            f"job {job.job_id} belongs to the trial in {directory}, and this machine has no {directory.parent}; "
            f"run rl-stop where it is mounted, or rl-stop --now {job.job_id} to end its jobs without a checkpoint"
        )
    return True


def cancel_orphan(job: Job, cluster: SlurmQueue) -> list[str]:
    """Ends all jobs of a trial whose directory is gone; returns their ids."""
    uuid = job.tag.get("trial_uuid")
    jobs = [one for one in cluster.jobs() if one.tag.get("trial_uuid") == uuid and one.is_active]
    for one in jobs:
        cluster.cancel(one.job_id)
    return [one.job_id for one in jobs]


def _cancel_rest(facts: TrialFacts, cluster: SlurmQueue, files: PatientFiles) -> None:
    """Nothing of a trial that has ended may start later, or hold nodes that nobody uses."""
    if not has_jobs(facts.mode):
        return
    jobs = answer_or([], cluster.jobs)  # what one that is down would start ends by itself: the trial log says Stop
    for job, note in files.run(lambda: OwnJobs(facts.directory, facts).select(jobs), facts.directory.path):
        is_extra_job = note.allocation != HEAD  # a head that still runs is about to end
        if job.phase is JobPhase.WAITING or (is_extra_job and job.is_active):
            cluster.cancel(job.job_id)


def _because(status: TrialStatus) -> str:
    return f" ({status.note})" if status.note else ""


def _append_stop(facts: TrialFacts) -> None:
    try:
        TrialLog(facts.directory.log_path).request_stop(_who(), reason="rl-stop")
    except DoneError:
        return


def _who() -> str:
    return f"{user_name()}@{socket.gethostname()}"


_TELL_EVERY_S = 10.0  # most stops take less
_TRIALS_HELP = f"{TRIAL_HELP} Or the id of its SLURM job."


def stop(
    trials: Annotated[list[str], typer.Argument(metavar="TRIAL", help=_TRIALS_HELP, autocompletion=complete_trial)],
    now: Annotated[bool, typer.Option("--now", help="Do not wait for a last checkpoint.")] = False,
    grace: Annotated[float | None, typer.Option(min=0, metavar="SECONDS", help="Seconds to checkpoint in.")] = None,
    requeue: Annotated[bool, typer.Option("--requeue", help="Checkpoint, then go on in a new job.")] = False,
    group: Annotated[
        str | None,
        typer.Option(metavar="GROUP", help="End only this group, and keep it down.", autocompletion=complete_group),
    ] = None,
    undo: Annotated[bool, typer.Option("--undo", help="With --group: start it again.")] = False,
    fileroot: Fileroot = None,
) -> None:
    """Let trials checkpoint, then stop them; rl-submit --resume continues them."""
    if now and (requeue or group):
        raise typer.BadParameter("--now ends a trial at once; it goes with neither --requeue nor --group")
    if requeue and group:
        raise typer.BadParameter("--requeue is for a whole trial; it does not go with --group")
    if undo and not group:
        raise typer.BadParameter("--undo takes back --group; name the group")
    found = [facts for trial in trials if (facts := _find(trial, fileroot, now=now)) is not None]
    if group is not None:
        _keep_down(found, group, undo=undo)
    else:
        _stop_all(found, now=now, grace=grace, requeue=requeue)


def _find(trial: str, fileroot: Path | None, *, now: bool) -> TrialFacts | None:
    """The trial that is meant; None if it was a job without a trial directory, which is ended here."""

    root, files = fileroot or default_fileroot(), PatientFiles()
    try:
        return find_in_time(files, trial, root)
    except TrialNotFoundError:
        cluster = SlurmQueue()
        if (job := find_job(trial, cluster, root)) is None:
            raise
        if (facts := trial_of_job(job, root, files=files)) is not None:
            return facts
        if not is_orphan(job, now=now, files=files):
            raise
        ended = cancel_orphan(job, cluster)
        print(
            f"{job.name} CANCELLED: its directory {job.tag.get('directory')} is not there; ended job {', '.join(ended)}"
        )
        return None


def _keep_down(found: Sequence[TrialFacts], group: str, *, undo: bool) -> None:

    for facts in found:
        print(keep_group_down(facts, group, undo=undo), flush=True)
    for facts in found if not undo else ():
        if not wait_until_down(facts, group):
            print(f"warning: some of {group} of {facts.name} still run; rl-status {facts.name}", file=sys.stderr)


def _stop_all(found: Sequence[TrialFacts], *, now: bool, grace: float | None, requeue: bool) -> None:
    """All at the same time: each may take its whole grace period."""

    cluster = SlurmQueue()
    endings = {
        facts: requeue_trial(facts, grace_s=grace) if requeue else stop_trial(facts, cluster, now=now, grace_s=grace)
        for facts in found
    }
    reported = {facts: reporting(facts, ending, now=now, requeue=requeue) for facts, ending in endings.items()}
    try:
        ends = see_through(reported, StatusReader())
    except KeyboardInterrupt:
        print("\nwhat was asked for goes on without this command; rl-status shows how far it is")
        raise typer.Exit(130) from None
    errors = [end for end in ends.values() if isinstance(end, Exception)]
    for other in errors[1:]:
        print(f"error: {other}", file=sys.stderr)
    if errors:
        raise errors[0]
    if any(has_jobs(facts.mode) for facts in found):
        # Else rl-status would show for some seconds what the queue said before.
        CachedQueue(cluster).look(newer_than=time.time())


def reporting(facts: TrialFacts, ending: Ending, *, now: bool, requeue: bool) -> Ending:
    """The same, with messages for the user: now and then for which worker it waits, as a step may take minutes."""

    next(ending)
    status, reported_at, what = (yield), time.monotonic(), ""
    if status.is_final and status.state != "LOST":
        what = "" if requeue else "has ended already: "
    elif not requeue:
        can_checkpoint = not now and status.state not in (*NOT_STARTED, "LOST")
        print(f"stopping {facts.name}" + (" after a last checkpoint" if can_checkpoint else ""), flush=True)
    elif has_jobs(facts.mode) and not status.is_final:
        print(f"putting back {facts.name} after a last checkpoint", flush=True)
    while True:
        try:
            ending.send(status)
        except StopIteration as ended:
            after: TrialStatus = ended.value
            print(f"{facts.name} {what}{after.state}" + (f": {after.note}" if after.note else ""), flush=True)
            return after
        status = yield
        if status.waits and not status.is_final and time.monotonic() - reported_at >= _TELL_EVERY_S:
            reported_at = time.monotonic()
            print(f"{facts.name} waits: {render_chain(status.waits[0])}", flush=True)


main = partial(run, stop)
"""rl-stop"""
