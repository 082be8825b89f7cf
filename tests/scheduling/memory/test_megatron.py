"""What a stage of a model on Megatron has to hold: pure numbers; an engine is measured in test_megatron.py."""

from dataclasses import replace

import pytest

from corral.scheduling.memory.decoder_sizes import DecoderSizes, num_parameters
from corral.scheduling.memory.model import CallSizes, RoleModel
from corral.scheduling.parallel import ParallelDims

SIZES = DecoderSizes(
    num_layers=8,
    hidden_size=64,
    intermediate_size=128,
    vocab_size=1024,
    num_heads=8,
    num_key_value_heads=4,
    head_dim=8,
)


def held(text: str, *, compute_bytes: int = 4, sizes: DecoderSizes = SIZES) -> dict[str, int]:
    model = RoleModel(sizes=sizes, backend="megatron", optimizer="adamw", compute_bytes=compute_bytes)
    return dict(model.on_gpu("actor", ParallelDims.parse(text), []).held)


def test_one_rank_holds_all_of_a_model() -> None:
    whole = num_parameters(SIZES)
    assert held("d1") == {"parameters": 4 * whole, "gradients": 4 * whole, "optimizer": 8 * whole}
    assert held("d1", compute_bytes=2) == {"parameters": 2 * whole, "gradients": 4 * whole, "optimizer": 12 * whole}


def test_data_parallel_ranks_share_the_optimizer_alone() -> None:
    one, four = held("d1"), held("d4")
    assert (four["parameters"], four["gradients"]) == (one["parameters"], one["gradients"])
    assert four["optimizer"] == one["optimizer"] / 4


def test_tensor_parallel_ranks_share_matrices_and_stages_share_layers() -> None:
    one = held("d1")["parameters"]
    ends = 4 * 64 * 1024  # the embedding, and the output
    norms = 4 * (8 * 2 * 64 + 64)
    assert held("t4")["parameters"] == (one - norms) / 4 + norms
    last_norm = 4 * 64
    assert held("p4")["parameters"] == (one - 2 * ends - last_norm) / 4 + ends + last_norm


def test_a_rank_that_generates_holds_all_weights_once_more_and_the_keys_and_values_of_its_answers() -> None:
    call = CallSizes(name="actor_gen", kind="generate", tokens=1000, sequences=10)
    model = RoleModel(sizes=SIZES, backend="megatron", optimizer="adamw", compute_bytes=2)
    (working,) = model.on_gpu("actor", ParallelDims.parse("d2t2"), [call]).working.values()
    assert working == {
        "buffers": 2 * num_parameters(SIZES),
        "KV cache": 1000 * 8 * 2 * (4 * 8) * 2,  # tokens, layers, (keys and values) of 4 heads of 8 numbers
        "activations": 1000 * (2 * (64 + 2 * (64 + 2 * 32) + 64 + 32 + 4 * 8) + 16),  # of prompts: test_server.py
        "head": 10 * 1024 * 4,
    }


MIXTURE = replace(SIZES, num_experts=8, experts_per_token=2, expert_size=32, sparse_layers=frozenset(range(8)))
EXPERTS = 8 * 8 * 3 * 32 * 64  # of all layers: gate, up and down projection of each


def test_a_moving_average_is_float32_beside_weights_of_a_lower_type() -> None:
    def parameters(*, follows: bool, compute_bytes: int) -> int:
        model = RoleModel(sizes=SIZES, backend="megatron", follows=follows, compute_bytes=compute_bytes)
        return model.on_gpu("ref", ParallelDims.parse("t2"), []).held["parameters"]

    low = parameters(follows=False, compute_bytes=2)
    assert parameters(follows=True, compute_bytes=2) == 3 * low
    assert parameters(follows=True, compute_bytes=4) == parameters(follows=False, compute_bytes=4) == 2 * low


def test_experts_are_shared_by_expert_and_tensor_parallel_ranks_and_their_optimizer_by_the_others() -> None:
    one, spread, cut = (held(text, sizes=MIXTURE) for text in ("d4", "d4e4", "d2t2e2"))
    shared = one["parameters"] // 4 - EXPERTS
    assert spread["parameters"] == 4 * (shared + EXPERTS // 4) == spread["gradients"]
    assert one["optimizer"] == 8 * (shared + EXPERTS) // 4
    assert spread["optimizer"] == 8 * (shared // 4 + EXPERTS // 4)  # nobody else has these experts
    whole = 8 * 64 * (8 + 2) + 64  # routers and norms
    assert cut["parameters"] == 4 * ((shared - whole) // 2 + whole + EXPERTS // 4)


def test_context_parallel_ranks_share_the_optimizer_and_the_tokens() -> None:
    assert held("d2c2") == held("d4")
    model = RoleModel(sizes=SIZES, backend="megatron", optimizer="adamw")
    call = CallSizes(name="train", kind="train", tokens=100)
    alone, two = (model.on_gpu("actor", ParallelDims(cp=cp), [call]).working["train"] for cp in (1, 2))
    assert 0.4 < two["activations"] / alone["activations"] < 0.6


@pytest.mark.parametrize("is_sparse", [False, True])
def test_what_is_computed_again_is_kept_of_one_layer_at_a_time(is_sparse: bool) -> None:
    sizes = replace(MIXTURE, num_layers=100, sparse_layers=frozenset(range(100) if is_sparse else ()))
    call = CallSizes(name="train", kind="train", tokens=100)
    kept = {}
    for how in ("none", "selective", "full"):
        model = RoleModel(sizes=sizes, backend="megatron", optimizer="adamw", recompute=how)
        kept[how] = model.on_gpu("actor", ParallelDims(), [call]).working["train"]["activations"]
    assert kept["none"] > kept["selective"] > kept["full"] > 100 * 100 * 4 * sizes.hidden_size


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_the_first_stage_keeps_as_many_micro_batches_as_there_are_stages(stages: int) -> None:
    sizes = replace(
        SIZES, vocab_size=8, intermediate_size=1024
    )  # so that a layer needs more than the head, which one stage has
    model = RoleModel(sizes=sizes, backend="megatron", optimizer="adamw")
    call = CallSizes(name="train", kind="train", tokens=100)
    alone = model.on_gpu("actor", ParallelDims(), [call]).working["train"]["activations"]
    piped = model.on_gpu("actor", ParallelDims(pp=stages), [call]).working["train"]["activations"]
    assert piped == alone
