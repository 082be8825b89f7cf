"""Whether the nodes of a cluster can ever hold a layout: each allocation alone, then those that run together.

    allocation + partition --_shortfalls--> problem: node too small, too few nodes, partition's limits
    hetjob     components never share a node (backfill wants one each): for every set of components the sum of their
               nodes must not exceed the nodes that any of them could have
    jobs       jobs may share nodes: CPUs, memory and GPUs of all must not exceed those of the nodes
    elastic    each alone; the trial runs without them

SLURM queues all of these requests, and hetjob sums pass `sbatch --test-only` too. All nodes count, whatever their
state: those that are down or drained come back. That too few of them are up at present is a warning.

Limits of QOS and accounts that a trial can never keep: refused where it names them, a warning for defaults.

layout + accounts --per allocation, and all that start together--> UnsatisfiableError | warnings

SLURM queues such a job without a word, and `sbatch --test-only` says that it can start. A site's own plugin may give a
job another account or QOS than the user's default, so that nothing is refused for a default.
"""

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from corral.experiments.errors import ConfigProblem, ConfigSource, KeyPath, UnsatisfiableError
from corral.experiments.plan import RunPlan
from corral.launcher.layout.layout import Allocation, Layout
from corral.launcher.slurm.accounts import Charge, Demand, Excess, excesses, name_of, seconds_of, wall_of
from corral.launcher.slurm.client import hostnames_command, nodes_command
from corral.launcher.slurm.parse import Node, limit_of
from corral.launcher.slurm.verdict import Holder
from corral.launcher.submit.asks import asks_of, leaves_time, limit_that_fits, raise_problems, shapes_for
from corral.launcher.submit.cluster import ClusterFacts, counted, hosts
from corral.launcher.submit.plan_text import describe, request_per_node
from corral.scheduling.placement import most_tasks_that_fit
from corral.scheduling.scheduling import TasksGroup
from corral.scheduling.slurm_formats import format_time_limit
from corral.scheduling.worker_information import WorkerKind

_FOR_EVER_S = 1 << 62


def check_layout(parts: Sequence["Part"]) -> list[str]:
    """Compares every allocation with the cluster; returns what waits until nodes are there again.

    SLURM says of these only that they are not available.

    Raises:
        UnsatisfiableError: with what is asked for, what there is, and what would fit.
    """
    fixed, nodes = fixed_of(parts), parts[0].facts.nodes
    problems = [problem for part in parts for problem in part.problems()]
    raise_problems(UnsatisfiableError, problems or list(_together(fixed, nodes)))
    waiting = [line for part in parts for line in part.waits("up", away={})]
    if not waiting and any(_together(fixed, [node for node in nodes if node.is_up])):
        waiting.append("of the nodes that are up, there are too few for all jobs of this trial together")
    if waiting:
        return [f"{line}: it waits until nodes are back (sinfo -R says why they are not)" for line in waiting]
    how = "up and in no reservation of others"
    reserved = [
        line for one in parts for line in one.waits(how, away=one.facts.reserved_for_others(one.allocation.options))
    ]
    return [f"{line}: it waits for the end of these (scontrol show reservation)" for line in reserved]


def fixed_of(parts: Sequence["Part"]) -> list["Part"]:
    """The allocations that the trial cannot do without."""
    return [part for part in parts if part.allocation.role != "elastic"]


