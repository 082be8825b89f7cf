"""Calls on model workers: one go of one model function call, from its samples to what it made of them.

    samples ──deal: equal work, where they lie──► a share for each data-parallel rank of the mesh
                                                        │
            what a share lacks ──► gives, takes ────────┤
                                                        ▼
    pull weights ──► request to every rank of the mesh ──► replies ──► outputs noted in the buffer
                                                                 statistics of a call that evaluates

Whoever calls holds all of the ranks that `ranks_of` names, and so nothing here meets a collective of another call.
"""

import asyncio
from collections.abc import Mapping, Sequence

from corral.experiments.worker_specs import MasterWorkerSpec
from corral.scheduling.dataflow import DataflowGraph
from corral.scheduling.mesh import Mesh
from corral.scheduling.model_function_call import CallType, ModelFunctionCall, ModelName, OffloadHook
from corral.scheduling.policy_version import Lineage
from corral.workers.data.sequence_sample import key_specs
from corral.workers.master.dealing import Dealer, Shares, TransferPlanner
from corral.workers.master.outcome import CallResult
from corral.workers.master.sequence_buffer import BufferedSample, SequenceBuffer, buffered, note_held
from corral.workers.master.trainer_gang import TrainerGang
from corral.workers.requests.messages import (
    DataTransfer,
    Evaluate,
    Generate,
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

_COPY = 1.0  # the eta of a pull


class MeshCalls:
    """Runs calls, each on the mesh of its model.

    Example:
        calls = MeshCalls(spec, graph, gang, buffer, lineage)
        outcome = await StepRunner(graph, calls, batch, version=12, publish=publish).run()
    """

    def __init__(
        self, spec: MasterWorkerSpec, graph: DataflowGraph, gang: TrainerGang, buffer: SequenceBuffer, lineage: Lineage
    ) -> None:
        self._spec = spec
        self._graph = graph
        self._gang = gang
        self._buffer = buffer
        self._lineage = lineage
        self._dealer = Dealer(spec, graph)
        self._transfers = TransferPlanner(gang.host_by_rank(), key_specs(spec.declared_keys))
        self._ranks_of_shares = {call.model_name: _ranks_of_shares(spec.mesh(call.model_name)) for call in graph.calls}
        self._moved_bytes = 0

    def ranks_of(self, call: ModelFunctionCall) -> frozenset[int]:
        """The ranks that a call needs for itself: its mesh, and those that its model's weights come from or go to."""
        names = {call.model_name, *(name for pair in self._graph.reallocations(call) for name in pair)}
        return frozenset(rank for name in names for rank in self._spec.mesh(name).ranks)

    def end_step(self) -> int:
        """Let go of the step's samples. Returns the bytes of samples that went from rank to rank since a step's end."""
        self._dealer.forget()
        moved, self._moved_bytes = self._moved_bytes, 0
        return moved

    async def run_call(
        self, call: ModelFunctionCall, uids: Sequence[str], *, version: int, is_last_go: bool
    ) -> CallResult:
        """Run a call on some samples of the batch.

        Args:
            version: policy version before this step.
            is_last_go: whether the step has no more samples for this call, so that its model may leave. Without `uids`
                it is known only now, since the samples of what was to be the last go were dropped.
        """
        mesh, shares, replies = await self._run(call, uids, version=version, is_last_go=is_last_go)
        if call.call_type is CallType.GENERATE:
            return self._take_in_answers(replies)
        reply = next((reply for reply in replies.values() if isinstance(reply, TrainReply)), None)
        if reply is None:
            for head, share in zip(mesh.dp_heads, shares, strict=True):
                note_held(share, call.output_keys, (head,))
        return CallResult(trained=reply)

    def _take_in_answers(self, replies: Mapping[int, ReplyPayload]) -> CallResult:
        """Note what ranks have made of prompts; what they had to give up, the step goes on without."""
        dropped: dict[str, str] = {}
        for rank, reply in replies.items():
            for sample in buffered(reply, owner=rank) if isinstance(reply, MetadataReply) else ():
                if sample.dropped_because:
                    dropped[sample.uid] = sample.dropped_because
                else:
                    self._buffer.fill(sample)
        return CallResult(dropped=dropped)

    async def reallocate(self, source: ModelName, target: ModelName, *, eta: float) -> None:
        """Let a model take over another one's weights: eta of them, and 1 - eta of its own."""
        ranks = {*self._spec.mesh(source).ranks, *self._spec.mesh(target).ranks}
        request = Reallocate(source=str(source), target=str(target), eta=eta)
        await self._gang.start(dict.fromkeys(sorted(ranks), request))

    async def evaluate(self, call: ModelFunctionCall, uids: Sequence[str], *, version: int) -> dict[str, float]:
        """Statistics of some held-out rows, or of problems of the call's own."""
        _, _, replies = await self._run(call, uids, version=version, is_last_go=True)
        return next((dict(reply.stats) for reply in replies.values() if isinstance(reply, StatsReply)), {})

    async def _run(
        self, call: ModelFunctionCall, uids: Sequence[str], *, version: int, is_last_go: bool
    ) -> tuple[Mesh, Shares, Mapping[int, ReplyPayload]]:
        """The call's mesh, the share of each data-parallel rank, and the replies by rank."""
        for hook in call.pre_hooks:
            await self.reallocate(hook.source, call.model_name, eta=_COPY)
        mesh = self._spec.mesh(call.model_name)
        shares = self._dealer.deal(call, self._buffer.find(uids))
        return mesh, shares, await self._ask(call, mesh, shares, version=version, is_last_go=is_last_go)

    async def _ask(
        self, call: ModelFunctionCall, mesh: Mesh, shares: Shares, *, version: int, is_last_go: bool
    ) -> Mapping[int, ReplyPayload]:
        """Every rank's reply to its own share of the call; those that hold inputs of others give them meanwhile."""
        share_by_ranks = dict(zip(self._ranks_of_shares[call.model_name], shares, strict=True))
        transfers = self._transfers.plan(share_by_ranks.items(), call.input_keys)
        self._moved_bytes += transfers.size_bytes
        asked_anyway = transfers.gives.keys() & set(mesh.ranks)
        self._gang.attach({rank: transfers.gives[rank] for rank in asked_anyway})
        given = asyncio.ensure_future(
            self._gang.tell({rank: give for rank, give in transfers.gives.items() if rank not in asked_anyway})
        )
        offloads = is_last_go and any(isinstance(hook, OffloadHook) for hook in call.post_hooks)
        asked = asyncio.ensure_future(
            self._gang.start(
                {
                    rank: self._request(
                        call,
                        share,
                        version,
                        reports=rank == mesh.ranks[0],
                        take=transfers.takes.get(rank),
                        offloads=offloads,
                    )
                    for ranks, share in share_by_ranks.items()
                    for rank in ranks
                }
            )
        )
        # A rank that lacks what it is to give says so, and nobody waits in vain for it.
        await all_or_first_error(asked, given)
        transfers.note_arrival()
        return asked.result()

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
            orders, tag = [sample.order for sample in samples], str(self._lineage.version(version))
            return Generate(mfc=call.name, uids=uids, take=take, offloads=offloads, orders=orders, version=tag)
        return Inference(mfc=call.name, uids=uids, take=take, offloads=offloads)


def _ranks_of_shares(mesh: Mesh) -> list[tuple[int, ...]]:
    """The ranks that work on each share of a call, by dp rank."""
    return [mesh.ranks_of_dp(dp_rank) for dp_rank in range(mesh.dims.dp)]
