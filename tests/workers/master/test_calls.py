"""What the master asks of which ranks because of what a call says; the ranks only write it down."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from corral.experiments.config.control import TrainControl
from corral.experiments.worker_specs import MasterWorkerSpec
from corral.scheduling.dataflow import build_dataflow
from corral.scheduling.keys import BUILT_IN_KEYS
from corral.scheduling.model_function_call import CallType, ModelFunctionCall, ModelName
from corral.scheduling.parallel import Mesh, ParallelDims
from corral.scheduling.policy_version import Lineage
from corral.scheduling.redistribution import Transfer
from corral.workers.data.sequence_sample import SequenceSample
from corral.workers.master.calls import MeshCalls, TransferPlanner
from corral.workers.master.sample_source import BufferedSample, SequenceBuffer
from corral.workers.master.step_order import StepRunner
from corral.workers.requests.messages import (
    CallRequest,
    DataTransfer,
    Evaluate,
    Generate,
    Give,
    HeldOutReply,
    Inference,
    OkReply,
    PiggybackedRequest,
    Reallocate,
    ReplyPayload,
    Request,
    StatsReply,
    TrainReply,
    TrainStep,
)

UIDS = ["a", "b", "c", "d"]
MESHES = {
    "actor/0": Mesh(ranks=(0, 1), dims=ParallelDims(dp=2)),
    "actor/1": Mesh(ranks=(2,), dims=ParallelDims()),
    "ref/0": Mesh(ranks=(0, 1), dims=ParallelDims(dp=2)),
    "critic/0": Mesh(ranks=(2, 3), dims=ParallelDims(dp=2)),
}
FINE = TrainReply(stats={}, num_updates=1, num_nonfinite=0)
SKIPPED = TrainReply(stats={}, num_updates=0, num_nonfinite=1)
DAMAGED = TrainReply(stats={}, num_updates=1, num_nonfinite=0, is_damaged=True)


@dataclass
class Ranks:
    """Answers everything; `happened` is what was asked, and published, in this order."""

    reply: TrainReply = FINE
    found: Mapping[int, HeldOutReply] = field(default_factory=dict)
    """What ranks answer to a call that evaluates."""
    evaluated: StatsReply | HeldOutReply | None = None
    """What the master makes of these answers."""
    happened: list[Any] = field(default_factory=list)
    gives: dict[int, Give] = field(default_factory=dict)
    piggybacked: dict[int, PiggybackedRequest] = field(default_factory=dict)
    takes: dict[int, DataTransfer] = field(default_factory=dict)

    def host_by_rank(self) -> dict[int, str]:
        return dict.fromkeys(range(4), "here")

    def attach(self, requests: Mapping[int, PiggybackedRequest]) -> None:
        self.piggybacked.update(requests)

    async def tell(self, requests: Mapping[int, Request]) -> dict[int, ReplyPayload]:
        self.gives.update(cast(dict[int, Give], requests))
        return dict.fromkeys(requests, OkReply())

    async def start(self, requests: Mapping[int, Request]) -> dict[int, ReplyPayload]:
        self.happened.append(dict(requests))
        for rank, request in requests.items():
            if isinstance(request, CallRequest) and request.take is not None:
                self.takes[rank] = request.take
        return {
            rank: self.reply
            if isinstance(request, TrainStep) and request.reports
            else self.found.get(rank, OkReply())
            if isinstance(request, Evaluate)
            else OkReply()
            for rank, request in requests.items()
        }

    async def publish(self) -> None:
        self.happened.append("publish")


def call(**changes: Any) -> ModelFunctionCall:
    """An inference of the reference, but for the changes."""
    usual = {"name": "ref_inf", "model_name": "ref", "call_type": "inference", "implementation": "x", "n_seqs": 4}
    return ModelFunctionCall.model_validate(
        usual | {"input_keys": ("input_ids",), "output_keys": ("ref_logprobs",)} | changes
    )


def update(**changes: Any) -> ModelFunctionCall:
    """A train step of the actor, but for the changes."""
    kind = {"name": "actor_train", "model_name": "actor", "call_type": "train_step", "output_keys": ()}
    return call(**kind | changes)


def run(
    called: ModelFunctionCall,
    ranks: Ranks | None = None,
    *,
    is_last_slice: bool = True,
    owners: Sequence[int] = (0, 1, 0, 1),
) -> tuple[Ranks, SequenceBuffer]:
    """Let the master run one call on samples that lie on ranks 0 and 1, or on these."""
    ranks = ranks or Ranks()
    buffer = SequenceBuffer(is_consumed=lambda uid: False)
    for number, (uid, owner) in enumerate(zip(UIDS, owners, strict=True)):
        keys = frozenset({"input_ids", "prompt_mask"})
        sample = BufferedSample(uid=uid, order=number, owner=owner, num_tokens=[10], versions=frozenset(), keys=keys)
        buffer.put(sample)
    spec = specification(called)
    graph = build_dataflow(spec.calls, called.input_keys)
    calls = MeshCalls(spec, graph, cast(Any, ranks), buffer, Lineage([], epoch=1))
    if called.call_type is CallType.EVALUATE:
        ranks.evaluated = asyncio.run(calls.evaluate(called, UIDS, version=7))
    else:
        step = StepRunner(graph, calls, UIDS, version=7, publish=ranks.publish)
        asyncio.run(step.run() if called.call_type is CallType.TRAIN_STEP else _run_slice(calls, called, is_last_slice))
    return ranks, buffer


async def _run_slice(calls: MeshCalls, called: ModelFunctionCall, is_last_slice: bool) -> None:
    await calls.run_call(called, UIDS, version=7, is_last_slice=is_last_slice)


def specification(called: ModelFunctionCall) -> MasterWorkerSpec:
    first = called.model_copy(update={"name": "first", "model_name": ModelName(called.role), "output_keys": ("other",)})
    return MasterWorkerSpec(
        calls=[first, called] if called.model_name.replica_id else [called],
        train_batch_size=4,
        num_prompts=4,
        source="dataset",
        max_head_offpolicyness=0,
        control=TrainControl(),
        initial_weights={"actor": Path("/nowhere")},
        published_role="actor",
        meshes=MESHES,
        sample_ranks=[0, 1],
    )


def only_request(called: ModelFunctionCall) -> dict[int, Request]:
    (requests,) = run(called)[0].happened
    return cast(dict[int, Request], requests)


def test_the_name_says_which_call_a_rank_runs() -> None:
    for name in ("ref_inf", "again"):
        assert {cast(Inference, request).mfc for request in only_request(call(name=name)).values()} == {name}


def test_the_kind_says_what_a_rank_is_asked_and_one_rank_of_a_train_step_reports() -> None:
    assert {type(request) for request in only_request(call()).values()} == {Inference}
    steps = cast(dict[int, TrainStep], only_request(update()))
    assert {rank: (type(step), step.reports, step.version) for rank, step in steps.items()} == {
        0: (TrainStep, True, 7),
        1: (TrainStep, False, 7),
    }


def test_prompts_are_answered_by_a_call_that_generates_with_their_numbers_and_the_tag_of_the_weights() -> None:
    asked = cast(dict[int, Generate], only_request(call(name="actor_gen", call_type="generate", model_name="actor")))
    assert asked == {
        0: Generate(mfc="actor_gen", uids=["a", "c"], orders=[0, 2], tries=[0, 0], version="1.7"),
        1: Generate(mfc="actor_gen", uids=["b", "d"], orders=[1, 3], tries=[0, 0], version="1.7"),
    }


def test_held_out_rows_are_dealt_to_a_call_that_evaluates_and_one_rank_reports() -> None:
    assert only_request(call(name="look", call_type="evaluate", model_name="actor", output_keys=())) == {
        0: Evaluate(mfc="look", uids=["a", "c"], reports=True),
        1: Evaluate(mfc="look", uids=["b", "d"], reports=False),
    }


def test_what_comes_out_of_held_out_problems_is_added_up_over_the_ranks_with_the_first_failures() -> None:
    found = {
        0: HeldOutReply(sums={"easy": {"judged": 2.0}, "hard": {"judged": 1.0}}, failures={"easy": "of rank 0"}),
        1: HeldOutReply(sums={"easy": {"judged": 3.0}}, failures={"easy": "of rank 1", "hard": "of rank 1"}),
    }
    looked = call(name="look", call_type="evaluate", model_name="actor", output_keys=())
    ranks, _ = run(looked, Ranks(found=found))
    sums = {"easy": {"judged": 5.0}, "hard": {"judged": 1.0}}
    assert ranks.evaluated == HeldOutReply(sums=sums, failures={"easy": "of rank 0", "hard": "of rank 1"})


@pytest.mark.parametrize(
    ("model_name", "ranks"),
    [("ref", {0, 1}), ("critic", {2, 3}), (ModelName("actor", 0), {0, 1}), (ModelName("actor", 1), {2})],
)
def test_role_and_replica_say_which_ranks_are_asked(model_name: str | ModelName, ranks: set[int]) -> None:
    assert only_request(call(model_name=model_name)).keys() == ranks


def test_each_rank_gets_its_own_samples() -> None:
    shares = {rank: cast(Inference, request).uids for rank, request in only_request(call()).items()}
    assert shares == {0: ["a", "c"], 1: ["b", "d"]}  # where they lie


@pytest.mark.parametrize("keys", [("input_ids",), ("input_ids", "prompt_mask")])
def test_what_a_call_reads_goes_to_its_ranks_and_nothing_else(keys: tuple[str, ...]) -> None:
    ranks, _ = run(call(model_name="critic", input_keys=keys))
    assert {transfer.keys for take in ranks.takes.values() for transfer in take.transfers} == {keys}
    assert {transfer.keys for give in ranks.gives.values() for transfer in give.transfers} == {keys}
    assert (set(ranks.gives), set(ranks.takes)) == ({0, 1}, {2, 3})
    assert not run(call(input_keys=keys))[0].takes  # all is where it is needed


def test_a_rank_that_gives_and_is_asked_anyway_hears_of_both_in_one_message() -> None:
    asked_anyway, _ = run(call(model_name="critic"), owners=(3, 3, 0, 3))
    assert asked_anyway.piggybacked.keys() == {3} and asked_anyway.gives.keys() == {0}


@pytest.mark.parametrize("keys", [("ref_logprobs",), ("ref_logprobs", "values")])
def test_what_a_call_makes_is_known_to_lie_where_it_was_made(keys: tuple[str, ...]) -> None:
    _, buffer = run(call(output_keys=keys))
    places = {uid: sample.ranks_by_key for uid, sample in buffer.samples.items()}
    assert {uid: set(places[uid]) - {"input_ids", "prompt_mask"} for uid in places} == dict.fromkeys(UIDS, set(keys))
    assert {uid: set(places[uid]["ref_logprobs"]) for uid in UIDS} == {"a": {0}, "b": {1}, "c": {0}, "d": {1}}


def test_weights_are_pulled_before_the_call() -> None:
    ranks, _ = run(call(model_name="critic", pre_hooks=({"source": "actor"},)))
    first, second = ranks.happened
    assert first == dict.fromkeys(range(4), Reallocate(source="actor/0", target="critic/0", eta=1.0))
    assert {type(request) for request in second.values()} == {Inference}


PUSH = {"type": "push_weights", "target": "ref", "eta": 0.25}
PUBLISH = {"type": "publish_weights"}


def test_new_weights_are_published_and_pushed_after_the_train_step_in_the_order_of_its_hooks() -> None:
    for hooks in ((PUBLISH, PUSH), (PUSH, PUBLISH)):
        ranks, _ = run(update(post_hooks=hooks))
        pushed = dict.fromkeys((0, 1), Reallocate(source="actor/0", target="ref/0", eta=0.25))
        expected = ["publish" if hook is PUBLISH else pushed for hook in hooks]
        assert ranks.happened[1:] == expected
        assert {type(request) for request in ranks.happened[0].values()} == {TrainStep}
    (_, copied) = run(update(post_hooks=({**PUSH, "eta": 1.0},)))[0].happened
    assert {request.eta for request in copied.values()} == {1.0}


@pytest.mark.parametrize("reply", [SKIPPED, DAMAGED], ids=["skipped", "damaged"])
def test_weights_that_are_not_new_or_not_sound_go_nowhere(reply: TrainReply) -> None:
    ranks, _ = run(update(post_hooks=(PUBLISH, PUSH)), Ranks(reply))
    assert len(ranks.happened) == 1


def test_weights_that_are_not_final_go_nowhere() -> None:
    first, second, *then = run(update(post_hooks=(PUBLISH,), n_seqs=2))[0].happened
    assert {type(request) for request in (*first.values(), *second.values())} == {TrainStep}
    assert then == ["publish"]


def test_a_model_is_moved_away_after_its_last_go_on_every_rank() -> None:
    offloading = call(post_hooks=({"type": "offload"},))
    assert moved_away(run(offloading)[0]) == {0: True, 1: True}
    assert moved_away(run(offloading, is_last_slice=False)[0]) == moved_away(run(call())[0]) == {0: False, 1: False}


def moved_away(ranks: Ranks) -> dict[int, bool]:
    """Which ranks of the one request move their model away."""
    (requests,) = ranks.happened
    return {rank: request.offloads for rank, request in requests.items()}


# --- what each rank gives and takes ---------------------------------------------------------------------------------

KEYS = ("input_ids", "rewards")


def buffer_of(owner_by_uid: dict[str, int], keys: tuple[str, ...] = KEYS) -> SequenceBuffer:
    buffer = SequenceBuffer(is_consumed=lambda uid: False)
    for order, (uid, owner) in enumerate(owner_by_uid.items()):
        buffer.put(
            BufferedSample(
                uid=uid, order=order, owner=owner, num_tokens=[5, 3], versions=frozenset(), keys=frozenset(keys)
            )
        )
    return buffer


def test_each_rank_is_told_of_its_own_transfers_only() -> None:
    buffer = buffer_of({"0:a": 0, "0:b": 1, "0:c": 2})
    planner = TransferPlanner({0: "A", 1: "A", 2: "B", 3: "B"})
    transfers = planner.plan([((2, 3), buffer.find(["0:a", "0:c"]))], KEYS)
    to_2 = Transfer(tag=0, source=0, destinations=(2,), uids=("0:a",), keys=KEYS)
    to_3 = Transfer(tag=1, source=2, destinations=(3,), uids=("0:c",), keys=KEYS)
    onward = Transfer(tag=2, source=2, destinations=(3,), uids=("0:a",), keys=KEYS, is_passed_on=True)
    assert transfers.gives == {0: Give(transfers=[to_2]), 2: Give(transfers=[to_3])}
    assert transfers.takes == {
        2: DataTransfer(transfers=[to_2, onward], num_tokens={"0:a": [5, 3]}),
        3: DataTransfer(transfers=[to_3, onward], num_tokens={"0:a": [5, 3], "0:c": [5, 3]}),
    }


def test_nothing_moves_twice_and_no_two_transfers_have_one_number() -> None:
    buffer = buffer_of({"0:a": 0, "0:b": 0})
    planner = TransferPlanner({0: "A", 1: "A"})
    first = planner.plan([((1,), buffer.find(["0:a"]))], ("input_ids",))
    assert first.takes.keys() == {1}
    first.note_arrival()
    again = planner.plan([((1,), buffer.find(["0:a"]))], ("input_ids",))
    assert (again.gives, again.takes, again.size_bytes) == ({}, {}, 0)
    more = planner.plan([((1,), buffer.find(["0:a", "0:b"]))], KEYS)
    more.note_arrival()
    tags = [
        transfer.tag for transfers in (first, more) for give in transfers.gives.values() for transfer in give.transfers
    ]
    assert len(set(tags)) == len(tags) == 3
    assert buffer.release(["0:a", "0:b"]) == {0: ["0:a", "0:b"], 1: ["0:a", "0:b"]}


def test_nobody_gives_away_what_is_still_on_its_way_to_it() -> None:
    buffer = buffer_of({"0:a": 0})
    planner = TransferPlanner({0: "A", 1: "B", 2: "B"})
    under_way = planner.plan([((1,), buffer.find(["0:a"]))], KEYS)
    beside_it = planner.plan([((2,), buffer.find(["0:a"]))], KEYS)
    assert beside_it.gives.keys() == {0}
    under_way.note_arrival()
    assert planner.plan([((2,), buffer.find(["0:a"]))], KEYS).gives.keys() == {1}


@pytest.mark.parametrize("key", sorted(BUILT_IN_KEYS))
def test_sizes_are_those_of_the_arrays(key: str) -> None:
    ids: list[list[int]] = [[1] * 5, [1] * 3]
    sample = SequenceSample.from_group("0:a", {"input_ids": ids})
    layout, dtype = BUILT_IN_KEYS[key].layout, BUILT_IN_KEYS[key].dtype
    values = np.zeros(sum(layout.length(len(answer)) for answer in ids), dtype)
    buffer = buffer_of({"0:a": 0}, ("input_ids", key))
    transfers = TransferPlanner({0: "A", 1: "A"}).plan([((1,), buffer.find(["0:a"]))], (key,))
    assert transfers.size_bytes == sample.with_key(key, values).data[key].nbytes
