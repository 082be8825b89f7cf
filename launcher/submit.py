"""rl-submit: everything is checked, then the trial directory is made, then something starts.

    experiment.yaml --load_experiment--> Experiment --make_run_plan--> RunPlan --checks--> Submission
    Submission --create--> trial directory: config.yaml, plan.json, secrets, control/attempt-0.json
               --local-->  keeper and supervisor, set free from the terminal
               --slurm-->  trial.sbatch, sbatch --> job id

An error before `create` leaves nothing; an error in it removes what it made.
"""

import contextlib
import logging
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from uuid import uuid4

from corral.experiments.attempt_ends import read_end
from corral.experiments.attempts import last_attempt, record_attempt
from corral.experiments.errors import NO_SOURCE, ConfigError, ConfigSource, shorten
from corral.experiments.experiment import Experiment
from corral.experiments.journal import Journal
from corral.experiments.log_witnesses import read_whole_log
from corral.experiments.plan import RunPlan, TrialIdentity, make_run_plan
from corral.experiments.profile import find_profiles
from corral.experiments.registry import load_with_source
from corral.experiments.secrets import TrialSecrets
from corral.experiments.trial_directory import (
    TrialDirectory,
    TrialExistsError,
    atomic_write,
    next_trial_name,
    validate_name,
)
from corral.experiments.trial_log import CorruptLogError, TrialLog
from corral.launcher.layout.layout import Layout
from corral.launcher.preflight import check_on_slurm
from corral.launcher.runners.local import share_gpus, start_detached, visible_gpus
from corral.launcher.slurm.client import SlurmClient, SlurmError, clean_environment
from corral.launcher.slurm.own_jobs import OwnJobs, own_jobs_of_plan
from corral.launcher.slurm.sbatch import holder_path, render_holder, render_script
from corral.launcher.slurm.submit_once import (
    SubmissionRunsError,
    SubmissionUnknownError,
    is_head_of,
    submit_once,
    submitting,
)
from corral.launcher.slurm.words import is_active
from corral.launcher.trial.find import TrialFacts, default_fileroot
from corral.launcher.trial.lock import is_locked
from corral.scheduling.slurm_formats import check_plain_text

logger = logging.getLogger(__name__)

Mode = Literal["local", "slurm"]
SUPERVISOR_COMMAND = (sys.executable, "-m", "corral.launcher.supervisor")
_SUPERVISOR_START_TIMEOUT_S = 20.0
_LEAVING_TIMEOUT_S = 10.0  # a supervisor that has recorded the end only has to exit
_LEAVING_POLL_S = 0.05
_LOG_PATIENCE_S = 10.0  # listing the folder of the log makes most file systems show what is in it


class SubmissionError(RuntimeError):
    """The trial could not be started, for a reason outside of its configuration."""


class NameTakenError(SubmissionError):
    """Somebody else has made a trial of this name in the meantime."""


class AlreadyCompleteError(SubmissionError):
    """There is nothing left to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A checked trial that can be started."""

    plan: RunPlan
    directory: TrialDirectory
    warnings: tuple[str, ...]
    checks: tuple[str, ...]
    layout: Layout | None
    """None for a local trial."""
    has_default_name: bool = False
    """Whether nobody chose the trial's name."""
    profiles: tuple[Path, ...] = ()
    """Profiles beneath the experiment file, the weakest first."""


def prepare(
    experiment_file: Path,
    overrides: Sequence[str],
    *,
    trial_name: str | None,
    mode: Mode,
    profile: str | None = None,
    sbatch_arguments: Sequence[str] = (),
    client: SlurmClient | None = None,
    has_checks: bool = True,
) -> Submission:
    """Reads and checks everything; writes nothing.

    Args:
        experiment_file: the YAML file.
        overrides: `key.path=value`, over the file's.
        trial_name: None is the file's, else the next free one.
        mode: where the trial is to run.
        profile: name or path of a profile beneath the file, over those of the site and the user.
        sbatch_arguments: added to `launch.extra_sbatch_arguments`.
        client: the cluster.
        has_checks: whether the cluster is compared with the trial.

    Raises:
        ConfigError: with every mistake that was found.
        SlurmError: if the cluster cannot be asked.
    """
    loaded = load_with_source(
        experiment_file, overrides, profiles=find_profiles(profile), sbatch_arguments=sbatch_arguments
    )
    experiment = loaded.experiment
    fileroot = (experiment.cluster.fileroot or default_fileroot()).absolute()
    chosen = experiment.trial if trial_name is None else trial_name
    trial = _trial_name(chosen, fileroot / experiment.name)
    try:
        directory = TrialDirectory.of(fileroot, experiment=experiment.name, trial=trial)
    except ValueError as error:
        raise ConfigError.of(str(error)) from error
    if chosen is not None and directory.path.exists():
        raise ConfigError.of(
            f"trial {experiment.name}/{trial} exists already: {directory.path}",
            hint=f"choose another name with -n, or continue it with rl-submit --resume {experiment.name}/{trial}",
        )
    try:
        _check_fileroot(fileroot, directory)
    except ConfigError as error:
        raise error.located(loaded.source) from error
    plan = make_run_plan(experiment, _identity(experiment, directory, trial=trial), mode)
    layout, checks, warnings = _check_resources(plan, directory, client, loaded.source, has_checks=has_checks)
    return Submission(
        plan=plan,
        directory=directory,
        warnings=(*experiment.find_warnings(), *warnings),
        checks=checks,
        layout=layout,
        has_default_name=chosen is None,
        profiles=loaded.source.profiles,
    )


