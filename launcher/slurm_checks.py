"""What can never start is refused before sbatch, with the numbers: a job that waits for ever looks like one that waits.

sinfo + scontrol show partition --check_layout (pure)--> ConfigError | facts to print
sbatch --test-only --> what SLURM itself refuses
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from corral.experiments.errors import ConfigError, closest
from corral.launcher.layout import Allocation
from corral.launcher.slurm import Node
from corral.scheduling.placement import NodeShape
from corral.scheduling.slurm_formats import format_time_limit, parse_time_limit

_UNLIMITED = ("UNLIMITED", "INFINITE", "NONE", "")


def check_layout(layout: Allocation, nodes: Sequence[Node], partitions: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Compares a request with the cluster; returns facts worth printing.

    Raises:
        ConfigError: naming what is asked for, what there is, and the way out.
    """
    name = _partition(layout, nodes, partitions)
    members = [node for node in nodes if node.partition == name]
    if not members:
        return [f"partition {name} shows no nodes here, not checked"]
    settings = partitions.get(name, {})
    _check_state(name, settings)
    _check_names(layout, nodes)
    fitting = _check_node_shape(layout, name, members)
    _check_counts(layout, name, fitting, members, settings)
    _check_time(layout, name, settings)
    _check_access(layout, name, settings)
    idle = sum(1 for node in fitting if node.state.startswith("idle"))
    return [f"partition {name} ok", f"{idle} of {len(members)} nodes idle"]


def _partition(layout: Allocation, nodes: Sequence[Node], partitions: Mapping[str, Mapping[str, str]]) -> str:
    known = sorted({*partitions, *(node.partition for node in nodes)})
    default = next((node.partition for node in nodes if node.is_default_partition), None)
    asked = layout.options.get("partition")
    if asked is None:
        if default is None:
            raise ConfigError.of(
                "this cluster has no default partition", hint=f"set launch.partition to one of {', '.join(known)}"
            )
        return default
    # A list of partitions means the first that can start; the first stands for all in these checks.
    for one in asked.split(","):
        if one not in known:
            near = closest(one, known)
            shown = ", ".join(f"{partition}*" if partition == default else partition for partition in known)
            raise ConfigError.of(
                f"no partition {one!r}; this cluster has {shown}",
                hint=f"did you mean {near!r}?" if near else "choose one of these",
                path=("launch", "partition"),
                shown=asked,
            )
    return asked.split(",")[0]


def _check_state(name: str, settings: Mapping[str, str]) -> None:
    if settings.get("State", "UP") not in ("UP", "DRAIN"):
        raise ConfigError.of(
            f"partition {name!r} is {settings['State']}",
            hint="choose another one",
            path=("launch", "partition"),
            shown=name,
        )


def _check_names(layout: Allocation, nodes: Sequence[Node]) -> None:
    known = {node.name for node in nodes}
    for field in ("nodelist", "exclude"):
        for one in expand_host_list(layout.options.get(field, "")):
            if one not in known:
                near = closest(one, sorted(known))
                raise ConfigError.of(
                    f"no node {one!r} in this cluster",
                    hint=f"did you mean {near!r}?" if near else "sinfo -N lists the nodes",
                    path=("launch", field),
                    shown=layout.options[field],
                )
    wanted = layout.options.get("constraint", "")
    features = {feature for node in nodes for feature in node.features}
    if re.fullmatch(r"[A-Za-z0-9._-]+", wanted) and wanted not in features:
        raise ConfigError.of(
            f"no node has the feature {wanted!r} (features: {', '.join(sorted(features)) or 'none'})",
            hint="remove the constraint, or choose one of these",
            path=("launch", "constraint"),
            shown=wanted,
        )


def _check_node_shape(layout: Allocation, name: str, members: Sequence[Node]) -> list[Node]:
    """Nodes that could hold one node's share of the trial."""
    limits = [
        ("GPUs", layout.gpus_per_node, [_gpus(node, layout.gpu_type) for node in members], "cluster.gpus_per_node"),
        ("CPUs", layout.cpus_per_node, [node.cpus for node in members], "cluster.cpus_per_node"),
        ("MB of memory", layout.mem_mb_per_node, [node.mem_mb for node in members], "cluster.mem_per_node"),
    ]
    if layout.gpus_per_node and layout.gpu_type:
        have = sorted({kind for node in members for kind in node.gpus_by_type})
        if layout.gpu_type not in have:
            raise ConfigError.of(
                f"no node of partition {name!r} offers gpu:{layout.gpu_type} "
                f"(it has {', '.join(f'gpu:{kind}' if kind else 'gpu' for kind in have) or 'no GPUs'})",
                hint="change gpu_type in the groups' scheduling",
            )
    for what, asked, offered, setting in limits:
        if asked > max(offered):
            raise ConfigError.of(
                f"trial can never start: it needs {asked} {what} on one node, the biggest node of partition "
                f"{name!r} has {max(offered)} ({_some(members)})",
                hint=f"set {setting} to what a node has, so that the trial is spread over more nodes, or ask for less",
            )
    fitting = [
        node
        for node in members
        if _gpus(node, layout.gpu_type) >= layout.gpus_per_node
        and node.cpus >= layout.cpus_per_node
        and node.mem_mb >= layout.mem_mb_per_node
    ]
    if not fitting:
        raise ConfigError.of(
            f"trial can never start: no node of partition {name!r} has {layout.cpus_per_node} CPUs, "
            f"{layout.mem_mb_per_node} MB and {layout.gpus_per_node} GPUs together",
            hint="ask for less per node, or choose another partition",
        )
    return fitting


