"""RunPlan: the frozen result of an experiment file, written as plan.json at submission and read by everybody.

experiment.yaml --load_experiment--> Experiment --make_run_plan--> RunPlan --plan.json--> supervisor, workers, rl-status

Nobody re-runs user code to find out its configuration: each worker finds its complete, typed specification here. What
workers of a kind have in common stands in plan.json once, with their numbers beside it: every process of a trial reads
the whole file, which therefore grows with the kinds of workers and not with how many there are.
"""

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

from pydantic import Field

from corral.experiments.config.base import FrozenConfig, parts_of
from corral.experiments.config.cluster import ClusterConfig, LaunchConfig, SupervisionConfig
from corral.experiments.config.model import ModelConfig
from corral.experiments.config.tracking import TrackingConfig
from corral.experiments.errors import ChangedInputError
from corral.experiments.inputs.model_directory import read_config
from corral.experiments.trial.mode import Mode
from corral.experiments.worker_specs import (
    GenerationServerSpec,
    MasterWorkerSpec,
    ModelRoleSpec,
    ModelWorkerSpec,
    WorkerSpec,
)
from corral.scheduling.errors import RuleError
from corral.scheduling.model_function_call import ModelName
from corral.scheduling.scheduling import ExperimentScheduling
from corral.scheduling.worker_information import NUMBERS, fold_numbers, unfold_numbers

if TYPE_CHECKING:
    from corral.experiments.experiment import Experiment

W = TypeVar("W")

SCHEMA_VERSION: Final = 13
"""Rises whenever a plan, or the checkpoints that a trial of it keeps, mean something else than before."""


class TrialIdentity(FrozenConfig):
    """Which run of which experiment this is."""

    experiment: str
    """Name of the experiment."""
    trial: str
    """Name of the trial; experiment and trial together name its folder."""
    uuid: str = Field(pattern=r"^[0-9a-f]{32}$")
    """What every message, key and log entry of the trial carries; names may be used again, this is not."""
    directory: Path
    """The trial directory."""