def summary_of(parts: Sequence["Part"]) -> list[str]:
    """Facts about the partitions worth printing."""
    facts, lines = parts[0].facts, []
    for name in dict.fromkeys(part.partitions[0] for part in fixed_of(parts)):
        if members := facts.members(name):
            lines.append(f"partition {name} ok")
            lines.append(f"{sum(node.state.startswith('idle') for node in members)} of {len(members)} nodes idle")
            if whole := facts.granularity(name):
                lines.append(f"jobs get whole {whole}, and are charged for them")
        else:
            lines.append(f"partition {name} shows no nodes here, not checked")
    return lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One allocation of a layout beside a cluster."""

    index: int
    layout: Layout
    plan: RunPlan
    facts: ClusterFacts
    source: ConfigSource

    @property
    def allocation(self) -> Allocation:
        return self.layout.allocations[self.index]

    @property
    def partitions(self) -> list[str]:
        return self.facts.asked(self.allocation.options)

    @property
    def who(self) -> str:
        """The trial, where it is one allocation; else the groups of this one."""
        if self.layout.fixed == [self.index]:
            return "it"
        return " and ".join(self.layout.kinds_of(self.index)) or self.allocation.name

    @property
    def largest_group(self) -> WorkerKind:
        """The group that takes most nodes, of those the biggest."""
        groups = self.groups
        return max(groups, key=lambda kind: (self._nodes_of(kind), groups[kind].count))

    @property
    def groups(self) -> dict[WorkerKind, TasksGroup]:
        kinds = self.layout.kinds_of(self.index)
        return {kind: group for kind, group in self.plan.scheduling.items() if kind in kinds}

    def _nodes_of(self, kind: WorkerKind) -> int:
        workers = self.layout.workers_of(self.index)
        return len({self.layout.steps[one].node_index for one in workers if one.startswith(f"{kind}/")})

    def option_path(self, field: str) -> KeyPath:
        """The key that gives the allocation a value: its groups', or that of launch."""
        kinds = self.layout.kinds_of(self.index)
        own: list[KeyPath] = [("groups", kind, "scheduling", field) for kind in kinds]
        if self.allocation.role == "elastic":
            own = [("groups", kind, "elastic", "scheduling", field) for kind in kinds] + own
        return next(filter(self.source.gives, own), ("launch", field))

    def count(self) -> KeyPath:
        """The key that decides how many workers the largest group has."""
        kind = self.largest_group
        if self.allocation.role == "elastic":
            return "groups", kind, "elastic", "count"
        keys: list[KeyPath] = [("groups", kind, "count"), ("allocation",)]
        follows = kind in ("model_worker", "generation_server")
        return self.source.first_given(*(reversed(keys) if follows else keys))

    def fitting(self, partition: str) -> list[Node]:
        """Nodes that could hold one node's share, whatever runs there now."""
        one, resources = self.allocation, counted(self.plan)
        return [
            node
            for node in self.facts.allowed(partition, one.options)
            if all(it.size(node, one.gpu_type) >= getattr(one, it.of_allocation) for it in resources)
        ]

    def problems(self) -> list[ConfigProblem]:
        """Why it cannot start in any of its partitions; the first partition speaks for all."""
        by_partition = [list(self._shortfalls(name)) for name in self.partitions]
        return by_partition[0] if all(by_partition) else []

    @property
    def signal_s(self) -> int:
        """How long before its end SLURM signals its job; 0 for jobs beside the trial's own, which get no signal."""
        return self.plan.launch.signal_before_end_s if self.index in self.layout.components else 0

    def _time_problems(self, name: str) -> Iterator[ConfigProblem]:
        """A time limit that the partition does not allow, or one of its own that is signalled as soon as a job runs."""
        facts, options, signal_s = self.facts, self.allocation.options, self.signal_s
        most_s = facts.max_time_s(name) or _FOR_EVER_S
        limit_s = facts.time_limit_s(name, options) or most_s
        shown, fits = format_time_limit(limit_s), limit_that_fits(most_s, signal_s)
        if limit_s > most_s:
            message = f"time limit {shown} is more than partition {name!r} allows (MaxTime {format_time_limit(most_s)})"
            longer = [
                repr(one)
                for one in facts.partition_names
                if facts.settings(one).get("State", "UP") == "UP" and (facts.max_time_s(one) or _FOR_EVER_S) >= limit_s
            ]
            hint = f"{fits} fits: a trial whose time is over goes on in its next attempt"
            hint += f"; or choose partition {' or '.join(longer[:3])}" if longer else ""
        elif "time_limit" not in options and signal_s and not leaves_time(limit_s, signal_s):
            message = (
                f"no time limit is asked for, and that of partition {name!r}, {shown}, leaves no time to train: SLURM "
                f"signals its end {signal_s} s before it (launch.signal_before_end_s)"
            )
            hint = "set launch.time_limit, or lower launch.signal_before_end_s"
            if not leaves_time(most_s, signal_s):
                hint = f"choose another partition; here launch.time_limit may be {fits}"
        else:
            return
        path, evidence = self.option_path("time_limit"), f"scontrol show partition {name}"
        yield ConfigProblem(message, hint, path=path, evidence=evidence)

    def _shortfalls(self, name: str) -> Iterator[ConfigProblem]:
        yield from self._time_problems(name)
        members, num_nodes, wanted = self.facts.members(name), self.allocation.num_nodes, self.allocation.options
        if not members:
            return
        least, most = self.nodes_of(name)
        if not self.fitting(name):
            yield self._too_big(name)
        elif num_nodes > most:
            yield self._too_many(name, most, len(members))
        elif num_nodes < least:
            yield self._problem(
                f"{num_nodes} nodes, partition {name!r} takes jobs of at least {least} (MinNodes)",
                hint="choose another partition",
                path=self.option_path("partition"),
                evidence=f"scontrol show partition {name}",
            )
        if (num_named := len(hosts(wanted, "nodelist"))) > num_nodes:
            yield self._problem(
                f"{num_nodes} nodes, nodelist names {num_named} nodes",
                hint=f"name at most {num_nodes}, or use exclude for the nodes that you do not want",
                path=self.option_path("nodelist"),
                evidence=shlex.join(hostnames_command(wanted["nodelist"])),
            )

    def nodes_of(self, partition: str) -> tuple[int, int]:
        """The fewest and the most nodes of a partition that such a job can have."""
        settings, num_fitting = self.facts.settings(partition), len(self.fitting(partition))
        limit = limit_of(settings, "MaxNodes")
        return limit_of(settings, "MinNodes") or 0, num_fitting if limit is None else min(limit, num_fitting)

    def _problem(self, needs: str, *, hint: str, path: KeyPath, evidence: str, note: str = "") -> ConfigProblem:
        """What it needs and cannot have, with the key that asks for it."""
        message = f"trial can never start: {self.who} needs {needs}"
        return ConfigProblem(message, hint, path=path, note=note, evidence=evidence)

    def _too_big(self, name: str) -> ConfigProblem:
        allocation, evidence = self.allocation, shlex.join(nodes_command(name))
        wanted = {one.of_task: getattr(allocation, one.of_allocation) for one in counted(self.plan)}
        for one, offered, biggest in self.facts.shortfalls(name, counted(self.plan), wanted, allocation.gpu_type):
            return self._problem(
                f"{wanted[one.of_task]} {one.unit} on one node; {biggest}",
                hint=f"set cluster.{one.setting} to at most {offered}, or leave it out, so that the trial is spread "
                "over more nodes; or ask for less",
                path=self.source.first_given(("cluster", one.setting), self.count()),
                evidence=evidence,
            )
        return self._problem(
            f"{request_per_node(allocation)} together on one node, and no usable node of partition {name!r} has them",
            hint="ask for less per node, choose another partition, or exclude fewer nodes",
            path=self.source.first_given(self.option_path("exclude"), self.count()),
            evidence=evidence,
        )

    def _too_many(self, name: str, available: int, num_members: int) -> ConfigProblem:
        allocation, kind, path = self.allocation, self.largest_group, self.count()
        num_fitting = len(self.fitting(name))
        offered = f"{num_fitting} such nodes of {num_members}"
        if available < num_fitting:
            offered = f"MaxNodes {available} for a job"
        hints = []
        if fits := self.count_that_fits(available, name):
            hints.append(f"{'count' if path[-1] == 'count' else f'd for {kind}'} {fits} fits")
        elsewhere = [
            f"{other!r} ({len(self.fitting(other))} such nodes)"
            for other in self.facts.partition_names
            for least, most in [self.nodes_of(other)]
            if other != name and least <= allocation.num_nodes <= most
        ]
        if elsewhere:
            hints.append(f"partition {' or '.join(elsewhere[:2])} fits")
        group = self.plan.scheduling[kind]
        task = f"{group.scheduling.gpu} GPU" if group.scheduling.gpu else f"{group.scheduling.cpu} CPU"
        return self._problem(
            f"{allocation.num_nodes} nodes ({request_per_node(allocation)} each), partition {name!r} has {offered}",
            hint=", or ".join(hints) or "ask for less per task, or lower the groups' counts",
            path=path,
            note=f"{group.count} x {task} = {self._nodes_of(kind)} nodes",
            evidence=shlex.join(nodes_command(name)),
        )

    def count_that_fits(self, num_nodes: int, partition: str) -> int:
        """The largest count of the largest group with which it needs at most so many nodes; 0 if none does."""
        shapes = shapes_for(asks_of(self.plan, self.source), self.plan, self.facts)
        shape = self.plan.cluster.node_shape(shapes.get(partition))
        has_slack = self.allocation.role == "head"
        return most_tasks_that_fit(self.groups, [self.largest_group], shape, has_slack=has_slack, max_nodes=num_nodes)

    def waits(self, how: str, *, away: Mapping[str, str]) -> Iterator[str]:
        """Too few nodes, or not those that are asked for by name, are `how` at present.

        Args:
            away: nodes that are not to be had though they are up, and why.
        """
        num_nodes, wanted = self.allocation.num_nodes, set(hosts(self.allocation.options, "nodelist"))
        fitting_by_partition = {
            name: fitting
            for name in self.partitions
            if (fitting := self.fitting(name)) and wanted <= {node.name for node in fitting}
        }
        there = {
            name: {node.name for node in fitting if node.is_up and node.name not in away}
            for name, fitting in fitting_by_partition.items()
        }
        if not there or any(wanted <= names and len(names) >= num_nodes for names in there.values()):
            return
        name = max(there, key=lambda name: len(there[name]))
        fitting = [node for node in fitting_by_partition[name] if not wanted or node.name in wanted]
        states = Counter(away.get(node.name, node.state) for node in fitting)
        shown = ", ".join(f"{count} {state}" for state, count in states.items())
        of_these = f"{len(wanted & there[name])} of {', '.join(sorted(wanted))}" if wanted else f"{len(there[name])}"
        yield f"{self.who} needs {num_nodes} nodes, {of_these} of partition {name!r} are {how} at present ({shown})"


