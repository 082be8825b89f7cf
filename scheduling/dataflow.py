"""Model function calls naming their inputs and outputs -> the graph of who waits for whom.

    dataset keys ──► ref_inf ──ref_logprobs──► actor_train     one edge per key that a call makes and another reads
             └─────► actor_inf ──proximal_logprobs──┘

Nobody writes edges down: they follow from the keys. A built graph is complete and never changes.
"""

import difflib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter

from corral.scheduling.model_function_call import CallType, ModelFunctionCall, ModelName, PushWeightsHook


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Edge:
    """`consumer` waits for `key` from `producer`."""

    producer: str
    consumer: str
    key: str


@dataclass(frozen=True, kw_only=True)
class DataflowGraph:
    """The calls of one step and who waits for whom; made by `build_dataflow`."""

    calls: tuple[ModelFunctionCall, ...]
    """In topological order; within a level, as they were given. Those that evaluate come last."""
    dataset_keys: frozenset[str]
    """Keys that no call makes: they come with the samples."""
    edges: tuple[Edge, ...]
    levels: tuple[tuple[str, ...], ...]
    """Names of the calls of a step by topological generation, for the eye: a call waits for its own input keys only."""

    @cached_property
    def _call_by_name(self) -> dict[str, ModelFunctionCall]:
        return {call.name: call for call in self.calls}

    def call(self, name: str) -> ModelFunctionCall:
        if name not in self._call_by_name:
            raise ValueError(f"no call is named {name!r}; there are {', '.join(self._call_by_name)}")
        return self._call_by_name[name]

    def producer_of(self, key: str) -> str | None:
        """The call that makes `key`; None if it comes with the dataset."""
        for call in self.calls:
            if key in call.output_keys:
                return call.name
        if key in self.dataset_keys:
            return None
        raise ValueError(f"nobody makes key {key!r}; {_known_keys(self.calls, self.dataset_keys)}")

    def consumers_of(self, key: str) -> tuple[str, ...]:
        """The calls that read `key`, in topological order."""
        return tuple(call.name for call in self.calls if key in call.input_keys)

    def makers_of(self, name: str) -> tuple[ModelFunctionCall, ...]:
        """The calls that make what `name` reads, and what these read, and so on, in topological order."""
        needed: set[str] = set()
        found = list(self.predecessors(name))
        while found:
            needed.add(found[-1])
            found += [other for other in self.predecessors(found.pop()) if other not in needed]
        return tuple(call for call in self.calls if call.name in needed)

    def predecessors(self, name: str) -> tuple[str, ...]:
        """The calls that must be done before `name`, in topological order."""
        producers = {edge.producer for edge in self.edges if edge.consumer == self.call(name).name}
        return tuple(call.name for call in self.calls if call.name in producers)

    @property
    def step_calls(self) -> tuple[ModelFunctionCall, ...]:
        """The calls of every train step, in topological order."""
        return tuple(call for call in self.calls if call.call_type is not CallType.EVALUATE)

    @property
    def evaluate_calls(self) -> tuple[ModelFunctionCall, ...]:
        """The calls that look at held-out problems between train steps, when that is due."""
        return tuple(call for call in self.calls if call.call_type is CallType.EVALUATE)

    @property
    def trained_models(self) -> tuple[ModelName, ...]:
        """The models that a train step changes, in topological order."""
        return tuple(call.model_name for call in self.calls if call.call_type is CallType.TRAIN_STEP)

    @property
    def model_names(self) -> tuple[ModelName, ...]:
        """Every model that a call runs on, or that takes over another one's weights."""
        names = [call.model_name for call in self.calls]
        names += [hook.source for call in self.calls for hook in call.pre_hooks]
        names += [hook.target for call in self.calls for hook in call.post_hooks if isinstance(hook, PushWeightsHook)]
        return tuple(dict.fromkeys(names))

    def reallocations(self, call: ModelFunctionCall) -> tuple[tuple[ModelName, ModelName], ...]:
        """(source, target) of each parameter reallocation that a call's hooks ask for."""
        pulled = [(hook.source, call.model_name) for hook in call.pre_hooks]
        pushed = [(call.model_name, hook.target) for hook in call.post_hooks if isinstance(hook, PushWeightsHook)]
        return (*pulled, *pushed)

    def changed_by(self, call: ModelFunctionCall) -> frozenset[ModelName]:
        """The models whose weights a call changes."""
        changed = {target for _, target in self.reallocations(call)}
        return frozenset(changed | ({call.model_name} if call.call_type is CallType.TRAIN_STEP else set()))

    def must_follow(self, name: str) -> tuple[str, ...]:
        """The calls of a step that have to be over before `name` begins, although it reads nothing of theirs.

        A train step changes the weights that other calls of the same step compute with. They see the weights from
        before it, however their batches are cut. Nothing waits for a train step in turn, so this adds no circle.
        """
        changing = self.call(name)
        if changing.call_type is not CallType.TRAIN_STEP:
            return ()
        changed = self.changed_by(changing)
        return tuple(
            call.name
            for call in self.step_calls
            if call.call_type is not CallType.TRAIN_STEP
            and changed & {call.model_name, *(hook.source for hook in call.pre_hooks)}
        )


