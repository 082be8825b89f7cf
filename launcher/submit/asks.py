"""Requests to the cluster by group of workers, with the configuration key of each value.

groups, elastic parts, launch --asks_of--> [Ask] --check_values--> time limits fit the signal before the end,
                                                                  nodes are not excluded

What can never start is refused before sbatch, with the numbers: a job that waits for ever looks like one that waits.

    Ask (asks.py) + ClusterFacts (cluster.py) --check_asks--> UnsatisfiableError | warnings

Pure; preflight.py asks SLURM. Each check yields all of its problems, and each problem names a key. What waiting cures
is a warning: nodes and partitions that are down, a reservation that is yet to begin.
"""

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from corral.experiments.errors import (
    ConfigError,
    ConfigProblem,
    ConfigSource,
    KeyPath,
    UnsatisfiableError,
    did_you_mean,
)
from corral.experiments.plan import RunPlan
from corral.launcher.layout.planner import SUPERVISED, asked_for
from corral.launcher.slurm.client import nodes_command
from corral.launcher.slurm.parse import Node
from corral.launcher.submit.cluster import ClusterFacts, counted, hosts, most_common_shape, some_of
from corral.launcher.trial.view import node_local_folder
from corral.scheduling.placement import NodeShape
from corral.scheduling.scheduling import ALLOCATION_FIELDS, Scheduling
from corral.scheduling.slurm_formats import format_time_limit, parse_time_limit

_SIGNAL_EARLY_S = 30  # slurmctld looks at time limits this often, and sends what is due before its next look


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """The request of one group's tasks to the cluster, with `launch` beneath, and the key of each value."""

    who: str
    """For people: the worker kind, or `elastic` before it."""
    task: Scheduling
    path: KeyPath
    """Where the group's scheduling stands."""
    values: Mapping[str, str]
    """ALLOCATION_FIELDS that are set."""
    path_by_field: Mapping[str, KeyPath]
    is_signalled: bool = True
    """Whether SLURM tells its job that the end comes near: the trial's own job, not those beside it."""

    def names(self, field: str) -> list[str]:
        """What a value names: several reservations with commas between them, an account."""
        return [name for name in self.values.get(field, "").split(",") if name]

    def problem(self, name: str, message: str, *, hint: str, evidence: str = "") -> ConfigProblem:
        """A problem with one of the values."""
        return ConfigProblem(message, hint, path=self.path_by_field.get(name, (*self.path, name)), evidence=evidence)


def asks_of(plan: RunPlan, source: ConfigSource) -> list[Ask]:
    """The requests of every group and of every elastic part of a group."""
    asks = []
    for kind, group in plan.scheduling.items():
        own: KeyPath = ("groups", kind, "scheduling")
        in_own_job = plan.launch.layout != "jobs" or kind in SUPERVISED
        ask = _ask(plan, kind, group.scheduling, own, is_signalled=in_own_job)
        if kind == "generation_server" and not source.gives((*own, "gpu")):  # its GPUs follow from the allocation then
            ask = replace(ask, path_by_field={**ask.path_by_field, "gpu": ("allocation",)})
        asks.append(ask)
        if group.elastic is not None:
            path = source.first_given(("groups", kind, "elastic", "scheduling"), own)
            asks.append(_ask(plan, f"elastic {kind}", group.elastic.scheduling, path, is_signalled=False))
    return asks


def _ask(plan: RunPlan, who: str, task: Scheduling, path: KeyPath, *, is_signalled: bool) -> Ask:
    values = {name: value for name in ALLOCATION_FIELDS if (value := asked_for(plan, task, name)) is not None}
    path_by_field = {name: ("launch", name) if getattr(task, name) is None else (*path, name) for name in values}
    return Ask(who=who, task=task, path=path, values=values, path_by_field=path_by_field, is_signalled=is_signalled)


def check_values(asks: Sequence[Ask], plan: RunPlan, source: ConfigSource) -> None:
    """Values against each other.

    Raises:
        ConfigError: if no cluster could do what is asked for.
    """
    problems = [problem for ask in asks for problem in (*_signal_problems(ask, plan, source), *_node_problems(ask))]
    raise_problems(ConfigError, problems)


