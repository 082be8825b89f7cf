"""What accounting lets a user do: accounts, QOS, and the limits of both.

scontrol show config --keeps accounts?--> sacctmgr show user, qos, assoc --parse_*--> Accounts --ladder--> [Limits]

Of limits of one kind SLURM applies the first that is set, in this order: the partition's QOS, the job's, the user's
association, the accounts above it. A QOS with the flag OverPartQOS comes before the partition's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from corral.launcher.slurm.client import SlurmClient, SlurmError
from corral.launcher.slurm.parse import keeps_accounts
from corral.scheduling.slurm_formats import parse_memory_mb, parse_time_limit

Amounts = Mapping[str, int]
"""By SLURM's name of what is counted: cpu, mem (MB), node, gres/gpu; and `job`, `submit`: jobs that run, all jobs."""

_MAX_ACCOUNTS_ABOVE = 64  # a chain of parents that does not end is no chain


class Scope(StrEnum):
    """What an amount is the limit of; the value is sacctmgr's name."""

    JOB = "MaxTRES"
    NODE = "MaxTRESPerNode"
    USER = "MaxTRESPU"
    ACCOUNT = "MaxTRESPA"
    ALL = "GrpTRES"
    """All jobs of the QOS or the association together."""
    LEAST = "MinTRES"
    """The least that a job has to ask for."""


