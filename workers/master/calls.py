"""Calls on model workers: one slice of one model function call, from its samples to its outputs.

    samples ──deal: equal work, where they lie──► a shard for each data-parallel rank of the mesh
                                                        │
            what a shard lacks ──► gives, takes ────────┤
                                                        ▼
    pull weights ──► request to every rank of the mesh ──► replies ──► outputs noted in the buffer
                                                                 statistics of a call that evaluates

The caller holds all of the ranks that `ranks_of` names, and so nothing here meets a collective of another call.

Which data-parallel rank of a mesh works on which samples (Dealer), and what has to move for it (TransferPlanner):

    samples of a slice ──► their work, in all calls on this mesh ──┐
    where their keys lie ───────────────────────────────────────┴──► a shard for each data-parallel rank

Work is balanced first, and then as little moves as that allows. Calls on one mesh count the same work, and the first of
them that takes some samples decides for the others, which find them where they need them.

shards of a call: which ranks need which samples ──┐
                                                   ├──► what is missing ────► plan_redistribution ──┐
BufferedSample.ranks_by_key: holders of each key ──┘                                                │
                       ┌────────────────────────────────────────────────────────────────────────────┘
                       ├──► Give: to each rank that sends, its own transfers
                       └──► DataTransfer: to each that takes or passes on, its own
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from corral.experiments.worker_specs import MasterWorkerSpec
from corral.scheduling.dataflow import DataflowGraph
from corral.scheduling.keys import BUILT_IN_KEYS, DeclaredKeys, find_declared, merge_keys
from corral.scheduling.model_function_call import CallType, ModelFunctionCall, ModelName, OffloadHook
from corral.scheduling.packing import TYPICAL_SHAPE, TransformerShape, forward_flops
from corral.scheduling.parallel import Mesh
from corral.scheduling.policy_version import Lineage
from corral.scheduling.redistribution import Demand, Transfer, partition_near_owners, plan_redistribution
from corral.workers.data.held_out import added
from corral.workers.master.sample_source import BufferedSample, SequenceBuffer, buffered, note_held
from corral.workers.master.trainer_group import TrainerGroup
from corral.workers.requests.messages import (
    DataTransfer,
    Evaluate,
    Generate,
    Give,
    HeldOutReply,
    Inference,
    MetadataReply,
    Reallocate,
    ReplyPayload,
    Request,
    StatsReply,
    TrainReply,
    TrainStep,
)
from corral.workers.streams.closing import all_or_first_error

Shards = Sequence[Sequence[BufferedSample]]
"""The samples of each data-parallel rank of a mesh, by dp rank: the batch, sharded."""
_TRAINING_FORWARDS = 3  # a backward pass takes as much as two forward passes
_COPY = 1.0  # the eta of a pull


@dataclass
class MeshCalls:
    """Runs calls, each on the mesh of its model.

    Example:
        calls = MeshCalls(spec, graph, trainer group, buffer, lineage)
        outcome = await StepRunner(graph, calls, batch, version=12, publish=publish).run()
    """

    spec: MasterWorkerSpec
    graph: DataflowGraph
    trainers: TrainerGroup
    buffer: SequenceBuffer
    lineage: Lineage

    def __post_init__(self) -> None:
        spec, graph = self.spec, self.graph
        self._dealer = Dealer(spec, graph)
        self._planner = TransferPlanner(self.trainers.host_by_rank(), merge_keys(spec.declared_keys))
        meshes = {call.model_name: spec.mesh(call.model_name) for call in graph.calls}
        self._ranks_of_shards = {
            name: [mesh.ranks_of_dp(dp_rank) for dp_rank in range(mesh.dims.dp)] for name, mesh in meshes.items()
        }
        self._moved_bytes = 0

    def ranks_of(self, call: ModelFunctionCall) -> frozenset[int]:
        """The ranks that a call needs for itself: its mesh, and those that its model's weights come from or go to."""
        names = {call.model_name, *(name for pair in self.graph.reallocations(call) for name in pair)}
        return frozenset(rank for name in names for rank in self.spec.mesh(name).ranks)

    def end_step(self) -> int:
        """Let go of the step's samples. Returns the bytes of samples that went from rank to rank since a step's end."""
        self._dealer.forget()
        moved, self._moved_bytes = self._moved_bytes, 0
        return moved

    async def run_call(
        self, call: ModelFunctionCall, uids: Sequence[str], *, version: int, is_last_slice: bool
    ) -> tuple[TrainReply | None, Mapping[str, str]]:
        """Run a call on some samples of the batch.

        Args:
            version: policy version before this step.
            is_last_slice: whether the step has no more samples for this call, so that its model may leave. Without
                `uids` it is known only now, since the samples of what was to be the last slice were dropped.

        Returns:
            What it did to the weights, if it is a train step; and why the step goes on without some samples, by uid: no
            other call of the step may have taken them before.
        """
        mesh, shards, replies = await self._ask(call, uids, version=version, is_last_slice=is_last_slice)
        if call.call_type is not CallType.GENERATE:
            trained = next((reply for reply in replies.values() if isinstance(reply, TrainReply)), None)
            if trained is None:
                for head, shard in zip(mesh.dp_heads, shards, strict=True):
                    note_held(shard, call.output_keys, (head,))
            return trained, {}
        dropped: dict[str, str] = {}
        for rank, reply in replies.items():
            for sample in buffered(reply, owner=rank) if isinstance(reply, MetadataReply) else ():
                if sample.dropped_because:
                    dropped[sample.uid] = sample.dropped_because
                else:
                    self.buffer.fill(sample)
        return None, dropped

    async def reallocate(self, source: ModelName, target: ModelName, *, eta: float) -> None:
        """Let a model take over another one's weights: eta of them, and 1 - eta of its own."""
        ranks = {*self.spec.mesh(source).ranks, *self.spec.mesh(target).ranks}
        request = Reallocate(source=str(source), target=str(target), eta=eta)
        await self.trainers.start(dict.fromkeys(sorted(ranks), request))

    async def evaluate(
        self, call: ModelFunctionCall, uids: Sequence[str], *, version: int
    ) -> StatsReply | HeldOutReply:
        """Statistics of some held-out rows, or what came out of problems of the call's own, on all ranks."""
        _, _, replies = await self._ask(call, uids, version=version, is_last_slice=True)
        sums, failures = defaultdict[str, dict[str, float]](dict), dict[str, str]()
        for reply in replies.values():
            if isinstance(reply, StatsReply):
                return reply
            if isinstance(reply, HeldOutReply):
                for name, of_rank in reply.sums.items():
                    sums[name] = added(sums[name], of_rank)
                failures = reply.failures | failures
        return HeldOutReply(sums=sums, failures=failures)

    async def _ask(
        self, call: ModelFunctionCall, uids: Sequence[str], *, version: int, is_last_slice: bool
    ) -> tuple[Mesh, Shards, Mapping[int, ReplyPayload]]:
        """The call's mesh, the shard of each data-parallel rank, and every rank's reply to its own shard of the call.

        Ranks that hold inputs of others give them meanwhile.
        """
        for hook in call.pre_hooks:
            await self.reallocate(hook.source, call.model_name, eta=_COPY)
        mesh = self.spec.mesh(call.model_name)
        shards = self._dealer.deal(call, self.buffer.find(uids))
        shard_by_ranks = dict(zip(self._ranks_of_shards[call.model_name], shards, strict=True))
        plan = self._planner.plan(shard_by_ranks.items(), call.input_keys)
        self._moved_bytes += plan.size_bytes
        asked_anyway = plan.gives.keys() & set(mesh.ranks)
        self.trainers.attach({rank: plan.gives[rank] for rank in asked_anyway})
        gives = {rank: give for rank, give in plan.gives.items() if rank not in asked_anyway}
        offloads = is_last_slice and any(isinstance(hook, OffloadHook) for hook in call.post_hooks)
        requests = {
            rank: self._request(
                call, shard, version, reports=rank == mesh.ranks[0], take=plan.takes.get(rank), offloads=offloads
            )
            for ranks, shard in shard_by_ranks.items()
            for rank in ranks
        }
        replies: Mapping[int, ReplyPayload]
        # A rank that lacks what it is to give says so, and nobody waits in vain for it.
        _, replies = await all_or_first_error(self.trainers.tell(gives), self.trainers.start(requests))
        plan.note_arrival()
        return mesh, shards, replies

    def _request(
        self,
        call: ModelFunctionCall,
        samples: Sequence[BufferedSample],
        version: int,
        *,
        reports: bool,
        take: DataTransfer | None,
        offloads: bool,
    ) -> Request:
        uids = [sample.uid for sample in samples]
        if call.call_type is CallType.EVALUATE:
            return Evaluate(mfc=call.name, uids=uids, take=take, offloads=offloads, reports=reports)
        if call.call_type is CallType.TRAIN_STEP:
            return TrainStep(mfc=call.name, uids=uids, take=take, offloads=offloads, version=version, reports=reports)
        if call.call_type is CallType.GENERATE:
            return Generate(
                mfc=call.name,
                uids=uids,
                take=take,
                offloads=offloads,
                orders=[sample.order for sample in samples],
                tries=[sample.tries for sample in samples],
                version=str(self.lineage.version(version)),
            )
        return Inference(mfc=call.name, uids=uids, take=take, offloads=offloads)


