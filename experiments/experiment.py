"""Experiment: an experiment file -> the workers and calls that run, and their data.

    experiment.yaml ──► Experiment ──scheduling_setup()──► ExperimentScheduling    counts and resources per worker kind
                          │   └─────specs.py─────────────► every worker's spec     the graph among it
                          └─────────registry.py──────────► what is wrong with it

Subclasses (row_experiment.py, async_ppo.py) say which model function calls there are and which workers run them.
"""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, PrivateAttr, field_validator

from corral.experiments.checks.data import (
    CheckedDataset,
    check_dataset,
    dataset_warnings,
)
from corral.experiments.checks.generation import check_allocation
from corral.experiments.checks.training import dtype_warnings
from corral.experiments.config.base import FrozenConfig
from corral.experiments.config.cluster import (
    ClusterConfig,
    GroupConfig,
    LaunchConfig,
    SupervisionConfig,
)
from corral.experiments.config.control import TrainControl
from corral.experiments.config.data import HELD_OUT_ANSWERS, DatasetConfig, EvaluationConfig, RowKind
from corral.experiments.config.model import ModelConfig, TrainedModelConfig
from corral.experiments.config.tracking import TrackingConfig
from corral.experiments.datasets.dataset import Dataset
from corral.experiments.errors import ConfigError, ConfigProblem
from corral.experiments.host_memory import BESIDE_MB, copied_mb, memory_warning
from corral.experiments.inputs.located_rows import locate_rows
from corral.experiments.inputs.users_code import Declared, users_paths
from corral.experiments.inputs.users_process import ask_keys
from corral.experiments.prompts.length_limits import LengthLimits
from corral.experiments.trial.directory import validate_name
from corral.experiments.worker_specs import (
    DatasetSpec,
    Head,
    ModelRoleSpec,
    WorkerSpec,
)
from corral.scheduling.allocation import Allocation, parse_allocation
from corral.scheduling.dataflow import DataflowGraph, build_dataflow
from corral.scheduling.errors import RuleError
from corral.scheduling.keys import Key
from corral.scheduling.model_function_call import (
    CallType,
    ModelFunctionCall,
    ModelName,
    OffloadHook,
    PostHook,
    PublishWeightsHook,
)
from corral.scheduling.parallel import Mesh
from corral.scheduling.scheduling import ElasticTasks, ExperimentScheduling, Scheduling, TasksGroup, default_scheduling
from corral.scheduling.worker_information import WorkerKind

Name = Annotated[str, AfterValidator(validate_name)]