class Holder(StrEnum):
    """Who has a limit."""

    QOS = "QOS"
    PARTITION = "QOS of the partition"
    ACCOUNT = "account"


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

    @property
    def key(self) -> tuple[bool, str, str]:
        """Of those that keep one count: a QOS counts the jobs of a partition that it is the QOS of, too."""
        return self.holder is Holder.ACCOUNT, self.name, self.partition

    def setting(self, scope: Scope, name: str) -> str:
        """What sacctmgr calls the limit of an amount."""
        counts = _COUNTS_OF_ACCOUNT if self.holder is Holder.ACCOUNT else _COUNTS_OF_QOS
        return next((setting for setting, limited in counts.items() if limited == (scope, name)), scope.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Association:
    """An account that the user may charge, with the QOS that it may use."""

    account: str
    qos: tuple[str, ...] = ()
    partition: str = ""
    """Where it counts; "" is everywhere."""
    default_qos: str = ""
    limits: Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Accounts:
    """What accounting knows of a user; empty where it does not answer."""

    is_kept: bool | None = None
    """Whether this cluster keeps accounts; None if it does not say."""
    has_limits: bool = False
    """Whether it enforces limits."""
    default_account: str = ""
    associations: Sequence[Association] = ()
    limits_by_qos: Mapping[str, Limits] = field(default_factory=dict)
    parent_by_account: Mapping[str, str] = field(default_factory=dict)
    limits_by_account: Mapping[str, Limits] = field(default_factory=dict)

    def association(self, account: str | None, partition: str) -> Association | None:
        """The one that a job is charged to."""
        mine = [one for one in self.associations if one.account == (account or self.default_account)]
        here = [one for one in mine if one.partition in ("", partition)]
        return max(here, key=lambda one: one.partition, default=None)

    def qos_of(self, qos: str | None, association: Association | None) -> str:
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
        if association is not None:
            steps.append(association.limits)
            steps += self._above(association.account)
        return steps

    def _above(self, account: str) -> list[Limits]:
        found = []
        for _ in range(_MAX_ACCOUNTS_ABOVE):
            if account in self.limits_by_account:
                found.append(self.limits_by_account[account])
            account = self.parent_by_account.get(account, "")
        return found


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

# An association has no amounts per user, per account or from below.
_OF_ASSOCIATION = (Scope.JOB, Scope.NODE, Scope.ALL)
_ASSOCIATION_FIELDS = (
    *("DefaultAccount", "Account", "Partition", "QOS", "DefaultQOS", "MaxWall"),
    *(*map(str, _OF_ASSOCIATION), *_COUNTS_OF_ACCOUNT),
)
_QOS_FIELDS = ("Name", "Flags", "MaxWall", *map(str, Scope), *_COUNTS_OF_QOS)
_ACCOUNT_FIELDS = ("Account", "ParentName", Scope.ALL.value, *_GROUP_COUNTS)


def read_accounts(client: SlurmClient, user: str) -> Accounts:
    """Asks accounting, where there is one; what it does not answer is unknown."""
    try:
        config = client.settings()
    except SlurmError:
        return Accounts()
    if not keeps_accounts(config):
        return Accounts(is_kept=False if "AccountingStorageType" in config else None)
    cluster = f"cluster={config.get('ClusterName', '')}"
    of_user = _rows(client, ["user", user, "withassoc", cluster], _ASSOCIATION_FIELDS)
    of_accounts = _rows(client, ["assoc", "user=", cluster], _ACCOUNT_FIELDS)
    of_qos = _rows(client, ["qos"], _QOS_FIELDS)
    return Accounts(
        is_kept=True,
        has_limits=bool({"limits", "safe"} & set(config.get("AccountingStorageEnforce", "").lower().split(","))),
        default_account=next((row["DefaultAccount"] for row in of_user if row["DefaultAccount"]), ""),
        associations=[
            Association(
                account=row["Account"],
                qos=tuple(sorted(name for name in row["QOS"].split(",") if name)),
                partition=row["Partition"],
                default_qos=row["DefaultQOS"],
                limits=_limits(row, Holder.ACCOUNT, row["Account"]),
            )
            for row in of_user
            if row["Account"]
        ],
        limits_by_qos={row["Name"]: _limits(row, Holder.QOS, row["Name"]) for row in of_qos if row["Name"]},
        parent_by_account={row["Account"]: row["ParentName"] for row in of_accounts},
        limits_by_account={row["Account"]: _limits(row, Holder.ACCOUNT, row["Account"]) for row in of_accounts},
    )


def _rows(client: SlurmClient, what: Sequence[str], fields: Sequence[str]) -> list[dict[str, str]]:
    try:
        text = client.accounting_rows(what, fields)
    except SlurmError:
        return []
    return parse_rows(text, fields)


def parse_rows(text: str, fields: Sequence[str]) -> list[dict[str, str]]:
    """sacctmgr's lines of values between bars; one of another length is skipped."""
    rows = (line.split("|") for line in text.splitlines())
    return [dict(zip(fields, row, strict=True)) for row in rows if len(row) == len(fields)]


def _limits(row: Mapping[str, str], holder: Holder, name: str) -> Limits:
    amounts = {scope: parse_amounts(row.get(scope, "")) for scope in Scope}
    for setting, (scope, what) in (_COUNTS_OF_ACCOUNT if holder is Holder.ACCOUNT else _COUNTS_OF_QOS).items():
        if (number := row.get(setting, "")).isdecimal():
            amounts[scope][what] = int(number)
    return Limits(
        holder=holder,
        name=name,
        partition=row.get("Partition", ""),
        amounts={scope: limited for scope, limited in amounts.items() if limited},
        wall_s=seconds_of(row.get("MaxWall", "")),
        flags=frozenset(row.get("Flags", "").split(",")),
    )


def parse_amounts(text: str) -> dict[str, int]:
    """`cpu=4,mem=100G,gres/gpu=2` -> {"cpu": 4, "mem": 102400, "gres/gpu": 2}; what is no number is left out."""
    amounts = {}
    for item in text.split(","):
        name, _, amount = item.partition("=")
        if name == "mem":
            try:
                amounts[name] = parse_memory_mb(amount)
            except ValueError:
                continue
        elif amount.isdecimal():
            amounts[name] = int(amount)
    return amounts


def seconds_of(text: str) -> int | None:
    """What SLURM writes as a time; None for UNLIMITED and the like."""
    try:
        return parse_time_limit(text)
    except ValueError:
        return None