def prepare_resume(facts: TrialFacts, *, client: SlurmClient | None = None, has_checks: bool = True) -> Submission:
    """Checks that a trial can go on from its last commit.

    Raises:
        AlreadyCompleteError: if it is done.
        SubmissionError: if it still runs, or has a damaged trial log.
        ConfigError: if its plan does not fit the machine any more.
    """
    directory = facts.directory
    try:
        plan = RunPlan.from_json(directory.plan_path.read_bytes())
    except ValueError as error:
        raise SubmissionError(f"trial {facts.name} cannot be resumed: {error}") from error
    _refuse_living(plan, directory, client)
    try:
        log = read_whole_log(directory, TrialLog(directory.log_path), patience_s=_LOG_PATIENCE_S)
    except CorruptLogError as error:
        raise SubmissionError(f"trial {facts.name} cannot be resumed: {error}") from error
    if log.is_done:
        raise AlreadyCompleteError(f"trial {facts.name} is complete; there is nothing to resume")
    layout, checks, warnings = _check_resources(plan, directory, client, has_checks=has_checks)
    return Submission(plan=plan, directory=directory, warnings=warnings, checks=checks, layout=layout)


def _refuse_living(plan: RunPlan, directory: TrialDirectory, client: SlurmClient | None) -> None:
    name = f"{plan.trial.experiment}/{plan.trial.trial}"
    if _still_runs(directory):
        raise SubmissionError(f"trial {name} still runs; rl-status {name} shows it")
    if plan.mode == "slurm":
        _refuse_queued(name, own_jobs_of_plan(plan, directory), client or SlurmClient())


def _still_runs(directory: TrialDirectory) -> bool:
    """Whether a supervisor has the trial; one that has recorded the end gets a moment to leave."""
    attempt = last_attempt(directory)
    end = read_end(directory, attempt.attempt) if attempt is not None else None
    has_ended = end is not None and end.is_final
    deadline = time.monotonic() + (_LEAVING_TIMEOUT_S if has_ended else 0.0)
    while is_locked(directory):
        if time.monotonic() >= deadline:
            return True
        time.sleep(_LEAVING_POLL_S)
    return False


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
        atomic_write(directory.config_path, _config_text(submission.plan))
        atomic_write(directory.plan_path, submission.plan.to_json())
    except BaseException:
        shutil.rmtree(directory.path)
        raise


def start(
    submission: Submission,
    *,
    resume: bool = False,
    client: SlurmClient | None = None,
    supervisor_command: Sequence[str] = SUPERVISOR_COMMAND,
) -> str:
    """Starts the next attempt; returns the SLURM job id, or the supervisor's process id as text.

    Raises:
        SubmissionError, SlurmError: if it does not start. A first attempt then leaves no trial directory.
    """
    if not resume:  # of two that make the same directory, one is through
        return _start(submission, client, supervisor_command, resume=False)
    try:
        with submitting(submission.directory):
            # It was looked at before, but of two who look at the same time both see that nobody is there.
            _refuse_living(submission.plan, submission.directory, client)
            return _start(submission, client, supervisor_command, resume=True)
    except SubmissionRunsError as error:
        raise SubmissionError(str(error)) from error


def _start(
    submission: Submission, client: SlurmClient | None, supervisor_command: Sequence[str], *, resume: bool
) -> str:
    directory, plan = submission.directory, submission.plan
    previous = last_attempt(directory)
    attempt = previous.attempt + 1 if previous else 0
    try:
        TrialSecrets.destroy(directory.secrets_path)
        TrialSecrets.create(directory.secrets_path)
        directory.clear_stop_request()
        directory.start_attempt_logs(attempt)
        record_attempt(directory, attempt=attempt, resume=resume, mode=plan.mode)
        if submission.layout is None:
            return _start_local(directory, attempt, supervisor_command)
        return _start_on_slurm(submission, submission.layout, attempt, client or SlurmClient())
    except SubmissionUnknownError as error:
        # The job, if there is one, needs its directory.
        name = f"{plan.trial.experiment}/{plan.trial.trial}"
        raise SubmissionUnknownError(
            f"{error}\n  hint: once SLURM answers, rl-status {name} shows the job, or rl-submit --resume {name} "
            "submits it"
        ) from error
    except BaseException:
        if previous is None and not is_locked(directory):
            shutil.rmtree(directory.path)
        raise


