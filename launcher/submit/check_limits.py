"""Limits of QOS and accounts that a trial can never keep: refused where it names them, a warning for defaults.

layout + accounts --per allocation, and all that start together--> UnsatisfiableError | warnings

SLURM queues such a job without a word, and `sbatch --test-only` says that it can start. A site's own plugin may give a
job another account or QOS than the user's default, so that nothing is refused for a default.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from corral.experiments.errors import ConfigProblem, ConfigSource, UnsatisfiableError
from corral.experiments.plan import RunPlan
from corral.launcher.layout.layout import Allocation, Layout
from corral.launcher.slurm.accounts import Charge, Demand, Excess, Holder, excesses, name_of, seconds_of, wall_of
from corral.launcher.submit.asks import leaves_time, limit_that_fits, option_path, raise_problems
from corral.launcher.submit.cluster import ClusterFacts
from corral.scheduling.slurm_formats import format_time_limit

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
        fixed = self.layout.fixed if index in self.layout.fixed else []
        beside = [self._charge(self.layout.allocations[other]) for other in fixed if other != index]
        demand, ladder = self._charge(self.layout.allocations[index])
        yield from excesses((demand, ladder), beside)
        given = wall_of(ladder) if demand.time_limit_s is None and index in self.layout.components else None
        signal_s = self.plan.launch.signal_before_end_s
        if given is not None and given.wall_s and not leaves_time(given.wall_s, signal_s):
            said = (
                f"no time limit is asked for, {name_of(given)} gives {format_time_limit(given.wall_s)} (MaxWall), and "
                f"SLURM signals its end {signal_s} s before it (launch.signal_before_end_s)"
            )
            yield Excess(limits=given, setting="MaxWall", said=said, is_time=True, never="train")

    def _charge(self, allocation: Allocation) -> Charge:
        account, qos, asked = _charged(allocation)
        # Of several partitions SLURM may take one whose own QOS allows it.
        partition = "" if asked and "," in asked else asked or self.facts.default_partition or ""
        settings = self.facts.settings(partition)
        ladder = self.facts.accounts.ladder(
            account=account, qos=qos, partition=partition, partition_qos=settings.get("QoS", "")
        )
        demand = Demand(
            of_job=self._amounts(allocation, allocation.num_nodes),
            of_node=self._amounts(allocation, 1),
            time_limit_s=seconds_of(allocation.options.get("time_limit") or settings.get("DefaultTime", "")),
        )
        return demand, ladder

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
            signal_s = self.plan.launch.signal_before_end_s if index in self.layout.components else 0
            hint = f"set time_limit to {limit_that_fits(limits.wall_s, signal_s)}, or choose {instead}"
        elif excess.counts_jobs and self.layout.kind != "packed":
            hint = f"set launch.layout: packed, which is one job, or choose {instead}"
        else:
            hint = f"ask for less, or choose {instead}"
        of_account = f"assoc account={limits.name} format=account,user"
        what = of_account if limits.holder is Holder.ACCOUNT else f"qos {limits.name} format=name"
        who = "" if allocation.role == "head" or excess.counts_jobs else f" ({allocation.name})"
        return ConfigProblem(
            message=f"trial can never {excess.never}: {excess.said}{who}",
            hint=hint,
            path=option_path(self.layout, self.source, index, field),
            shown=allocation.options.get(field, ""),
            evidence=f"sacctmgr show {what},{excess.setting}",
        )

    def _other_qos(self, allocation: Allocation, exceeded: str) -> list[str]:
        account, _, partition = _charged(allocation)
        association = self.facts.accounts.association(account, partition or self.facts.default_partition or "")
        return [name for name in association.qos if name != exceeded] if association else []


def _charged(allocation: Allocation) -> tuple[str | None, str | None, str | None]:
    """What decides whose limits count: account, QOS, partition."""
    options = allocation.options
    return options.get("account"), options.get("qos"), options.get("partition")