class RunPlan(FrozenConfig):
    """Everything that a trial's processes need to know."""

    schema_version: Literal[13] = SCHEMA_VERSION
    trial: TrialIdentity
    mode: Mode
    """Where the workers run."""
    seed: int
    """Every random choice of the trial follows from it."""
    config: dict[str, Any]
    """The experiment file with defaults and overrides applied, for people."""
    cluster: ClusterConfig
    launch: LaunchConfig
    supervision: SupervisionConfig
    tracking: TrackingConfig = TrackingConfig()
    scheduling: ExperimentScheduling
    workers: list[WorkerSpec]
    code: dict[str, str] = {}
    """SHA-256 of the files of the user's own code that the trial keeps, by their names below its folder `code`."""
    packages: dict[str, str] = {}
    """Versions of the installed packages that this code loaded when the trial was submitted."""

    def to_json(self) -> bytes:
        """The text of plan.json, with the digest of everything else in it."""
        content = self._content()
        return json.dumps({"digest": _digest(content), **content}, indent=1).encode()

    @classmethod
    def from_json(cls, text: bytes) -> "RunPlan":
        """Read plan.json.

        Raises:
            ValueError: if the digest does not match: the file was changed after submission; or if another version of
                corral has written it, whose trials this one cannot carry on.
        """
        content = json.loads(text)
        if not isinstance(content, dict):
            raise RuleError("plan.json does not hold a plan (no JSON object)", "submit the trial again")
        digest = content.pop("digest", None)
        if digest != _digest(content):
            raise RuleError(
                f"plan.json was changed after submission (digest {digest!r}, content {_digest(content)!r})",
                "submit a new trial instead of editing a plan",
            )
        if content.get("schema_version") != SCHEMA_VERSION:
            raise RuleError(
                f"plan.json was written by another version of corral (plans of form {content.get('schema_version')}, "
                f"this one reads form {SCHEMA_VERSION})",
                "go on with that version, or submit a new trial that starts from this one's exports",
            )
        groups = content["workers"]
        numbers = [unfold_numbers(group.pop(NUMBERS)) for group in groups]
        plan = cls.model_validate({**content, "workers": [{**group, "index": 0} for group in groups]})
        kinds = {worker.kind: place for place, worker in reversed(list(enumerate(plan.workers)))}
        workers = [
            worker.model_copy(update={"index": index})
            for worker, indices in zip(plan.workers, numbers, strict=True)
            for index in indices
        ]
        return plan.model_copy(
            update={"workers": sorted(workers, key=lambda worker: (kinds[worker.kind], worker.index))}
        )

    def _content(self) -> dict[str, Any]:
        """The plan as data, each specification once for all workers that have it."""
        groups: list[tuple[WorkerSpec, list[int]]] = []
        for worker in self.workers:
            shared = worker.model_copy(update={"index": 0})
            numbers = next((numbers for spec, numbers in groups if spec == shared), None)
            if numbers is None:
                groups.append((shared, numbers := []))
            numbers.append(worker.index)
        return {
            **self.model_dump(mode="json", exclude={"workers"}),
            "workers": [
                {NUMBERS: fold_numbers(numbers), **spec.model_dump(mode="json", exclude={"index"})}
                for spec, numbers in groups
            ],
        }

    @property
    def digest(self) -> str:
        """SHA-256 of the plan, hexadecimal."""
        return _digest(self._content())

    @property
    def master(self) -> MasterWorkerSpec:
        """The specification of the master worker."""
        if masters := self.all_of(MasterWorkerSpec):
            return masters[0]
        raise RuleError("the plan has no master_worker", "submit the trial again")

    @property
    def roles(self) -> dict[ModelName, ModelRoleSpec]:
        """Every model that is held, whichever rank holds a part of it."""
        return {role.model_name: role for worker in self.all_of(ModelWorkerSpec) for role in worker.roles}

    def all_of(self, kind: type[W]) -> list[W]:
        """The specifications of all workers of one kind."""
        return [worker for worker in self.workers if isinstance(worker, kind)]

    @property
    def total_steps(self) -> int:
        """Train steps of the whole run."""
        return self.master.total_steps

    def worker(self, kind: str, index: int) -> WorkerSpec:
        """The specification of one worker; ValueError if the plan has no such worker."""
        for worker in self.workers:
            if worker.kind == kind and worker.index == index:
                return worker
        have = ", ".join(f"{worker.kind}/{worker.index}" for worker in self.workers)
        raise RuleError(f"the plan has no worker {kind}/{index}", f"it has {have}")


def make_run_plan(experiment: "Experiment", trial_identity: TrialIdentity, mode: Mode) -> RunPlan:
    """Resolve an experiment into the plan of one trial.

    The datasets are read here once more, so that the plan holds the digest of what the workers will find.

    Raises:
        ConfigError: if the experiment cannot be resolved: its calls do not fit each other, or a file has vanished since
            it was loaded.
    """
    # What reads and checks inputs: only who submits needs it, and every process of a trial reads a plan.
    from corral.experiments.inputs.users_class import naming_users_line
    from corral.experiments.specs import worker_specs

    experiment = experiment.placed_in(trial_identity.directory)
    with naming_users_line(type(experiment), path=("experiment",), shown=experiment.experiment):
        scheduling, workers = experiment.scheduling_setup(), worker_specs(experiment)
    return RunPlan(
        trial=trial_identity,
        mode=mode,
        seed=experiment.seed,
        config=experiment.model_dump(mode="json"),
        cluster=experiment.cluster,
        launch=experiment.launch,
        supervision=experiment.supervision,
        tracking=experiment.tracking,
        scheduling=scheduling,
        workers=workers,
    )


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def check_models(specifications: object) -> None:
    """Raises ChangedInputError if a model that these specifications begin with is not there any more."""
    paths = [model.path for model in parts_of(specifications, ModelConfig)]
    paths += [server.initial_weights for server in parts_of(specifications, GenerationServerSpec)]
    for path in dict.fromkeys(paths):
        if read_config(path) is None:
            raise ChangedInputError(
                f"model {path} cannot be read any more: it has no config.json",
                "put the old folder back, or submit a new trial",
            )
