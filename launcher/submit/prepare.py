"""From an experiment file to a submission that can start: checks everything, and writes nothing.

experiment.yaml --load_with_source--> Experiment --make_run_plan--> RunPlan --checks--> Submission
a trial that has ended --its plan, its log--> Submission of the next attempt, on other ranks if so asked for

What a trial was planned with: tasks of its environment among its files; and whether all of it is still the same.

submission ──listed_rows──► tasks.jsonl, held-out-tasks.jsonl ──kept_rows──► a resume with other ranks: listed once
resume ──check_inputs──► data sets and models as workers check them
resume ──changed_environment──► what is installed now, beside what the plan says of it

A trial goes on with other ranks: what a resume may change of a plan, and what must be as it was.

config.yaml, as the user wrote it --still gives--> the settings of plan.json
            + another allocation  --is planned----> RunPlan of the same trial

A checkpoint is that of the whole model, and samples belong to rollout workers, whose number therefore stays. All else
that follows from the allocation follows from the new one, which is why config.yaml holds nothing that was filled in.
"""

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

from corral.experiments.config.base import parts_of
from corral.experiments.config.control import KEPT_COMMITS
from corral.experiments.config.model import TrainedModelConfig
from corral.experiments.datasets.dataset import Dataset
from corral.experiments.errors import NO_SOURCE, ConfigError, ConfigProblem, ConfigSource, located
from corral.experiments.exit_codes import UserError
from corral.experiments.experiment import Experiment
from corral.experiments.inputs.environment_tasks import find_environment
from corral.experiments.inputs.parameters import count_parameters
from corral.experiments.inputs.users_process import importing_from
from corral.experiments.loading.profile import find_profiles
from corral.experiments.plan import RunPlan, TrialIdentity, check_models, make_run_plan
from corral.experiments.registry import load_with_source
from corral.experiments.trial.attempts import last_attempt, read_end
from corral.experiments.trial.directory import TrialDirectory, next_trial_name
from corral.experiments.trial.log import TrialLog, read_whole_log
from corral.experiments.trial.log_state import CorruptLogError
from corral.experiments.trial.mode import Mode, has_jobs
from corral.experiments.worker_specs import DatasetSpec, RolloutWorkerSpec
from corral.launcher.files.patience import wait_until
from corral.launcher.runners.runner import share_gpus, visible_gpus, wanted_gpus
from corral.launcher.slurm.client import SlurmError
from corral.launcher.slurm.cluster import SlurmCluster
from corral.launcher.slurm.own_jobs import OwnJobs
from corral.launcher.submit.asks import raise_problems
from corral.launcher.submit.preflight import ClusterShape, Preflight, check_on_shape, check_on_slurm
from corral.launcher.submit.users_code import KeptCode, look_again, look_at_code
from corral.launcher.trial.lock import LEAVING_TIMEOUT_S, is_locked
from corral.launcher.trial.view import TrialFacts, default_fileroot
from corral.scheduling.errors import message_and_hint
from corral.scheduling.slurm_formats import check_plain_text

_LOG_PATIENCE_S = 10.0  # listing the folder of the log makes most file systems show what is in it


class SubmissionError(UserError):
    """The trial could not be started, for a reason outside of its configuration."""


class NameTakenError(SubmissionError):
    """Somebody else has made a trial of this name in the meantime."""


class AlreadyCompleteError(SubmissionError):
    """There is nothing left to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission(Preflight):
    """A checked trial that can be started."""

    plan: RunPlan
    directory: TrialDirectory
    code: KeptCode = KeptCode()
    """The user's own."""
    has_default_name: bool = False
    """Whether nobody chose the trial's name."""
    profiles: tuple[Path, ...] = ()
    """Profiles beneath the experiment file, the weakest first."""
    written: Mapping[str, Any] = field(default_factory=dict)
    """What config.yaml is to say; empty where it stays as it is."""
    listed_rows: Mapping[Path, bytes] = field(default_factory=dict)
    """What datasets of the trial's own are to hold."""


