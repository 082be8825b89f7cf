"""Whether a job, with those that it runs with, exceeds a limit of QOS or account: SLURM queues it, and it never starts.

    what a job asks for (Demand) + limits that it has to keep (accounts.py) --excesses--> [Excess]
          + the same of those that run with it
    squeue's reason of a pending job --limit_of_reason--> LimitKind

Pure.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from corral.launcher.slurm.accounts import Amounts, Holder, Limits, Scope, parse_amounts, seconds_of
from corral.scheduling.slurm_formats import format_time_limit

_UNIT_BY_NAME = {"cpu": "CPUs", "mem": "MB of memory", "node": "nodes", "gres/gpu": "GPUs"}
_COUNTED_JOBS = {"job": "jobs that run at once", "submit": "jobs in the queue at once"}
_WHOSE_BY_SCOPE = {Scope.USER: "of a user", Scope.ACCOUNT: "of an account", Scope.ALL: "in all"}
_PLACE_BY_SCOPE = {
    Scope.JOB: "in one job",
    Scope.NODE: "on one node",
    Scope.USER: "in all jobs of a user",
    Scope.ACCOUNT: "in all jobs of an account",
    Scope.ALL: "in all its jobs together",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a job asks for, as accounting counts it."""

    of_job: Amounts
    of_node: Amounts = field(default_factory=dict)
    time_limit_s: int | None = None
    """None if it has none: it then gets what is allowed."""

    @property
    def counted(self) -> Amounts:
        """What it adds to the counts of all jobs of somebody."""
        return {**self.of_job, "job": 1, "submit": 1}


Charge = tuple[Demand, Sequence[Limits]]
"""A job, and the limits that it has to keep, those first that count first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Excess:
    """A limit that a job does not keep, whatever else runs."""

    limits: Limits
    setting: str
    """As sacctmgr calls it."""
    said: str
    """What is asked for, and what is allowed."""
    is_time: bool = False
    counts_jobs: bool = False
    never: str = "start"
    """What the trial can never do for it."""


def excesses(job: Charge, beside: Sequence[Charge] = ()) -> Iterator[Excess]:
    """Every limit that a job exceeds, or does not reach where it must.

    Args:
        beside: the jobs that it only runs with, to whom a limit of several jobs counts, too.
    """
    demand, ladder = job
    timed = wall_of(ladder)
    if timed and timed.wall_s and demand.time_limit_s and demand.time_limit_s > timed.wall_s:
        has, allowed = format_time_limit(demand.time_limit_s), format_time_limit(timed.wall_s)
        said = f"its time limit is {has}, and {name_of(timed)} allows {allowed} (MaxWall)"
        yield Excess(limits=timed, setting="MaxWall", said=said, is_time=True)
    for scope in Scope:
        together = beside if scope in _WHOSE_BY_SCOPE else ()
        for name, asked in (demand.of_node if scope is Scope.NODE else demand.counted).items():
            for limits in _in_force(ladder, scope, name):
                if excess := _excess(limits, scope, name, asked + sum(_added(one, limits, name) for one in together)):
                    yield excess
                    break


def wall_of(ladder: Sequence[Limits]) -> Limits | None:
    """Whose limit of a job's time counts; None if nobody has one."""
    return next((limits for limits in ladder if limits.wall_s is not None), None)


def _added(other: Charge, limits: Limits, name: str) -> int:
    """What another job adds to the count that a limit is compared with."""
    demand, ladder = other
    return demand.counted.get(name, 0) if any(one.key == limits.key for one in ladder) else 0


def _in_force(ladder: Sequence[Limits], scope: Scope, name: str) -> list[Limits]:
    """The limits of one kind that count: the first, but accounts count each for itself where no QOS has one."""
    have = [limits for limits in ladder if name in limits.amounts.get(scope, {})]
    are_accounts = all(limits.holder is Holder.ACCOUNT for limits in have)
    return have if scope is Scope.ALL and are_accounts else have[:1]


def _excess(limits: Limits, scope: Scope, name: str, asked: int) -> Excess | None:
    allowed, unit = limits.amounts[scope][name], _COUNTED_JOBS.get(name) or _UNIT_BY_NAME.get(name, name)
    if scope is Scope.LEAST:
        if asked >= allowed:
            return None
        said = f"it asks for {asked} {unit}, and {name_of(limits)} wants at least {allowed} in a job"
    else:
        if asked <= allowed:
            return None
        where = _WHOSE_BY_SCOPE[scope] if name in _COUNTED_JOBS else _PLACE_BY_SCOPE[scope]
        said = f"it asks for {asked} {unit}, and {name_of(limits)} allows {allowed} {where}"
    setting = limits.setting(scope, name)
    return Excess(limits=limits, setting=setting, said=f"{said} ({setting})", counts_jobs=name in _COUNTED_JOBS)


def name_of(limits: Limits) -> str:
    """For people: `QOS 'short'`."""
    return f"{'the ' if limits.holder is Holder.PARTITION else ''}{limits.holder} {limits.name!r}"


def demand_of_job(values: Mapping[str, str]) -> Demand:
    """What `scontrol show job` says that a job asks for."""
    of_job = parse_amounts(values.get("ReqTRES") or values.get("TRES", ""))
    counted = {name: amount for name, amount in of_job.items() if name in _UNIT_BY_NAME}
    nodes = max(counted.get("node", 1), 1)
    return Demand(
        of_job=counted,
        of_node={name: -(-amount // nodes) for name, amount in counted.items() if name != "node"},
        time_limit_s=seconds_of(values.get("TimeLimit", "")),
    )


class LimitKind(StrEnum):
    """What cures a job's waiting for a limit."""

    NOTHING = "it never fits"
    """A limit of one job, of a node, or a least amount: others have no part in it."""
    OTHERS = "other jobs end"
    """Or nothing, if the job alone asks for more."""
    RENEWAL = "the site renews the budget"
    """Of CPU minutes and the like."""


# QOSMaxCpuPerJobLimit, QOSMaxGRESPerUser, AssocGrpCPUMinutesLimit, QOSMinCpuNotSatisfied, MaxCpuPerAccount, ...
_REASON = re.compile(
    r"(?P<holder>QOS|Assoc|)(?P<bound>Max|Min|Grp)(?P<what>[A-Z][A-Za-z]*?)(?P<minutes>Minutes|RunMinutes|)"
    r"(?P<scope>Per(?:Job|Node|User|Account)|)(?:Limit|NotSatisfied|)"
)


def limit_of_reason(reason: str) -> LimitKind | None:
    """What cures the waiting that squeue gives this reason for; None if it is about no limit."""
    match = _REASON.fullmatch(reason)
    if match is None or not (match["holder"] or match["scope"]):
        return None
    if match["scope"] in ("PerJob", "PerNode") or match["bound"] == "Min":
        return LimitKind.NOTHING
    is_budget = match["minutes"] == "Minutes" or match["what"] == "Wall"
    return LimitKind.RENEWAL if is_budget else LimitKind.OTHERS


def holder_of_reason(reason: str) -> Holder:
    """Whose limit it is."""
    return Holder.QOS if reason.startswith("QOS") else Holder.ACCOUNT
