"""What is asked of the cluster: options of a job; Scheduling (a task) -> TasksGroup (how many) -> groups of a trial.

launch.FIELD, groups.KIND.scheduling.FIELD --planner--> Allocation.options --option_name--> #SBATCH --FIELD=...
--sbatch-arg, extra_sbatch_arguments --check_extra_argument--> none of these, and none that corral sets itself

ExperimentScheduling
  master_worker      TasksGroup(count=1,  Scheduling(cpu=16, mem=20 GiB))
  model_worker       TasksGroup(count=8,  Scheduling(cpu=2, gpu=1, mem=60 GiB))
  generation_server  TasksGroup(count=4,  Scheduling(cpu=4, gpu=2, mem=60 GiB))
  gserver_manager    TasksGroup(count=1,  Scheduling(cpu=4, mem=10 GiB))
  rollout_worker     TasksGroup(count=16, Scheduling(cpu=4, mem=20 GiB))
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, model_validator

from corral.scheduling.errors import RuleError
from corral.scheduling.frozen import FrozenModel
from corral.scheduling.slurm_formats import (
    check_environment_name,
    check_plain_text,
    parse_memory_mb,
    parse_time_limit,
)
from corral.scheduling.worker_information import WORKER_KINDS, LayoutKind, WorkerKind

T = TypeVar("T")

AskedLayout = Literal["auto", LayoutKind]
"""As `launch.layout` may say."""

_OPTION_BY_FIELD = {"time_limit": "time"}  # the others have the name of their option


def _checked(check: Callable[[T], object]) -> AfterValidator:
    """A value that this has nothing against."""

    def keep(value: T) -> T:
        check(value)
        return value

    return AfterValidator(keep)


def _word(rule: str) -> AfterValidator:
    """Text that this regular expression matches as a whole."""
    pattern = re.compile(rule)

    def check(value: str | None, info: ValidationInfo) -> str | None:
        if value is not None:
            check_plain_text(value, what=str(info.field_name))
            if not pattern.fullmatch(value):
                raise RuleError(
                    f"{info.field_name} {value!r} has another form than SLURM reads", f"it must match {rule}"
                )
        return value

    return AfterValidator(check)


def _quoted_time(value: Any) -> Any:
    # YAML 1.1 reads an unquoted 24:00:00 as 86400, which SLURM would take for 60 days of minutes.
    if isinstance(value, int | float):
        raise RuleError(f"must be quoted, got the number {value}", "write '60' for minutes or '1:00:00' for an hour")
    return value


_TimeLimit = Annotated[str, BeforeValidator(_quoted_time), _checked(parse_time_limit)]


class AllocationNeeds(FrozenModel):
    """What decides whether two groups can share one SLURM allocation: only groups with equal needs can."""

    partition: Annotated[str | None, _word(r"[A-Za-z0-9._,-]+")] = None
    """SLURM partition; None is the cluster's default."""
    account: Annotated[str | None, _word(r"[A-Za-z0-9._@-]+")] = None
    """Account to charge; None is the user's default."""
    qos: Annotated[str | None, _word(r"[A-Za-z0-9._-]+")] = None
    """Quality of service; None is the account's default."""
    constraint: Annotated[str | None, _word(r"[A-Za-z0-9._&|*()\[\],:=-]+")] = None
    """Node features that are needed ("h100&ib")."""
    reservation: Annotated[str | None, _word(r"[A-Za-z0-9._,-]+")] = None
    """Reservation to run in."""
    nodelist: Annotated[str | None, _word(r"[A-Za-z0-9._,\[\]-]+")] = None
    """Nodes that the allocation must contain, as a SLURM host list ("n[1-4]"); None lets SLURM choose."""
    exclude: Annotated[str | None, _word(r"[A-Za-z0-9._,\[\]-]+")] = None
    """Nodes that the allocation must not contain, as a SLURM host list."""


NEEDS = tuple(AllocationNeeds.model_fields)
ALLOCATION_FIELDS = (*NEEDS, "time_limit")
"""Fields that are set for a whole allocation: in `launch`, or in the groups' scheduling."""


def option_name(field: str) -> str:
    """The option of sbatch, without its dashes, that a field stands for."""
    return _OPTION_BY_FIELD.get(field, field.replace("_", "-"))


