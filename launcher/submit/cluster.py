"""Facts of a cluster for the checks before a submission: a few questions, more where a trial names more.

scontrol show config                      -> how memory is counted, whether there is accounting
scontrol show partition, node, sinfo      -> partitions, nodes of those that the trial names, with what jobs get of them
scontrol show reservation                 -> reservations: a trial's own, and others' nodes
sacctmgr where there is accounting        -> accounts, QOS and their limits
"""

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from corral.experiments.plan import RunPlan
from corral.launcher.slurm.accounts import Accounts, read_accounts, seconds_of
from corral.launcher.slurm.client import SlurmClient, answer_or
from corral.launcher.slurm.parse import Node, limit_of, memory_rules
from corral.launcher.terminal import first_few
from corral.scheduling.placement import NodeShape
from corral.scheduling.slurm_formats import COUNTED_MEMORY, MemoryRules, expand_host_list, parse_time_limit

_NO_LIMIT = 1 << 62


@dataclass(frozen=True, kw_only=True)
class ClusterFacts:
    """A cluster as SLURM describes it."""

    config: Mapping[str, str] = field(default_factory=dict)
    """`scontrol show config`; empty if SLURM did not say."""

    nodes: Sequence[Node]
    """Once for each partition that a node is in."""
    partitions: Mapping[str, Mapping[str, str]]
    """Settings by partition."""
    closed: Mapping[str, str] = field(default_factory=dict)
    """Partitions that sinfo hides from this user, of those that a trial names, with the groups that may use them."""
    reservations: Mapping[str, Mapping[str, str]] | None = None
    """Settings by name; None if SLURM did not say."""
    asked_at: float = field(default_factory=time.time)
    """Seconds since the epoch."""
    accounts: Accounts = field(default_factory=Accounts)
    """The accounts and QOS of the user, and their limits."""

    @property
    def partition_names(self) -> list[str]:
        return sorted({*self.partitions, *(node.partition for node in self.nodes)})

    @property
    def default_partition(self) -> str | None:
        of_nodes = next((node.partition for node in self.nodes if node.is_default_partition), None)
        return default_of(self.partitions) or of_nodes

    @property
    def shown_partitions(self) -> str:
        """The names for people, the default one with SLURM's star."""
        return ", ".join(f"{name}*" if name == self.default_partition else name for name in self.partition_names)

    def members(self, partition: str) -> Sequence[Node]:
        """The nodes of a partition, each with what its jobs may have of it."""
        return self._members_by_partition.get(partition, ())

    @cached_property
    def _members_by_partition(self) -> Mapping[str, Sequence[Node]]:
        members: dict[str, list[Node]] = {}
        for node in self.nodes:
            members.setdefault(node.partition, []).append(self._limited(node))
        return members

    def _limited(self, node: Node) -> Node:
        """A node with what jobs may have of it in its partition."""
        rules, most_cpus = self.memory(node.partition), limit_of(self.settings(node.partition), "MaxCPUsPerNode")
        node = node.at_most(cpus=most_cpus or _NO_LIMIT, cpu_rule="MaxCPUsPerNode")
        if not rules.is_counted:
            return replace(node, mem_mb=_NO_LIMIT)
        node = node.at_most(mem_mb=rules.max_mb_per_node or _NO_LIMIT, mem_rule="MaxMemPerNode")
        per_cpu = rules.max_mb_per_cpu or _NO_LIMIT
        return node.at_most(mem_mb=node.cpus * per_cpu, mem_rule=f"{node.cpus} CPUs x MaxMemPerCPU {per_cpu}")

    def memory(self, partition: str) -> MemoryRules:
        """How a partition gives out memory."""
        return memory_rules(self.config, self.settings(partition))

    def granularity(self, partition: str) -> str:
        """What a job always gets whole, and pays for, by which rule; "" if that is no more than it asks for."""
        if self.config.get("SelectType", "").endswith("linear"):
            return "nodes (select/linear)"
        if self.settings(partition).get("OverSubscribe") == "EXCLUSIVE":
            return "nodes (OverSubscribe=EXCLUSIVE)"
        of_partition = self.settings(partition).get("SelectTypeParameters", "NONE")
        parameters = self.config.get("SelectTypeParameters", "") if of_partition == "NONE" else of_partition
        return "sockets (CR_Socket)" if "CR_SOCKET" in parameters.upper() else ""

    def biggest(self, partition: str, resource: "Resource", gpu_type: str | None) -> tuple[int, str]:
        """The most that jobs may have of it on one node of a partition, and a sentence that names these nodes."""
        members = self.members(partition)
        most = max(resource.size(node, gpu_type) for node in members)
        biggest = [node for node in members if resource.size(node, gpu_type) == most]
        rule = next((f"; {node.rules[resource.of_task]}" for node in biggest if resource.of_task in node.rules), "")
        return most, (
            f"the biggest node of partition {partition!r} has {most} ({some_of(node.name for node in biggest)}{rule})"
        )

    def shortfalls(
        self, partition: str, resources: Iterable["Resource"], asked: Mapping[str, int], gpu_type: str | None
    ) -> Iterator[tuple["Resource", int, str]]:
        """What no node of a partition has enough of, with the most of it on one node and a sentence on these nodes.

        Args:
            asked: of one node, by the field of a task.
        """
        for one in resources:
            most, biggest = self.biggest(partition, one, gpu_type)
            if asked[one.of_task] > most:
                yield one, most, biggest

    def allowed(self, partition: str, options: Mapping[str, str]) -> list[Node]:
        """The nodes of a partition that a job with these options may get beside those that it names."""
        excluded, features = set(hosts(options, "exclude")), plain_features(options.get("constraint", ""))
        return [
            node
            for node in self.members(partition)
            if node.name not in excluded and all(feature in node.features for feature in features)
        ]

    def asked(self, options: Mapping[str, str]) -> list[str]:
        """The partitions that a job may run in; a list means the first of them that can start it."""
        names = options.get("partition")
        return names.split(",") if names else [self.default_partition or ""]

    def max_time_s(self, partition: str) -> int | None:
        """The longest time limit that a partition allows; None if it has none."""
        return seconds_of(self.settings(partition).get("MaxTime", ""))

    def time_limit_s(self, partition: str, options: Mapping[str, str]) -> int | None:
        """The time limit of a job with these options in a partition; None if it has none."""
        given = options.get("time_limit") or self.settings(partition).get("DefaultTime", "")
        return seconds_of(given) or self.max_time_s(partition)

    def are_down(self, partitions: Sequence[str]) -> bool:
        """Whether none of these starts jobs at present, though they take them."""
        return all(self.settings(name).get("State") == "DOWN" for name in partitions)

    def begins_later(self, reservation: str) -> str:
        """When a reservation begins that is still to come; "" for all others."""
        settings = (self.reservations or {}).get(reservation, {})
        return settings.get("StartTime", "") if settings.get("State") == "INACTIVE" else ""

    def reserved_for_others(self, options: Mapping[str, str]) -> dict[str, str]:
        """Nodes of the reservations that a job with these options cannot use and may run into, with their names."""
        own, limit = options.get("reservation", "").split(","), options.get("time_limit")
        reserved: dict[str, str] = {}
        for name, settings in (self.reservations or {}).items():
            begins_at = seconds_of_moment(settings.get("StartTime", ""))
            waits_s = 0.0 if begins_at is None else begins_at - self.asked_at
            if name not in own and (limit is None or waits_s < parse_time_limit(limit)):
                nodes = expand_host_list(settings.get("Nodes", "").replace("(null)", ""))
                reserved |= dict.fromkeys(nodes, f"in reservation {name!r} until {settings.get('EndTime', '?')}")
        return reserved

    def settings(self, partition: str) -> Mapping[str, str]:
        return self.partitions.get(partition, {})