def _check_counts(
    layout: Allocation, name: str, fitting: Sequence[Node], members: Sequence[Node], settings: Mapping[str, str]
) -> None:
    excluded = set(expand_host_list(layout.options.get("exclude", "")))
    usable = [node for node in fitting if node.name not in excluded]
    share = f"{layout.cpus_per_node} CPUs, {layout.mem_mb_per_node} MB"
    share += f", {layout.gpus_per_node} GPUs" if layout.gpus_per_node else ""
    if layout.num_nodes > len(usable):
        raise ConfigError.of(
            f"trial can never start: it needs {layout.num_nodes} nodes with {share} each, partition {name!r} has "
            f"{len(usable)} such nodes of {len(members)}",
            hint="lower the groups' counts, or choose a bigger partition",
        )
    limit = settings.get("MaxNodes", "")
    if limit.isdigit() and layout.num_nodes > int(limit):
        raise ConfigError.of(
            f"trial can never start: it needs {layout.num_nodes} nodes, partition {name!r} allows {limit} per job",
            hint="lower the groups' counts, or choose another partition",
        )
    up = [node for node in usable if node.is_up]
    if layout.num_nodes > len(up):
        states = ", ".join(f"{count} {state}" for state, count in Counter(node.state for node in usable).items())
        raise ConfigError.of(
            f"trial cannot start: it needs {layout.num_nodes} nodes, {len(up)} of partition {name!r} are up ({states})",
            hint="wait until the nodes are back, or choose another partition",
        )


def _check_time(layout: Allocation, name: str, settings: Mapping[str, str]) -> None:
    asked, limit = layout.options.get("time_limit"), settings.get("MaxTime", "")
    if asked is None or limit.upper() in _UNLIMITED:
        return
    asked_s, limit_s = parse_time_limit(asked), parse_time_limit(limit)
    if asked_s > limit_s:
        raise ConfigError.of(
            f"time limit {format_time_limit(asked_s)} is more than partition {name!r} allows (MaxTime {limit})",
            hint=f"set launch.time_limit to at most '{limit}'; a trial that is cut off goes on with rl-submit --resume",
            path=("launch", "time_limit"),
            shown=asked,
        )


def _check_access(layout: Allocation, name: str, settings: Mapping[str, str]) -> None:
    for field, setting in (("account", "AllowAccounts"), ("qos", "AllowQos")):
        asked, allowed = layout.options.get(field), settings.get(setting, "ALL")
        if asked is not None and allowed != "ALL" and asked not in allowed.split(","):
            raise ConfigError.of(
                f"partition {name!r} is not open to {field} {asked!r} (it allows {allowed})",
                hint=f"choose one of these, or another partition; launch.{field}",
                path=("launch", field),
                shown=asked,
            )


def expand_host_list(text: str) -> list[str]:
    """`n[1-3,07],login` -> n1, n2, n3, n07, login; the numbers keep their leading zeros."""
    hosts: list[str] = []
    for item in re.findall(r"[^,\[]*(?:\[[^\]]*\][^,\[]*)*", text):
        hosts += _expand(item) if item else []
    return hosts


def _expand(item: str) -> list[str]:
    match = re.fullmatch(r"([^\[]*)\[([^\]]*)\](.*)", item)
    if match is None:
        return [item]
    head, ranges, tail = match.groups()
    numbers: list[str] = []
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        if last and first.isdigit() and last.isdigit():
            numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
        else:
            numbers.append(part)
    return [f"{head}{number}{rest}" for number in numbers for rest in _expand(tail)]


def _gpus(node: Node, gpu_type: str | None) -> int:
    return node.gpus if gpu_type is None else node.gpus_by_type.get(gpu_type, 0)


def _some(nodes: Sequence[Node]) -> str:
    names = [node.name for node in nodes]
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")


def node_shapes(nodes: Sequence[Node], partitions: Mapping[str, Mapping[str, str]]) -> Mapping[str | None, NodeShape]:
    """What a node of each partition has: the shape that most of its nodes share, those that are up first.

    The default partition is also under None. A partition without nodes is left out.
    """
    shape_by_partition: dict[str | None, NodeShape] = {}
    for name in dict.fromkeys([*(node.partition for node in nodes), *partitions]):
        members = [node for node in nodes if node.partition == name and node.cpus > 0 and node.mem_mb > 0]
        usable = [node for node in members if node.is_up] or members
        if not usable:
            continue
        counts = Counter((node.cpus, node.gpus, node.mem_mb) for node in usable)
        # Of shapes that are equally common the biggest.
        cpus, gpus, mem_mb = max(counts, key=lambda shape: (counts[shape], shape))
        shape_by_partition[name] = NodeShape(cpus=cpus, gpus=gpus, mem_mb=mem_mb)
        if any(node.is_default_partition for node in members):
            shape_by_partition[None] = shape_by_partition[name]
    return shape_by_partition