def _start_local(directory: TrialDirectory, attempt: int, supervisor_command: Sequence[str]) -> str:
    log_path = directory.attempt_logs(attempt) / "supervisor.log"
    command = [*supervisor_command, "--trial", str(directory.path), "--attempt", str(attempt)]
    pid = start_detached(command, log_path=log_path, environment=clean_environment())
    deadline = time.monotonic() + _SUPERVISOR_START_TIMEOUT_S
    while not is_locked(directory):
        try:
            ended = os.waitpid(pid, os.WNOHANG)[0] == pid
        except ChildProcessError:
            ended = True
        if ended or time.monotonic() > deadline:
            said = log_path.read_text(errors="replace")[-2000:] if log_path.exists() else ""
            why = "ended at once" if ended else f"did not start within {_SUPERVISOR_START_TIMEOUT_S:.0f} s"
            raise SubmissionError(f"the supervisor {why}: {said or 'it said nothing'}")
        time.sleep(0.02)
    _note(directory, attempt=attempt, pid=pid)
    return str(pid)


def _start_on_slurm(submission: Submission, layout: Layout, attempt: int, client: SlurmClient) -> str:
    directory = submission.directory
    write_launch_files(submission.plan, layout, directory)
    own = own_jobs_of_plan(submission.plan, directory)
    job_id = submit_once(client, [], directory.sbatch_path, is_it=is_head_of(own))
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
    """What this submission would hand to sbatch; None for a local trial."""
    if submission.layout is None:
        return None
    return os.fsencode(render_script(submission.plan, submission.layout, submission.directory))


def write_launch_files(plan: RunPlan, layout: Layout, directory: TrialDirectory) -> None:
    """What the job and its supervisor read: layout.json, trial.sbatch, holder.sbatch."""
    script = render_script(plan, layout, directory)
    atomic_write(directory.layout_path, layout.to_json())
    atomic_write(directory.sbatch_path, os.fsencode(script), mode=0o700)
    atomic_write(holder_path(directory), os.fsencode(render_holder(directory)), mode=0o700)


def _identity(experiment: Experiment, directory: TrialDirectory, *, trial: str) -> TrialIdentity:
    """Who the trial is: no two plans ever have the same uuid, whatever their names."""
    return TrialIdentity(experiment=experiment.name, trial=trial, uuid=uuid4().hex, directory=directory.path)


def _trial_name(wanted: str | None, experiment_directory: Path) -> str:
    if wanted is None:
        return next_trial_name(experiment_directory)
    try:
        return validate_name(wanted, what="trial name")
    except ValueError as error:
        raise ConfigError.of(str(error), shown=f"-n {wanted!r}") from error


def _check_fileroot(fileroot: Path, directory: TrialDirectory) -> None:
    path, shown = ("cluster", "fileroot"), shorten(str(fileroot))
    try:
        check_plain_text(str(directory.path), what="the trial's folder")
        str(directory.path).encode()
    except ValueError as error:
        raise ConfigError.of(str(error), hint="use a folder with a plain name", path=path, shown=shown) from error
    existing = next(parent for parent in (fileroot, *fileroot.parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError.of(
            f"trials cannot be written below {fileroot}: {existing} is not a writable folder",
            hint="set cluster.fileroot or $CORRAL_FILEROOT to a folder of yours that every node sees",
            path=path,
            shown=shown,
        )


def _check_resources(
    plan: RunPlan,
    directory: TrialDirectory,
    client: SlurmClient | None,
    source: ConfigSource = NO_SOURCE,
    *,
    has_checks: bool,
) -> tuple[Layout | None, tuple[str, ...], tuple[str, ...]]:
    """Layout, checks and warnings."""
    if plan.mode == "slurm":
        preflight = check_on_slurm(plan, directory, client or SlurmClient(), source=source, has_checks=has_checks)
        return preflight.layout, preflight.checks, preflight.warnings
    gpus_wanted: dict[str, int] = {
        kind: sum(group.scheduling_of(index).gpu for index in range(group.total_count))
        for kind, group in plan.scheduling.items()
    }
    try:
        share_gpus(gpus_wanted, visible_gpus())
    except ValueError as error:
        raise ConfigError.of(str(error)) from error
    gpus = f"GPUs ok ({sum(gpus_wanted.values())} of {len(visible_gpus())})"
    contained = [kind for kind, group in plan.scheduling.items() if group.scheduling.container_image]
    ignored = f"container_image has no effect with --local ({', '.join(contained)}): workers run in this environment"
    return None, (gpus, "output folder writable"), (ignored,) if contained else ()


def _refuse_queued(name: str, own: OwnJobs, client: SlurmClient) -> None:
    try:
        jobs = client.queue()
    except SlurmError as error:
        raise SubmissionError(f"cannot tell whether trial {name} still runs: {error}") from error
    for job, _ in own.select(jobs):
        if is_active(job.state):
            raise SubmissionError(f"trial {name} is still job {job.job_id} ({job.state}); rl-stop {name} first")


def _config_text(plan: RunPlan) -> bytes:
    # Not at the top: only a submission writes YAML.
    import yaml

    return yaml.safe_dump(plan.config, sort_keys=False, allow_unicode=True).encode()