def prepare(
    experiment_file: Path,
    overrides: Sequence[str],
    *,
    trial_name: str | None,
    mode: Mode,
    profile: str | None = None,
    sbatch_arguments: Sequence[str] = (),
    has_checks: bool = True,
    shape: ClusterShape | None = None,
    has_place: bool = True,
    code: KeptCode | None = None,
) -> Submission:
    """Reads and checks everything; writes nothing.

    Args:
        overrides: `key.path=value`, over the file's.
        trial_name: None is the file's, else the next free one.
        profile: name or path of a profile beneath the file, over those of the site and the user.
        sbatch_arguments: added to `launch.extra_sbatch_arguments`.
        has_checks: whether the cluster is compared with the trial.
        shape: a cluster to plan for that need not be there, for a trial that is only looked at.
        has_place: whether it is planned where it would run; without, neither a cluster nor this machine is asked.
        code: of the user's own, which has been tried for another name of the trial; None to try it.

    Raises:
        ConfigError: with every mistake that was found.
        SlurmError: if the cluster cannot be asked.
    """
    loaded = load_with_source(
        experiment_file,
        overrides,
        profiles=find_profiles(profile),
        sbatch_arguments=sbatch_arguments,
        is_to_run=shape is None and has_place,
    )
    experiment = loaded.experiment
    fileroot = (experiment.cluster.fileroot or default_fileroot()).absolute()
    trial = next_trial_name(fileroot / experiment.name) if trial_name is None else trial_name
    try:
        directory = TrialDirectory.of(fileroot, experiment=experiment.name, trial=trial)
    except ValueError as error:
        raise ConfigError.of(str(error), shown=f"-n {trial!r}") from error
    if trial_name is not None and directory.path.exists():
        raise ConfigError.of(
            f"trial {experiment.name}/{trial} exists already: {directory.path}",
            hint=f"choose another name with -n, or continue it with rl-submit --resume {experiment.name}/{trial}",
        )
    with located(loaded.source, experiment):
        short_of_room = _check_fileroot(fileroot, directory, experiment)
        # No two plans ever have the same uuid, whatever their names.
        identity = TrialIdentity(experiment=experiment.name, trial=trial, uuid=uuid4().hex, directory=directory.path)
        plan = make_run_plan(experiment, identity, mode)
        # On an imagined cluster nothing will run.
        if code is None:
            code = look_at_code(plan, tries=has_checks) if shape is None else KeptCode()
        plan = code.in_plan(plan)
        if shape is not None:
            plan = shape.in_plan(plan)
            found = check_on_shape(plan, shape)
        elif not has_place:
            found = Preflight(layout=None, checks=("no cluster asked",), warnings=())
        else:
            found = _CHECK_BY_MODE[mode](plan, directory, source=loaded.source, has_checks=has_checks)
    return Submission(
        plan=plan,
        directory=directory,
        warnings=(*short_of_room, *experiment.find_warnings(), *_unread_outputs(plan), *code.warnings, *found.warnings),
        checks=(*code.checks, *found.checks),
        layout=found.layout,
        code=code,
        has_default_name=trial_name is None,
        profiles=loaded.source.profiles,
        written=loaded.written,
        listed_rows=listed_rows(experiment, directory),
    )


def prepare_resume(facts: TrialFacts, *, allocation: str | None = None, has_checks: bool = True) -> Submission:
    """Checks that a trial can go on from its last commit.

    Args:
        allocation: another one than the trial has had; None for the same.

    Raises:
        AlreadyCompleteError: if it is done.
        SubmissionError: if it still runs, or has a damaged trial log.
        ConfigError: if its plan does not fit the machine any more, or the allocation not the experiment.
    """
    directory = facts.directory
    try:
        plan = RunPlan.from_json(directory.plan_path.read_bytes())
        refuse_living(plan, directory)
        log = read_whole_log(directory, TrialLog(directory.log_path), patience_s=_LOG_PATIENCE_S)
    except (ValueError, CorruptLogError) as error:
        raise SubmissionError(f"trial {facts.name} cannot be resumed: {error}") from error
    if log.is_done:
        raise AlreadyCompleteError(f"trial {facts.name} is complete; there is nothing to resume")
    code = look_again(plan, directory)
    plan = code.in_plan(plan)
    check_inputs(plan)
    changed = changed_environment(plan)
    written: Mapping[str, Any] = {}
    if allocation is not None:
        with importing_from(directory.code_path):
            plan, written = reallocated(plan, directory, allocation)
        plan = code.in_plan(plan)
    with located(NO_SOURCE, plan.config):
        found = _CHECK_BY_MODE[plan.mode](plan, directory, has_checks=has_checks)
    return Submission(
        plan=plan,
        directory=directory,
        warnings=(*code.warnings, *changed, *found.warnings),
        checks=(*code.checks, *found.checks),
        layout=found.layout,
        code=code,
        written=written,
    )


_CHECKPOINT_BYTES = 12  # of a parameter: its float32 value, and two moments of the optimizer