def parts_of(layout: Layout, plan: RunPlan, facts: ClusterFacts, source: ConfigSource) -> list[Part]:
    """Every allocation beside the cluster."""
    return [
        Part(index=index, layout=layout, plan=plan, facts=facts, source=source)
        for index in range(len(layout.allocations))
    ]


def _together(fixed: Sequence[Part], nodes: Sequence[Node]) -> Iterator[ConfigProblem]:
    """Some of the allocations that only start together need more than the nodes that any of them could have."""
    fitting = {part.index: {node.name for name in part.partitions for node in part.fitting(name)} for part in fixed}
    seen = [part for part in fixed if any(node.name in fitting[part.index] for node in nodes)]
    for size in range(len(seen), 1, -1):
        for chosen in combinations(seen, size):
            theirs = set[str]().union(*(fitting[part.index] for part in chosen))
            shared = {node.name: node for node in nodes if node.name in theirs}
            if problem := next(_not_together(chosen, list(shared.values())), None):
                yield problem
                return


def _not_together(chosen: Sequence[Part], nodes: Sequence[Node]) -> Iterator[ConfigProblem]:
    """Components of a heterogeneous job never share a node; jobs may, and then share what it has."""
    allocations = [part.allocation for part in chosen]
    blamed = max(chosen, key=lambda part: part.allocation.num_nodes)
    path, num_nodes = blamed.count(), sum(one.num_nodes for one in allocations)
    if len(blamed.layout.components) > 1:
        who, amounts = "hetjob components, which never share a node,", [("nodes", num_nodes, len(nodes))]
        fits = blamed.count_that_fits(len(nodes) - num_nodes + blamed.allocation.num_nodes, blamed.partitions[0])
        hint = (
            "lower the groups' counts, or let them share nodes: the same partition and constraint make one allocation"
        )
        hint = f"count {fits} of {blamed.largest_group} fits; or {hint}" if fits and path[-1] == "count" else hint
    else:
        who, hint = "jobs", "lower the groups' counts or sizes, or use more partitions"
        types = {one.gpu_type for one in allocations}
        amounts = [
            (
                one.unit,
                sum(it.num_nodes * getattr(it, one.of_allocation) for it in allocations),
                sum(max(one.size(node, gpu_type) for gpu_type in types) for node in nodes),
            )
            for one in counted(blamed.plan)
        ]
    for unit, asked, offered in amounts:
        if asked > offered:
            yield ConfigProblem(
                message=f"trial can never start: its {who} need {asked} {unit} together, and there are {offered} on "
                f"the {len(nodes)} nodes that they could have",
                hint=hint,
                path=path,
                note=" + ".join(f"{it.name}: {describe(it)}" for it in allocations),
                evidence=shlex.join(nodes_command()),
            )