class Experiment(FrozenConfig):
    """The common part of all experiments."""

    experiment: str
    """Kind of the experiment: a name, or the import path of a class of your own."""
    name: Name
    """Name of the experiment; with the trial's name it makes the folder."""
    seed: int = Field(default=1, ge=0, lt=2**63)
    """Every random choice follows from it."""
    allocation: str
    """Engines that generate and train, each with its GPUs or processes: hf:d2+fsdp:d4."""
    train_batch_size: int = Field(default=64, ge=1)
    """Prompts (rows, where nothing is generated) that one train step consumes."""
    dataset: DatasetConfig
    """The training data."""
    evaluation: EvaluationConfig | None = None
    """Held-out rows; None trains without looking."""
    control: TrainControl = TrainControl()
    """How long to train, and what is written when."""
    groups: dict[WorkerKind, GroupConfig] = {}
    """Resources per kind of worker. Counts of the master, the manager, training ranks and generation servers follow from the allocation."""  # noqa: E501
    cluster: ClusterConfig = ClusterConfig()
    """Facts of the site."""
    launch: LaunchConfig = LaunchConfig()
    """How the trial is submitted to SLURM."""
    supervision: SupervisionConfig = SupervisionConfig()
    """Restart budgets and deadlines."""
    tracking: TrackingConfig = TrackingConfig()
    """Where its numbers go while it runs."""

    _declared: dict[str, Declared] = PrivateAttr(default_factory=dict)

    generates: ClassVar[bool] = False
    """Whether there is a generation side: servers, a manager and rollout workers."""
    heads: ClassVar[Mapping[str, Head]] = {"critic": "value", "reward": "scalar"}
    """The heads of some roles' models; all others are language models."""
    role_by_field: ClassVar[Mapping[str, str]] = {"model": "actor", "reward_model": "reward"}
    """Roles of the models in some fields; all others are called as their fields."""
    beside_first: ClassVar[frozenset[str]] = frozenset()
    """Roles whose models read the tokens of the first one's."""

    @property
    @abstractmethod
    def row_kind(self) -> RowKind:
        """The kind of the training rows."""

    @cached_property
    def models(self) -> dict[str, ModelConfig]:
        """The model of each role, first the one whose weights are published: of every field that holds one."""
        fields = {self.role_by_field.get(name, name): getattr(self, name) for name in type(self).model_fields}
        return {role: model for role, model in fields.items() if isinstance(model, ModelConfig)}

    def key_of(self, role: str) -> str:
        """The key of the file that describes the model of a role: the field that holds it."""
        model = self.models.get(role)
        return next((name for name in type(self).model_fields if model and getattr(self, name) is model), role)

    @cached_property
    def roles(self) -> tuple[str, ...]:
        """Roles of the models that are held."""
        return tuple(self.models)

    @property
    def first_model(self) -> ModelConfig:
        """The one whose weights are published."""
        return next(iter(self.models.values()))

    @property
    def trained(self) -> TrainedModelConfig:
        """The model whose weights are published.

        Raises:
            ValueError: if it is none that is trained.
        """
        role, model = next(iter(self.models.items()))
        if not isinstance(model, TrainedModelConfig):
            raise RuleError(
                f"the first of the models, {role!r}, is the one that is published, and nothing trains it",
                "declare its field a TrainedModelConfig, or put another one first",
            )
        return model

    @abstractmethod
    def length_limits(self) -> LengthLimits:
        """How long a row of the dataset may be."""

    def find_own_problems(self) -> Iterator[ConfigProblem]:
        """Mistakes that only this kind of experiment can have."""
        return iter(())

    @abstractmethod
    def calls(self) -> list[ModelFunctionCall]:
        """The model function calls of one step."""

    @property
    @abstractmethod
    def sample_keys(self) -> tuple[str, ...]:
        """The keys of samples before the first call of a step."""

    @cached_property
    def graph(self) -> DataflowGraph:
        """The calls, and who waits for whom."""
        return build_dataflow([*self.calls(), *self.evaluate_calls()], self.sample_keys)

    @field_validator("allocation")
    @classmethod
    def _is_an_allocation(cls, value: str) -> str:
        parse_allocation(value)
        return value

    @cached_property
    def parsed_allocation(self) -> Allocation:
        """The allocation string, read."""
        return parse_allocation(self.allocation)

    @cached_property
    def meshes(self) -> dict[str, Mesh]:
        """The ranks of each role."""
        return self.parsed_allocation.meshes(self.roles)

    @cached_property
    def num_training_ranks(self) -> int:
        return 1 + max(rank for mesh in self.meshes.values() for rank in mesh.ranks)

    @cached_property
    def allocation_problems(self) -> list[ConfigProblem]:
        """Parts of the allocation that this experiment or this version does not support."""
        return check_allocation(self.parsed_allocation, roles=self.roles, generates=self.generates)

    @property
    def known_meshes(self) -> Mapping[str, Mesh]:
        """The ranks of each role; none if the allocation is broken."""
        return {} if self.allocation_problems else self.meshes

    @property
    def expected_counts(self) -> dict[WorkerKind, int | None]:
        """Workers by kind; None where the user may choose."""
        counts: dict[WorkerKind, int | None] = {"master_worker": 1, "model_worker": self.num_training_ranks}
        if self.generates:
            counts["generation_server"] = self.parsed_allocation.num_generation_servers
            counts["gserver_manager"] = 1
            counts["rollout_worker"] = None
        return counts

    def num_workers(self, kind: WorkerKind) -> int:
        """Workers of one kind, elastic ones included."""
        group = self.scheduling_setup().get(kind)
        return group.total_count if group else 0

    def scheduling_setup(self) -> ExperimentScheduling:
        """Count and resources of every group."""
        return self._scheduling

    @cached_property
    def _scheduling(self) -> ExperimentScheduling:
        return ExperimentScheduling(**{kind: self._tasks_group(kind) for kind in self.expected_counts})

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy without what `cached_property` keeps here beside the fields, since other values follow from others."""
        copied = super().model_copy(update=update, deep=deep)
        for name in copied.__dict__.keys() - type(self).model_fields.keys():
            del copied.__dict__[name]
        return copied

    def default_scheduling(self, kind: WorkerKind) -> Scheduling:
        """The resources of a worker where the experiment does not set them."""
        default = default_scheduling(gpus_per_server=self.parsed_allocation.gpus_per_server)[kind]
        if kind != "model_worker":
            return default
        return default.model_copy(update={"mem": max(default.mem, self._copied_mb + BESIDE_MB)})

    @property
    def _copied_mb(self) -> int:
        """The most that a training rank copies for a commit."""
        if not self.control.commit_beside_training:
            return 0
        return copied_mb(self.models, self.known_meshes, heads=self.heads, published=self.roles[0])

    def _tasks_group(self, kind: WorkerKind) -> TasksGroup:
        """As the user says, else as the allocation says, else one per training rank."""
        group = self.groups.get(kind, GroupConfig())
        scheduling = group.scheduling or self.default_scheduling(kind)
        elastic = group.elastic
        return TasksGroup(
            count=group.count or self.expected_counts[kind] or self.num_training_ranks,
            scheduling=scheduling,
            elastic=ElasticTasks(count=elastic.count, scheduling=elastic.scheduling or scheduling) if elastic else None,
        )

    @cached_property
    def checked_dataset(self) -> CheckedDataset:
        """The result of the checks of the training data."""
        rows, limits = self.listed_rows.get("dataset"), self.length_limits()
        try:
            config = self.located_dataset
        except ConfigError as error:
            return CheckedDataset(num_rows=None, problems=list(error.problems))
        return check_dataset(config, ("dataset",), kind=self.row_kind, limits=limits, content=rows)

    @cached_property
    def located_dataset(self) -> DatasetConfig:
        """`dataset`, with the files that its rows are in.

        Raises:
            ConfigError: if there are none, or a function of the user's fails on a row.
        """
        return locate_rows(self.dataset, ("dataset",))

    @cached_property
    def located_evaluation(self) -> EvaluationConfig | None:
        """`evaluation`, with the files of its rows; raises the same."""
        if self.evaluation is None:
            return None
        rows = locate_rows(self.evaluation.dataset, ("evaluation", "dataset"))
        arguments = {"chat_template_kwargs": self.dataset.chat_template_kwargs}
        return self.evaluation.model_copy(update={"dataset": rows.model_copy(update=arguments)})

    @cached_property
    def answers_held_out(self) -> bool:
        """Whether held-out rows are problems with answers, and no conversations, as the first of them says."""
        if self.located_evaluation is None or self.row_kind != "conversations":
            return True
        try:
            rows = Dataset.open(self.located_evaluation.dataset, kind="conversations")
            first = next(iter(rows.values()), None)
        except ValueError:
            return True  # the checks of data say what is wrong
        return first is None or isinstance(first.answers[0], str)

    @property
    def held_out_kind(self) -> RowKind:
        """The kind of the held-out rows."""
        return self.row_kind

    @property
    def asks_for_rows(self) -> bool:
        """Whether `listed_rows` takes seconds."""
        return False

    @property
    def listed_rows(self) -> Mapping[str, bytes]:
        """Rows that no file has before the trial does, by the key of their dataset.

        Raises:
            ConfigError: if they cannot be had.
        """
        return {}

    def placed_in(self, directory: Path) -> Self:
        """The same, with the names of the files that its rows are in, or are going to be in the trial's directory."""
        return self._with_rows_in(dataset=self.located_dataset, evaluation=self.located_evaluation)

    def _with_rows_in(self, **datasets: DatasetConfig | EvaluationConfig | None) -> Self:
        """A copy that reads the same rows from other files, for which all that was computed holds: tasks, too."""
        return super().model_copy(update=datasets)

    @property
    def own_code(self) -> tuple[str, ...]:
        """Names of what may be the user's own and says which keys it reads and makes, beside the graph's interfaces."""
        return ()

    def declared(self, names: Iterable[str], *, interfaces: Iterable[str] = ()) -> Mapping[str, Declared]:
        """What each of them that is the user's own says of its keys; one process is asked, once.

        Raises:
            ConfigError: if one cannot be imported.
        """
        made = users_paths(interfaces)
        asked = users_paths([*names, *made])
        if missing := [path for path in asked if path not in self._declared]:
            ppo = getattr(self, "ppo", None)
            config = self.model_dump(mode="json")
            self._declared.update(ask_keys(missing, interfaces=made, ppo=ppo, config=config))
        return {path: self._declared[path] for path in asked}

    def find_warnings(self) -> Iterator[str]:
        """Settings that have no effect as they stand."""
        checked, evaluation = self.checked_dataset, self.located_evaluation
        yield from dataset_warnings(self.located_dataset, evaluation, checked, kind=self.row_kind)
        task = self.scheduling_setup()["model_worker"].scheduling
        yield from memory_warning(
            {"the copy of weights and optimizer for each commit": self._copied_mb},
            of="a training rank",
            key="groups.model_worker.scheduling.mem",
            asked_mb=task.mem,
            beside_mb=BESIDE_MB,
            otherwise=", or set control.commit_beside_training: false, which takes no copies and lets training wait",
        )
        if task.gpu > 0:
            yield from dtype_warnings(self.models)

    @property
    def source(self) -> Literal["dataset", "prompts", "trajectories"]:
        """Where the samples of a train step come from."""
        return "trajectories" if self.generates else "dataset"

    @property
    def max_head_offpolicyness(self) -> int:
        """How many versions older than the policy the tokens may be that it is trained on."""
        return 0

    @property
    def writes_deltas(self) -> bool:
        """Whether published weights also say what has changed since the version before."""
        return False

    def mesh_of(self, model: ModelName) -> Mesh:
        """The ranks of a model."""
        return self.meshes[model.role]

    def evaluate_calls(self) -> list[ModelFunctionCall]:
        """The calls that look at held-out rows, where that is not done by generation servers beside training."""
        if self.evaluation is None or self.row_kind == "preferences" or self.generates or not self.answers_held_out:
            return []
        return [
            ModelFunctionCall(
                name="evaluate",
                model_name=ModelName(self.roles[0]),
                call_type=CallType.EVALUATE,
                implementation=HELD_OUT_ANSWERS,
                n_seqs=self.evaluation.batch_size,
            )
        ]

    def inference_call(
        self,
        name: str,
        role: str,
        implementation: str,
        *,
        input_keys: Sequence[str],
        outputs: Mapping[str, str],
        post_hooks: Sequence[PostHook] = (),
    ) -> ModelFunctionCall:
        """A call that makes keys with the model of a role.

        Args:
            outputs: what the graph calls each key, by the interface's own name.
        """
        model = self.models[role]
        return ModelFunctionCall(
            name=name,
            model_name=ModelName(role),
            call_type=CallType.INFERENCE,
            implementation=implementation,
            n_seqs=self.train_batch_size,
            input_keys=tuple(input_keys),
            output_keys=tuple(outputs.values()),
            output_key_remap={own: name for own, name in outputs.items() if own != name},
            micro_batches=model.micro_batches,
            # What is trained is called again.
            post_hooks=(*post_hooks, *(() if isinstance(model, TrainedModelConfig) else _leaving(model))),
        )

    def train_call(
        self,
        implementation: str,
        *,
        input_keys: Sequence[str],
        role: str | None = None,
        input_key_remap: Mapping[str, str] = MappingProxyType({}),
        post_hooks: Sequence[PostHook] = (),
    ) -> ModelFunctionCall:
        """The call that trains the model of a role; of the first one, it publishes the weights.

        Args:
            input_key_remap: the interface's own name of keys that the graph calls otherwise.
        """
        role = self.roles[0] if role is None else role
        model = self.models[role]
        publish = (PublishWeightsHook(),) if role == self.roles[0] else ()
        return ModelFunctionCall(
            name=f"{role}_train",
            model_name=ModelName(role),
            call_type=CallType.TRAIN_STEP,
            implementation=implementation,
            n_seqs=self.train_batch_size,
            input_keys=tuple(input_keys),
            input_key_remap=dict(input_key_remap),
            micro_batches=model.micro_batches,
            post_hooks=(*publish, *post_hooks, *_leaving(model)),
        )

    @property
    def model_keys(self) -> tuple[Key, ...]:
        """Keys of samples whose shape follows from a model."""
        return ()

    def role_settings(self, role: str) -> Mapping[str, Any]:
        """Fields of ModelRoleSpec that its model's configuration does not give."""
        return {}

    def replicas(self, first: ModelRoleSpec) -> list[ModelRoleSpec]:
        """Models that hold the parameters of the first role's in another place."""
        return []

    def rank_settings(self) -> Mapping[str, Any]:
        """Fields of ModelWorkerSpec about answers: how every training rank generates and judges them."""
        return {}

    def generation_side(self, dataset: DatasetSpec) -> list[WorkerSpec]:
        """The workers that generate, where that is no call of the graph."""
        return []


def _leaving(model: ModelConfig) -> tuple[OffloadHook, ...]:
    """The hooks behind a model's last call of a step, if it makes room for other models."""
    return (OffloadHook(),) if model.offload == "between_calls" else ()
