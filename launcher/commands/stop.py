"""rl-stop: a last checkpoint, then the end; or only a group's; or the next attempt."""

import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from corral.launcher.commands.common import TRIAL_HELP, Fileroot, find_in_time, run
from corral.launcher.commands.completion import complete_group, complete_trial

if TYPE_CHECKING:
    from corral.launcher.status.judge import TrialStatus
    from corral.launcher.stop import Ending
    from corral.launcher.trial.find import TrialFacts

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


def _find(trial: str, fileroot: Path | None, *, now: bool) -> "TrialFacts | None":
    """The trial that is meant; None if it was a job without a trial directory, which is ended here."""
    from corral.launcher.files.patient_files import PatientFiles
    from corral.launcher.slurm.job_queue import SlurmQueue
    from corral.launcher.stop import cancel_orphan, find_job, is_orphan, trial_of_job
    from corral.launcher.trial.find import TrialNotFoundError, default_fileroot

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


def _keep_down(found: "Sequence[TrialFacts]", group: str, *, undo: bool) -> None:
    from corral.launcher.stop import keep_group_down, wait_until_down

    for facts in found:
        print(keep_group_down(facts, group, undo=undo), flush=True)
    for facts in found if not undo else ():
        if not wait_until_down(facts, group):
            print(f"warning: some of {group} of {facts.name} still run; rl-status {facts.name}", file=sys.stderr)


def _stop_all(found: "Sequence[TrialFacts]", *, now: bool, grace: float | None, requeue: bool) -> None:
    """All at the same time: each may take its whole grace period."""
    from corral.experiments.trial.mode import has_jobs
    from corral.launcher.slurm.cached_queue import CachedQueue
    from corral.launcher.slurm.job_queue import SlurmQueue
    from corral.launcher.status.reader import StatusReader
    from corral.launcher.stop import requeue_trial, see_through, stop_trial

    cluster = SlurmQueue()
    endings = {
        facts: requeue_trial(facts, grace_s=grace) if requeue else stop_trial(facts, cluster, now=now, grace_s=grace)
        for facts in found
    }
    told = {facts: told_of(facts, ending, now=now, requeue=requeue) for facts, ending in endings.items()}
    try:
        ends = see_through(told, StatusReader())
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


def told_of(facts: "TrialFacts", ending: "Ending", *, now: bool, requeue: bool) -> "Ending":
    """The same, with what people are told of it: now and then for whom it waits, as a step may take minutes."""
    from corral.experiments.trial.mode import has_jobs
    from corral.launcher.status.waits import render_chain
    from corral.launcher.trial.words import NOT_STARTED

    next(ending)
    status, told_at, what = (yield), time.monotonic(), ""
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
        if status.waits and not status.is_final and time.monotonic() - told_at >= _TELL_EVERY_S:
            told_at = time.monotonic()
            print(f"{facts.name} waits: {render_chain(status.waits[0])}", flush=True)


main = partial(run, stop)
"""rl-stop"""
