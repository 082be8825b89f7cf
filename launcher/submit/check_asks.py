"""What can never start is refused before sbatch, with the numbers: a job that waits for ever looks like one that waits.

    Ask (asks.py) + ClusterFacts (cluster.py) --check_asks--> UnsatisfiableError | warnings

Pure; preflight.py asks SLURM. Each check yields all of its problems, and each problem names a key. What waiting cures
is a warning: nodes and partitions that are down, a reservation that is yet to begin.
"""

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from corral.experiments.errors import ConfigProblem, ConfigSource, UnsatisfiableError, did_you_mean
from corral.experiments.plan import RunPlan
from corral.launcher.slurm.client import nodes_command
from corral.launcher.slurm.parse import Node
from corral.launcher.submit.asks import Ask, leaves_time, limit_that_fits, partitions_asked, raise_problems
from corral.launcher.submit.cluster import ClusterFacts, biggest_nodes, gpus_of, some_nodes
from corral.launcher.trial.find import node_local_folder
from corral.scheduling.slurm_formats import expand_host_list, format_time_limit, parse_time_limit

UNLIMITED = ("UNLIMITED", "INFINITE", "NONE", "")
_FEATURE = re.compile(r"[A-Za-z_][A-Za-z0-9_.:=-]*")


def check_asks(asks: Sequence[Ask], plan: RunPlan, facts: ClusterFacts, source: ConfigSource) -> list[str]:
    """Names and sizes that the groups give, against what the cluster has; returns warnings.

    Raises:
        UnsatisfiableError: with every value that this cluster does not know or cannot give.
    """
    problems: list[ConfigProblem] = []
    warnings: list[str] = []
    for ask in asks:
        partition_problems = list(_partition_problems(ask, facts))
        problems += partition_problems
        problems += [*_node_name_problems(ask, facts), *_reservation_problems(ask, facts)]
        if partition_problems:
            continue
        partition = partitions_asked(ask.values, facts)[0]
        problems += _constraint_problems(ask, partition, facts)
        problems += _time_limit_problems(ask, plan, facts)
        problems += _signal_problems(ask, plan, facts) if ask.is_signalled else ()
        problems += _access_problems(ask, facts)
        problems += _task_problems(ask, plan, partition, facts)
        warnings += _warnings(ask, partition, facts)
    raise_problems(UnsatisfiableError, problems, source)
    return list(dict.fromkeys(warnings))


def _partition_problems(ask: Ask, facts: ClusterFacts) -> Iterator[ConfigProblem]:
    known = facts.partition_names
    if "partition" not in ask.values and facts.default_partition is None:
        yield ask.problem(
            "partition",
            "this cluster has no default partition",
            hint=f"set launch.partition to one of {', '.join(known)}",
            evidence=shlex.join(nodes_command()),
        )
        return
    for name in partitions_asked(ask.values, facts):
        if name in facts.closed:
            yield ask.problem(
                "partition",
                f"partition {name!r} is open to the groups {facts.closed[name]} only, and you are in none of them",
                hint=f"choose one of {facts.shown_partitions}, or ask the administrators",
                evidence=f"scontrol -a show partition {name}",
            )
            continue
        if name not in known:
            yield ask.problem(
                "partition",
                f"no partition {name!r}; this cluster has {facts.shown_partitions}",
                hint=did_you_mean(name, known, "choose one of these"),
                evidence=shlex.join(nodes_command()),
            )
            continue
        state = facts.settings(name).get("State", "UP")
        others = [other for other in known if other != name and facts.settings(other).get("State") == "UP"]
        if state not in ("UP", "DOWN"):  # one that is DOWN takes jobs, and starts them when it is UP again
            yield ask.problem(
                "partition",
                f"partition {name!r} is {state}: it takes no jobs",
                hint=f"choose another one: {', '.join(others)}" if others else "wait until it is UP again",
                evidence=f"scontrol show partition {name}",
            )
        if facts.settings(name).get("ReqResv") == "YES" and "reservation" not in ask.values:
            yield ask.problem(
                "partition",
                f"partition {name!r} takes jobs with a reservation only",
                hint="set launch.reservation, or choose another partition",
                evidence=f"scontrol show partition {name}",
            )