def read_cluster(
    client: SlurmClient, *, wanted_partitions: Sequence[str], accounts_of: str | None, wants_all_nodes: bool = False
) -> ClusterFacts:
    """Asks SLURM; what only some sites have may fail without harm.

    Args:
        wanted_partitions: those that the trial may run in; "" is the default one.
        accounts_of: whose accounts to look up; None has none looked up.
        wants_all_nodes: those of partitions that it does not name, too, to say what would do instead.

    Raises:
        SlurmError: if nodes or partitions cannot be asked for.
    """
    partitions = client.partitions()
    wanted = sorted({name or default_of(partitions) or "" for name in wanted_partitions})
    config = answer_or({}, client.settings)
    hidden = [name for name in wanted if name and name not in partitions]
    is_narrow = not wants_all_nodes and all(name in partitions for name in wanted)
    nodes = client.nodes(",".join(wanted) if is_narrow else None, in_detail=True)
    closed = answer_or(None, client.partitions, with_hidden=True) if hidden else None
    return ClusterFacts(
        config=config,
        nodes=nodes,
        partitions=partitions,
        closed={name: closed[name].get("AllowGroups", "") for name in hidden if closed and name in closed},
        reservations=answer_or(None, client.reservations),
        accounts=read_accounts(client, accounts_of, config) if accounts_of is not None else Accounts(),
    )


