"""From what a user types to a trial directory: a trial's name, experiment/trial, or a path.

{fileroot}/{experiment}/{trial}/plan.json      fileroot is --fileroot, else $CORRAL_FILEROOT, else ~/corral
"""

import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from corral.experiments.errors import did_you_mean
from corral.experiments.exit_codes import CommandExit, UserError
from corral.experiments.trial.directory import TrialDirectory, list_names, validate_name
from corral.scheduling.worker_information import planned_workers

_NODE_LOCAL = tuple(Path(folder) for folder in ("/tmp", "/var/tmp", "/dev/shm", "/run"))


class TrialNotFoundError(UserError):
    """No trial is meant by that, or more than one."""

    exit_code = CommandExit.NOT_FOUND


class PlanDamagedError(UserError):
    """The trial is there, and its plan cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialFacts:
    """What plan.json says about a trial, read without the schema: rl-status shows many trials in no time."""

    directory: TrialDirectory
    experiment: str
    trial: str
    uuid: str
    mode: str
    total_steps: int | None
    workers: tuple[str, ...]
    setup_timeout_s: float
    stop_grace_s: float
    healthy_after_s: float
    planned_path: Path | None = None
    """Where its folder was when it was submitted, and where its workers look for it."""
    trackers: tuple[str, ...] = ()
    """What its numbers go to, which the supervisor calls tracker/0, tracker/1, ..."""

    @property
    def name(self) -> str:
        """experiment/trial."""
        return f"{self.experiment}/{self.trial}"

    @property
    def tasks(self) -> list[str]:
        """Workers, and trackers as the supervisor calls them."""
        return [*self.workers, *(f"tracker/{index}" for index in range(len(self.trackers)))]


def default_fileroot() -> Path:
    """Where trials are, unless an experiment or --fileroot says otherwise."""
    configured = os.environ.get("CORRAL_FILEROOT")
    return Path(os.path.expanduser(configured)) if configured else Path.home() / "corral"


def node_local_folder(directory: Path) -> Path | None:
    """The folder above this one that every node usually has for itself; None if there is none."""
    real = Path(os.path.realpath(directory))
    return next((folder for folder in _NODE_LOCAL if real.is_relative_to(folder)), None)


def find_trial(argument: str, fileroot: Path) -> TrialFacts:
    """The one trial that is meant.

    Raises:
        TrialNotFoundError: with the candidates.
        PlanDamagedError: if it is there, and its plan cannot be read.
    """
    as_path = Path(os.path.expanduser(argument))
    if as_path.is_absolute() or argument.startswith((".", "~")) or (as_path / "plan.json").is_file():
        facts = load_facts(TrialDirectory(Path(os.path.realpath(as_path))))
        if facts is None:
            raise TrialNotFoundError(f"{as_path} is no trial directory: it has no plan.json")
        return facts
    # Names are folder names, so the trial is found without reading the others.
    exact = [facts for path in _paths_of(argument, fileroot) if (facts := load_facts(TrialDirectory(path)))]
    if len(exact) == 1:
        return exact[0]
    if exact:
        names = ", ".join(one.name for one in exact)
        raise TrialNotFoundError(f"{argument!r} is the name of {len(exact)} trials: {names}; write experiment/trial")
    there = [plan.parent for plan in fileroot.glob("*/*/plan.json")]
    known = [f"{path.parent.name}/{path.name}" for path in there] + [path.name for path in there]
    hint = did_you_mean(argument, known, f"rl-status lists those that are there ({len(there)})")
    raise TrialNotFoundError(f"no trial {argument!r} below {fileroot}; {hint}")


def _paths_of(argument: str, fileroot: Path) -> list[Path]:
    try:
        parts = [validate_name(part) for part in argument.split("/")]
    except ValueError:
        return []
    if len(parts) == 1:
        folders = (fileroot / experiment / argument for experiment in list_names(fileroot))
        return [path for path in folders if path.is_dir()]
    return [fileroot / argument] if len(parts) == 2 else []


def read_facts(directory: TrialDirectory) -> TrialFacts | None:
    """What the plan says, or None if there is no plan (yet), or none that can be read."""
    try:
        return load_facts(directory)
    except (PlanDamagedError, PermissionError):
        return None


def load_facts(directory: TrialDirectory) -> TrialFacts | None:
    """What the plan says, or None if there is no plan (yet).

    Raises:
        PlanDamagedError: if there is one, and it is not what rl-submit writes.
        PermissionError: if it is somebody else's.
    """
    try:
        data = directory.plan_path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        plan = msgspec.json.decode(data)
        return TrialFacts(
            directory=directory,
            experiment=plan["trial"]["experiment"],
            trial=plan["trial"]["trial"],
            uuid=plan["trial"]["uuid"],
            mode=plan["mode"],
            total_steps=next((worker["total_steps"] for worker in plan["workers"] if "total_steps" in worker), None),
            workers=tuple(planned_workers(plan["workers"])),
            setup_timeout_s=float(plan["supervision"]["setup_timeout_s"]),
            stop_grace_s=float(plan["supervision"]["stop_grace_s"]),
            healthy_after_s=float(plan["supervision"]["healthy_after_s"]),
            planned_path=Path(plan["trial"]["directory"]),
            trackers=tuple(plan.get("tracking", {}).get("to", ())),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise PlanDamagedError(
            f"{directory.plan_path} is damaged ({error}): put the file back from a backup. Without one, end what still "
            f"runs of the trial with scancel or kill, and submit {directory.config_path} as a new trial; its model may "
            f"be the weights of a checkpoint in {directory.checkpoints_path}"
        ) from error
