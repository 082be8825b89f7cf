"""What a stage of a model on Megatron has to hold: pure numbers; an engine is measured in test_megatron.py."""

import pytest

from corral.scheduling.memory.decoder_sizes import DecoderSizes, num_parameters
from corral.scheduling.memory.fsdp import CallSizes
from corral.scheduling.memory.megatron import MegatronModel
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


def held(text: str, *, compute_bytes: int = 4) -> dict[str, int]:
    model = MegatronModel(SIZES, is_trained=True, compute_bytes=compute_bytes)
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


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_the_first_stage_keeps_as_many_micro_batches_as_there_are_stages(stages: int) -> None:
    model = MegatronModel(SIZES, is_trained=True)
    call = CallSizes(name="train", kind="train", tokens=100)
    alone = model.on_gpu("actor", ParallelDims(), [call]).working["train"]["activations"]
    piped = model.on_gpu("actor", ParallelDims(pp=stages), [call]).working["train"]["activations"]
    assert piped == alone