def leaves_time(limit_s: int, signal_before_end_s: int) -> bool:
    """Whether a job of this time limit runs at all before SLURM signals that its end comes near."""
    minutes = -(-limit_s // 60)  # SLURM rounds limits up
    return minutes * 60 > signal_before_end_s + _SIGNAL_EARLY_S


def limit_that_fits(most_s: int, signal_before_end_s: int) -> str:
    """What to write where a time limit may be no longer than this, and is signalled before its end."""
    shown = f"at most '{format_time_limit(most_s)}'"
    if leaves_time(most_s, signal_before_end_s):
        return shown
    return f"{shown}, and launch.signal_before_end_s below {max(most_s - _SIGNAL_EARLY_S, 1)}"


def _signal_problems(ask: Ask, plan: RunPlan, source: ConfigSource) -> Iterator[ConfigProblem]:
    limit, signal_s = ask.values.get("time_limit"), plan.launch.signal_before_end_s
    if not ask.is_signalled or limit is None or leaves_time(parse_time_limit(limit), signal_s):
        return
    shown = format_time_limit(parse_time_limit(limit))
    least = format_time_limit(60 * ((signal_s + _SIGNAL_EARLY_S) // 60 + 1))
    message = (
        f"a time limit of {shown} leaves no time to train: SLURM signals its end {signal_s} s before it "
        f"(launch.signal_before_end_s), up to {_SIGNAL_EARLY_S} s early"
    )
    hint = f"set time_limit to at least '{least}', or launch.signal_before_end_s lower"
    path = source.first_given(ask.path_by_field["time_limit"], ("launch", "signal_before_end_s"))
    yield ConfigProblem(message, hint, path=path)


def _node_problems(ask: Ask) -> Iterator[ConfigProblem]:
    unwanted = set(hosts(ask.values, "exclude"))
    if both := [host for host in hosts(ask.values, "nodelist") if host in unwanted]:
        yield ask.problem(
            "exclude", f"{', '.join(both)} is in nodelist and in exclude", hint="remove it from one of them"
        )


def shapes_for(asks: Sequence[Ask], plan: RunPlan, facts: ClusterFacts) -> Mapping[str | None, NodeShape]:
    """What a node has, by partition: of the nodes that could run what is asked for there, the most common shape."""
    shapes: dict[str | None, NodeShape] = {}
    for name in dict.fromkeys(facts.asked(ask.values)[0] for ask in asks):
        here = [ask for ask in asks if facts.asked(ask.values)[0] == name]
        types = {ask.task.gpu_type for ask in here} - {None}
        gpu_type = types.pop() if len(types) == 1 else None
        most = {one: max(getattr(ask.task, one.of_task) for ask in here) for one in counted(plan)}
        names = {node.name for ask in here for node in _may_run_on(ask, name, facts)}
        allowed = [node for node in facts.members(name) if node.name in names]
        able = [node for node in allowed if all(one.size(node, gpu_type) >= size for one, size in most.items())]
        shape = most_common_shape(able or allowed, gpu_type=gpu_type, memory=facts.memory(name))
        if shape is not None:
            shapes[name] = shape
            if name == facts.default_partition:
                shapes[None] = shape
    return shapes


def _may_run_on(ask: Ask, partition: str, facts: ClusterFacts) -> list[Node]:
    wanted, allowed = set(hosts(ask.values, "nodelist")), facts.allowed(partition, ask.values)
    return [node for node in allowed if not wanted or node.name in wanted]


def raise_problems(kind: type[ConfigError], problems: Sequence[ConfigProblem]) -> None:
    """One error with each problem once, as groups may share a value; none if there are none."""
    if problems:
        raise kind({(problem.path, problem.message): problem for problem in problems}.values())


_FEATURE = re.compile(r"[A-Za-z_][A-Za-z0-9_.:=-]*")


def check_asks(asks: Sequence[Ask], plan: RunPlan, facts: ClusterFacts) -> list[str]:
    """Names and sizes that the groups give, against what the cluster has; returns warnings.

    Raises:
        UnsatisfiableError: with every value that this cluster does not know or cannot give.
    """
    problems: list[ConfigProblem] = []
    warnings: list[str] = []
    for ask in asks:
        of_partitions = list(_partition_problems(ask, facts))
        problems += of_partitions
        if not of_partitions:
            partition = facts.asked(ask.values)[0]
            problems += _task_problems(ask, plan, partition, facts)
            warnings += _warnings(ask, partition, facts)
        problems += _unknown_names(ask, facts)
    raise_problems(UnsatisfiableError, problems)
    return list(dict.fromkeys(warnings))


def _partition_problems(ask: Ask, facts: ClusterFacts) -> Iterator[ConfigProblem]:
    known, sinfo = facts.partition_names, shlex.join(nodes_command())
    if "partition" not in ask.values and facts.default_partition is None:
        hint = f"set launch.partition to one of {', '.join(known)}"
        yield ask.problem("partition", "this cluster has no default partition", hint=hint, evidence=sinfo)
        return
    for name in facts.asked(ask.values):
        is_there = name in facts.closed or name in known
        evidence = f"scontrol -a show partition {name}" if is_there else sinfo
        for field, message, hint in _partition_rules(name, ask, facts):
            yield ask.problem(field, message, hint=hint, evidence=evidence)


def _partition_rules(name: str, ask: Ask, facts: ClusterFacts) -> Iterator[tuple[str, str, str]]:
    """What a partition has against a job: which of its values, by which rule, and the way out."""
    known, settings = facts.partition_names, facts.settings(name)
    if name in facts.closed:
        rule = f"partition {name!r} is open to the groups {facts.closed[name]} only, and you are in none of them"
        yield "partition", rule, f"choose one of {facts.shown_partitions}, or ask the administrators"
    elif name not in known:
        rule = f"no partition {name!r}; this cluster has {facts.shown_partitions}"
        yield "partition", rule, did_you_mean(name, known, "choose one of these")
    if (state := settings.get("State", "UP")) not in ("UP", "DOWN"):  # one that is DOWN starts them when it is UP again
        others = ", ".join(one for one in known if one != name and facts.settings(one).get("State") == "UP")
        instead = f"choose another one: {others}" if others else "wait until it is UP again"
        yield "partition", f"partition {name!r} is {state}: it takes no jobs", instead
    if settings.get("ReqResv") == "YES" and "reservation" not in ask.values:
        rule = f"partition {name!r} takes jobs with a reservation only"
        yield "partition", rule, "set launch.reservation, or choose another partition"
    for field, setting in (("account", "Accounts"), ("qos", "Qos")):
        allowed = settings.get(f"Allow{setting}", "ALL").split(",")
        denied = settings.get(f"Deny{setting}", "").split(",")
        asked = ask.values.get(field)
        if asked is not None and (asked in denied or not {"ALL", asked} & set(allowed)):
            rule = f"it refuses {', '.join(denied)}" if asked in denied else f"it allows {', '.join(allowed)}"
            instead = did_you_mean(
                asked, [one for one in allowed if one != asked], f"choose another {field}, or another partition"
            )
            yield field, f"partition {name!r} is not open to {field} {asked!r} ({rule})", instead


def _unknown_names(ask: Ask, facts: ClusterFacts) -> Iterator[ConfigProblem]:
    """Names that there are not, or not for this user, as far as SLURM says which there are."""
    values, partitions, mine = ask.values, facts.asked(ask.values), facts.accounts.associations
    account, of_partition = values.get("account"), f"no node of partition {' or '.join(partitions)!r}"
    members, wanted = facts.members(partitions[0]), _FEATURE.findall(values.get("constraint", ""))
    features = [feature for node in members for feature in node.features]
    in_partitions = [node.name for node in facts.nodes if node.partition in partitions]
    usable = [name for one in mine if account in (None, one.name) for name in one.qos]
    sinfo, sacctmgr = shlex.join(nodes_command()), "sacctmgr show assoc user=$USER format=account,qos"
    reservations = "scontrol show reservation"
    rows: Sequence[tuple[str, Sequence[str], Iterable[str] | None, str, str]] = (
        ("nodelist", hosts(values, "nodelist"), in_partitions or None, f"{of_partition} is called", sinfo),
        ("exclude", hosts(values, "exclude"), [node.name for node in facts.nodes], "no node is called", sinfo),
        ("reservation", ask.names("reservation"), facts.reservations, "no reservation is called", reservations),
        ("constraint", wanted, features if members else None, f"{of_partition} has the feature", sinfo),
        ("account", ask.names("account"), [one.name for one in mine] or None, "you may not charge account", sacctmgr),
        ("qos", ask.names("qos"), usable or None, "you may not use qos", sacctmgr),
    )
    for field, asked, names, rule, evidence in rows:
        known = dict.fromkeys(names or ())
        # One problem for an expression, with one look for a near name: it may stand for thousands of hosts.
        if names is not None and (unknown := [one for one in asked if one not in known]):
            message = f"{rule} {some_of(map(repr, unknown))} (there are: {some_of(known) or 'none'})"
            hint = did_you_mean(unknown[0], [*known], "choose one of these, or remove it" if known else "remove it")
            yield ask.problem(field, message, hint=hint, evidence=evidence)


def _task_problems(ask: Ask, plan: RunPlan, partition: str, facts: ClusterFacts) -> Iterator[ConfigProblem]:
    """One task that is bigger than every node."""
    members, task = facts.members(partition), ask.task
    if not members:
        return
    evidence = shlex.join(nodes_command(partition))
    is_unknown = plan.cluster.gpu_request == "none" and plan.cluster.gpus_per_node is None
    if task.gpu and is_unknown and not any(node.gpus for node in members):
        message = "with cluster.gpu_request none, SLURM does not know how many GPUs a node has"
        hint, path = "set cluster.gpus_per_node", ("cluster", "gpus_per_node")
        yield ConfigProblem(message, hint, path=path, evidence=evidence)
    wanted = {one.of_task: getattr(task, one.of_task) for one in counted(plan)}
    for one, most, biggest in facts.shortfalls(partition, counted(plan), wanted, task.gpu_type):
        field, asked = one.of_task, wanted[one.of_task]
        if field == "gpu" and not most:
            field, message, hint = _wrong_gpus(ask, partition, facts)
        else:
            message = f"{ask.who} wants {asked} {one.unit} in one task; {biggest}"
            hint = f"at most {most} fits"
            if field == "gpu":
                hint += ", as t in the allocation" if "generation_server" in ask.who else ""
            else:
                everywhere = (node for name in facts.partition_names for node in facts.members(name))
                fitting = sorted({repr(node.partition) for node in everywhere if one.size(node, None) >= asked})
                bigger = f"; partition {' or '.join(fitting[:3])} has bigger nodes" if fitting else ""
                hint += f", less what the supervisor keeps{bigger}"
        yield ask.problem(field, message, hint=hint, evidence=evidence)


def _wrong_gpus(ask: Ask, partition: str, facts: ClusterFacts) -> tuple[str, str, str]:
    """The field of a task whose GPUs no node of the partition has, however many; what is wrong, and the way out."""
    kinds = sorted({kind for node in facts.members(partition) for kind, count in node.gpus_by_type.items() if count})
    if kinds:
        wanted, have = str(ask.task.gpu_type), ", ".join(f"gpu:{kind}" if kind else "gpu" for kind in kinds)
        hint = did_you_mean(wanted, kinds, "leave gpu_type out to take any, or choose one of these")
        return "gpu_type", f"no node of partition {partition!r} offers gpu:{wanted} (it has {have})", hint
    if others := sorted({node.partition for node in facts.nodes if node.gpus}):
        hint = f"partitions with GPUs: {', '.join(others)}; gpu: 0 runs on CPUs"
        return "gpu", f"{ask.who} wants GPUs, but no node of partition {partition!r} has any", hint
    hint = "set cluster.gpu_request: none if nodes come with all of their GPUs, or gpu: 0 to run on CPUs"
    return "gpu", f"{ask.who} wants GPUs, but this cluster has no GRES 'gpu'", hint


def _warnings(ask: Ask, partition: str, facts: ClusterFacts) -> Iterator[str]:
    if facts.settings(partition) and facts.time_limit_s(partition, ask.values) is None:
        yield (
            f"no launch.time_limit, and partition {partition!r} has none either: "
            "SLURM never starts such a job early in a gap (backfill)"
        )
    if not facts.memory(partition).is_counted:
        yield (
            f"SLURM does not count memory in partition {partition!r} (SelectTypeParameters): the trial asks for none, "
            "and its workers are placed by CPUs and GPUs alone unless cluster.mem_per_node is set"
        )
    asked = facts.asked(ask.values)
    if facts.are_down(asked):
        yield f"partition {' and '.join(asked)} is DOWN: the job waits until it is UP again"
    for name in ask.names("reservation"):
        if begin := facts.begins_later(name):
            yield f"reservation {name!r} begins at {begin}: the job waits for it"
    for name in ("account", "qos"):
        if name in ask.values and facts.accounts.is_kept is False:
            yield f"this cluster keeps no accounting: {name} {ask.values[name]!r} has no effect"


def node_local_warning(directory: Path) -> str | None:
    """A warning about a trial directory that other nodes are unlikely to see."""
    if (folder := node_local_folder(directory)) is None:
        return None
    return (
        f"{directory} is below {folder}, which every node usually has for itself: if so, workers elsewhere "
        "fail without a log; set cluster.fileroot or $CORRAL_FILEROOT to a shared folder"
    )