def _node_name_problems(ask: Ask, facts: ClusterFacts) -> Iterator[ConfigProblem]:
    known = {node.name for node in facts.nodes}
    wanted, unwanted = (expand_host_list(ask.values.get(name, "")) for name in ("nodelist", "exclude"))
    for name, hosts in (("nodelist", wanted), ("exclude", unwanted)):
        # One problem for an expression, with one look for a near name: it may stand for thousands of hosts.
        if unknown := [host for host in hosts if host not in known]:
            others = f" and {len(unknown) - 1} others that {name} names" if len(unknown) > 1 else ""
            yield ask.problem(
                name,
                f"no node {unknown[0]!r}{others} in this cluster",
                hint=did_you_mean(unknown[0], sorted(known), f"this cluster has {some_nodes(facts.nodes)}"),
                evidence=shlex.join(nodes_command()),
            )
    allowed = {node.name for name in partitions_asked(ask.values, facts) for node in facts.members(name)}
    outside = [host for host in wanted if host in known and host not in allowed]
    if outside and allowed:
        yield ask.problem(
            "nodelist",
            f"{', '.join(outside)} is not in partition {' or '.join(partitions_asked(ask.values, facts))!r}",
            hint=f"name nodes of it: {some_nodes([node for node in facts.nodes if node.name in allowed])}",
            evidence=shlex.join(nodes_command()),
        )


def _reservation_problems(ask: Ask, facts: ClusterFacts) -> Iterator[ConfigProblem]:
    if facts.reservations is None:
        return
    for name in ask.reservations:
        if name not in facts.reservations:
            there_are = f"there are {', '.join(facts.reservations)}" if facts.reservations else "remove it: none exists"
            yield ask.problem(
                "reservation",
                f"no reservation {name!r} in this cluster",
                hint=did_you_mean(name, list(facts.reservations), there_are),
                evidence="scontrol show reservation",
            )


def _constraint_problems(ask: Ask, partition: str, facts: ClusterFacts) -> Iterator[ConfigProblem]:
    members = facts.members(partition)
    features = sorted({feature for node in members for feature in node.features})
    for wanted in dict.fromkeys(_FEATURE.findall(ask.values.get("constraint", ""))):
        if wanted not in features and members:
            yield ask.problem(
                "constraint",
                f"no node of partition {partition!r} has the feature {wanted!r} "
                f"(features: {', '.join(features) or 'none'})",
                hint=did_you_mean(wanted, features, "remove the constraint, or choose one of these"),
                evidence=shlex.join(nodes_command(partition)),
            )


def _time_limit_problems(ask: Ask, plan: RunPlan, facts: ClusterFacts) -> Iterator[ConfigProblem]:
    asked = ask.values.get("time_limit")
    names = partitions_asked(ask.values, facts)
    limits = {name: seconds for name in names if (seconds := _limit_s(facts.settings(name).get("MaxTime", "")))}
    if asked is None or len(limits) < len(names) or parse_time_limit(asked) <= max(limits.values()):
        return
    name = max(limits, key=lambda name: limits[name])
    fits = limit_that_fits(limits[name], plan.launch.signal_before_end_s if ask.is_signalled else 0)
    longer = [
        other
        for other in facts.partition_names
        if facts.settings(other).get("State", "UP") == "UP"
        and (_limit_s(facts.settings(other).get("MaxTime", "")) or 1 << 62) >= parse_time_limit(asked)
    ]
    yield ask.problem(
        "time_limit",
        f"time limit {format_time_limit(parse_time_limit(asked))} is more than partition {name!r} allows "
        f"(MaxTime {format_time_limit(limits[name])})",
        hint=f"{fits} fits: a trial whose time is over goes on in its next attempt"
        + (f"; or choose partition {' or '.join(map(repr, longer[:3]))}" if longer else ""),
        evidence=f"scontrol show partition {name}",
    )