def dataset_keys(calls: Iterable[ModelFunctionCall]) -> frozenset[str]:
    """The keys that calls read and none of them makes: they come with the samples."""
    given = list(calls)
    made = {key for call in given for key in call.output_keys}
    return frozenset(key for call in given for key in call.input_keys) - made


def build_dataflow(calls: Sequence[ModelFunctionCall], dataset_keys: Iterable[str]) -> DataflowGraph:
    """Connect calls by their keys.

    Args:
        calls: in any order.
        dataset_keys: keys that every sample has before the first call.

    Raises:
        ValueError: for a key without or with two producers, a circle, a repeated name, two train steps of one role, or
            gaps in a role's replica ids.
    """
    given = frozenset(dataset_keys)
    if not calls:
        raise ValueError("a dataflow graph needs at least one call")
    _check_names(calls)
    _check_roles(calls)
    producer_by_key = _producer_by_key(calls, given)
    edges = []
    for call in calls:
        for key in call.input_keys:
            if key in producer_by_key:
                edges.append(Edge(producer=producer_by_key[key], consumer=call.name, key=key))
            elif key not in given:
                raise ValueError(
                    f"call {call.name!r} reads key {key!r}, which nobody makes; {_hint(key, calls, given)}"
                )
    evaluating = [call.name for call in calls if call.call_type is CallType.EVALUATE]
    levels = _levels([call.name for call in calls if call.name not in evaluating], edges)
    call_by_name = {call.name: call for call in calls}
    return DataflowGraph(
        calls=tuple(call_by_name[name] for level in (*levels, evaluating) for name in level),
        dataset_keys=given,
        edges=tuple(edges),
        levels=levels,
    )


def _check_names(calls: Sequence[ModelFunctionCall]) -> None:
    names = [call.name for call in calls]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"call names must be unique; {', '.join(repeated)} occurs more than once")


def _check_roles(calls: Sequence[ModelFunctionCall]) -> None:
    calls_by_role: dict[str, list[ModelFunctionCall]] = defaultdict(list)
    for call in calls:
        calls_by_role[call.role].append(call)
    for role, role_calls in calls_by_role.items():
        trains = [call.name for call in role_calls if call.call_type is CallType.TRAIN_STEP]
        if len(trains) > 1:
            raise ValueError(
                f"role {role!r} has {len(trains)} train steps ({', '.join(trains)}); a role is trained by one call"
            )
        replica_ids = sorted({call.model_name.replica_id for call in role_calls})
        if replica_ids != list(range(len(replica_ids))):
            raise ValueError(f"replica ids of role {role!r} must be 0..{len(replica_ids) - 1}, got {replica_ids}")


def _producer_by_key(calls: Sequence[ModelFunctionCall], dataset_keys: frozenset[str]) -> dict[str, str]:
    producer_by_key: dict[str, str] = {}
    for call in calls:
        for key in call.output_keys:
            other = "the dataset" if key in dataset_keys else producer_by_key.get(key)
            if other is not None:
                raise ValueError(
                    f"key {key!r} is made by {other} and by {call.name}; a key has one producer, "
                    "so give one of them another name with output_key_remap"
                )
            producer_by_key[key] = call.name
    return producer_by_key


def _hint(key: str, calls: Sequence[ModelFunctionCall], dataset_keys: frozenset[str]) -> str:
    producers = {made: call.name for call in calls for made in call.output_keys} | {
        made: "the dataset" for made in dataset_keys
    }
    close = difflib.get_close_matches(key, sorted(producers), n=1)
    if close:
        return f"did you mean {close[0]!r}, which {producers[close[0]]} makes? {_known_keys(calls, dataset_keys)}"
    return _known_keys(calls, dataset_keys)


def _known_keys(calls: Sequence[ModelFunctionCall], dataset_keys: frozenset[str]) -> str:
    made = [f"{call.name} makes {', '.join(call.output_keys)}" for call in calls if call.output_keys]
    return "; ".join([f"the dataset has {', '.join(sorted(dataset_keys)) or 'no keys'}", *made])


def _levels(names: Sequence[str], edges: Sequence[Edge]) -> tuple[tuple[str, ...], ...]:
    """Topological generations: a call is one level below the last of those that it waits for."""
    sorter = TopologicalSorter({name: {edge.producer for edge in edges if edge.consumer == name} for name in names})
    try:
        sorter.prepare()
    except CycleError as error:
        circle = " -> ".join(reversed(error.args[1]))
        raise ValueError(f"calls wait for each other in a circle: {circle} (each needs a key of the next)") from error
    levels: list[tuple[str, ...]] = []
    while sorter.is_active():
        levels.append(tuple(sorted(sorter.get_ready(), key=names.index)))
        sorter.done(*levels[-1])
    return tuple(levels)