class Dealer:
    """Deals the samples of one graph's calls."""

    def __init__(self, spec: MasterWorkerSpec, graph: DataflowGraph) -> None:
        self._spec = spec
        self._shapes: dict[tuple[int, ...], list[TransformerShape]] = {}
        self._dp_ranks: dict[tuple[int, ...], dict[int, int]] = {}
        self._last: dict[tuple[int, ...], tuple[Sequence[BufferedSample], Shards]] = {}
        """What was dealt last on a mesh, and how."""
        for call in graph.calls:
            shape = spec.shape_by_role.get(call.role, TYPICAL_SHAPE)
            count = _TRAINING_FORWARDS if call.call_type is CallType.TRAIN_STEP else 1
            mesh = spec.mesh(call.model_name)
            if call.call_type is CallType.EVALUATE and mesh.ranks in self._shapes:
                continue  # held-out rows are dealt as others are, and do not change how those are
            self._shapes.setdefault(mesh.ranks, []).extend([shape] * count)
            self._dp_ranks[mesh.ranks] = {rank: mesh.coords(rank).dp_rank for rank in mesh.ranks}

    def deal(self, call: ModelFunctionCall, samples: Sequence[BufferedSample]) -> Shards:
        """The samples of each data-parallel rank of the call's mesh."""
        mesh = self._spec.mesh(call.model_name)
        if mesh.dims.dp == 1:
            return [samples]
        dealt, shards = self._last.get(mesh.ranks, ([], [[] for _ in range(mesh.dims.dp)]))
        if dealt != samples:
            flops = forward_flops((sample.num_tokens for sample in samples), self._shapes[mesh.ranks])
            costs = [cost or 1.0 for cost in flops]  # nobody knows how long the answers to a prompt will be
            owners = _owners(samples, call.input_keys, self._dp_ranks[mesh.ranks])
            parts = partition_near_owners(costs, owners, num_parts=mesh.dims.dp)
            shards = [[samples[index] for index in part] for part in parts]
            if call.call_type is not CallType.GENERATE:  # its answers will have other lengths than its prompts
                self._last[mesh.ranks] = samples, shards
        return shards

    def forget(self) -> None:
        """What was dealt will not be asked for again: the next step's samples can have the memory of these."""
        self._last.clear()


