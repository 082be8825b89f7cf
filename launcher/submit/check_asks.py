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
from typing import NamedTuple

from corral.experiments.errors import ConfigProblem, ConfigSource, UnsatisfiableError, did_you_mean
from corral.experiments.plan import RunPlan
from corral.launcher.slurm.client import nodes_command
from corral.launcher.slurm.parse import Node
from corral.launcher.submit.asks import Ask, leaves_time, limit_that_fits, partitions_asked, raise_problems
from corral.launcher.submit.cluster import ClusterFacts, biggest_nodes, gpus_of, some_nodes
from corral.launcher.trial.find import node_local_folder
from corral.scheduling.slurm_formats import expand_host_list, format_time_limit, parse_time_limit

UNLIMITED = ("UNLIMITED", "INFINITE", "NONE", "")
_FOR_EVER_S = 1 << 62
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
        names = [*_node_names(ask, facts), *_reservation_names(ask, facts)]
        if not partition_problems:
            partition = partitions_asked(ask.values, facts)[0]
            names += [*_feature_names(ask, partition, facts), *_account_names(ask, facts)]
            problems += [*_limit_problems(ask, plan, facts), *_task_problems(ask, plan, partition, facts)]
            warnings += _warnings(ask, partition, facts)
        problems += [
            ask.problem(
                one.field, one.message, hint=did_you_mean(one.name, one.known, one.otherwise), evidence=one.evidence
            )
            for one in names
            if one.name not in one.known
        ]
    raise_problems(UnsatisfiableError, problems, source)
    return list(dict.fromkeys(warnings))


def _partition_problems(ask: Ask, facts: ClusterFacts) -> Iterator[ConfigProblem]:
    if "partition" not in ask.values and facts.default_partition is None:
        hint = f"set launch.partition to one of {', '.join(facts.partition_names)}"
        message, evidence = "this cluster has no default partition", shlex.join(nodes_command())
        yield ask.problem("partition", message, hint=hint, evidence=evidence)
        return
    for name in partitions_asked(ask.values, facts):
        is_there = name in facts.closed or name in facts.partition_names
        for message, hint in _partition_rules(name, ask, facts):
            evidence = f"scontrol -a show partition {name}" if is_there else shlex.join(nodes_command())
            yield ask.problem("partition", message, hint=hint, evidence=evidence)


def _partition_rules(name: str, ask: Ask, facts: ClusterFacts) -> Iterator[tuple[str, str]]:
    """What a partition has against a job, and the way out."""
    known, settings = facts.partition_names, facts.settings(name)
    if name in facts.closed:
        yield (
            f"partition {name!r} is open to the groups {facts.closed[name]} only, and you are in none of them",
            f"choose one of {facts.shown_partitions}, or ask the administrators",
        )
        return
    if name not in known:
        there_are = f"no partition {name!r}; this cluster has {facts.shown_partitions}"
        yield there_are, did_you_mean(name, known, "choose one of these")
        return
    if (state := settings.get("State", "UP")) not in ("UP", "DOWN"):  # one that is DOWN starts them when it is UP again
        others = ", ".join(one for one in known if one != name and facts.settings(one).get("State") == "UP")
        instead = f"choose another one: {others}" if others else "wait until it is UP again"
        yield f"partition {name!r} is {state}: it takes no jobs", instead
    if settings.get("ReqResv") == "YES" and "reservation" not in ask.values:
        yield (
            f"partition {name!r} takes jobs with a reservation only",
            "set launch.reservation, or choose another partition",
        )


class _Name(NamedTuple):
    """A name that a trial gives, and those that the cluster knows."""

    field: str
    name: str
    known: Sequence[str]
    message: str
    """What is wrong if it is not among them."""
    otherwise: str
    """What to do if it is like none of them."""
    evidence: str


def _node_names(ask: Ask, facts: ClusterFacts) -> Iterator[_Name]:
    known, evidence = sorted({node.name for node in facts.nodes}), shlex.join(nodes_command())
    there = set(known)
    for field in ("nodelist", "exclude"):
        # One problem for an expression, with one look for a near name: it may stand for thousands of hosts.
        if unknown := [host for host in expand_host_list(ask.values.get(field, "")) if host not in there]:
            others = f" and {len(unknown) - 1} others that {field} names" if len(unknown) > 1 else ""
            message = f"no node {unknown[0]!r}{others} in this cluster"
            yield _Name(field, unknown[0], known, message, f"this cluster has {some_nodes(facts.nodes)}", evidence)
    partitions = partitions_asked(ask.values, facts)
    members = [node for node in facts.nodes if node.partition in partitions]
    allowed = {node.name for node in members}
    outside = [host for host in expand_host_list(ask.values.get("nodelist", "")) if host in there - allowed]
    if outside and allowed:
        message = f"{', '.join(outside)} is not in partition {' or '.join(partitions)!r}"
        yield _Name("nodelist", outside[0], (), message, f"name nodes of it: {some_nodes(members)}", evidence)


