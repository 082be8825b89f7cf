"""Whether the nodes of a cluster can ever hold a layout: each allocation alone, then those that run together.

    allocation + partition --_shortfalls--> problem: node too small, too few nodes, partition's limits
    hetjob     components never share a node (backfill wants one each): for every set of components the sum of their
               nodes must not exceed the nodes that any of them could have
    jobs       jobs may share nodes: CPUs, memory and GPUs of all must not exceed those of the nodes
    elastic    each alone; the trial runs without them

SLURM queues all of these requests, and hetjob sums pass `sbatch --test-only` too. All nodes count, whatever their
state: those that are down or drained come back. That too few of them are up at present is a warning.
"""

import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import NamedTuple

from corral.experiments.errors import ConfigProblem, ConfigSource, KeyPath, UnsatisfiableError
from corral.experiments.plan import RunPlan
from corral.launcher.layout.layout import Allocation, Layout
from corral.launcher.slurm.client import hostnames_command, nodes_command
from corral.launcher.slurm.parse import Node
from corral.launcher.submit.asks import asks_of, option_path, partitions_asked, shapes_for
from corral.launcher.submit.cluster import ClusterFacts, biggest_nodes, gpus_of, plain_features
from corral.scheduling.placement import place
from corral.scheduling.scheduling import TasksGroup
from corral.scheduling.slurm_formats import expand_host_list
from corral.scheduling.worker_information import WorkerKind, parse_worker_id

_MAX_COMPONENTS = 8  # of a heterogeneous job; there are five kinds of workers


class Capacity(NamedTuple):
    """What was found about the nodes."""

    checks: list[str]
    """Facts worth printing."""
    waits_for_nodes: list[str]
    """What waits until nodes are up again; SLURM says of them only that they are not available."""


def check_layout(layout: Layout, plan: RunPlan, facts: ClusterFacts, source: ConfigSource) -> Capacity:
    """Compares every allocation with the cluster.

    Raises:
        UnsatisfiableError: with what is asked for, what there is, and what would fit.
    """
    checks = _Checks(layout=layout, plan=plan, facts=facts, source=source)
    problems = [problem for index in range(len(layout.allocations)) for problem in checks.of_allocation(index)]
    if not problems:
        problems = list(checks.of_all_together(list(facts.nodes)))
    if problems:
        raise UnsatisfiableError(problems).located(source)
    return Capacity(checks=checks.summary(), waits_for_nodes=checks.waits_for_nodes())


def describe(allocation: Allocation) -> str:
    """What an allocation asks for, on a line."""
    where = allocation.options.get("partition")
    return f"{allocation.name}: {allocation.num_nodes} x ({_share(allocation)})" + (f" of {where}" if where else "")


class _Resource(NamedTuple):
    """What nodes have and allocations ask for."""

    unit: str
    asked: str
    """The field of an allocation, for each of its nodes."""
    setting: str
    """The key below `cluster` that describes a node's."""
    size: Callable[[Allocation, Node], int]
    """What an allocation could have of a node."""


_RESOURCES = (
    _Resource("CPUs", "cpus_per_node", "cpus_per_node", lambda _, node: node.cpus),
    _Resource("MB of memory", "mem_mb_per_node", "mem_per_node", lambda _, node: node.mem_mb),
    _Resource("GPUs", "gpus_per_node", "gpus_per_node", lambda allocation, node: gpus_of(node, allocation.gpu_type)),
)
_FIELD_BY_LIMIT = {
    "MaxNodes": "num_nodes",
    "MinNodes": "num_nodes",
    "MaxCPUsPerNode": "cpus_per_node",
    "MaxMemPerNode": "mem_mb_per_node",
}
"""A partition's limits of one job, and the field of an allocation that they are about."""


