"""What a job asks of SLURM as a whole: each field here is the option of sbatch of its name, and all there is to it.

launch.FIELD, groups.KIND.scheduling.FIELD --planner--> Allocation.options --option_name--> #SBATCH --FIELD=...
--sbatch-arg, extra_sbatch_arguments --check_sbatch_argument--> none of these, and none that corral sets itself
"""

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, ValidationInfo, field_validator

from corral.scheduling.frozen import FrozenModel
from corral.scheduling.slurm_formats import (
    check_plain_text,
    check_point_in_time,
    check_sbatch_argument,
    parse_time_limit,
)

_OPTION_BY_FIELD = {"time_limit": "time"}  # the others have the name of their option


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


SlurmTime = Annotated[str, BeforeValidator(_quoted_time)]


def check_extra_argument(argument: str) -> str:
    """Refuse a further option of sbatch that corral sets itself, or that a field stands for.

    Raises:
        ValueError: with what to do instead.
    """
    check_plain_text(argument, what="extra sbatch argument")
    check_sbatch_argument(argument, field_by_option={option_name(name): name for name in ALLOCATION_FIELDS})
    return argument


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


class JobOptions(AllocationNeeds):
    """What `launch` may say for the whole trial, and a group for itself."""

    time_limit: SlurmTime | None = None
    """Longest run in a SLURM form ("30", "12:00:00", "2-12"); None is the partition's default."""
    begin: SlurmTime | None = None
    """Earliest start ("now+2hours", "2026-01-31T08:00"); None is at once."""
    deadline: SlurmTime | None = None
    """Time by which the job must be able to end, or SLURM removes it; None is never."""
    extra_sbatch_arguments: tuple[Annotated[str, AfterValidator(check_extra_argument)], ...] = ()
    """More options of sbatch, each as one text ("--licenses=matlab:1"); those that corral sets itself are refused."""

    @field_validator("time_limit")
    @classmethod
    def _time_limit_is_one_of_slurms_forms(cls, value: str | None) -> str | None:
        if value is not None:
            parse_time_limit(value)
        return value

    @field_validator("begin", "deadline")
    @classmethod
    def _points_in_time_exist(cls, value: str | None) -> str | None:
        return None if value is None else check_point_in_time(value)


NEEDS = tuple(AllocationNeeds.model_fields)
TIMES = ("time_limit", "begin", "deadline")
ALLOCATION_FIELDS = (*NEEDS, *TIMES)
"""Fields that are set for a whole allocation: in `launch`, or in the groups' scheduling."""


def option_name(field: str) -> str:
    """The option of sbatch, without its dashes, that a field stands for."""
    return _OPTION_BY_FIELD.get(field, field.replace("_", "-"))