_OURS = "corral sets it for every trial"
_IN_TRIAL_DIRECTORY = "logs are in the trial directory"
_ANSWER = "corral reads sbatch's answer, which this option changes"
_OWNED: Sequence[tuple[str, str, str]] = (
    # Options of sbatch that are not the user's, why, and what to do about the same thing; "" if nothing.
    ("job-name", _OURS, "choose experiment and trial names"),
    ("output error", _IN_TRIAL_DIRECTORY, ""),
    ("open-mode comment signal requeue no-requeue no-kill dependency wrap", _OURS, ""),
    ("chdir", "a trial runs in the folder that rl-submit is called from", "call rl-submit there"),
    ("input", "no process of a trial reads an input", ""),
    ("gpu-bind", "each worker's step binds its own GPUs", "use the field gpu_binding"),
    ("export export-file", _OURS, "use the group's env_vars"),
    ("array", "a trial is one job", "submit one trial per point of a sweep"),
    ("clusters", "a trial runs on one cluster, that of $SLURM_CONF", ""),
    ("nodes use-min-nodes", "it follows from the groups' counts, cpu, gpu and mem", ""),
    ("ntasks ntasks-per-node ntasks-per-gpu ntasks-per-core ntasks-per-socket", _OURS, "use the group's count"),
    ("cpus-per-task cpus-per-gpu", _OURS, "use the field cpu"),
    ("mem mem-per-gpu", _OURS, "use the field mem"),
    ("mem-per-cpu", _OURS, "use the field mem, and cluster.mem_request: cpu where jobs have to ask for it per CPU"),
    ("gres gpus gpus-per-node gpus-per-task gpus-per-socket", _OURS, "use the fields gpu and gpu_type"),
    ("tres-per-task", _OURS, "use the fields cpu, gpu and gpu_type"),
    ("nodefile", _OURS, "use the field nodelist"),
    ("container-image", _OURS, "use the field container_image"),
    ("container-mounts", _OURS, "use the field container_mounts"),
    ("parsable wait quiet verbose help usage version", _ANSWER, ""),
    ("test-only", _ANSWER, "rl-submit --dry-run checks without submitting"),
    *((option_name(name), _OURS, f"use the field {name}") for name in ALLOCATION_FIELDS),
)
_REFUSAL_BY_OPTION = {option: (why, instead) for options, why, instead in _OWNED for option in options.split()}
_OPTION = re.compile(r"--(?P<name>[A-Za-z][A-Za-z0-9-]*)(?:=.*)?")


def check_extra_argument(argument: str) -> str:
    """Refuse a further option of sbatch that corral sets itself, or that a field stands for.

    Args:
        argument: "--option" or "--option=value".

    Raises:
        ValueError: with what to do instead.
    """
    check_plain_text(argument, what="extra sbatch argument")
    match = _OPTION.fullmatch(argument)
    if match is None:
        raise RuleError(
            f"extra sbatch argument {argument!r} must be one long option with its value", "write --name=value"
        )
    name = match["name"].lower()
    # getopt accepts any unambiguous beginning: --job-n is --job-name too.
    beginnings = [owned for owned in _REFUSAL_BY_OPTION if owned.startswith(name)]
    if beginnings:
        owned = name if name in beginnings else min(beginnings)
        why, instead = _REFUSAL_BY_OPTION[owned]
        remedy = f"leave it out: {instead}" if instead else "leave it out"
        raise RuleError(f"extra sbatch argument {argument!r} may not be given (--{owned}), {why}", remedy)
    return argument


class JobOptions(AllocationNeeds):
    """What `launch` may say for the whole trial, and a group for itself."""

    time_limit: _TimeLimit | None = None
    """Longest run in a SLURM form ("30", "12:00:00", "2-12"); None is the partition's default."""
    extra_sbatch_arguments: tuple[Annotated[str, AfterValidator(check_extra_argument)], ...] = ()
    """More options of sbatch, each as one text ("--licenses=matlab:1", "--begin=now+2hours"); options that corral sets itself are refused."""  # noqa: E501


GIB_MB = 1024


def _memory_mb(value: Any) -> Any:
    return parse_memory_mb(value) if isinstance(value, str) else value


ELASTIC_KINDS = ("generation_server", "rollout_worker")

MemoryMb = Annotated[int, BeforeValidator(_memory_mb)]
OptionalMemoryMb = Annotated[int | None, BeforeValidator(_memory_mb)]


def _check_image(image: str) -> None:
    check_plain_text(image, what="container_image")
    if not image.strip():
        raise RuleError("container_image must not be empty", "leave it out to run on the host")
    if image.startswith("-"):
        raise RuleError(f"container_image {image!r} would be read as an option", f"write ./{image} if it is a file")


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
    gpu_type: Annotated[str | None, _word(r"[A-Za-z0-9._-]+")] = None
    """GRES type of the GPUs ("a100"); None takes any."""
    gpu_binding: Literal["per_task", "slice", "none"] | None = None
    """`slice`: the tasks of a node share one device cgroup, and each gets its part in CUDA_VISIBLE_DEVICES, so that ranks reach each other's memory (CUDA IPC, NVLink). `per_task`: SLURM shows a task its own GPUs only. `none`: all GPUs of the step. None: `slice` on nodes that have several training ranks, `per_task` elsewhere."""  # noqa: E501
    mem: MemoryMb = Field(ge=1)
    """Memory per task in MB; a string may carry a unit ("20G")."""
    container_image: Annotated[str, _checked(_check_image)] | None = None
    """Image that the task runs in; None runs on the host."""
    container_mounts: Annotated[tuple[str, ...], _checked(_check_mounts)] = ()
    """Bind mounts of the container, each "/host/path:/container/path[:options]"."""
    env_vars: Annotated[dict[str, str], _checked(_check_variables)] = Field(default_factory=dict)
    """Environment variables of the task, beside the inherited ones."""

    @model_validator(mode="after")
    def _settings_have_an_effect(self) -> "Scheduling":
        if self.container_mounts and self.container_image is None:
            rule = "container_mounts has no effect without container_image"
            raise RuleError(rule, "set container_image, or remove it", key="container_mounts")
        if self.gpu_type is not None and self.gpu == 0:
            raise RuleError(f"gpu_type {self.gpu_type!r} has no effect with gpu=0", "set gpu or remove gpu_type")
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
