"""What a job asks of SLURM as a whole: each field here is the option of sbatch of its name, and all there is to it.

launch.FIELD, groups.KIND.scheduling.FIELD --planner--> Allocation.options --option_name--> #SBATCH --FIELD=...
--sbatch-arg, extra_sbatch_arguments --check_extra_argument--> none of these, and none that corral sets itself
"""

import re
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, ValidationInfo

from corral.scheduling.frozen import FrozenModel
from corral.scheduling.slurm_formats import (
    check_plain_text,
    parse_point_in_time,
    parse_time_limit,
)

T = TypeVar("T")

LayoutKind = Literal["packed", "hetjob", "jobs"]
"""Which jobs a trial asks for, and what they are to each other.

packed   [head]                            one job
hetjob   [head] [component] ...            one heterogeneous job
jobs     [head] [group] [group] ...        a job each
any      ... + [elastic] [elastic] ...     and a job for each elastic worker
"""
AskedLayout = Literal["auto", LayoutKind]
"""As `launch.layout` may say."""

_OPTION_BY_FIELD = {"time_limit": "time"}  # the others have the name of their option


def checked(check: Callable[[T], object]) -> AfterValidator:
    """A value that this has nothing against."""

    def keep(value: T) -> T:
        check(value)
        return value

    return AfterValidator(keep)


def word(rule: str) -> AfterValidator:
    """Text that this regular expression matches as a whole."""
    pattern = re.compile(rule)

    def check(value: str | None, info: ValidationInfo) -> str | None:
        if value is not None:
            check_plain_text(value, what=str(info.field_name))
            if not pattern.fullmatch(value):
                raise ValueError(f"{info.field_name} {value!r} must match {rule}")
        return value

    return AfterValidator(check)


def _quoted_time(value: Any) -> Any:
    # YAML 1.1 reads an unquoted 24:00:00 as 86400, which SLURM would take for 60 days of minutes.
    if isinstance(value, int | float):
        raise ValueError(f"must be quoted, got the number {value}; write '60' for minutes or '1:00:00' for an hour")
    return value


_TimeLimit = Annotated[str, BeforeValidator(_quoted_time), checked(parse_time_limit)]
# Any moment will do: whether a text is a point in time does not depend on it.
_PointInTime = Annotated[
    str, BeforeValidator(_quoted_time), checked(partial(parse_point_in_time, now=datetime(2000, 1, 1, 12)))
]


class AllocationNeeds(FrozenModel):
    """What decides whether two groups can share one SLURM allocation: only groups with equal needs can."""

    partition: Annotated[str | None, word(r"[A-Za-z0-9._,-]+")] = None
    """SLURM partition; None is the cluster's default."""
    account: Annotated[str | None, word(r"[A-Za-z0-9._@-]+")] = None
    """Account to charge; None is the user's default."""
    qos: Annotated[str | None, word(r"[A-Za-z0-9._-]+")] = None
    """Quality of service; None is the account's default."""
    constraint: Annotated[str | None, word(r"[A-Za-z0-9._&|*()\[\],:=-]+")] = None
    """Node features that are needed ("h100&ib")."""
    reservation: Annotated[str | None, word(r"[A-Za-z0-9._,-]+")] = None
    """Reservation to run in."""
    nodelist: Annotated[str | None, word(r"[A-Za-z0-9._,\[\]-]+")] = None
    """Nodes that the allocation must contain, as a SLURM host list ("n[1-4]"); None lets SLURM choose."""
    exclude: Annotated[str | None, word(r"[A-Za-z0-9._,\[\]-]+")] = None
    """Nodes that the allocation must not contain, as a SLURM host list."""


NEEDS = tuple(AllocationNeeds.model_fields)
TIMES = ("time_limit", "begin", "deadline")
ALLOCATION_FIELDS = (*NEEDS, *TIMES)
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
    ("input open-mode chdir comment signal requeue no-requeue no-kill dependency wrap gpu-bind", _OURS, ""),
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
        raise ValueError(
            f"extra sbatch argument {argument!r} must be one long option with its value; write --name=value"
        )
    name = match["name"].lower()
    # getopt accepts any unambiguous beginning: --job-n is --job-name too.
    beginnings = [owned for owned in _REFUSAL_BY_OPTION if owned.startswith(name)]
    if beginnings:
        owned = name if name in beginnings else min(beginnings)
        why, instead = _REFUSAL_BY_OPTION[owned]
        remedy = f"leave it out: {instead}" if instead else "leave it out"
        raise ValueError(f"extra sbatch argument {argument!r} may not be given (--{owned}), {why}; {remedy}")
    return argument


class JobOptions(AllocationNeeds):
    """What `launch` may say for the whole trial, and a group for itself."""

    time_limit: _TimeLimit | None = None
    """Longest run in a SLURM form ("30", "12:00:00", "2-12"); None is the partition's default."""
    begin: _PointInTime | None = None
    """Earliest start ("now+2hours", "2026-01-31T08:00"); None is at once."""
    deadline: _PointInTime | None = None
    """Time by which the job must be able to end, or SLURM removes it; None is never."""
    extra_sbatch_arguments: tuple[Annotated[str, AfterValidator(check_extra_argument)], ...] = ()
    """More options of sbatch, each as one text ("--licenses=matlab:1"); those that corral sets itself are refused."""