def _unread_outputs(plan: RunPlan) -> Iterator[str]:
    """Calls that nobody needs: their work costs time in every step, and changes nothing."""
    read = {key for call in plan.master.calls for key in call.input_keys}
    for call in plan.master.calls:
        if call.output_keys and read.isdisjoint(call.output_keys):
            yield (
                f"call {call.name} makes {', '.join(call.output_keys)}, and no call reads that; leave the call out, or "
                "declare the key as an input of what shall read it (docs/customize.md)"
            )


def refuse_living(plan: RunPlan, directory: TrialDirectory) -> None:
    """SubmissionError if something of the trial still runs, or is going to."""
    name = f"{plan.trial.experiment}/{plan.trial.trial}"
    if _still_runs(directory):
        raise SubmissionError(f"trial {name} still runs; rl-status {name} shows it")
    if has_jobs(plan.mode):
        try:
            jobs = SlurmCluster().jobs()
        except SlurmError as error:
            raise SubmissionError(f"cannot tell whether trial {name} still runs: {error}") from error
        for job, _ in OwnJobs(directory, plan.trial).select(jobs):
            if job.is_active:
                raise SubmissionError(f"trial {name} is still job {job.job_id} ({job.word}); rl-stop {name} first")


def _still_runs(directory: TrialDirectory) -> bool:
    """Whether a supervisor has the trial; one that has recorded the end gets a moment to leave."""
    attempt = last_attempt(directory)
    end = read_end(directory, attempt.attempt) if attempt is not None else None
    has_ended = end is not None and end.is_final
    return not wait_until(lambda: not is_locked(directory), timeout_s=LEAVING_TIMEOUT_S if has_ended else 0.0)


