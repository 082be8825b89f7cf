"""What worker groups ask of the cluster: Scheduling (one task) -> TasksGroup (how many) -> ExperimentScheduling (all).

ExperimentScheduling
  master_worker      TasksGroup(count=1,  Scheduling(cpu=16, mem=20 GiB))
  model_worker       TasksGroup(count=8,  Scheduling(cpu=2, gpu=1, mem=60 GiB))
  generation_server  TasksGroup(count=4,  Scheduling(cpu=4, gpu=2, mem=60 GiB))
  gserver_manager    TasksGroup(count=1,  Scheduling(cpu=4, mem=10 GiB))
  rollout_worker     TasksGroup(count=16, Scheduling(cpu=4, mem=20 GiB))
"""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from corral.scheduling.frozen import FrozenModel
from corral.scheduling.job_options import JobOptions, checked, word
from corral.scheduling.slurm_formats import check_environment_name, check_plain_text, parse_memory_mb
from corral.scheduling.worker_information import WORKER_KINDS, WorkerKind

GIB_MB = 1024


def _memory_mb(value: Any) -> Any:
    return parse_memory_mb(value) if isinstance(value, str) else value


ELASTIC_KINDS = ("generation_server", "rollout_worker")

MemoryMb = Annotated[int, BeforeValidator(_memory_mb)]
OptionalMemoryMb = Annotated[int | None, BeforeValidator(_memory_mb)]


def _check_image(image: str) -> None:
    check_plain_text(image, what="container_image")
    if not image.strip():
        raise ValueError("container_image must not be empty; leave it out to run on the host")
    if image.startswith("-"):
        raise ValueError(f"container_image {image!r} would be read as an option; write ./{image} if it is a file")


def _check_mounts(mounts: Sequence[str]) -> None:
    for mount in mounts:
        check_plain_text(mount, what="container mount")
        if not re.fullmatch("/[^:,]*:/[^:,]*(:[^:]*)?", mount):
            raise ValueError(f"container mount {mount!r} must be /host/path:/container/path[:options], without commas")


def _check_variables(variables: Mapping[str, str]) -> None:
    for name, text in variables.items():
        check_environment_name(name)
        check_plain_text(text, what=f"environment variable {name}")


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
    container_image: Annotated[str, checked(_check_image)] | None = None
    """Image that the task runs in; None runs on the host."""
    container_mounts: Annotated[tuple[str, ...], checked(_check_mounts)] = ()
    """Bind mounts of the container, each "/host/path:/container/path[:options]"."""
    env_vars: Annotated[dict[str, str], checked(_check_variables)] = Field(default_factory=dict)
    """Environment variables of the task, beside the inherited ones."""

    @model_validator(mode="after")
    def _gpu_type_needs_a_gpu(self) -> "Scheduling":
        if self.gpu_type is not None and self.gpu == 0:
            raise ValueError(f"gpu_type {self.gpu_type!r} has no effect with gpu=0; set gpu or remove gpu_type")
        return self


def default_scheduling(*, gpus_per_server: int = 1) -> dict[WorkerKind, Scheduling]:
    """Resources of one worker where the experiment says nothing, by kind.

    A generation server has a process of SGLang for each GPU, and beside them its HTTP server, its detokenizer and
    corral's worker.

    Args:
        gpus_per_server: as the allocation says.
    """
    return {
        "master_worker": Scheduling(cpu=16, mem=20 * GIB_MB),
        "model_worker": Scheduling(cpu=2, gpu=1, mem=60 * GIB_MB),
        "generation_server": Scheduling(cpu=gpus_per_server + 3, gpu=gpus_per_server, mem=60 * GIB_MB),
        "gserver_manager": Scheduling(cpu=4, mem=10 * GIB_MB),
        "rollout_worker": Scheduling(cpu=4, mem=20 * GIB_MB),
    }


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
    master_worker: TasksGroup = TasksGroup(count=1, scheduling=default_scheduling()["master_worker"])
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

    def items(self) -> list[tuple[WorkerKind, TasksGroup]]:
        """The groups that this trial has."""
        return [(kind, group) for kind in WORKER_KINDS if (group := self.get(kind)) is not None]

    def get(self, kind: WorkerKind) -> TasksGroup | None:
        group: TasksGroup | None = getattr(self, kind)
        return group

    def __getitem__(self, kind: WorkerKind) -> TasksGroup:
        group = self.get(kind)
        if group is None:
            raise KeyError(f"this trial has no {kind}; it has {', '.join(kind for kind, _ in self.items())}")
        return group