def check_limits(parts: Sequence[Part]) -> list[str]:
    """Compares every job of a trial with the limits that it has to keep; returns warnings.

    Raises:
        UnsatisfiableError: if a limit of an account, QOS or partition that the trial names can never be kept.
    """
    problems: list[ConfigProblem] = []
    warnings: list[str] = []
    fixed = fixed_of(parts)
    for part in parts:
        for excess in _excesses(part, beside=[other for other in fixed if part in fixed and other is not part]):
            problem, holder = _limit_problem(part, excess), excess.limits.holder
            # A partition's QOS holds for all in it.
            if holder is Holder.PARTITION or holder.field in part.allocation.options:
                problems.append(problem)
            else:
                warnings.append(f"{problem.message}; {problem.hint} (checked with: {problem.evidence})")
    raise_problems(UnsatisfiableError, problems)
    return list(dict.fromkeys(warnings))


def _excesses(part: Part, *, beside: Sequence[Part]) -> Iterator[Excess]:
    """The limits that an allocation exceeds, by itself or with those that it starts with."""
    demand, ladder = _charge(part)
    yield from excesses((demand, ladder), [_charge(other) for other in beside])
    given, signal_s = None if demand.time_limit_s else wall_of(ladder), part.signal_s
    if signal_s and given and given.wall_s and not leaves_time(given.wall_s, signal_s):
        text = (
            f"no time limit is asked for, {name_of(given)} gives {format_time_limit(given.wall_s)} (MaxWall), and "
            f"SLURM signals its end {signal_s} s before it (launch.signal_before_end_s)"
        )
        yield Excess(limits=given, setting="MaxWall", text=text, never="train")