def _check_fileroot(fileroot: Path, directory: TrialDirectory, experiment: Experiment) -> tuple[str, ...]:
    """Warnings about a disk that is too small for the checkpoints; a ConfigError where nothing can be written."""
    path = ("cluster", "fileroot")
    try:
        check_plain_text(str(directory.path), what="the trial's folder")
        str(directory.path).encode()
    except ValueError as error:
        raise ConfigError.of(str(error), hint="use a folder with a plain name", path=path) from error
    existing = next(parent for parent in (fileroot, *fileroot.parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError.of(
            f"trials cannot be written below {fileroot}: {existing} is not a writable folder",
            hint="set cluster.fileroot or $CORRAL_FILEROOT to a folder of yours that every node sees",
            path=path,
        )
    free = shutil.disk_usage(existing).free
    if not free:
        hint = "set cluster.fileroot or $CORRAL_FILEROOT to a folder on another file system"
        raise ConfigError.of(
            f"trials cannot be written below {fileroot}: its file system has no room", hint=hint, path=path
        )
    trained = [model for model in experiment.models.values() if isinstance(model, TrainedModelConfig)]
    counts = [count.trained for model in trained if (count := count_parameters(model, head="lm")) is not None]
    needed = _CHECKPOINT_BYTES * sum(counts) * (KEPT_COMMITS + 1)
    if needed <= free:
        return ()
    return (
        f"checkpoints need about {needed / 1e9:.3g} GB ({KEPT_COMMITS} that are kept and the next one, "
        f"{_CHECKPOINT_BYTES} bytes per trained parameter), and {existing} has {free / 1e9:.3g} GB free: training "
        "waits for room there",
    )


def _check_here(
    plan: RunPlan, directory: TrialDirectory, *, source: ConfigSource = NO_SOURCE, has_checks: bool = True
) -> Preflight:
    """What a trial needs of this machine. There is nothing that could be left unchecked."""
    raise_problems(ConfigError, list(_too_large(plan, source)))
    wanted = wanted_gpus(plan)
    try:
        share_gpus(wanted, visible_gpus())
    except ValueError as error:
        raise ConfigError.of(str(error)) from error
    gpus = f"GPUs ok ({sum(wanted.values())} of {len(visible_gpus())})"
    contained = [kind for kind, group in plan.scheduling.items() if group.scheduling.container_image]
    ignored = f"container_image has no effect with --local ({', '.join(contained)}): workers run in this environment"
    return Preflight(layout=None, checks=(gpus, "output folder writable"), warnings=(ignored,) if contained else ())


def _too_large(plan: RunPlan, source: ConfigSource) -> Iterator[ConfigProblem]:
    """What the experiment asks for a single worker and this machine does not have; defaults are made for clusters."""
    cpus, mem_mb = os.cpu_count() or 1, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20
    for kind, group in plan.scheduling.items():
        wanted, path = group.scheduling, ("groups", kind, "scheduling")
        if wanted.cpu > cpus and source.gives((*path, "cpu")):
            text = f"a {kind} asks for {wanted.cpu} CPUs, and this machine has {cpus}"
            yield ConfigProblem(text, f"ask for at most {cpus}, or leave out --local", path=(*path, "cpu"))
        if wanted.mem > mem_mb and source.gives((*path, "mem")):
            text = f"a {kind} asks for {wanted.mem:,} MB of memory, and this machine has {mem_mb:,} MB"
            yield ConfigProblem(text, f"ask for at most {mem_mb}, or leave out --local", path=(*path, "mem"))


_CHECK_BY_MODE = {"local": _check_here, "slurm": check_on_slurm}


def listed_rows(experiment: Experiment, directory: TrialDirectory) -> Mapping[Path, bytes]:
    """What is to be written of tasks, by where."""
    return {_path_of(key, directory): rows for key, rows in experiment.listed_rows.items()}


def kept_rows(directory: TrialDirectory) -> Iterator[str]:
    """Overrides by which the tasks of a trial are those that it began with."""
    for key in ("dataset", "evaluation.dataset"):
        if (path := _path_of(key, directory)).exists():
            yield f"{key}.path={path}"


def _path_of(key: str, directory: TrialDirectory) -> Path:
    return directory.tasks_path if key == "dataset" else directory.held_out_tasks_path


def check_inputs(plan: RunPlan) -> None:
    """Checks what workers check when they start: that data sets are what they were, and models are there.

    Raises:
        ConfigError: with the words of the workers.
    """
    problems = []
    specs = {str(spec.sources): spec for spec in parts_of(plan.workers, DatasetSpec)}
    for spec in specs.values():
        try:
            Dataset.planned(spec)
        except (OSError, ValueError) as error:
            problems.append(ConfigProblem(*message_and_hint(error)))
    try:
        check_models(plan.workers)
    except ValueError as error:
        problems.append(ConfigProblem(*message_and_hint(error)))
    if problems:
        raise ConfigError(problems)


def changed_environment(plan: RunPlan) -> tuple[str, ...]:
    """A warning if what is installed is not what the trial began with.

    Raises:
        ConfigError: if it cannot be loaded any more.
    """
    workers = plan.all_of(RolloutWorkerSpec)
    if not workers or (spec := workers[0].environment) is None or (config := workers[0].rollout.environment) is None:
        return ()
    try:
        found = find_environment(config)
    except ValueError as error:
        message, hint = message_and_hint(error)
        raise ConfigError.of(message, hint=hint, path=("rollout", "environment", "id")) from error
    if found.sha256 == spec.sha256 and dict(found.packages) == spec.packages:
        return ()
    return (
        f"environment {config.id} is not what the trial began with: {_shown_versions(spec.packages)} then, "
        f"{_shown_versions(found.packages)} now; its tasks stay those of {plan.trial.directory.name}/tasks.jsonl",
    )


def _shown_versions(packages: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in sorted(packages.items()))


_FOLLOWING: Final = ("model_worker", "generation_server")
"""Groups whose count the allocation says; one that was written beside it said the same once."""


def reallocated(plan: RunPlan, directory: TrialDirectory, allocation: str) -> tuple[RunPlan, Mapping[str, Any]]:
    """The trial's plan with another allocation, and what config.yaml is to say then.

    What is in the spool of a rollout worker that there is no longer is generated again.

    Args:
        allocation: as the experiment file would have it.

    Raises:
        ConfigError: if it does not fit the experiment, or the trial's files are not what it was planned from.
    """
    kept = kept_rows(directory)
    before = load_with_source(directory.config_path, [f"allocation={plan.config['allocation']}", *kept])
    if differing := _changed_keys(plan.config, before.experiment.placed_in(directory.path).model_dump(mode="json")):
        raise ConfigError.of(
            f"{directory.config_path} is not what the trial was planned from: {', '.join(differing[:3])} differs",
            hint="put the file back; a trial goes on with other ranks, and with no other settings",
        )
    follow = [f"groups.{kind}.count=null" for kind in _FOLLOWING if kind in before.written.get("groups", {})]
    loaded = load_with_source(directory.config_path, [f"allocation={allocation}", *follow, *kept])
    with located(loaded.source):
        changed = make_run_plan(loaded.experiment, plan.trial, plan.mode)
    return changed, loaded.written


def _changed_keys(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
