"""What worker groups ask of the cluster: Scheduling (one task) -> TasksGroup (how many) -> ExperimentScheduling (all).

ExperimentScheduling
  master_worker      TasksGroup(count=1,  Scheduling(cpu=16, mem=20 GiB))
  model_worker       TasksGroup(count=8,  Scheduling(cpu=2, gpu=1, mem=60 GiB))
  generation_server  TasksGroup(count=4,  Scheduling(cpu=4, gpu=2, mem=60 GiB))
  gserver_manager    TasksGroup(count=1,  Scheduling(cpu=4, mem=10 GiB))
  rollout_worker     TasksGroup(count=16, Scheduling(cpu=4, mem=20 GiB))
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from corral.scheduling.frozen import FrozenModel
from corral.scheduling.job_options import JobOptions, word
from corral.scheduling.slurm_formats import check_environment_name, check_plain_text, parse_memory_mb
from corral.scheduling.worker_information import WORKER_KINDS, WorkerKind

GIB_MB = 1024


def _memory_mb(value: Any) -> Any:
    return parse_memory_mb(value) if isinstance(value, str) else value


ELASTIC_KINDS = ("generation_server", "rollout_worker")

MemoryMb = Annotated[int, BeforeValidator(_memory_mb)]
OptionalMemoryMb = Annotated[int | None, BeforeValidator(_memory_mb)]


class Scheduling(JobOptions):
    """What one task of a worker group asks of the cluster."""

    cpu: int = Field(ge=1)
    """CPUs per task, as SLURM counts them. Where it counts threads, a task gets the whole cores that they are of."""
    gpu: int = Field(default=0, ge=0)
    """GPUs per task."""
    gpu_type: Annotated[str | None, word(r"[A-Za-z0-9._-]+")] = None
    """GRES type of the GPUs ("a100"); None takes any."""
    gpu_binding: Literal["per_task", "slice", "none"] | None = None
    """`slice`: the tasks of a node share one device cgroup, and each is told its part in CUDA_VISIBLE_DEVICES, so that ranks reach each other's memory (CUDA IPC, NVLink). `per_task`: SLURM shows a task its own GPUs only. `none`: all GPUs of the step. None: `slice` on nodes that have several training ranks, `per_task` elsewhere."""  # noqa: E501
    mem: MemoryMb = Field(ge=1)
    """Memory per task in MB; a string may carry a unit ("20G")."""
    container_image: str | None = None
    """Image that the task runs in; None runs on the host."""
    container_mounts: tuple[str, ...] = ()
    """Bind mounts of the container, each "/host/path:/container/path[:options]"."""
    env_vars: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the task, beside the inherited ones."""

    @field_validator("container_image")
    @classmethod
    def _image_is_plain_text(cls, value: str | None) -> str | None:
        if value is not None:
            check_plain_text(value, what="container_image")
            if not value.strip():
                raise ValueError("container_image must not be empty; leave it out to run on the host")
            if value.startswith("-"):
                raise ValueError(
                    f"container_image {value!r} would be read as an option; write ./{value} if it is a file"
                )
        return value

    @field_validator("container_mounts")
    @classmethod
    def _mounts_are_pairs_of_paths(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for mount in value:
            check_plain_text(mount, what="container mount")
            parts = mount.split(":")
            if (
                len(parts) not in (2, 3)
                or "," in parts[0] + parts[1]
                or not all(part.startswith("/") for part in parts[:2])
            ):
                raise ValueError(
                    f"container mount {mount!r} must be /host/path:/container/path[:options], without commas"
                )
        return value

    @field_validator("env_vars")
    @classmethod
    def _variables_can_be_exported(cls, value: dict[str, str]) -> dict[str, str]:
        for name, text in value.items():
            check_environment_name(name)
            check_plain_text(text, what=f"environment variable {name}")
        return value

    @model_validator(mode="after")
    def _gpu_type_needs_a_gpu(self) -> "Scheduling":
        if self.gpu_type is not None and self.gpu == 0:
            raise ValueError(f"gpu_type {self.gpu_type!r} has no effect with gpu=0; set gpu or remove gpu_type")
        return self

    @classmethod
    def master_worker_default(cls, **overrides: Any) -> "Scheduling":
        return cls(**({"cpu": 16, "mem": 20 * GIB_MB} | overrides))

    @classmethod
    def model_worker_default(cls, **overrides: Any) -> "Scheduling":
        return cls(**({"cpu": 2, "gpu": 1, "mem": 60 * GIB_MB} | overrides))

    @classmethod
    def generation_server_default(cls, *, gpu: int = 1, **overrides: Any) -> "Scheduling":
        """A process of SGLang for each GPU, and beside them its HTTP server, its detokenizer and corral's worker."""
        return cls(**({"cpu": gpu + 3, "gpu": gpu, "mem": 60 * GIB_MB} | overrides))

    @classmethod
    def gserver_manager_default(cls, **overrides: Any) -> "Scheduling":
        return cls(**({"cpu": 4, "mem": 10 * GIB_MB} | overrides))

    @classmethod
    def rollout_worker_default(cls, **overrides: Any) -> "Scheduling":
        return cls(**({"cpu": 4, "mem": 20 * GIB_MB} | overrides))


