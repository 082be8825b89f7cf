"""Limits of QOS and accounts beside what jobs ask for: which one counts, and which can never be kept."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from corral.launcher.slurm.accounts import (
    Accounts,
    Demand,
    Limits,
    Scope,
    demand_of_job,
    excesses,
    parse_amounts,
    read_accounts,
)
from corral.launcher.slurm.client import SlurmClient, SlurmError
from corral.launcher.slurm.parse import parse_rows, parse_settings
from corral.launcher.slurm.verdict import Holder

CONFIG = """\
AccountingStorageEnforce = associations,limits,qos
AccountingStorageType   = accounting_storage/slurmdbd
ClusterName             = test
"""
USER = """\
lab|lab||deny,normal|normal|00:30:00|cpu=6||||||
lab|team|gpu|normal||||cpu=2|||||
lab|team||low||||cpu=3|mem=8G|3|9||
"""
ACCOUNTS = "root||||40\nlab|root|gres/gpu=2|8|\nteam|lab|||\n"
QOS = """\
normal||||||||||||||
deny|DenyOnLimit||||cpu=4|||||||||
strong|OverPartQOS|1-00:00:00|cpu=64|||||||||||
part||01:00:00|cpu=8||||||1|2|3|4|5|6
"""


class SiteWithAccounts(SlurmClient):
    """Answers as scontrol and sacctmgr do."""

    def __init__(self, config: str = CONFIG) -> None:
        super().__init__()
        self.config = config
        self.asked: list[Sequence[str]] = []

    def settings(self) -> dict[str, str]:
        return parse_settings(self.config)

    def accounting_rows(self, what: Sequence[str], fields: Sequence[str]) -> list[dict[str, str]]:
        self.asked.append(what)
        return parse_rows({"user": USER, "assoc": ACCOUNTS, "qos": QOS}[what[0]], fields)


def _read(site: SiteWithAccounts) -> Accounts:
    return read_accounts(site, "me", site.settings())


def of(holder: Holder, name: str = "x", *, wall_s: int | None = None, **amounts: Mapping[str, int]) -> Limits:
    by_scope = {Scope[scope.upper()]: amount for scope, amount in amounts.items()}
    return Limits(holder=holder, name=name, amounts=by_scope, wall_s=wall_s)


def said(demand: Demand, *ladder: Limits) -> list[str]:
    return [excess.text for excess in excesses((demand, ladder))]


def test_accounting_is_read_as_sacctmgr_writes_it() -> None:
    accounts = _read(SiteWithAccounts())
    assert accounts.has_limits and accounts.is_kept and accounts.default_account == "lab"
    lab, on_gpu, team = accounts.associations
    assert (lab.name, lab.qos, lab.default_qos) == ("lab", ("deny", "normal"), "normal")
    assert lab.wall_s == 1800 and lab.amounts == {Scope.JOB: {"cpu": 6}}
    assert accounts.association("team", "gpu") == on_gpu and accounts.association("team", "cpu") == team
    assert team.amounts[Scope.ALL] == {"mem": 8192}
    assert team.amounts[Scope.USER] == {"job": 3, "submit": 9}
    assert accounts.limits_by_account["lab"].amounts == {Scope.ALL: {"gres/gpu": 2, "job": 8}}
    assert accounts.limits_by_account["root"].amounts == {Scope.ALL: {"submit": 40}}
    assert accounts.limits_by_qos["part"].amounts == {
        Scope.JOB: {"cpu": 8},
        Scope.USER: {"job": 1, "submit": 2},
        Scope.ACCOUNT: {"job": 3, "submit": 4},
        Scope.ALL: {"job": 5, "submit": 6},
    }
    assert accounts.limits_by_qos["deny"].flags == {"DenyOnLimit"}


@pytest.mark.parametrize(
    ("asked", "ladder"),
    [
        ({"account": None, "qos": None}, ["QOS normal", "account lab", "account lab", "account root"]),
        ({"account": "team", "qos": None}, ["QOS low?", "account team", "account team", "account lab", "account root"]),
        ({"account": "team", "qos": None, "partition": "gpu"}, ["QOS normal", "account team"]),
        ({"account": None, "qos": "deny", "partition_qos": "part"}, ["QOS of the partition part", "QOS deny"]),
        ({"account": None, "qos": "strong", "partition_qos": "part"}, ["QOS strong", "QOS of the partition part"]),
    ],
    ids=str,
)
def test_limits_are_asked_in_the_order_of_slurm(asked: dict[str, Any], ladder: list[str]) -> None:
    accounts = _read(SiteWithAccounts())
    found = accounts.ladder(**{"partition": "cpu", "partition_qos": "N/A", **asked})
    names = [f"{limits.holder} {limits.name}" for limits in found]
    wanted = [name for name in ladder if not name.endswith("?")]  # a QOS that nobody knows has no limits
    assert names[: len(wanted)] == wanted


@pytest.mark.parametrize(
    ("config", "is_kept"),
    [
        (CONFIG.replace("accounting_storage/slurmdbd", "(null)"), False),
        (CONFIG.replace("accounting_storage/slurmdbd", "accounting_storage/none"), False),
        ("", None),
    ],
)
def test_a_site_without_accounts_is_not_asked_for_them(config: str, is_kept: bool | None) -> None:
    site = SiteWithAccounts(config)
    assert _read(site) == Accounts(is_kept=is_kept)
    assert site.asked == []


def test_limits_that_nobody_enforces_do_not_count() -> None:
    accounts = _read(SiteWithAccounts(CONFIG.replace("associations,limits,qos", "associations")))
    assert not accounts.has_limits
    assert accounts.ladder(account=None, qos="deny", partition="p", partition_qos="part") == []


def test_accounting_that_does_not_answer_is_unknown() -> None:
    class Silent(SiteWithAccounts):
        def accounting_rows(self, what: Sequence[str], fields: Sequence[str]) -> list[dict[str, str]]:
            raise SlurmError("slurmdbd is away")

    accounts = _read(Silent())
    assert accounts.is_kept and accounts.ladder(account=None, qos="deny", partition="p", partition_qos="part") == []


@pytest.mark.parametrize(
    ("demand", "ladder", "words"),
    [
        ({"cpu": 4}, [of(Holder.QOS, job={"cpu": 4})], ""),
        ({"cpu": 5}, [of(Holder.QOS, job={"cpu": 4})], "5 CPUs, and QOS 'x' allows 4 in one job (MaxTRES)"),
        ({"cpu": 5}, [of(Holder.QOS, user={"cpu": 4})], "allows 4 in all jobs of a user (MaxTRESPU)"),
        (
            {"gres/gpu": 3},
            [of(Holder.ACCOUNT, all={"gres/gpu": 2})],
            "3 GPUs, and account 'x' allows 2 in all its jobs",
        ),
        ({"cpu": 1}, [of(Holder.QOS, least={"cpu": 2})], "1 CPUs, and QOS 'x' wants at least 2 in a job (MinTRES)"),
        # The first that has a limit of this kind counts, be it wider.
        ({"cpu": 6}, [of(Holder.PARTITION, job={"cpu": 8}), of(Holder.QOS, job={"cpu": 4})], ""),
        ({"cpu": 6}, [of(Holder.PARTITION, job={"mem": 8}), of(Holder.QOS, job={"cpu": 4})], "QOS 'x' allows 4"),
        # But each account keeps count for itself.
        ({"cpu": 6}, [of(Holder.ACCOUNT, all={"cpu": 8}), of(Holder.ACCOUNT, "up", all={"cpu": 4})], "'up' allows 4"),
        ({"cpu": 6}, [of(Holder.QOS, all={"cpu": 8}), of(Holder.ACCOUNT, "up", all={"cpu": 4})], ""),
    ],
    ids=str,
)
def test_a_job_is_compared_with_the_limit_that_counts(
    demand: dict[str, int], ladder: Sequence[Limits], words: str
) -> None:
    found = said(Demand(of_job=demand), *ladder)
    assert len(found) == bool(words) and words in "".join(found), found


def test_what_runs_together_counts_together_and_each_job_alone() -> None:
    demand, other = Demand(of_job={"cpu": 4}, of_node={"cpu": 2}), Demand(of_job={"cpu": 6}, of_node={"cpu": 6})

    def together(limits: Limits, of_other: Limits) -> list[str]:
        return [excess.text for excess in excesses((demand, [limits]), [(other, [of_other])])]

    each = of(Holder.QOS, job={"cpu": 4}, node={"cpu": 2})
    assert together(each, each) == []
    assert "2 CPUs, and QOS 'x' allows 1 on one node" in said(demand, of(Holder.QOS, node={"cpu": 1}))[0]
    nine = of(Holder.QOS, user={"cpu": 9})
    assert "10 CPUs" in together(nine, nine)[0]
    assert together(nine, of(Holder.QOS, "y")) == together(nine, of(Holder.ACCOUNT)) == []
    # A partition's QOS counts those, too, that ask for it by name.
    assert "10 CPUs" in together(nine, of(Holder.PARTITION))[0]


@pytest.mark.parametrize(
    ("holder", "amounts", "words"),
    [
        (Holder.QOS, {"user": {"job": 2}}, "3 jobs that run at once, and QOS 'x' allows 2 of a user (MaxJobsPU)"),
        (Holder.QOS, {"user": {"submit": 1}}, "3 jobs in the queue at once, and QOS 'x' allows 1 of a user (MaxSub"),
        (Holder.QOS, {"account": {"job": 1}}, "allows 1 of an account (MaxJobsPA)"),
        (Holder.QOS, {"all": {"job": 1}}, "allows 1 in all (GrpJobs)"),
        (Holder.ACCOUNT, {"user": {"job": 1}}, "account 'x' allows 1 of a user (MaxJobs)"),
        (Holder.ACCOUNT, {"all": {"submit": 1}}, "account 'x' allows 1 in all (GrpSubmit)"),
        (Holder.QOS, {"user": {"job": 3, "submit": 3}, "all": {"job": 3}}, ""),
    ],
    ids=str,
)
def test_the_jobs_themselves_are_counted(holder: Holder, amounts: Mapping[str, Any], words: str) -> None:
    job = Demand(of_job={}), [of(holder, **amounts)]
    found = [excess.text for excess in excesses(job, [job, job])]
    assert len(found) == bool(words) and words in "".join(found), found


def test_a_time_limit_counts_only_if_one_is_asked_for() -> None:
    hour = of(Holder.QOS, "short", wall_s=3600)
    assert said(Demand(of_job={}), hour) == said(Demand(of_job={}, time_limit_s=3600), hour) == []
    assert said(Demand(of_job={}, time_limit_s=7200), hour) == [
        "its time limit is 02:00:00, and QOS 'short' allows 01:00:00 (MaxWall)"
    ]


@pytest.mark.parametrize("key", ["TRES", "ReqTRES"])
def test_a_queued_job_says_what_it_asks_for(key: str) -> None:
    demand = demand_of_job({key: "cpu=8,mem=16G,node=2,billing=8,gres/gpu=4", "TimeLimit": "1-00:00:00"})
    assert demand.of_job == {"cpu": 8, "mem": 16384, "node": 2, "gres/gpu": 4}
    assert demand.of_node == {"cpu": 4, "mem": 8192, "gres/gpu": 2} and demand.time_limit_s == 86400
    assert demand_of_job({"TimeLimit": "UNLIMITED"}) == Demand(of_job={})


def test_odd_amounts_and_lines_are_left_out() -> None:
    assert parse_amounts("cpu=4,mem=100G,gres/gpu=2,license/x=,cpu,mem=lots") == {
        "cpu": 4,
        "mem": 102400,
        "gres/gpu": 2,
    }
    assert parse_rows("a|b\nc\n\n", ["x", "y"]) == [{"x": "a", "y": "b"}]
    nobody = of(Holder.ACCOUNT, "a")
    assert Accounts().qos_of(None, nobody) == "normal" and Accounts().qos_of(None, None) == ""