def _signal_problems(ask: Ask, plan: RunPlan, facts: ClusterFacts) -> Iterator[ConfigProblem]:
    """A partition's own time limit that leaves no time before SLURM signals its end."""
    names = partitions_asked(ask.values, facts)
    limits = [_limit_in_force_s(ask, facts.settings(name)) for name in names]
    shortest = min((limit for limit in limits if limit is not None), default=None)
    if "time_limit" in ask.values or shortest is None or leaves_time(shortest, plan.launch.signal_before_end_s):
        return
    name = names[limits.index(shortest)]
    most_s, signal_s = _limit_s(facts.settings(name).get("MaxTime", "")), plan.launch.signal_before_end_s
    yield ask.problem(
        "time_limit",
        f"no time limit is asked for, and that of partition {name!r}, {format_time_limit(shortest)}, leaves no time to "
        f"train: SLURM signals its end {signal_s} s before it (launch.signal_before_end_s)",
        hint="set launch.time_limit, or lower launch.signal_before_end_s"
        if most_s is None or leaves_time(most_s, signal_s)
        else f"choose another partition; here launch.time_limit may be {limit_that_fits(most_s, signal_s)}",
        evidence=f"scontrol show partition {name}",
    )


def _limit_in_force_s(ask: Ask, settings: Mapping[str, str]) -> int | None:
    """The time limit of a job in a partition; None if it has none."""
    if "time_limit" in ask.values:
        return parse_time_limit(ask.values["time_limit"])
    return _limit_s(settings.get("DefaultTime", "")) or _limit_s(settings.get("MaxTime", ""))


def _limit_s(text: str) -> int | None:
    return None if text.upper() in UNLIMITED else parse_time_limit(text)


def _access_problems(ask: Ask, facts: ClusterFacts) -> Iterator[ConfigProblem]:
    for name in partitions_asked(ask.values, facts):
        for field, suffix in (("account", "Accounts"), ("qos", "Qos")):
            asked = ask.values.get(field)
            allowed = facts.settings(name).get(f"Allow{suffix}", "ALL").split(",")
            denied = facts.settings(name).get(f"Deny{suffix}", "").split(",")
            if asked is None or (asked not in denied and ("ALL" in allowed or asked in allowed)):
                continue
            rule = f"it refuses {', '.join(denied)}" if asked in denied else f"it allows {', '.join(allowed)}"
            instead = f"choose another {field}, or another partition"
            yield ask.problem(
                field,
                f"partition {name!r} is not open to {field} {asked!r} ({rule})",
                hint=instead if asked in denied else did_you_mean(asked, allowed, instead),
                evidence=f"scontrol show partition {name}",
            )
    yield from _association_problems(ask, facts)


def _association_problems(ask: Ask, facts: ClusterFacts) -> Iterator[ConfigProblem]:
    if not facts.accounts.associations:
        return
    account = ask.values.get("account")
    accounts = [association.account for association in facts.accounts.associations]
    usable = sorted({name for one in facts.accounts.associations if account in (None, one.account) for name in one.qos})
    for field, may_not, known in (("account", "charge", accounts), ("qos", "use", usable)):
        asked = ask.values.get(field)
        if asked is not None and known and asked not in known:
            yield ask.problem(
                field,
                f"you may not {may_not} {field} {asked!r} (you have {', '.join(known)})",
                hint=did_you_mean(asked, known, "choose one of these, or ask the administrators"),
                evidence="sacctmgr show assoc user=$USER format=account,qos",
            )


def _task_problems(ask: Ask, plan: RunPlan, partition: str, facts: ClusterFacts) -> Iterator[ConfigProblem]:
    """One task that is bigger than every node."""
    members = facts.members(partition)
    if not members:
        return
    evidence = shlex.join(nodes_command(partition))
    task = ask.task
    sizes: list[tuple[str, str, Callable[[Node], int]]] = [
        ("cpu", "CPUs", lambda node: node.cpus),
        ("mem", "MB of memory", lambda node: node.mem_mb),
    ]
    for name, unit, size in sizes:
        asked, (most, biggest) = getattr(task, name), biggest_nodes(members, size)
        if asked > most:
            yield ask.problem(
                name,
                f"{ask.who} wants {asked} {unit} in one task; the biggest node of partition {partition!r} has "
                f"{most} ({biggest})",
                hint=f"at most {most} fits, less what the supervisor keeps" + _bigger_partitions(size, asked, facts),
                shown=str(asked),
                evidence=evidence,
            )
    if task.gpu and plan.cluster.gpu_request != "none":
        yield from _gpu_problems(ask, partition, members, facts, evidence)
    elif task.gpu and plan.cluster.gpus_per_node is None and not any(node.gpus for node in members):
        yield ConfigProblem(
            message="with cluster.gpu_request none, SLURM does not know how many GPUs a node has",
            hint="set cluster.gpus_per_node",
            path=("cluster", "gpus_per_node"),
            shown="null",
            evidence=evidence,
        )


