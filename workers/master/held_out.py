"""Held-out rows through the calls of an evaluation: what a trial knows of its present weights besides their loss.

    uids of held-out rows ──n_seqs at a time──► read by the ranks where samples come in
                                                   │
             calls that make what is read besides ─┤    ref_inf ──ref_logprobs──┐
                                                   ▼                            ▼
                                     the call that evaluates, on the ranks of its mesh ──► statistics of these rows
                                                                                               │ weighed by count
                     metrics.jsonl ◄── one number each over all rows ◄─────────────────────────┘

Held-out rows are samples like others, dealt, moved and freed as those are; nothing is learned from them. A call that
evaluates without reading keys has problems of its own, and is asked once.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from corral.scheduling.model_function_call import ModelFunctionCall
from corral.workers.data.prompts import held_out_uids
from corral.workers.master.calls import MeshCalls
from corral.workers.master.sample_source import SampleHolders
from corral.workers.requests.messages import StatsReply

COUNT = "count"
"""The statistic that says over how many (pairs, tokens) the others of a go are means."""
_PERPLEXITY = "perplexity"  # the exponential of a mean: its logarithm is averaged


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """Runs the calls that evaluate, between train steps, when no other call runs."""

    calls: MeshCalls
    holders: SampleHolders
    row_ids: Sequence[str]
    """Of all held-out rows."""

    async def evaluate(self, call: ModelFunctionCall, *, version: int) -> StatsReply:
        """Statistics over all held-out rows under the present weights."""
        if not call.input_keys:
            return await self.calls.evaluate(call, [], version=version)
        uids = held_out_uids(self.row_ids, version=version)
        goes = [(await self._go(call, part, version=version), len(part)) for part in _parts(uids, call.n_seqs)]
        return StatsReply(stats=merge_goes(goes))

    async def _go(self, call: ModelFunctionCall, uids: Sequence[str], *, version: int) -> dict[str, float]:
        for sample in await self.holders.load_rows(uids):
            self.calls.buffer.put(sample)
        for maker in self.calls.graph.makers_of(call.name):
            for part in _parts(uids, maker.n_seqs):
                await self.calls.run_call(maker, part, version=version, is_last_go=part[-1] == uids[-1])
        stats = (await self.calls.evaluate(call, uids, version=version)).stats
        self.holders.clear(self.calls.buffer.release(uids))
        return stats


def merge_goes(goes: Sequence[tuple[Mapping[str, float], int]]) -> dict[str, float]:
    """Means over several goes, each weighed by its count.

    Args:
        goes: statistics of each go, and its rows, which count where its statistics name no count.
    """
    weights = [stats.get(COUNT, float(num_rows)) for stats, num_rows in goes]
    total = sum(weights)
    merged: dict[str, float] = {}
    for name in dict.fromkeys(name for stats, _ in goes for name in stats if name != COUNT):
        values = [stats[name] for stats, _ in goes]
        if name.endswith(_PERPLEXITY):
            values = [math.log(value) for value in values]
        mean = math.fsum(w * value for w, value in zip(weights, values, strict=True)) / total if total else 0.0
        merged[name] = math.exp(mean) if name.endswith(_PERPLEXITY) else mean
    return merged | {COUNT: total}


def _parts(uids: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    return (uids[start : start + size] for start in range(0, len(uids), size))
