"""Who asks the cluster for what, and under which key of the configuration each value stands.

groups, elastic parts, launch --asks_of--> [Ask] --check_values--> time limits fit the signal before the end,
                                                                  nodes are not excluded
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from corral.experiments.errors import ConfigError, ConfigProblem, ConfigSource, KeyPath
from corral.experiments.plan import RunPlan
from corral.launcher.layout.planner import SUPERVISED, asked_for
from corral.launcher.slurm.parse import Node
from corral.launcher.submit.cluster import ClusterFacts, counted, hosts, most_common_shape
from corral.scheduling.placement import NodeShape
from corral.scheduling.scheduling import ALLOCATION_FIELDS, Scheduling
from corral.scheduling.slurm_formats import format_time_limit, parse_time_limit

_SIGNAL_EARLY_S = 30  # slurmctld looks at time limits this often, and sends what is due before its next look


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What the tasks of one group ask of the cluster, with `launch` beneath, and the key that each value has."""

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
    """What every group and every elastic part of one asks for."""
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
