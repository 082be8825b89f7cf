"""Model function calls naming their inputs and outputs -> the graph of who waits for whom.

    dataset keys ──► ref_inf ──ref_logprobs──► actor_train     one edge per key that a call makes and another reads
             └─────► actor_inf ──proximal_logprobs──┘

Nobody writes edges down: they follow from the keys. A built graph is complete and never changes.
"""

import difflib
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from corral.scheduling.frozen import FrozenModel
from corral.scheduling.packing import MicroBatchSpec
from corral.scheduling.parallel import ParallelDims

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def _check_name(what: str, name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{what} {name!r} must consist of letters, digits and _, not starting with a digit")


class CallType(StrEnum):
    """What a call asks a model to do."""

    GENERATE = "generate"
    INFERENCE = "inference"
    TRAIN_STEP = "train_step"
    EVALUATE = "evaluate"


@dataclass(frozen=True, slots=True, order=True)
class ModelName:
    """One instance of a role's model; replicas of a role hold the same parameters in different layouts or places."""

    role: str
    replica_id: int = 0

    def __post_init__(self) -> None:
        _check_name("role", self.role)
        if self.replica_id < 0:
            raise ValueError(f"replica_id of role {self.role!r} must be 0 or more, got {self.replica_id}")

    def __str__(self) -> str:
        return f"{self.role}/{self.replica_id}"


@dataclass(frozen=True, slots=True, order=True)
class ModelShardID:
    """The part of a model that one rank holds."""

    model_name: ModelName
    dp_rank: int
    tp_rank: int
    pp_rank: int

    def __str__(self) -> str:
        return f"{self.model_name}@d{self.dp_rank}t{self.tp_rank}p{self.pp_rank}"


def shard_ids(model_name: ModelName, dims: ParallelDims) -> tuple[ModelShardID, ...]:
    """The shards of a model, by rank."""
    return tuple(ModelShardID(model_name, *dims.coords(rank)) for rank in range(dims.world_size))


class DataTransferHook(FrozenModel):
    """Before a call: bring its input keys to every rank that needs them."""

    type: Literal["data_transfer"] = "data_transfer"


class SaveHook(FrozenModel):
    """After a train step: write a checkpoint, when one is due."""

    type: Literal["save"] = "save"


class EvaluateHook(FrozenModel):
    """After a call: run the interface's evaluation, when one is due."""

    type: Literal["evaluate"] = "evaluate"


class PublishWeightsHook(FrozenModel):
    """After a train step: hand the new policy version to the generation servers."""

    type: Literal["publish_weights"] = "publish_weights"


class OffloadHook(FrozenModel):
    """After a call: move the model's parameters to host memory until it is called again."""

    type: Literal["offload"] = "offload"


PreHook = DataTransferHook
PostHook = Annotated[SaveHook | EvaluateHook | PublishWeightsHook | OffloadHook, Field(discriminator="type")]


class ModelFunctionCall(FrozenModel):
    """One thing that one model does in every step.

    Example:
        ModelFunctionCall(
            name="actor_inf", model_name="actor", call_type="inference", implementation="ppo_actor", n_seqs=64,
            input_keys=("input_ids",), output_keys=("proximal_logprobs",),
            output_key_remap={"logprobs": "proximal_logprobs"},
        )
    """

    name: str
    """Unique in the graph."""
    model_name: ModelName
    """Whose model runs it; a plain string is replica 0 of that role."""
    call_type: CallType
    implementation: str
    """Name of the interface that implements it ("ppo_actor")."""
    n_seqs: int = Field(ge=1)
    """Samples (prompts with all of their answers) per step."""
    input_keys: tuple[str, ...] = ()
    """Keys that it reads, as the graph calls them."""
    output_keys: tuple[str, ...] = ()
    """Keys that it makes, as the graph calls them."""
    input_key_remap: dict[str, str] = Field(default_factory=dict)
    """The interface's own name by the graph's name, for the input keys whose names differ."""
    output_key_remap: dict[str, str] = Field(default_factory=dict)
    """The graph's name by the interface's own name, for the output keys whose names differ."""
    micro_batches: MicroBatchSpec = MicroBatchSpec()
    pre_hooks: tuple[PreHook, ...] = ()
    post_hooks: tuple[PostHook, ...] = ()

    @field_validator("model_name", mode="before")
    @classmethod
    def _role_is_replica_zero(cls, value: Any) -> Any:
        return ModelName(value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _keys_agree(self) -> "ModelFunctionCall":
        _check_name("call name", self.name)
        for field, keys in (("input_keys", self.input_keys), ("output_keys", self.output_keys)):
            if repeated := sorted({key for key in keys if keys.count(key) > 1}):
                raise ValueError(f"call {self.name!r} names {', '.join(repeated)} more than once in {field}")
        _check_remap(self.name, "input_key_remap", self.input_key_remap, self.input_key_remap.keys(), self.input_keys)
        _check_remap(
            self.name, "output_key_remap", self.output_key_remap, self.output_key_remap.values(), self.output_keys
        )
        return self

    @model_validator(mode="after")
    def _type_fits_the_rest(self) -> "ModelFunctionCall":
        trains = self.call_type is CallType.TRAIN_STEP
        if self.call_type in (CallType.GENERATE, CallType.INFERENCE) and not self.output_keys:
            raise ValueError(f"call {self.name!r} is of type {self.call_type.value} and must have output_keys")
        if self.call_type in (CallType.TRAIN_STEP, CallType.EVALUATE) and self.output_keys:
            raise ValueError(
                f"call {self.name!r} is of type {self.call_type.value}, which returns statistics and no keys; "
                f"remove output_keys {list(self.output_keys)}"
            )
        for hook in self.post_hooks:
            if isinstance(hook, SaveHook | PublishWeightsHook) and not trains:
                raise ValueError(
                    f"call {self.name!r}: hook {hook.type} follows a train_step only, not {self.call_type.value}"
                )
        return self

    @property
    def role(self) -> str:
        return self.model_name.role


MFCDef = ModelFunctionCall  # the reference system's name


def _check_remap(
    call: str, field: str, remap: Mapping[str, str], graph_names: Iterable[str], declared: Sequence[str]
) -> None:
    if unknown := sorted(set(graph_names) - set(declared)):
        raise ValueError(
            f"call {call!r}: {field} names {', '.join(unknown)}, which are not among its keys {list(declared)}"
        )
    if len(set(remap.values())) < len(remap):
        raise ValueError(f"call {call!r}: {field} gives two keys the same name: {dict(remap)}")


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
    """In topological order; within a level, as they were given."""
    dataset_keys: frozenset[str]
    """Keys that no call makes: they come with the samples."""
    edges: tuple[Edge, ...]
    levels: tuple[tuple[str, ...], ...]
    """Names by topological generation: calls of one level do not wait for each other and may run at the same time."""

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

    def predecessors(self, name: str) -> tuple[str, ...]:
        """The calls that must be done before `name`, in topological order."""
        producers = {edge.producer for edge in self.edges if edge.consumer == self.call(name).name}
        return tuple(call.name for call in self.calls if call.name in producers)

    def successors(self, name: str) -> tuple[str, ...]:
        """The calls that wait for `name`, in topological order."""
        consumers = {edge.consumer for edge in self.edges if edge.producer == self.call(name).name}
        return tuple(call.name for call in self.calls if call.name in consumers)

    def is_src(self, name: str) -> bool:
        """Whether it waits for no other call."""
        return not self.predecessors(name)

    def is_dst(self, name: str) -> bool:
        """Whether no other call waits for it: a sample is done once all of these have read it."""
        return not self.successors(name)

    def render_text(self) -> str:
        """One line per call, level by level."""
        lines = [f"dataset -> {', '.join(sorted(self.dataset_keys)) or '(nothing)'}"]
        for number, level in enumerate(self.levels):
            for name in level:
                call = self.call(name)
                made = ", ".join(call.output_keys) or "(statistics)"
                read = ", ".join(call.input_keys) or "(nothing)"
                lines.append(f"{number}: {name} [{call.model_name} {call.call_type.value}] {read} -> {made}")
        return "\n".join(lines)

    def render_mermaid(self) -> str:
        """A Mermaid flow chart; nodes have numbers, since a name may be one of Mermaid's own words."""
        node = {call.name: f"c{number}" for number, call in enumerate(self.calls)}
        lines = ["flowchart LR", "  dataset([dataset])"]
        lines += [
            f'  {node[call.name]}["{call.name}<br/>{call.model_name} {call.call_type.value}"]' for call in self.calls
        ]
        keys_by_arrow: dict[tuple[str, str], list[str]] = defaultdict(list)
        for call in self.calls:
            for key in call.input_keys:
                producer = self.producer_of(key)
                keys_by_arrow[node[producer] if producer else "dataset", node[call.name]].append(key)
        lines += [f'  {start} -->|"{", ".join(keys)}"| {end}' for (start, end), keys in keys_by_arrow.items()]
        return "\n".join(lines)


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
    levels = _levels([call.name for call in calls], edges)
    call_by_name = {call.name: call for call in calls}
    return DataflowGraph(
        calls=tuple(call_by_name[name] for level in levels for name in level),
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
    waits_for = {name: {edge.producer for edge in edges if edge.consumer == name} for name in names}
    levels: list[tuple[str, ...]] = []
    done: set[str] = set()
    while len(done) < len(names):
        level = tuple(name for name in names if name not in done and waits_for[name] <= done)
        if not level:
            circle = _circle({name: sorted(waits_for[name] - done) for name in names if name not in done})
            raise ValueError(
                f"calls wait for each other in a circle: {' -> '.join(circle)} (each needs a key of the next)"
            )
        levels.append(level)
        done.update(level)
    return tuple(levels)


def _circle(waits_for: Mapping[str, Sequence[str]]) -> list[str]:
    """One circle, its first call repeated at the end; every call here waits for another one here."""
    path = [next(iter(waits_for))]
    while True:
        follower = waits_for[path[-1]][0]
        if follower in path:
            return [*path[path.index(follower) :], follower]
        path.append(follower)
