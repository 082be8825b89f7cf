"""Who works on which samples: equal work, and nothing moves that need not."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from corral.experiments.config.control import TrainControl
from corral.experiments.worker_specs import MasterWorkerSpec
from corral.scheduling.dataflow import build_dataflow
from corral.scheduling.model_function_call import ModelFunctionCall
from corral.scheduling.parallel import Mesh, ParallelDims
from corral.workers.master.calls import Dealer
from corral.workers.master.sample_source import BufferedSample, SequenceBuffer, note_held


def call(name: str, role: str, reads: tuple[str, ...], *makes: str) -> ModelFunctionCall:
    return ModelFunctionCall.model_validate(
        {"name": name, "model_name": role, "call_type": "inference", "implementation": "x", "n_seqs": 4}
        | {"input_keys": reads, "output_keys": makes}
    )


REF = call("ref_inf", "ref", ("ids",), "ref")
CRITIC = call("critic_inf", "critic", ("ids",), "values")
GRAPH = build_dataflow([REF, CRITIC], ["ids"])
SPEC = MasterWorkerSpec(
    calls=[REF, CRITIC],
    train_batch_size=4,
    num_prompts=4,
    source="trajectories",
    max_head_offpolicyness=0,
    control=TrainControl(),
    initial_weights={"critic": Path("/nowhere")},
    published_role="critic",
    meshes={
        "ref/0": Mesh(ranks=(0, 1), dims=ParallelDims(dp=2)),
        "critic/0": Mesh(ranks=(2, 3), dims=ParallelDims(dp=2)),
    },
    sample_ranks=[0, 1],
)


def buffer_of(owner_by_uid: dict[str, int], tokens: dict[str, int]) -> SequenceBuffer:
    buffer = SequenceBuffer(is_consumed=lambda uid: False)
    for order, (uid, owner) in enumerate(owner_by_uid.items()):
        sample = BufferedSample(
            uid=uid, order=order, owner=owner, num_tokens=[tokens[uid]], versions=frozenset(), keys=frozenset({"ids"})
        )
        buffer.put(sample)
    return buffer


def deal(dealer: Dealer, what: ModelFunctionCall, uids: Sequence[str], buffer: SequenceBuffer) -> list[list[str]]:
    return [[sample.uid for sample in share] for share in dealer.deal(what, buffer.find(uids))]


def test_samples_stay_where_they_are_while_the_work_is_equal() -> None:
    buffer = buffer_of({"a": 1, "b": 0, "c": 1, "d": 0}, dict.fromkeys("abcd", 100))
    assert deal(Dealer(SPEC, GRAPH), REF, list("abcd"), buffer) == [["b", "d"], ["a", "c"]]


def test_work_is_equal_where_lengths_are_not() -> None:
    buffer = buffer_of({"a": 0, "b": 0, "c": 0, "d": 0}, {"a": 300, "b": 100, "c": 100, "d": 100})
    shares = deal(Dealer(SPEC, GRAPH), REF, list("abcd"), buffer)
    assert sorted(map(sorted, shares)) == [["a"], ["b", "c", "d"]]


def test_another_mesh_is_dealt_by_itself_and_then_stays_as_it_is() -> None:
    buffer = buffer_of({"a": 0, "b": 0, "c": 1, "d": 1}, dict.fromkeys("abcd", 100))
    dealer = Dealer(SPEC, GRAPH)
    first = deal(dealer, CRITIC, list("abcd"), buffer)
    assert [len(share) for share in first] == [2, 2]
    for rank, share in zip((2, 3), first, strict=True):
        for uid in share:
            note_held(buffer.find([uid]), ["ids"], [rank])
    assert deal(dealer, CRITIC, list("dcba"), buffer) == [sorted(share, reverse=True) for share in first]


def test_samples_are_dealt_once_a_step() -> None:
    buffer = buffer_of({"a": 0, "b": 0, "c": 1, "d": 1}, dict.fromkeys("abcd", 100))
    dealer = Dealer(SPEC, GRAPH)
    assert deal(dealer, REF, list("abcd"), buffer) == [["a", "b"], ["c", "d"]]
    buffer.samples["a"].num_tokens = [300]
    assert deal(dealer, REF, list("abcd"), buffer) == [["a", "b"], ["c", "d"]]
    dealer.forget()
    assert sorted(deal(dealer, REF, list("abcd"), buffer), key=len) == [["a"], ["b", "c", "d"]]


def test_every_rank_has_a_share_of_no_samples_too() -> None:
    buffer = buffer_of({"a": 0}, {"a": 100})
    dealer = Dealer(SPEC, GRAPH)
    assert deal(dealer, REF, [], buffer) == [[], []]
    assert sorted(deal(dealer, REF, ["a"], buffer)) == [[], ["a"]]
    assert deal(dealer, REF, [], buffer) == [[], []]


def test_answers_are_dealt_anew_once_their_lengths_are_known() -> None:
    generate = ModelFunctionCall.model_validate(
        {"name": "gen", "model_name": "ref", "call_type": "generate", "implementation": "x", "n_seqs": 4}
        | {"output_keys": ("ids",)}
    )
    buffer = buffer_of({"a": 0, "b": 0, "c": 0, "d": 0}, {"a": 300, "b": 100, "c": 100, "d": 100})
    for uid in "abcd":
        buffer.samples[uid] = msgspec.structs.replace(buffer.samples[uid], num_tokens=[])
    dealer = Dealer(SPEC, build_dataflow([generate, REF], []))
    assert [len(share) for share in deal(dealer, generate, list("abcd"), buffer)] == [2, 2]
    for uid, length in {"a": 300, "b": 100, "c": 100, "d": 100}.items():
        buffer.samples[uid] = msgspec.structs.replace(buffer.samples[uid], num_tokens=[length])
    assert sorted(map(len, deal(dealer, REF, list("abcd"), buffer))) == [1, 3]
