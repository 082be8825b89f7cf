"""Attention over packed rows on the device, in the way that is chosen there, beside a slow loop in float64."""

from itertools import accumulate
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from corral.workers.backends.packed_attention import (
    attend_by_runs,
    packed_attention,
    setting_of,
    share_heads,
    takes_one_call,
)
from corral.workers.backends.parallel_context import ParallelContext
from tests.workers.backends.attention_reference import Row, attend, make_row, slow_attention, with_gradients
from tests.workers.backends.trainer_helpers import play

pytestmark = pytest.mark.gpu
LENGTHS = (3, 3, 17, 1, 40)
CLOSE = 0.01  # of all numbers together: bfloat16 has eight bits


def assert_close(found: Tensor, wanted: Tensor) -> None:
    assert found.shape == wanted.shape
    assert (found - wanted).norm() <= CLOSE * wanted.norm()


@pytest.mark.parametrize("window", [None, 2, 64])
@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_outputs_and_gradients_are_those_of_a_slow_loop_and_of_runs(
    head_dim: int, key_heads: int, window: int | None, device: str
) -> None:
    row = make_row(LENGTHS, key_heads=key_heads, head_dim=head_dim, device=device)
    assert takes_one_call(setting_of(row.query, dropout=0.0, sliding_window=window)) == (device == "cuda")
    own = with_gradients(row, attend(row, window=window))
    by_runs = attend_by_runs(
        row.query, row.key, row.value, segment_lengths=LENGTHS, scaling=None, dropout=0.0, sliding_window=window
    )
    slow = slow_attention(row.query, row.key, row.value, lengths=LENGTHS, window=window)
    for found, of_runs, wanted in zip(own, with_gradients(row, by_runs), with_gradients(row, slow), strict=True):
        assert_close(found, wanted)
        assert_close(found, of_runs)


def test_a_call_waits_for_no_device(device: str) -> None:
    row = make_row(LENGTHS, head_dim=64, device=device)
    bounds = row.cu_seqlens
    if device != "cuda":
        pytest.skip("a CPU is never waited for")
    torch.cuda.set_sync_debug_mode("error")
    try:
        output, _ = packed_attention(
            nn.Module(), row.query, row.key, row.value, None, segment_lengths=LENGTHS, cu_seqlens=bounds
        )
        torch.autograd.grad(output, (row.query, row.key, row.value), row.gradient)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def share(world: ParallelContext, directory: Path) -> None:
    """What one of two ranks does: attend for its half of a row, and write what it got and its gradients."""
    whole = make_row(LENGTHS, head_dim=64)
    width = sum(LENGTHS) // 2
    own = slice(world.rank * width, (world.rank + 1) * width)
    of_tokens = (
        tensor.detach()[:, :, own].to(world.device).requires_grad_() for tensor in (whole.query, whole.key, whole.value)
    )
    query, key, value = of_tokens
    gradient = whole.gradient[:, own].to(world.device)
    row = Row(lengths=LENGTHS, query=query, key=key, value=value, gradient=gradient)
    layer = nn.Module()
    assert world.group is not None
    share_heads(layer, world.group)
    torch.save(with_gradients(row, attend(row, layer=layer)), directory / f"rank-{world.rank}.pt")
    dist.barrier(group=world.group)  # rank 0 has the store


def test_ranks_that_share_a_row_attend_as_one_does(two_devices: int, device: str, tmp_path: Path) -> None:
    assert list(accumulate(LENGTHS))[-1] % 2 == 0
    play(share, tmp_path, world_size=two_devices, directory=tmp_path, device=device)
    parts = [torch.load(tmp_path / f"rank-{rank}.pt", weights_only=True) for rank in range(two_devices)]
    whole = make_row(LENGTHS, head_dim=64)
    expected = with_gradients(whole, slow_attention(whole.query, whole.key, whole.value, lengths=LENGTHS))
    for number, wanted in enumerate(expected):
        tokens = 1 if number == 0 else 2  # the output has tokens before heads
        assert_close(torch.cat([part[number] for part in parts], dim=tokens), wanted)