def _charge(part: Part) -> Charge:
    options, facts, one = part.allocation.options, part.facts, part.allocation
    # Of several partitions SLURM may take one whose own QOS allows it.
    partition = part.partitions[0] if len(part.partitions) == 1 else ""
    settings = facts.settings(partition)
    ladder = facts.accounts.ladder(
        account=options.get("account"),
        qos=options.get("qos"),
        partition=partition,
        partition_qos=settings.get("QoS", ""),
    )
    of_node = {it.of_accounts: getattr(one, it.of_allocation) for it in counted(part.plan)}
    of_node = {name: amount for name, amount in of_node.items() if amount} | {"node": 1}
    return Demand(
        of_job={name: amount * one.num_nodes for name, amount in of_node.items()},
        of_node=of_node,
        time_limit_s=seconds_of(options.get("time_limit") or settings.get("DefaultTime", "")),
    ), ladder


def _limit_problem(part: Part, excess: Excess) -> ConfigProblem:
    allocation, limits = part.allocation, excess.limits
    field = limits.holder.field
    instead = f"another launch.{field}"
    if limits.holder is Holder.QOS and (others := _other_qos(part, limits.name)):
        instead += f" (you may use {', '.join(others)})"
    if excess.setting == "MaxWall" and limits.wall_s:
        field = "time_limit"
        hint = f"set time_limit to {limit_that_fits(limits.wall_s, part.signal_s)}, or choose {instead}"
    elif excess.counts_jobs and part.layout.kind != "packed":
        hint = f"set launch.layout: packed, which is one job, or choose {instead}"
    else:
        hint = f"ask for less, or choose {instead}"
    of_account = f"assoc account={limits.name} format=account,user"
    what = of_account if limits.holder is Holder.ACCOUNT else f"qos {limits.name} format=name"
    who = "" if allocation.role == "head" or excess.counts_jobs else f" ({allocation.name})"
    return ConfigProblem(
        message=f"trial can never {excess.never}: {excess.text}{who}",
        hint=hint,
        path=part.option_path(field),
        evidence=f"sacctmgr show {what},{excess.setting}",
    )


def _other_qos(part: Part, exceeded: str) -> list[str]:
    association = part.facts.accounts.association(part.allocation.options.get("account"), part.partitions[0])
    return [name for name in association.qos if name != exceeded] if association else []
