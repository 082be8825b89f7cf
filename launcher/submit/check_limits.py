"""Limits of QOS and accounts that a trial can never keep: refused where it names them, a warning for defaults.

layout + accounts --per allocation, and all that start together--> UnsatisfiableError | warnings

SLURM queues such a job without a word, and `sbatch --test-only` says that it can start. A site's own plugin may give a
job another account or QOS than the user's default, so that nothing is refused for a default.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from corral.experiments.errors import ConfigProblem, ConfigSource, KeyPath, UnsatisfiableError
from corral.experiments.plan import RunPlan
from corral.launcher.layout.layout import Allocation, Layout
from corral.launcher.slurm.accounts import Holder, Limits
from corral.launcher.slurm.limits import Demand, Excess, excesses
from corral.launcher.submit.asks import raise_problems
from corral.launcher.submit.cluster import ClusterFacts
from corral.scheduling.slurm_formats import format_time_limit, parse_time_limit
from corral.scheduling.worker_information import parse_worker_id

_FIELD_BY_HOLDER: Mapping[Holder, str] = {Holder.QOS: "qos", Holder.PARTITION: "partition", Holder.ACCOUNT: "account"}


def check_limits(layout: Layout, plan: RunPlan, facts: ClusterFacts, source: ConfigSource) -> list[str]:
    """Compares every job of a trial with the limits that it has to keep; returns warnings.

    Raises:
        UnsatisfiableError: if a limit of an account, QOS or partition that the trial names can never be kept.
    """
    checks = _Checks(layout=layout, plan=plan, facts=facts, source=source)
    problems: list[ConfigProblem] = []
    warnings: list[str] = []
    for index in range(len(layout.allocations)):
        for excess in checks.excesses_of(index):
            problem = checks.problem(index, excess)
            if checks.is_chosen(index, excess):
                problems.append(problem)
            else:
                warnings.append(f"{problem.message}; {problem.hint} (checked with: {problem.evidence})")
    raise_problems(UnsatisfiableError, problems, source)
    return list(dict.fromkeys(warnings))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Checks:
    """A layout beside the limits of its user."""

    layout: Layout
    plan: RunPlan
    facts: ClusterFacts
    source: ConfigSource

    def excesses_of(self, index: int) -> Iterator[Excess]:
        """What one allocation exceeds, by itself or with those that it starts with."""
        allocation = self.layout.allocations[index]
        together: Counter[str] = Counter()
        if allocation.role != "elastic":
            for other in self.layout.allocations:
                if other.role != "elastic" and _charged(other) == _charged(allocation):
                    together.update(self._amounts(other, other.num_nodes))
        limit = allocation.options.get("time_limit")
        demand = Demand(
            of_job=self._amounts(allocation, allocation.num_nodes),
            of_node=self._amounts(allocation, 1),
            together=together,
            time_limit_s=parse_time_limit(limit) if limit else None,
        )
        yield from excesses(demand, self._ladder(allocation))

    def _ladder(self, allocation: Allocation) -> list[Limits]:
        account, qos, asked = _charged(allocation)
        # Of several partitions SLURM may take one whose own QOS allows it.
        partition = "" if asked and "," in asked else asked or self.facts.default_partition or ""
        return self.facts.accounts.ladder(
            account=account,
            qos=qos,
            partition=partition,
            partition_qos=self.facts.settings(partition).get("QoS", ""),
        )

    def _amounts(self, allocation: Allocation, num_nodes: int) -> dict[str, int]:
        amounts = {
            "cpu": allocation.cpus_per_node * num_nodes,
            "mem": allocation.mem_mb_per_node * num_nodes,
            "node": num_nodes,
        }
        if allocation.gpus_per_node and self.plan.cluster.gpu_request != "none":
            amounts["gres/gpu"] = allocation.gpus_per_node * num_nodes
        return amounts

    def is_chosen(self, index: int, excess: Excess) -> bool:
        """Whether the configuration names who has the limit; a partition's QOS holds for all in it."""
        holder, options = excess.limits.holder, self.layout.allocations[index].options
        return holder is Holder.PARTITION or _FIELD_BY_HOLDER[holder] in options

    def problem(self, index: int, excess: Excess) -> ConfigProblem:
        allocation, limits = self.layout.allocations[index], excess.limits
        field = _FIELD_BY_HOLDER[limits.holder]
        instead = f"another launch.{field}"
        if limits.holder is Holder.QOS and (others := self._other_qos(allocation, limits.name)):
            instead += f" (you may use {', '.join(others)})"
        if excess.is_time and limits.wall_s:
            field = "time_limit"
            hint = f"set time_limit to at most '{format_time_limit(limits.wall_s)}', or choose {instead}"
        else:
            hint = f"ask for less, or choose {instead}"
        of_account = f"assoc account={limits.name} format=account,user"
        what = of_account if limits.holder is Holder.ACCOUNT else f"qos {limits.name} format=name"
        who = "" if allocation.role == "head" else f" ({allocation.name})"
        return ConfigProblem(
            message=f"trial can never start: {excess.said}{who}",
            hint=hint,
            path=self._path(index, field),
            shown=allocation.options.get(field, ""),
            evidence=f"sacctmgr show {what},{excess.setting}",
        )

    def _other_qos(self, allocation: Allocation, exceeded: str) -> list[str]:
        account, _, partition = _charged(allocation)
        association = self.facts.accounts.association(account, partition or self.facts.default_partition or "")
        return [name for name in association.qos if name != exceeded] if association else []

    def _path(self, index: int, field: str) -> KeyPath:
        kinds = dict.fromkeys(parse_worker_id(worker)[0] for worker in self.layout.workers_of(index))
        own: list[KeyPath] = [("groups", kind, "scheduling", field) for kind in kinds]
        if self.layout.allocations[index].role == "elastic":
            own = [("groups", kind, "elastic", "scheduling", field) for kind in kinds] + own
        common: KeyPath = ("launch", field)
        given = self.source.first_given(*own, common)
        return given if self.source.gives(given) else common


def _charged(allocation: Allocation) -> tuple[str | None, str | None, str | None]:
    """What decides whose limits count: account, QOS, partition."""
    options = allocation.options
    return options.get("account"), options.get("qos"), options.get("partition")