def _reservation_names(ask: Ask, facts: ClusterFacts) -> Iterator[_Name]:
    if facts.reservations is not None:
        known = list(facts.reservations)
        there_are = f"there are {', '.join(known)}" if known else "remove it: none exists"
        for name in ask.reservations:
            message = f"no reservation {name!r} in this cluster"
            yield _Name("reservation", name, known, message, there_are, "scontrol show reservation")


def _feature_names(ask: Ask, partition: str, facts: ClusterFacts) -> Iterator[_Name]:
    members = facts.members(partition)
    known = sorted({feature for node in members for feature in node.features})
    for name in dict.fromkeys(_FEATURE.findall(ask.values.get("constraint", "")) if members else ()):
        there_are = f"(features: {', '.join(known) or 'none'})"
        message = f"no node of partition {partition!r} has the feature {name!r} {there_are}"
        otherwise = "remove the constraint, or choose one of these"
        yield _Name("constraint", name, known, message, otherwise, shlex.join(nodes_command(partition)))


def _account_names(ask: Ask, facts: ClusterFacts) -> Iterator[_Name]:
    """Accounts and QOS that a partition does not let in, and those that the user has not."""
    mine, account = facts.accounts.associations, ask.values.get("account")
    usable = sorted({name for one in mine if account in (None, one.account) for name in one.qos})
    rows = (
        ("account", "Accounts", "charge", [one.account for one in mine]),
        ("qos", "Qos", "use", usable),
    )
    for field, setting, may_not, known in rows:
        asked = ask.values.get(field)
        if asked is None:
            continue
        for name in partitions_asked(ask.values, facts):
            allowed = facts.settings(name).get(f"Allow{setting}", "ALL").split(",")
            denied = facts.settings(name).get(f"Deny{setting}", "").split(",")
            if asked in denied or not {"ALL", asked} & set(allowed):
                rule = f"it refuses {', '.join(denied)}" if asked in denied else f"it allows {', '.join(allowed)}"
                message = f"partition {name!r} is not open to {field} {asked!r} ({rule})"
                others = [one for one in allowed if one != asked]
                instead = f"choose another {field}, or another partition"
                yield _Name(field, asked, others, message, instead, f"scontrol show partition {name}")
        if known:
            message = f"you may not {may_not} {field} {asked!r} (you have {', '.join(known)})"
            evidence = "sacctmgr show assoc user=$USER format=account,qos"
            yield _Name(field, asked, known, message, "choose one of these, or ask the administrators", evidence)


def _limit_problems(ask: Ask, plan: RunPlan, facts: ClusterFacts) -> Iterator[ConfigProblem]:
    """Time limits: one that no partition allows, or that of a partition which is signalled as soon as a job runs."""
    names, signal_s = partitions_asked(ask.values, facts), plan.launch.signal_before_end_s
    most_by_name = {name: _most_s(facts.settings(name)) for name in names}
    if "time_limit" in ask.values:
        asked_s = parse_time_limit(ask.values["time_limit"])
        name = max(names, key=lambda name: most_by_name[name] or _FOR_EVER_S)
        if (most_s := most_by_name[name]) is None or asked_s <= most_s:
            return
        message = (
            f"time limit {format_time_limit(asked_s)} is more than partition {name!r} allows "
            f"(MaxTime {format_time_limit(most_s)})"
        )
        fits = limit_that_fits(most_s, signal_s if ask.is_signalled else 0)
        longer = [
            repr(one)
            for one in facts.partition_names
            if facts.settings(one).get("State", "UP") == "UP"
            and (_most_s(facts.settings(one)) or _FOR_EVER_S) >= asked_s
        ]
        hint = f"{fits} fits: a trial whose time is over goes on in its next attempt"
        hint += f"; or choose partition {' or '.join(longer[:3])}" if longer else ""
    else:
        limits = {name: limit for name in names if (limit := _limit_in_force_s(ask, facts.settings(name))) is not None}
        name = min(limits, key=lambda name: limits[name], default="")
        if not ask.is_signalled or not limits or leaves_time(limits[name], signal_s):
            return
        message = (
            f"no time limit is asked for, and that of partition {name!r}, {format_time_limit(limits[name])}, leaves no "
            f"time to train: SLURM signals its end {signal_s} s before it (launch.signal_before_end_s)"
        )
        most_s, hint = most_by_name[name], "set launch.time_limit, or lower launch.signal_before_end_s"
        if most_s is not None and not leaves_time(most_s, signal_s):
            hint = f"choose another partition; here launch.time_limit may be {limit_that_fits(most_s, signal_s)}"
    yield ask.problem("time_limit", message, hint=hint, evidence=f"scontrol show partition {name}")


