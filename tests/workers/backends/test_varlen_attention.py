"""Attention of a whole row in one call: the rule, what torch's kernel is told, and what becomes of it in a layer.

The kernel runs on GPUs only. Here its place is taken below torch's own call, which is told and differentiated as on a
GPU, by a slow one that refuses what the real one does not take; tests/gpu/test_attention.py has the real one.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from corral.experiments.config.model import Recompute
from corral.workers.backends import packed_attention
from corral.workers.backends.packed_attention import AttentionSetting, attend_by_runs, takes_one_call, why_not_one_call
from corral.workers.backends.parallel_context import ParallelContext
from tests.workers.backends.attention_reference import (
    attend,
    make_row,
    slow_attention,
    slow_gradients,
    with_gradients,
)
from tests.workers.backends.layout_scene import Variant, make_engine, save_tiny, train

H100, A100, L4, T4 = (9, 0), (8, 0), (8, 9), (7, 5)
GOOD = AttentionSetting(capability=H100, dtype=torch.bfloat16, head_dim=128, dropout=0.0, sliding_window=None)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"dtype": torch.float16},
        {"capability": L4, "head_dim": 192},
        {"capability": A100, "head_dim": 256},
        {"sliding_window": 1},
    ],
)
def test_a_gpu_of_our_days_takes_a_row_in_one_call(change: dict[str, Any]) -> None:
    assert why_not_one_call(GOOD._replace(**change)) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"capability": None}, "no Flash Attention for the device"),
        ({"capability": T4}, "needs compute capability 8.0, and this GPU has 7.5"),
        ({"dtype": torch.float32}, "products are float32"),
        ({"head_dim": 100}, "multiple of 8 up to 256 here, and these have 100"),
        ({"head_dim": 264}, "these have 264"),
        ({"capability": L4, "head_dim": 256}, "up to 192 here"),
        ({"dropout": 0.1}, "attention here has 0.1"),
        ({"sliding_window": 0}, "window of 0 tokens"),
    ],
)
def test_what_the_kernel_cannot_take_goes_by_runs_for_a_reason(change: dict[str, Any], reason: str) -> None:
    assert reason in str(why_not_one_call(GOOD._replace(**change)))


def test_the_choice_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    takes_one_call.cache_clear()
    with caplog.at_level(logging.INFO, logger=packed_attention.__name__):
        for _ in range(2):
            assert takes_one_call(GOOD)
            assert not takes_one_call(GOOD._replace(dtype=torch.float32))
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "attention takes all sequences of a row in one call",
        "attention takes sequences of equal length together, not all of a row in one call",
    ]


@dataclass(frozen=True, slots=True)
class Call:
    """What Flash Attention is told besides tensors; AssertionError where it would refuse, or do something else."""

    lengths: tuple[int, ...]
    window: int | None

    @classmethod
    def of(
        cls,
        rows: tuple[Tensor, Tensor, Tensor],
        bounds: Tensor,
        bounds_k: Tensor,
        longest: int,
        longest_k: int,
        dropout: float,
        is_causal: bool,
        *,
        scale: float | None = None,
        window_size_left: int,
        window_size_right: int,
        **_: Any,
    ) -> "Call":
        lengths = tuple(bounds.diff().tolist())
        assert bounds.equal(bounds_k) and bounds.dtype == torch.int32 and bounds.is_contiguous()
        assert longest == longest_k == max(lengths) and sum(lengths) == len(rows[0])
        assert dropout == 0.0 and scale in (None, rows[0].shape[-1] ** -0.5)
        assert window_size_right == 0 and is_causal == (window_size_left == -1)
        for tensor in rows:
            assert tensor.dtype == rows[0].dtype in (torch.bfloat16, torch.float16)
            assert tensor.stride(-1) == 1 and tensor.shape[-1] % 8 == 0
        return cls(lengths, None if is_causal else window_size_left + 1)


@dataclass
class Kernel:
    """Stands for Flash Attention on the CPU, and remembers how often it was run, and where bounds were."""

    forward_bounds: list[int] = field(default_factory=list)
    """Addresses of the `cu_seqlens` of each forward call."""
    num_backward: int = 0

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bounds: Tensor,
        bounds_k: Tensor,
        longest: int,
        longest_k: int,
        dropout: float,
        is_causal: bool,
        return_debug_mask: bool,
        **named: Any,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        self.forward_bounds.append(bounds.data_ptr())
        rows = (query, key, value)
        call = Call.of(rows, bounds, bounds_k, longest, longest_k, dropout, is_causal, **named)
        output = slow_attention(*map(_heads_first, rows), lengths=call.lengths, window=call.window)[0]
        log_sums = query.new_empty(query.shape[1], query.shape[0], dtype=torch.float32)
        unused = torch.empty(0)
        return output.to(query.dtype), log_sums, torch.empty(2, dtype=torch.uint64), unused, unused

    def differentiate(
        self,
        gradient: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        _: Tensor,
        *more: Any,
        **named: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        self.num_backward += 1
        *told, _random_state, _unused = more
        call = Call.of((query, key, value), *told, **named)
        of_query, of_key, of_value = slow_gradients(
            *map(_heads_first, (query, key, value, gradient)), lengths=call.lengths, window=call.window
        )
        return tuple(tensor[0].transpose(0, 1).to(query.dtype) for tensor in (of_query, of_key, of_value))  # type: ignore[return-value]


def _heads_first(tensor: Tensor) -> Tensor:
    return tensor.transpose(0, 1)[None]


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    """This CPU as a GPU with Flash Attention."""
    monkeypatch.setattr(packed_attention, "_capability", lambda _: H100)
    stand_in = Kernel()
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", stand_in.attend, "CPU")
    library.impl("_flash_attention_backward", stand_in.differentiate, "CPU")
    yield stand_in
    library._destroy()


lengths = st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple)


@settings(max_examples=20)
@given(lengths, st.sampled_from([(4, 4), (4, 2), (3, 1)]), st.sampled_from([None, 1, 3, 8]))
def test_by_runs_a_token_sees_its_own_sequence_up_to_itself(
    lengths: tuple[int, ...], heads: tuple[int, int], window: int | None
) -> None:
    row = make_row(lengths, heads=heads[0], key_heads=heads[1], dtype=torch.float64)
    own = with_gradients(row, attend(row, window=window))
    expected = slow_attention(row.query, row.key, row.value, lengths=lengths, window=window)
    for found, wanted in zip(own, with_gradients(row, expected), strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("window", [None, 1, 3, 8])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=["own keys", "shared keys"])
def test_one_call_says_what_runs_say(heads: tuple[int, int], window: int | None, kernel: Kernel) -> None:
    row = make_row((3, 3, 1, 5), heads=heads[0], key_heads=heads[1])
    own = with_gradients(row, attend(row, window=window))
    by_runs = attend_by_runs(
        row.query,
        row.key,
        row.value,
        segment_lengths=row.lengths,
        scaling=None,
        dropout=0.0,
        sliding_window=window,
    )
    assert len(kernel.forward_bounds) == kernel.num_backward == 1
    for found, wanted in zip(own, with_gradients(row, by_runs), strict=True):
        torch.testing.assert_close(found, wanted, atol=0.03, rtol=0.03)


def test_under_autocast_what_is_left_in_float32_is_cast_for_the_call(kernel: Kernel) -> None:
    row = make_row((2, 4), dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = attend(row)
    assert output.dtype == torch.bfloat16 and len(kernel.forward_bounds) == 1
    for gradient in torch.autograd.grad(output, (row.query, row.key, row.value), row.gradient.to(output.dtype)):
        assert gradient.dtype == torch.float32
    attend(row)
    assert len(kernel.forward_bounds) == 1  # without it, products are float32, which the kernel has none for


@pytest.mark.parametrize(("recompute", "calls"), [("none", 1), ("selective", 1), ("full", 2)])
def test_a_model_trains_by_one_call_per_layer_and_row(
    recompute: Recompute, calls: int, kernel: Kernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variant = Variant(dtype=torch.bfloat16, recompute=recompute)
    model = save_tiny("qwen3", tmp_path)
    engine = make_engine(model, ParallelContext(), variant)
    kernel.forward_bounds.clear()  # of the rows by which the kind of model is tried at load
    [stats] = train(engine, range(1))
    num_layers, num_rows = 2, kernel.num_backward // 2
    assert len(kernel.forward_bounds) == calls * num_layers * num_rows and num_rows >= 1
    assert kernel.forward_bounds[::num_layers] == kernel.forward_bounds[1::num_layers]  # made once for all layers
    monkeypatch.setattr(packed_attention, "_capability", lambda _: None)
    [by_runs] = train(make_engine(model, ParallelContext(), variant), range(1))
    assert stats == pytest.approx(by_runs, rel=0.02, abs=1e-3)
