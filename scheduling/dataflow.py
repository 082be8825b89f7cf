"""Model function calls naming their inputs and outputs -> the graph of who waits for whom.

    dataset keys ──► ref_inf ──ref_logprobs──► actor_train     one edge per key that a call makes and another reads
             └─────► actor_inf ──proximal_logprobs──┘

Nobody writes edges down: they follow from the keys. A built graph is complete and never changes.
"""

import difflib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter

from corral.scheduling.errors import RuleError
from corral.scheduling.model_function_call import CallType, ModelFunctionCall, ModelName, PushWeightsHook


@dataclass(frozen=True, kw_only=True)
class DataflowGraph:
    """The calls of one step and who waits for whom; made by `build_dataflow`."""

    calls: tuple[ModelFunctionCall, ...]
    """In topological order; within a level, as they were given. Those that evaluate come last."""
    producer_by_key: Mapping[str, str | None]
    """The call that makes a key; None if it comes with the samples."""

    @property
    def dataset_keys(self) -> frozenset[str]:
        """Keys that no call makes: they come with the samples."""
        return frozenset(key for key, producer in self.producer_by_key.items() if producer is None)

    @cached_property
    def _call_by_name(self) -> dict[str, ModelFunctionCall]:
        return {call.name: call for call in self.calls}

    def call(self, name: str) -> ModelFunctionCall:
        if name not in self._call_by_name:
            raise RuleError(f"no call is named {name!r}", f"there are {', '.join(self._call_by_name)}")
        return self._call_by_name[name]

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
        producers = {self.producer_by_key[key] for key in self.call(name).input_keys}
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


def build_dataflow(calls: Sequence[ModelFunctionCall], dataset_keys: Iterable[str] | None = None) -> DataflowGraph:
    """Connect calls by their keys.

    Args:
        calls: in any order.
        dataset_keys: keys that every sample has before the first call; None for all that no call makes.

    Raises:
        ValueError: for a key without or with two producers, a circle, a repeated name, two train steps of one role, or
            gaps in a role's replica ids.
    """
    if not calls:
        raise ValueError("a dataflow graph needs at least one call")
    _check_names(calls)
    _check_roles(calls)
    if dataset_keys is None:
        made = {key for call in calls for key in call.output_keys}
        dataset_keys = {key for call in calls for key in call.input_keys} - made
    producer_by_key = _producer_by_key(calls, dataset_keys)
    waits: dict[str, set[str]] = {}
    for call in calls:
        if unknown := [key for key in call.input_keys if key not in producer_by_key]:
            raise RuleError(
                f"call {call.name!r} reads key {unknown[0]!r}, which nobody makes",
                _hint(unknown[0], producer_by_key),
            )
        if call.call_type is not CallType.EVALUATE:
            waits[call.name] = {producer for key in call.input_keys if (producer := producer_by_key[key])}
    call_by_name = {call.name: call for call in calls}
    evaluating = [name for name in call_by_name if name not in waits]
    return DataflowGraph(
        calls=tuple(call_by_name[name] for name in (*_in_order(waits), *evaluating)),
        producer_by_key=producer_by_key,
    )


def _check_names(calls: Sequence[ModelFunctionCall]) -> None:
    names = [call.name for call in calls]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise RuleError("call names must be unique", f"{', '.join(repeated)} occurs more than once")


def _check_roles(calls: Sequence[ModelFunctionCall]) -> None:
    calls_by_role: dict[str, list[ModelFunctionCall]] = defaultdict(list)
    for call in calls:
        calls_by_role[call.role].append(call)
    for role, role_calls in calls_by_role.items():
        trains = [call.name for call in role_calls if call.call_type is CallType.TRAIN_STEP]
        if len(trains) > 1:
            raise RuleError(
                f"role {role!r} has {len(trains)} train steps ({', '.join(trains)})", "a role is trained by one call"
            )
        replica_ids = sorted({call.model_name.replica_id for call in role_calls})
        if replica_ids != list(range(len(replica_ids))):
            raise ValueError(f"replica ids of role {role!r} must be 0..{len(replica_ids) - 1}, got {replica_ids}")


def _producer_by_key(calls: Sequence[ModelFunctionCall], dataset_keys: Iterable[str]) -> dict[str, str | None]:
    producer_by_key: dict[str, str | None] = dict.fromkeys(dataset_keys)
    for call in calls:
        for key in call.output_keys:
            if key in producer_by_key:
                raise RuleError(
                    f"key {key!r} is made by {producer_by_key[key] or 'the dataset'} and by {call.name}",
                    "a key has one producer, so give one of them another name with output_key_remap",
                )
            producer_by_key[key] = call.name
    return producer_by_key


def _hint(key: str, producer_by_key: Mapping[str, str | None]) -> str:
    """The closest key to one that there is not, and all that there are."""
    keys_by_producer: dict[str | None, list[str]] = {None: []}
    for made in sorted(producer_by_key):
        keys_by_producer.setdefault(producer_by_key[made], []).append(made)
    given = ", ".join(keys_by_producer.pop(None)) or "no keys"
    known = "; ".join(
        [f"the dataset has {given}", *(f"{name} makes {', '.join(keys)}" for name, keys in keys_by_producer.items())]
    )
    close = difflib.get_close_matches(key, producer_by_key, n=1)
    return (
        f"did you mean {close[0]!r}, which {producer_by_key[close[0]] or 'the dataset'} makes? {known}"
        if close
        else known
    )


def _in_order(waits: Mapping[str, Set[str]]) -> list[str]:
    """By topological generations: a call is one level below the last of those that it waits for."""
    sorter = TopologicalSorter(waits)
    try:
        sorter.prepare()
    except CycleError as error:
        circle = " -> ".join(reversed(error.args[1]))
        raise ValueError(f"calls wait for each other in a circle: {circle} (each needs a key of the next)") from error
    names: list[str] = []
    while sorter.is_active():
        level = sorted(sorter.get_ready(), key=list(waits).index)
        sorter.done(*level)
        names += level
    return names
