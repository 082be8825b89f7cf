"""A graph on its meshes -> what a train step does where: slices, routes of keys, reallocations, calls side by side.

    samples ─input_ids─┬─► ref_inf     2 slices of 4 samples, 2 for each data-parallel rank ranks 0-1
                       └─► values      1 slice of 8                                          ranks 2-3, beside ref_inf
    ref_inf ─ref_logprobs─► actor_train
    actor_train ┄┄ 0.1 ┄┄► ref/0                                                             after it

Everything here follows from the calls, their meshes and the batch size, and decides nothing: it is what people are
shown before a trial starts, and what its pictures are drawn from.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from graphlib import TopologicalSorter

from corral.scheduling.dataflow import DataflowGraph
from corral.scheduling.model_function_call import (
    ModelFunctionCall,
    ModelName,
    PublishWeightsHook,
    PushWeightsHook,
)
from corral.scheduling.parallel import Mesh
from corral.scheduling.worker_information import fold_numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Keys that are made in the same place and read by the same calls."""

    producer: str | None
    """The call that makes them; None for what comes with the samples."""
    source: tuple[int, ...]
    """The ranks that hold them when they have been made: the heads of the producer's mesh."""
    consumers: tuple[str, ...]
    """The calls that read them, in topological order."""
    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightRoute:
    """Weights that go from one model to another, or to the generation servers."""

    source: ModelName
    target: ModelName | None
    """None for the generation servers."""
    call: str
    """The call whose hook asks for it."""
    is_before: bool
    """Whether the weights go before the call, or after it."""
    eta: float
    """Fraction of the source in what the target holds afterwards; 1 is a copy."""


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """One train step.

    Example:
        plan = StepPlan(graph=build_dataflow(calls), meshes=meshes, sample_ranks=(0,), batch_size=8)
        plan.slices(plan.graph.call("ref_inf"))       # (4, 4)
        plan.beside("ref_inf")                      # ("values",)
    """

    graph: DataflowGraph
    meshes: Mapping[ModelName, Mesh]
    sample_ranks: tuple[int, ...]
    """Where samples come in."""
    batch_size: int
    """Samples of one step."""

    def mesh(self, call: ModelFunctionCall) -> Mesh:
        """The ranks that compute a call."""
        return self.meshes[call.model_name]

    def slices(self, call: ModelFunctionCall) -> tuple[int, ...]:
        """Samples of each slice of a call, in the order in which it takes them."""
        whole, rest = divmod(self.batch_size, call.n_seqs)
        return (call.n_seqs,) * whole + ((rest,) if rest else ())

    @cached_property
    def routes(self) -> tuple[Route, ...]:
        """Which keys go from where to whom, what comes with the samples first."""
        keys_by_way: dict[tuple[str | None, tuple[str, ...]], list[str]] = defaultdict(list)
        for key in dict.fromkeys(key for call in self.graph.step_calls for key in call.input_keys):
            consumers = tuple(call.name for call in self.graph.step_calls if key in call.input_keys)
            keys_by_way[self.graph.producer_by_key[key], consumers].append(key)
        order = {name: number for number, name in enumerate([None, *(call.name for call in self.graph.calls)])}
        return tuple(
            Route(producer=producer, source=self._heads(producer), consumers=consumers, keys=tuple(keys))
            for (producer, consumers), keys in sorted(keys_by_way.items(), key=lambda item: order[item[0][0]])
        )

    @cached_property
    def weight_routes(self) -> tuple[WeightRoute, ...]:
        """Whose weights go where, by the calls' hooks, in topological order."""
        routes = []
        for call in self.graph.calls:
            routes += [
                WeightRoute(source=hook.source, target=call.model_name, call=call.name, is_before=True, eta=1.0)
                for hook in call.pre_hooks
            ]
            for hook in call.post_hooks:
                if isinstance(hook, PushWeightsHook | PublishWeightsHook):
                    target, eta = (hook.target, hook.eta) if isinstance(hook, PushWeightsHook) else (None, 1.0)
                    routes.append(
                        WeightRoute(source=call.model_name, target=target, call=call.name, is_before=False, eta=eta)
                    )
        return tuple(routes)

    def beside(self, name: str) -> tuple[str, ...]:
        """The calls that can run at the same time as `name`: on other ranks, and neither has to be over first."""
        ranks = self._ranks(self.graph.call(name))
        return tuple(
            other.name
            for other in self.graph.step_calls
            if other.name != name
            and ranks.isdisjoint(self._ranks(other))
            and other.name not in self._over_before[name]
            and name not in self._over_before[other.name]
        )

    def _heads(self, producer: str | None) -> tuple[int, ...]:
        return self.sample_ranks if producer is None else self.mesh(self.graph.call(producer)).dp_heads

    def _ranks(self, call: ModelFunctionCall) -> frozenset[int]:
        """With those that its model's weights come from or go to."""
        names = {call.model_name, *(name for pair in self.graph.reallocations(call) for name in pair)}
        return frozenset(rank for name in names for rank in self.meshes[name].ranks)

    @cached_property
    def _over_before(self) -> dict[str, frozenset[str]]:
        """The calls that have taken the whole batch before a call begins, by call."""
        names = [call.name for call in self.graph.step_calls]
        waits = {name: {*self.graph.predecessors(name), *self.graph.must_follow(name)} for name in names}
        earlier: dict[str, frozenset[str]] = {}
        over: dict[str, frozenset[str]] = {}
        for name in TopologicalSorter(waits).static_order():
            earlier[name] = frozenset(waits[name]).union(*(earlier[other] for other in waits[name]))
            ended = {other for other in waits[name] if self._ends_before(other, name)}
            over[name] = frozenset(ended).union(
                *(earlier[other] for other in ended), *(over[other] for other in waits[name])
            )
        return over

    def _ends_before(self, producer: str, consumer: str) -> bool:
        """Whether a call has to be over before one that waits for it begins: its slices before the last do not do."""
        if producer in self.graph.must_follow(consumer):
            return True
        first_of_consumer = self.slices(self.graph.call(consumer))[0]
        return first_of_consumer > sum(self.slices(self.graph.call(producer))[:-1])


def describe_shards(mesh: Mesh) -> str:
    """Which shard of a model lies on which model worker, in the order of both.

    Example:
        "d0-1 on 0-1"                                     data-parallel shard 0 on model_worker/0, 1 on model_worker/1
        "p0 d0-1 t0-1 on 0-3, p1 d0-1 t0-1 on 4-7"        t counts first, then c, then d
    """
    stages: dict[int, list[int]] = defaultdict(list)
    for rank in mesh.ranks:
        stages[mesh.coords(rank).pp_rank].append(rank)
    dims = mesh.dims
    spans = [f"{letter}0-{size - 1}" if size > 1 else "" for letter, size in (("c", dims.cp), ("t", dims.tp))]
    letters = [f"d0-{dims.dp - 1}" if dims.dp > 1 else "d0", *spans]
    return ", ".join(
        " ".join([*([f"p{stage}"] if dims.pp > 1 else []), *filter(None, letters), "on", fold_numbers(ranks)])
        for stage, ranks in stages.items()
    )
