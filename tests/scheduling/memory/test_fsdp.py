"""What a rank of the fsdp backend has to hold: pure numbers; engines are measured in test_memory_estimates.py."""

from dataclasses import replace
from typing import Any

import pytest

from corral.scheduling.memory.decoder_sizes import DecoderSizes, num_parameters
from corral.scheduling.memory.gpu import Parts
from corral.scheduling.memory.layers import Layers
from corral.scheduling.memory.model import Adapters, CallSizes, RoleModel
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
        RoleModel(sizes=SIZES, optimizer="adamw", **options)
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
    layers = Layers(sizes=SIZES, compute_bytes=2)
    kept = {"selective": layers.kept(0, "selective"), "full": layers.kept(0, "full")}
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
    layer = Layers(sizes=SIZES, dims=dims).works_in(0)
    assert activations["none"] - activations["full"] == TOKENS // dims.cp * 8 * (layer - 4 * 64)


@pytest.mark.parametrize("tokens", [TOKENS, 1])
def test_moments_in_host_memory_take_the_place_of_activations_while_a_step_is_made(tokens: int) -> None:
    call = replace(TRAIN, tokens=tokens)
    for layout, ranks in (("d1", 1), ("d4", 4)):
        there, hosted = (
            RoleModel(sizes=SIZES, optimizer="adamw", hosts_optimizer=is_hosted).on_gpu(
                "actor", ParallelDims.parse(layout), [call]
            )
            for is_hosted in (False, True)
        )
        moments = 8 * num_parameters(SIZES) // ranks
        assert there.held["optimizer"] - hosted.held["optimizer"] == moments
        assert there.held["parameters"] == hosted.held["parameters"]
        passes, step = (one.working["train"] for one in (there, hosted))
        assert "optimizer" not in passes
        is_largest = moments + passes["gradients"] > sum(passes.values())
        assert step == ({"gradients": passes["gradients"], "optimizer": moments} if is_largest else passes)


def test_what_both_products_of_an_adapter_gave_is_kept_where_layers_are_computed_again_selectively() -> None:
    layers = frozenset(f"model.layers.{layer}.self_attn.q_proj" for layer in range(8))
    one, four = (
        training("d1", recompute="selective", adapters=Adapters(rank=rank, layers=layers))["activations"]
        for rank in (1, 4)
    )
    assert four - one == TOKENS * 4 * 3 * 8  # of all layers, at the head, which has most of so small a model
    beside = Layers(sizes=SIZES, compute_bytes=2).of_adapter("q_proj", (64, 64), rank=4, recompute="selective")
    assert beside == 2 * (64 + 4)


def test_a_pass_without_gradients_needs_what_a_layer_does_or_what_the_head_does_and_never_both() -> None:
    call = CallSizes(name="infer", kind="infer", tokens=TOKENS)

    def working(vocab_size: int) -> Parts:
        sizes = replace(SIZES, vocab_size=vocab_size)
        return RoleModel(sizes=sizes).on_gpu("ref", ParallelDims(), [call]).working["infer"]

    narrow, wide = working(8), working(100_000)
    assert "head" not in narrow and narrow["activations"] >= TOKENS * Layers(sizes=SIZES).passes_through(0)
    assert wide["head"] > 2 * 4 * TOKENS * 100_000 and wide["activations"] < narrow["activations"]
