"""SLURM accounting: a user's accounts and QOS, and the limits of both.

scontrol show config --keeps accounts?--> sacctmgr show user, qos, assoc --parse_*--> Accounts --ladder--> [Limits]

Of limits of one kind SLURM applies the first that is set, in this order: the partition's QOS, the job's, the user's
association, the accounts above it. A QOS with the flag OverPartQOS comes before the partition's.

    what a job asks for (Demand) + limits that it has to keep --excesses (pure)--> [Excess]: it is queued, never started
          + the same of those that run with it
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum

from corral.launcher.slurm.client import SlurmClient, answer_or
from corral.launcher.slurm.parse import keeps_accounts
from corral.launcher.slurm.verdict import Holder
from corral.scheduling.slurm_formats import format_time_limit, parse_memory_mb, parse_time_limit

Amounts = Mapping[str, int]
"""By SLURM's name of what is counted: cpu, mem (MB), node, gres/gpu; and `job`, `submit`: jobs that run, all jobs."""


class Scope(StrEnum):
    """The scope of a limit; the value is sacctmgr's name."""

    JOB = "MaxTRES"
    NODE = "MaxTRESPerNode"
    USER = "MaxTRESPU"
    ACCOUNT = "MaxTRESPA"
    ALL = "GrpTRES"
    """All jobs of the QOS or the association together."""
    LEAST = "MinTRES"
    """The least that a job has to ask for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of one QOS or one association."""

    holder: Holder
    name: str
    partition: str = ""
    """Where an association counts; "" is everywhere."""
    amounts: Mapping[Scope, Amounts] = field(default_factory=dict)
    wall_s: int | None = None
    flags: frozenset[str] = frozenset()
    qos: tuple[str, ...] = ()
    """That an association may use."""
    default_qos: str = ""
    parent: str = ""
    """The account above an account."""

    @property
    def key(self) -> tuple[bool, str, str]:
        """Of those that keep one count: a QOS counts the jobs of a partition that it is the QOS of, too."""
        return self.holder is Holder.ACCOUNT, self.name, self.partition

    def setting(self, scope: Scope, name: str) -> str:
        """sacctmgr's name of the limit of an amount."""
        counts = _counts_of(self.holder).items()
        return next((setting for setting, limited in counts if limited == (scope, name)), scope.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Accounts:
    """The accounting data of a user; empty if accounting does not answer."""

    is_kept: bool | None = None
    """Whether this cluster keeps accounts; None if it does not say."""
    has_limits: bool = False
    """Whether it enforces limits."""
    default_account: str = ""
    associations: Sequence[Limits] = ()
    """The accounts that the user may charge."""
    limits_by_qos: Mapping[str, Limits] = field(default_factory=dict)
    limits_by_account: Mapping[str, Limits] = field(default_factory=dict)

    def association(self, account: str | None, partition: str) -> Limits | None:
        """The one that a job is charged to."""
        mine = [one for one in self.associations if one.name == (account or self.default_account)]
        here = [one for one in mine if one.partition in ("", partition)]
        return max(here, key=lambda one: one.partition, default=None)

    def qos_of(self, qos: str | None, association: Limits | None) -> str:
        """The QOS that a job gets: what it asks for, else the default."""
        if qos or association is None:
            return qos or ""
        only = association.qos[0] if len(association.qos) == 1 else "normal"
        return association.default_qos or only

    def ladder(self, *, account: str | None, qos: str | None, partition: str, partition_qos: str) -> list[Limits]:
        """The limits that a job has to keep, those first that count first."""
        if not self.has_limits:
            return []
        association = self.association(account, partition)
        own = self.limits_by_qos.get(self.qos_of(qos, association))
        of_partition = self.limits_by_qos.get(partition_qos)
        steps = [replace(of_partition, holder=Holder.PARTITION)] if of_partition else []
        if own is not None:
            steps.insert(0 if "OverPartQOS" in own.flags else len(steps), own)
        return steps + self._upwards(association) if association is not None else steps

    def _upwards(self, association: Limits) -> list[Limits]:
        """The user's own association, its account, and the accounts above that."""
        found: dict[str, Limits] = {}
        account = association.name
        while account in self.limits_by_account and account not in found:
            found[account] = self.limits_by_account[account]
            account = found[account].parent
        return [association, *found.values()]


_GROUP_COUNTS = {"GrpJobs": (Scope.ALL, "job"), "GrpSubmit": (Scope.ALL, "submit")}
_COUNTS_OF_QOS: Mapping[str, tuple[Scope, str]] = {
    "MaxJobsPU": (Scope.USER, "job"),
    "MaxSubmitPU": (Scope.USER, "submit"),
    "MaxJobsPA": (Scope.ACCOUNT, "job"),
    "MaxSubmitPA": (Scope.ACCOUNT, "submit"),
    **_GROUP_COUNTS,
}
_COUNTS_OF_ACCOUNT: Mapping[str, tuple[Scope, str]] = {
    "MaxJobs": (Scope.USER, "job"),
    "MaxSubmit": (Scope.USER, "submit"),
    **_GROUP_COUNTS,
}
"""Numbers of jobs, by sacctmgr's name of the limit."""


def _counts_of(holder: Holder) -> Mapping[str, tuple[Scope, str]]:
    return _COUNTS_OF_ACCOUNT if holder is Holder.ACCOUNT else _COUNTS_OF_QOS


# An association has no amounts per user, per account or from below.
_OF_ASSOCIATION = (Scope.JOB, Scope.NODE, Scope.ALL)
_ASSOCIATION_FIELDS = (
    *("DefaultAccount", "Account", "Partition", "QOS", "DefaultQOS", "MaxWall"),
    *(*map(str, _OF_ASSOCIATION), *_COUNTS_OF_ACCOUNT),
)
_QOS_FIELDS = ("Name", "Flags", "MaxWall", *map(str, Scope), *_COUNTS_OF_QOS)
_ACCOUNT_FIELDS = ("Account", "ParentName", Scope.ALL.value, *_GROUP_COUNTS)


def read_accounts(client: SlurmClient, user: str, config: Mapping[str, str]) -> Accounts:
    """Asks accounting, where there is one; what it does not answer is unknown.

    Args:
        config: the cluster's settings.
    """
    if not keeps_accounts(config):
        return Accounts(is_kept=False if "AccountingStorageType" in config else None)
    cluster = f"cluster={config.get('ClusterName', '')}"
    rows = client.accounting_rows
    of_user = answer_or([], rows, ["user", user, "withassoc", cluster], _ASSOCIATION_FIELDS)
    of_accounts = answer_or([], rows, ["assoc", "user=", cluster], _ACCOUNT_FIELDS)
    of_qos = answer_or([], rows, ["qos"], _QOS_FIELDS)
    return Accounts(
        is_kept=True,
        has_limits=bool({"limits", "safe"} & set(config.get("AccountingStorageEnforce", "").lower().split(","))),
        default_account=next((row["DefaultAccount"] for row in of_user if row["DefaultAccount"]), ""),
        associations=[_limits(row, Holder.ACCOUNT) for row in of_user if row["Account"]],
        limits_by_qos={row["Name"]: _limits(row, Holder.QOS) for row in of_qos if row["Name"]},
        limits_by_account={row["Account"]: _limits(row, Holder.ACCOUNT) for row in of_accounts},
    )


def _limits(row: Mapping[str, str], holder: Holder) -> Limits:
    amounts = {scope: parse_amounts(row.get(scope, "")) for scope in Scope}
    for setting, (scope, what) in _counts_of(holder).items():
        if (number := row.get(setting, "")).isdecimal():
            amounts[scope][what] = int(number)
    return Limits(
        holder=holder,
        name=row["Name" if holder is Holder.QOS else "Account"],
        partition=row.get("Partition", ""),
        amounts={scope: limited for scope, limited in amounts.items() if limited},
        wall_s=seconds_of(row.get("MaxWall", "")),
        flags=frozenset(row.get("Flags", "").split(",")),
        qos=tuple(sorted(name for name in row.get("QOS", "").split(",") if name)),
        default_qos=row.get("DefaultQOS", ""),
        parent=row.get("ParentName", ""),
    )


def parse_amounts(text: str) -> dict[str, int]:
    """`cpu=4,mem=100G,gres/gpu=2` -> {"cpu": 4, "mem": 102400, "gres/gpu": 2}; what is no number is left out."""
    amounts = {}
    for item in text.split(","):
        name, _, amount = item.partition("=")
        with suppress(ValueError):
            amounts[name] = parse_memory_mb(amount) if name == "mem" else int(amount)
    return amounts


def seconds_of(text: str) -> int | None:
    """What SLURM writes as a time; None for UNLIMITED and the like."""
    try:
        return parse_time_limit(text)
    except ValueError:
        return None


_UNIT_BY_NAME = {"cpu": "CPUs", "mem": "MB of memory", "node": "nodes", "gres/gpu": "GPUs"}
_COUNTED_JOBS = {"job": "jobs that run at once", "submit": "jobs in the queue at once"}
_WHOSE_BY_SCOPE = {Scope.USER: "of a user", Scope.ACCOUNT: "of an account", Scope.ALL: "in all"}
_PLACE_BY_SCOPE = {
    Scope.JOB: "in one job",
    Scope.NODE: "on one node",
    Scope.USER: "in all jobs of a user",
    Scope.ACCOUNT: "in all jobs of an account",
    Scope.ALL: "in all its jobs together",
    Scope.LEAST: "in a job",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The request of a job, as accounting counts it."""

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
    text: str
    """The request and the limit, in words."""
    counts_jobs: bool = False
    never: str = "start"
    """The action that the trial can never do because of it."""


def excesses(job: Charge, beside: Sequence[Charge] = ()) -> Iterator[Excess]:
    """Every limit that a job exceeds, or does not reach where it must.

    Args:
        beside: the jobs that it only runs with, to whom a limit of several jobs counts, too.
    """
    demand, ladder = job
    timed = wall_of(ladder)
    if timed and timed.wall_s and demand.time_limit_s and demand.time_limit_s > timed.wall_s:
        has, allowed = format_time_limit(demand.time_limit_s), format_time_limit(timed.wall_s)
        text = f"its time limit is {has}, and {name_of(timed)} allows {allowed} (MaxWall)"
        yield Excess(limits=timed, setting="MaxWall", text=text)
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
    if asked >= allowed if scope is Scope.LEAST else asked <= allowed:
        return None
    where = (_WHOSE_BY_SCOPE if name in _COUNTED_JOBS else _PLACE_BY_SCOPE)[scope]
    verb = "wants at least" if scope is Scope.LEAST else "allows"
    text = f"it asks for {asked} {unit}, and {name_of(limits)} {verb} {allowed} {where}"
    setting = limits.setting(scope, name)
    return Excess(limits=limits, setting=setting, text=f"{text} ({setting})", counts_jobs=name in _COUNTED_JOBS)


def name_of(limits: Limits) -> str:
    """For people: `QOS 'short'`."""
    return f"{'the ' if limits.holder is Holder.PARTITION else ''}{limits.holder} {limits.name!r}"


def demand_of_job(values: Mapping[str, str]) -> Demand:
    """The request of a job, from `scontrol show job`."""
    of_job = parse_amounts(values.get("ReqTRES") or values.get("TRES", ""))
    counted = {name: amount for name, amount in of_job.items() if name in _UNIT_BY_NAME}
    nodes = max(counted.get("node", 1), 1)
    return Demand(
        of_job=counted,
        of_node={name: -(-amount // nodes) for name, amount in counted.items() if name != "node"},
        time_limit_s=seconds_of(values.get("TimeLimit", "")),
    )