def _owners(samples: Sequence[BufferedSample], keys: Sequence[str], dp_ranks: Mapping[int, int]) -> list[int | None]:
    """For each sample the data-parallel rank that holds most of its keys; None if none holds anything."""
    known: dict[int, int | None] = {}  # by id of the mapping that samples share
    owners: list[int | None] = []
    for sample in samples:
        ranks_by_key = sample.ranks_by_key
        if id(ranks_by_key) not in known:
            held = Counter(dp_ranks[rank] for key in keys for rank in ranks_by_key.get(key, ()) if rank in dp_ranks)
            known[id(ranks_by_key)] = max(held, key=lambda dp_rank: (held[dp_rank], -dp_rank), default=None)
        owners.append(known[id(ranks_by_key)])
    return owners


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferPlan:
    """One plan, cut into what each rank has to know."""

    transfers: Sequence[Transfer]
    moved: Mapping[str, BufferedSample]
    """The samples of these transfers, by uid."""
    gives: Mapping[int, Give]
    takes: Mapping[int, DataTransfer]
    """A rank that only passes something on has taken it before."""
    size_bytes: int
    """What reaches ranks that lacked it."""

    def note_arrival(self) -> None:
        """All is where it was wanted, and can be given away from there; a call beside this one must not plan on it
        before."""
        for transfer in self.transfers:
            note_held([self.moved[uid] for uid in transfer.uids], transfer.keys, transfer.destinations)