class ElasticTasks(FrozenModel):
    """Tasks beside those of a group, each in a job of its own: they join a running trial and may vanish."""

    count: int = Field(ge=1)
    """How many; their worker indices follow those of the group's fixed tasks."""
    scheduling: Scheduling
    """What each of them asks for."""


class TasksGroup(FrozenModel):
    """`count` tasks that all ask for the same, and elastic ones beside them."""

    count: int = Field(ge=1)
    """How many fixed tasks."""
    scheduling: Scheduling
    """What each of them asks for."""
    elastic: ElasticTasks | None = None
    """Tasks that may come and go."""

    @property
    def total_count(self) -> int:
        """Fixed and elastic tasks: as many workers have an index."""
        return self.count + (self.elastic.count if self.elastic else 0)

    def scheduling_of(self, index: int) -> Scheduling:
        """What the worker with this index asks for: elastic ones come after the fixed ones."""
        return self.elastic.scheduling if self.elastic is not None and index >= self.count else self.scheduling


class ExperimentScheduling(FrozenModel):
    """Every worker group of a trial, by worker kind; a kind that the trial does not have is None."""

    model_worker: TasksGroup | None = None
    master_worker: TasksGroup = TasksGroup(count=1, scheduling=Scheduling.master_worker_default())
    generation_server: TasksGroup | None = None
    gserver_manager: TasksGroup | None = None
    rollout_worker: TasksGroup | None = None

    @model_validator(mode="after")
    def _single_workers_are_single(self) -> "ExperimentScheduling":
        for kind in ("master_worker", "gserver_manager"):
            group = getattr(self, kind)
            if group is not None and group.count != 1:
                raise ValueError(f"{kind} must have count 1, got {group.count}: a trial has one")
        for kind, group in self.items():
            if group.elastic is not None and kind not in ELASTIC_KINDS:
                raise ValueError(f"{kind} cannot be elastic: the trial cannot do without one of them for a moment")
        return self

    def keys(self) -> list[WorkerKind]:
        """The kinds that this trial has."""
        return [kind for kind in WORKER_KINDS if getattr(self, kind) is not None]

    def items(self) -> Iterator[tuple[WorkerKind, TasksGroup]]:
        for kind in self.keys():
            yield kind, self[kind]

    def get(self, kind: WorkerKind) -> TasksGroup | None:
        group: TasksGroup | None = getattr(self, kind)
        return group

    def __getitem__(self, kind: WorkerKind) -> TasksGroup:
        group = self.get(kind)
        if group is None:
            raise KeyError(f"this trial has no {kind}; it has {', '.join(self.keys())}")
        return group

    def __contains__(self, kind: str) -> bool:
        return kind in self.keys()

    @property
    def num_tasks(self) -> int:
        return sum(group.count for _, group in self.items())