def default_of(partitions: Mapping[str, Mapping[str, str]]) -> str | None:
    """The partition of jobs that name none."""
    return next((name for name, settings in partitions.items() if settings.get("Default") == "YES"), None)


def seconds_of_moment(text: str) -> float | None:
    """Seconds since the epoch of a moment that SLURM writes; None if it is none."""
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except (ValueError, OverflowError):
        return None


class Resource(NamedTuple):
    """What nodes have, and tasks and allocations ask for."""

    unit: str
    of_task: str
    """The field of a task."""
    of_allocation: str
    """The field of an allocation, for each of its nodes."""
    setting: str
    """The key below `cluster` that describes a node's."""
    of_accounts: str
    """As accounting counts it."""
    size: Callable[[Node, str | None], int]
    """What a node has of it, of one type if it is given."""


def gpus_of(node: Node, gpu_type: str | None) -> int:
    """GPUs of a node that a request for this type can get."""
    return node.gpus if gpu_type is None else node.gpus_by_type.get(gpu_type, 0)


_RESOURCES = (
    Resource("CPUs", "cpu", "cpus_per_node", "cpus_per_node", "cpu", lambda node, _: node.cpus),
    Resource("MB of memory", "mem", "mem_mb_per_node", "mem_per_node", "mem", lambda node, _: node.mem_mb),
    Resource("GPUs", "gpu", "gpus_per_node", "gpus_per_node", "gres/gpu", gpus_of),
)


def counted(plan: RunPlan) -> Sequence[Resource]:
    """The resources that SLURM allocates here."""
    return _RESOURCES[:-1] if plan.cluster.gpu_request == "none" else _RESOURCES


def most_common_shape(
    nodes: Sequence[Node], *, gpu_type: str | None = None, memory: MemoryRules = COUNTED_MEMORY
) -> NodeShape | None:
    """The shape that most of the nodes share, with GPUs of one type only if it is given; None of no nodes."""
    real = [node for node in nodes if node.cpus > 0 and node.mem_mb > 0]
    usable = [node for node in real if node.is_up] or real
    if not usable:
        return None
    counts = Counter((node.cpus, gpus_of(node, gpu_type), node.mem_mb) for node in usable)
    # Of shapes that are equally common the biggest.
    cpus, gpus, mem_mb = max(counts, key=lambda shape: (counts[shape], shape))
    # Whole cores of the thickest kind are whole cores of any: a step that asks for them fits every node.
    threads = max(node.threads_per_core for node in usable)
    rules = next(node.rules for node in usable if (node.cpus, node.mem_mb) == (cpus, mem_mb))
    return NodeShape(
        cpus=cpus,
        gpus=gpus,
        mem_mb=mem_mb,
        threads_per_core=threads,
        memory=memory,
        rules=", ".join(rules.values()),
    )


def hosts(options: Mapping[str, str], name: str) -> list[str]:
    """The nodes that `nodelist` or `exclude` names."""
    return expand_host_list(options.get(name, ""))


def some_of(names: Iterable[str]) -> str:
    """The first few names, each once, and how many others there are."""
    return first_few(list(dict.fromkeys(names)), most=4, separator=", ", rest="others")


def plain_features(constraint: str) -> list[str]:
    """The features that every node must have; none of an expression that only SLURM understands."""
    return constraint.split("&") if re.fullmatch(r"\w+(&\w+)*", constraint) else []