@dataclass(slots=True)
class TransferPlanner:
    """Plans and numbers the transfers of one trainer epoch."""

    host_by_rank: Mapping[int, str]
    specs: DeclaredKeys = field(default_factory=lambda: BUILT_IN_KEYS)
    """Every key that the plan knows."""
    _next_tag: int = 0
    _coefficients: dict[tuple[str, ...], tuple[int, int]] = field(default_factory=dict)

    def plan(
        self, wanted: Iterable[tuple[tuple[int, ...], Sequence[BufferedSample]]], keys: Sequence[str]
    ) -> TransferPlan:
        """How these keys of samples come where they are wanted; `note_arrival` when they have come.

        Args:
            wanted: ranks, each of which must hold all of these samples then.

        Raises:
            ValueError: if nobody holds something that is wanted.
        """
        demands: list[Demand] = []
        moved: dict[str, BufferedSample] = {}
        for ranks, samples in wanted:
            if lacking := {sample.uid: sample for sample in _not_there(samples, frozenset(ranks), keys)}:
                demands.append(Demand(ranks=ranks, uids=list(lacking), keys=keys))
                moved |= lacking
        transfers = plan_redistribution(
            {uid: sample.ranks_by_key for uid, sample in moved.items()},
            demands,
            size_bytes=lambda uid, keys: self._size_bytes(moved[uid], keys),
            host_by_rank=self.host_by_rank,
            first_tag=self._next_tag,
        )
        self._next_tag += len(transfers)
        given, taken = defaultdict[int, list[Transfer]](list), defaultdict[int, list[Transfer]](list)
        for transfer in transfers:
            for rank in transfer.destinations:
                taken[rank].append(transfer)
            (taken if transfer.is_passed_on else given)[transfer.source].append(transfer)
        return TransferPlan(
            transfers=transfers,
            moved=moved,
            gives={rank: Give(transfers=of_rank) for rank, of_rank in given.items()},
            takes={rank: _data_transfer(of_rank, moved) for rank, of_rank in taken.items()},
            size_bytes=sum(
                len(transfer.destinations) * self._size_bytes(moved[uid], transfer.keys)
                for transfer in transfers
                for uid in transfer.uids
            ),
        )

    def _size_bytes(self, sample: BufferedSample, keys: Sequence[str]) -> int:
        """Bytes of some keys of a sample: a number per token and one per answer, whatever the keys."""
        names = tuple(keys)
        if names not in self._coefficients:
            declared = [find_declared(name, self.specs) for name in names]
            bytes_of = [sum(key.itemsize * key.length(tokens) for key in declared) for tokens in (0, 1)]
            per_answer, per_token = bytes_of[0], bytes_of[1] - bytes_of[0]
            self._coefficients[names] = per_token, per_answer
        per_token, per_answer = self._coefficients[names]
        return per_token * sum(sample.num_tokens) + per_answer * len(sample.num_tokens)


def _not_there(
    samples: Sequence[BufferedSample], ranks: frozenset[int], keys: Sequence[str]
) -> Sequence[BufferedSample]:
    """Samples of which one of the ranks lacks a key. Mostly there are few, and the others are to cost little."""
    holders_by_id = {id(sample.ranks_by_key): sample.ranks_by_key for sample in samples}
    nobody = frozenset[int]()
    lacking = {
        number
        for number, holders in holders_by_id.items()
        if not all(ranks <= holders.get(key, nobody) for key in keys)
    }
    return [sample for sample in samples if id(sample.ranks_by_key) in lacking] if lacking else ()


def _data_transfer(transfers: list[Transfer], samples: Mapping[str, BufferedSample]) -> DataTransfer:
    uids = {uid for transfer in transfers for uid in transfer.uids}
    return DataTransfer(transfers=transfers, num_tokens={uid: list(samples[uid].num_tokens) for uid in sorted(uids)})
