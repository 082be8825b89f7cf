"""What a rank of the fsdp backend has to hold: pure numbers; engines are measured in test_memory_estimates.py."""

from typing import Any

import pytest

from corral.scheduling.memory.activations import kept_bytes_per_token, layer_bytes_per_token
from corral.scheduling.memory.decoder_sizes import DecoderSizes, num_parameters
from corral.scheduling.memory.fsdp import CallSizes, RoleModel
from corral.scheduling.memory.gpu import Parts
from corral.scheduling.parallel import ParallelDims

SIZES = DecoderSizes(
    num_layers=8,
    hidden_size=64,
    intermediate_size=96,
    vocab_size=1024,
    num_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    has_head_norms=True,
)
TOKENS = 100
TRAIN = CallSizes(name="train", kind="train", tokens=TOKENS)


def training(text: str, **options: Any) -> Parts:
    return (
        RoleModel(SIZES, optimizer="adamw", **options)
        .on_gpu("actor", ParallelDims.parse(text), [TRAIN])
        .working["train"]
    )


def test_gradients_that_are_added_up_once_a_step_are_whole_until_then() -> None:
    assert training("d4")["gradients"] == num_parameters(SIZES)  # a quarter of 4 bytes
    assert training("d4", sums_gradients_once=True)["gradients"] == 4 * num_parameters(SIZES)
    cut = training("d2t2", sums_gradients_once=True)["gradients"]
    norms = 8 * (2 * 64 + 2 * 16) + 64
    assert cut == 4 * (norms + (num_parameters(SIZES) - norms) // 2)


def test_a_layer_that_is_computed_again_keeps_its_input_and_at_most_what_products_gave() -> None:
    hidden, inner, queries, keys, heads = 64, 96, 64, 32, 4
    products = queries + 2 * keys + hidden + 2 * inner + hidden
    kept = {
        how: kept_bytes_per_token(SIZES, 0, recompute=how, compute_bytes=2, tensor_parallel=1)
        for how in ("selective", "full")
    }
    assert kept == {"selective": 4 * hidden + 2 * (products + queries) + 4 * heads, "full": 4 * hidden}


def test_attention_to_a_shared_prompt_is_a_result_more_that_is_kept() -> None:
    alone, shared = (
        training("d1", recompute="selective", shares_prompts=shares_prompts)["activations"]
        for shares_prompts in (False, True)
    )
    queries, heads, layers = 64, 4, 8
    assert shared - alone == TOKENS * layers * (4 * queries + 4 * heads)


@pytest.mark.parametrize("layout", ["d1", "t2", "c2"])
def test_layers_that_are_computed_again_keep_less_and_work_as_before(layout: str) -> None:
    activations = {how: training(layout, recompute=how)["activations"] for how in ("none", "selective", "full")}
    assert activations["none"] > activations["selective"] > activations["full"]
    dims = ParallelDims.parse(layout)
    layer = layer_bytes_per_token(SIZES, 0, compute_bytes=4, context_parallel=dims.cp, tensor_parallel=dims.tp)
    assert activations["none"] - activations["full"] == TOKENS // dims.cp * 8 * (layer - 4 * 64)


def test_moments_in_host_memory_take_those_of_two_tensors_while_a_step_is_made() -> None:
    largest = 1024 * 64  # input and output, which this model does not tie
    for layout, ranks in (("d1", 1), ("d4", 4)):
        there, hosted = (
            RoleModel(SIZES, optimizer="adamw", hosts_optimizer=is_hosted).on_gpu(
                "actor", ParallelDims.parse(layout), [TRAIN]
            )
            for is_hosted in (False, True)
        )
        assert there.held["optimizer"] - hosted.held["optimizer"] == 8 * num_parameters(SIZES) // ranks
        assert there.held["parameters"] == hosted.held["parameters"]
        assert "optimizer" not in there.working["train"]
        assert hosted.working["train"]["optimizer"] == 2 * 8 * largest // ranks