def _excesses(allocation: Allocation, settings: Mapping[str, str]) -> Iterator[tuple[str, int, int]]:
    """The limits of a partition that one job exceeds, or stays below where it must not; what it asks for; the limit."""
    for name, field in _FIELD_BY_LIMIT.items():
        text, asked = settings.get(name, ""), getattr(allocation, field)
        if not text.isdigit() or (text == "0" and name != "MaxNodes"):
            continue  # UNLIMITED, or not there; what is to be counted per node has no limit at zero either
        if asked < int(text) if name == "MinNodes" else asked > int(text):
            yield name, asked, int(text)


def _share(allocation: Allocation) -> str:
    share = f"{allocation.cpus_per_node} CPUs, {allocation.mem_mb_per_node} MB"
    return share + (f", {allocation.gpus_per_node} GPUs" if allocation.gpus_per_node else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Checks:
    """A layout beside a cluster."""

    layout: Layout
    plan: RunPlan
    facts: ClusterFacts
    source: ConfigSource

    def summary(self) -> list[str]:
        names = dict.fromkeys(partitions_asked(allocation.options, self.facts)[0] for allocation in self._fixed())
        lines = []
        for name in names:
            members = self.facts.members(name)
            if not members:
                lines.append(f"partition {name} shows no nodes here, not checked")
                continue
            lines.append(f"partition {name} ok")
            lines.append(f"{sum(node.state.startswith('idle') for node in members)} of {len(members)} nodes idle")
        return lines

    def _fixed(self) -> list[Allocation]:
        return [allocation for allocation in self.layout.allocations if allocation.role != "elastic"]

    def of_allocation(self, index: int) -> list[ConfigProblem]:
        """Why one allocation cannot start in any of its partitions; the first partition speaks for all."""
        allocation = self.layout.allocations[index]
        by_partition = [
            list(self._shortfalls(index, name)) for name in partitions_asked(allocation.options, self.facts)
        ]
        return by_partition[0] if all(by_partition) else []

    def _shortfalls(self, index: int, name: str) -> Iterator[ConfigProblem]:
        members = self.facts.members(name)
        if not members:
            return
        allocation = self.layout.allocations[index]
        fitting = self._fitting(allocation, name)
        if not fitting:
            yield self._too_big(index, name, members)
        elif allocation.num_nodes > len(fitting):
            yield self._too_many(index, name, len(fitting), f"{len(fitting)} such nodes of {len(members)}")
        else:
            yield from self._limits(index, name)
        wanted = expand_host_list(allocation.options.get("nodelist", ""))
        if len(wanted) > allocation.num_nodes:
            path = option_path(self.layout, self.source, index, "nodelist")
            yield ConfigProblem(
                message=f"nodelist names {len(wanted)} nodes, and {self._who(index)} needs {allocation.num_nodes}",
                hint=f"name at most {allocation.num_nodes}, or use exclude for the nodes that you do not want",
                path=path,
                shown=allocation.options["nodelist"],
                evidence=shlex.join(hostnames_command(allocation.options["nodelist"])),
            )

    def _fitting(self, allocation: Allocation, name: str) -> list[Node]:
        """Nodes that could hold one node's share, whatever runs there now."""
        excluded = set(expand_host_list(allocation.options.get("exclude", "")))
        features = plain_features(allocation.options.get("constraint", ""))
        return [
            node
            for node in self.facts.members(name)
            if all(one.size(allocation, node) >= getattr(allocation, one.asked) for one in self._counted)
            and node.name not in excluded
            and all(feature in node.features for feature in features)
        ]

    @property
    def _counted(self) -> Sequence[_Resource]:
        """What SLURM gives out here."""
        return _RESOURCES[:-1] if self.plan.cluster.gpu_request == "none" else _RESOURCES

    def _too_big(self, index: int, name: str, members: Sequence[Node]) -> ConfigProblem:
        allocation = self.layout.allocations[index]
        evidence = shlex.join(nodes_command(name))
        for unit, field, setting, size in self._counted:
            asked = getattr(allocation, field)
            offered, biggest = biggest_nodes(members, partial(size, allocation))
            if asked > offered:
                configured = getattr(self.plan.cluster, setting)
                return ConfigProblem(
                    message=f"trial can never start: {self._who(index)} needs {asked} {unit} on one node; the biggest "
                    f"node of partition {name!r} has {offered} ({biggest})",
                    hint=f"set cluster.{setting} to at most {offered}, or leave it out, so that the trial is spread "
                    "over more nodes; or ask for less",
                    path=("cluster", setting) if configured is not None else self._count_path(index),
                    shown=str(configured) if configured is not None else "",
                    evidence=evidence,
                )
        return ConfigProblem(
            message=f"trial can never start: no usable node of partition {name!r} has {_share(allocation)} together",
            hint="ask for less per node, choose another partition, or exclude fewer nodes",
            path=self.source.first_given(
                option_path(self.layout, self.source, index, "exclude"), self._count_path(index)
            ),
            shown=allocation.options.get("exclude", ""),
            evidence=evidence,
        )

    def _too_many(self, index: int, name: str, available: int, offered: str) -> ConfigProblem:
        allocation = self.layout.allocations[index]
        kind = self._largest_group(index)
        path = self._count_path(index)
        hints = []
        fits = self._count_that_fits(index, kind, available, name)
        if fits:
            unit = "count" if path[-1] == "count" else f"d for {kind}"
            hints.append(f"{unit} {fits} fits")
        elsewhere = [
            f"{other!r} ({len(self._fitting(allocation, other))} such nodes)"
            for other in self.facts.partition_names
            if other != name and len(self._fitting(allocation, other)) >= allocation.num_nodes
            and not any(_excesses(allocation, self.facts.settings(other)))
        ]  # fmt: skip
        if elsewhere:
            hints.append(f"partition {' or '.join(elsewhere[:2])} fits")
        count = self.plan.scheduling[kind].count
        return ConfigProblem(
            message=f"trial can never start: {self._who(index)} needs {allocation.num_nodes} nodes "
            f"({_share(allocation)} each), partition {name!r} has {offered}",
            hint=", or ".join(hints) or "ask for less per task, or lower the groups' counts",
            path=path,
            shown=self._count_text(index),
            note=f"{count} x {self._task_text(kind)} = {self._nodes_of(index, kind)} nodes",
            evidence=shlex.join(nodes_command(name)),
        )

    def _task_text(self, kind: WorkerKind) -> str:
        task = self.plan.scheduling[kind].scheduling
        return f"{task.gpu} GPU" if task.gpu else f"{task.cpu} CPU"

    def _limits(self, index: int, name: str) -> Iterator[ConfigProblem]:
        """What a partition allows one job."""
        evidence = f"scontrol show partition {name}"
        for limit_name, asked, limit in _excesses(self.layout.allocations[index], self.facts.settings(name)):
            path, shown = option_path(self.layout, self.source, index, "partition"), name
            if limit_name == "MaxNodes":
                yield self._too_many(index, name, limit, f"MaxNodes {limit} for a job")
                continue
            if limit_name == "MinNodes":
                rule = f"nodes, partition {name!r} takes jobs of at least {limit} (MinNodes)"
                hint = "choose another partition"
            else:
                unit, field = ("CPUs", "cpus_per_node") if "CPUs" in limit_name else ("MB", "mem_per_node")
                rule = f"{unit} on one node, partition {name!r} allows {limit} ({limit_name})"
                hint = f"set cluster.{field}: {limit}, so that the trial is spread over more nodes"
                path, shown = self.source.first_given(("cluster", field), path), ""
            yield ConfigProblem(
                message=f"trial can never start: {self._who(index)} needs {asked} {rule}",
                hint=hint,
                path=path,
                shown=shown,
                evidence=evidence,
            )

    def waits_for_nodes(self) -> list[str]:
        """What cannot start on the nodes that are up and not others', of a layout that all nodes could hold."""
        indices = range(len(self.layout.allocations))
        waiting = [line for index in indices for line in self._waits(index, "up", away={})]
        up = [node for node in self.facts.nodes if node.is_up]
        if not waiting and any(self.of_all_together(up)):
            waiting.append("of the nodes that are up, there are too few for all jobs of this trial together")
        if waiting:
            return [f"{line}: it waits until nodes are back (sinfo -R says why they are not)" for line in waiting]
        reserved = [
            line
            for index in indices
            for line in self._waits(
                index,
                "up and in no reservation of others",
                away=self.facts.reserved_for_others(self.layout.allocations[index].options),
            )
        ]
        return [f"{line}: it waits for the end of these (scontrol show reservation)" for line in reserved]

    def _waits(self, index: int, how: str, *, away: Mapping[str, str]) -> Iterator[str]:
        """Too few nodes, or not those that are asked for by name, are `how` at present.

        Args:
            away: nodes that are not to be had though they are up, and why.
        """
        allocation = self.layout.allocations[index]
        wanted = set(expand_host_list(allocation.options.get("nodelist", "")))
        fitting_by_partition = {
            name: fitting
            for name in partitions_asked(allocation.options, self.facts)
            if (fitting := self._fitting(allocation, name)) and wanted <= {node.name for node in fitting}
        }
        there = {
            name: {node.name for node in fitting if node.is_up and node.name not in away}
            for name, fitting in fitting_by_partition.items()
        }
        if not there or any(wanted <= names and len(names) >= allocation.num_nodes for names in there.values()):
            return
        name = max(there, key=lambda name: len(there[name]))
        fitting = [node for node in fitting_by_partition[name] if not wanted or node.name in wanted]
        states = Counter(away.get(node.name, node.state) for node in fitting)
        shown = ", ".join(f"{count} {state}" for state, count in states.items())
        of_these = f"{len(wanted & there[name])} of {', '.join(sorted(wanted))}" if wanted else f"{len(there[name])}"
        yield (
            f"{self._who(index)} needs {allocation.num_nodes} nodes, {of_these} of partition {name!r} are {how} "
            f"at present ({shown})"
        )

    def of_all_together(self, nodes: Sequence[Node]) -> Iterator[ConfigProblem]:
        """Allocations that only start together, on nodes that each of them could have alone."""
        names = {node.name for node in nodes}
        usable = {index: self._usable(index, names) for index in self.layout.fixed}
        if len(self.layout.components) > 1:
            yield from self._components_together(usable)
        elif len(usable) > 1:
            yield from self._jobs_together(usable)

    def _usable(self, index: int, names: Set[str]) -> dict[str, Node]:
        allocation = self.layout.allocations[index]
        return {
            node.name: node
            for name in partitions_asked(allocation.options, self.facts)
            for node in self._fitting(allocation, name)
            if node.name in names
        }

    def _components_together(self, usable: Mapping[int, Mapping[str, Node]]) -> Iterator[ConfigProblem]:
        if not all(usable.values()):
            return
        for size in range(2, min(len(usable), _MAX_COMPONENTS) + 1):
            for chosen in combinations(usable, size):
                nodes = {name for index in chosen for name in usable[index]}
                counts = [self.layout.allocations[index].num_nodes for index in chosen]
                if sum(counts) > len(nodes):
                    yield self._not_together(chosen, counts, len(nodes))
                    return

    def _not_together(self, chosen: Sequence[int], counts: Sequence[int], available: int) -> ConfigProblem:
        blamed = max(chosen, key=lambda index: self.layout.allocations[index].num_nodes)
        kind = self._largest_group(blamed)
        path = self._count_path(blamed)
        allowed = available - (sum(counts) - self.layout.allocations[blamed].num_nodes)
        partition = partitions_asked(self.layout.allocations[blamed].options, self.facts)[0]
        fits = self._count_that_fits(blamed, kind, allowed, partition) if allowed > 0 else 0
        names = " + ".join(self._who(index) for index in chosen)
        hint = (
            "lower the groups' counts, or let them share nodes: the same partition and constraint make one allocation"
        )
        return ConfigProblem(
            message=f"trial can never start: {self.layout.kind} {'+'.join(map(str, counts))} nodes of {available}: "
            f"components never share a node ({names})",
            hint=(f"count {fits} of {kind} fits; or " if fits and path[-1] == "count" else "") + hint,
            path=path,
            shown=self._count_text(blamed),
            evidence=shlex.join(nodes_command()),
        )

    def _jobs_together(self, usable: Mapping[int, Mapping[str, Node]]) -> Iterator[ConfigProblem]:
        nodes = {name: node for of_one in usable.values() for name, node in of_one.items()}
        if not nodes:
            return
        allocations = [self.layout.allocations[index] for index in usable]
        for unit, field, _, size in self._counted:
            asked = sum(one.num_nodes * getattr(one, field) for one in allocations)
            offered = sum(max(size(one, node) for one in allocations) for node in nodes.values())
            if asked > offered:
                largest = max(usable, key=lambda index: self.layout.allocations[index].num_nodes)
                yield ConfigProblem(
                    message=f"trial can never start: its jobs need {asked} {unit} together, the {len(nodes)} nodes "
                    f"that they could run on have {offered}",
                    hint="lower the groups' counts or sizes, or use more partitions",
                    path=self._count_path(largest),
                    shown=self._count_text(largest),
                    note=" + ".join(describe(one) for one in allocations),
                    evidence=shlex.join(nodes_command()),
                )
                return

    def _who(self, index: int) -> str:
        """The trial, where it is one allocation; else the groups of this one."""
        if self.layout.fixed == [index]:
            return "it"
        kinds = dict.fromkeys(parse_worker_id(worker)[0] for worker in self.layout.workers_of(index))
        return " and ".join(kinds) or self.layout.allocations[index].name

    def _groups(self, index: int) -> dict[WorkerKind, TasksGroup]:
        kinds = {parse_worker_id(worker)[0] for worker in self.layout.workers_of(index)}
        return {kind: group for kind, group in self.plan.scheduling.items() if kind in kinds}

    def _nodes_of(self, index: int, kind: WorkerKind) -> int:
        workers = [one for one in self.layout.workers_of(index) if parse_worker_id(one)[0] == kind]
        return len({self.layout.steps[worker].node_index for worker in workers})

    def _largest_group(self, index: int) -> WorkerKind:
        """The group that takes most nodes, of those the biggest."""
        groups = self._groups(index)
        return max(groups, key=lambda kind: (self._nodes_of(index, kind), groups[kind].count))

    def _count_path(self, index: int) -> KeyPath:
        """The key that decides how many workers the largest group of an allocation has."""
        kind = self._largest_group(index)
        if self.layout.allocations[index].role == "elastic":
            return ("groups", kind, "elastic", "count")
        if kind in ("model_worker", "generation_server"):
            return self.source.first_given(("allocation",), ("groups", kind, "count"))
        return self.source.first_given(("groups", kind, "count"), ("allocation",))

    def _count_text(self, index: int) -> str:
        """The value at that key."""
        if self._count_path(index)[-1] != "count":
            return str(self.plan.config.get("allocation", ""))
        group = self.plan.scheduling[self._largest_group(index)]
        is_elastic = self.layout.allocations[index].role == "elastic" and group.elastic is not None
        return str(group.elastic.count if is_elastic and group.elastic else group.count)

    def _count_that_fits(self, index: int, kind: WorkerKind, num_nodes: int, partition: str) -> int:
        """The largest count of one group with which its allocation needs at most so many nodes; 0 if none does."""
        groups, role = self._groups(index), self.layout.allocations[index].role
        shapes = shapes_for(asks_of(self.plan, self.source), self.plan, self.facts)
        shape = self.plan.cluster.node_shape(shapes.get(partition))

        def fits(count: int) -> bool:
            less = {**groups, kind: TasksGroup(count=count, scheduling=groups[kind].scheduling)}
            try:
                return place(less, shape, has_slack=role == "head").num_nodes <= num_nodes
            except ValueError:
                return False

        low, high = 0, groups[kind].count - 1
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(middle) else (low, middle - 1)
        return low if low and fits(low) else 0