def _limit_in_force_s(ask: Ask, settings: Mapping[str, str]) -> int | None:
    """The time limit of a job in a partition; None if it has none."""
    if "time_limit" in ask.values:
        return parse_time_limit(ask.values["time_limit"])
    return _limit_s(settings.get("DefaultTime", "")) or _most_s(settings)


def _most_s(settings: Mapping[str, str]) -> int | None:
    return _limit_s(settings.get("MaxTime", ""))


def _limit_s(text: str) -> int | None:
    return None if text.upper() in UNLIMITED else parse_time_limit(text)


def _task_problems(ask: Ask, plan: RunPlan, partition: str, facts: ClusterFacts) -> Iterator[ConfigProblem]:
    """One task that is bigger than every node."""
    members, task = facts.members(partition), ask.task
    if not members:
        return
    evidence = shlex.join(nodes_command(partition))
    offers: list[tuple[str, str, Callable[[Node], int]]] = [
        ("cpu", "CPUs", lambda node: node.cpus),
        ("mem", "MB of memory", lambda node: node.mem_mb),
    ]
    if task.gpu and plan.cluster.gpu_request != "none":
        wrong = _wrong_gpus(ask, partition, members, facts)
        if wrong is not None:
            field, message, hint = wrong
            yield ask.problem(field, message, hint=hint, shown=str(getattr(task, field)), evidence=evidence)
        else:
            offers.append(("gpu", "GPUs", partial(gpus_of, gpu_type=task.gpu_type)))
    elif task.gpu and plan.cluster.gpus_per_node is None and not any(node.gpus for node in members):
        yield ConfigProblem(
            message="with cluster.gpu_request none, SLURM does not know how many GPUs a node has",
            hint="set cluster.gpus_per_node",
            path=("cluster", "gpus_per_node"),
            shown="null",
            evidence=evidence,
        )
    for field, unit, size in offers:
        asked, (most, biggest) = getattr(task, field), biggest_nodes(members, size)
        if asked > most:
            message = (
                f"{ask.who} wants {asked} {unit} in one task; the biggest node of partition {partition!r} has {most} "
                f"({biggest})"
            )
            hint = f"at most {most} fits"
            if field == "gpu":
                hint += ", as t in the allocation" if "generation_server" in ask.who else ""
            else:
                fitting = sorted({repr(node.partition) for node in facts.nodes if size(node) >= asked})
                bigger = f"; partition {' or '.join(fitting[:3])} has bigger nodes" if fitting else ""
                hint += f", less what the supervisor keeps{bigger}"
            yield ask.problem(field, message, hint=hint, shown=str(asked), evidence=evidence)


def _wrong_gpus(ask: Ask, partition: str, members: Sequence[Node], facts: ClusterFacts) -> tuple[str, str, str] | None:
    """The field of a task whose GPUs no node of the partition has, however many; what is wrong, and the way out."""
    kinds = sorted({kind for node in members for kind, count in node.gpus_by_type.items() if count})
    wanted = ask.task.gpu_type
    if not any(node.gpus for node in facts.nodes):
        hint = "set cluster.gpu_request: none if nodes come with all of their GPUs, or gpu: 0 to run on CPUs"
        return "gpu", f"{ask.who} wants GPUs, but this cluster has no GRES 'gpu'", hint
    if not kinds:
        others = sorted({node.partition for node in facts.nodes if node.gpus})
        hint = f"partitions with GPUs: {', '.join(others)}; gpu: 0 runs on CPUs"
        return "gpu", f"{ask.who} wants GPUs, but no node of partition {partition!r} has any", hint
    if wanted is not None and wanted not in kinds:
        have = ", ".join(f"gpu:{kind}" if kind else "gpu" for kind in kinds)
        hint = did_you_mean(wanted, kinds, "leave gpu_type out to take any, or choose one of these")
        return "gpu_type", f"no node of partition {partition!r} offers gpu:{wanted} (it has {have})", hint
    return None


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