def _gpu_problems(
    ask: Ask, partition: str, members: Sequence[Node], facts: ClusterFacts, evidence: str
) -> Iterator[ConfigProblem]:
    task = ask.task
    kinds = sorted({kind for node in members for kind, count in node.gpus_by_type.items() if count})
    if not any(node.gpus for node in facts.nodes):
        yield ask.problem(
            "gpu",
            f"{ask.who} wants GPUs, but this cluster has no GRES 'gpu'",
            hint="set cluster.gpu_request: none if nodes come with all of their GPUs, or gpu: 0 to run on CPUs",
            shown=str(task.gpu),
            evidence=shlex.join(nodes_command()),
        )
    elif not kinds:
        others = sorted({node.partition for node in facts.nodes if node.gpus})
        yield ask.problem(
            "gpu",
            f"{ask.who} wants GPUs, but no node of partition {partition!r} has any",
            hint=f"partitions with GPUs: {', '.join(others)}; gpu: 0 runs on CPUs",
            shown=str(task.gpu),
            evidence=evidence,
        )
    elif task.gpu_type is not None and task.gpu_type not in kinds:
        have = ", ".join(f"gpu:{kind}" if kind else "gpu" for kind in kinds)
        yield ask.problem(
            "gpu_type",
            f"no node of partition {partition!r} offers gpu:{task.gpu_type} (it has {have})",
            hint=did_you_mean(task.gpu_type, kinds, "leave gpu_type out to take any, or choose one of these"),
            shown=task.gpu_type,
            evidence=evidence,
        )
    elif task.gpu > (biggest := biggest_nodes(members, partial(gpus_of, gpu_type=task.gpu_type)))[0]:
        most, names = biggest
        yield ask.problem(
            "gpu",
            f"{ask.who} wants {task.gpu} GPUs in one task; the biggest node of partition {partition!r} has {most} "
            f"({names})",
            hint=f"at most {most} fits" + (", as t in the allocation" if "generation_server" in ask.who else ""),
            shown=str(task.gpu),
            evidence=evidence,
        )


def _bigger_partitions(size: Callable[[Node], int], asked: int, facts: ClusterFacts) -> str:
    fitting = sorted({node.partition for node in facts.nodes if size(node) >= asked})
    return f"; partition {' or '.join(map(repr, fitting[:3]))} has bigger nodes" if fitting else ""


def _warnings(ask: Ask, partition: str, facts: ClusterFacts) -> Iterator[str]:
    settings = facts.settings(partition)
    if settings and _limit_in_force_s(ask, settings) is None:
        yield (
            f"no launch.time_limit, and partition {partition!r} has none either: "
            "SLURM never starts such a job early in a gap (backfill)"
        )
    asked = partitions_asked(ask.values, facts)
    if facts.are_down(asked):
        yield f"partition {' and '.join(asked)} is DOWN: the job waits until it is UP again"
    for name in ask.reservations:
        if begin := facts.begins_later(name):
            yield f"reservation {name!r} begins at {begin}: the job waits for it"
    for name in ("account", "qos"):
        if name in ask.values and facts.accounts.is_kept is False:
            yield f"this cluster keeps no accounting: {name} {ask.values[name]!r} has no effect"


def node_local_warning(directory: Path) -> str | None:
    """What to say of a trial directory that other nodes are unlikely to see."""
    folder = node_local_folder(directory)
    if folder is None:
        return None
    return (
        f"{directory} is below {folder}, which every node usually has for itself: if so, workers elsewhere "
        "fail without a log; set cluster.fileroot or $CORRAL_FILEROOT to a shared folder"
    )
