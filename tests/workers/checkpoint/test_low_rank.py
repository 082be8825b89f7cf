"""W0 + (B A) alpha / r: the same bits as a plain loop, however the work is divided."""

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from corral.workers.checkpoint.low_rank import AdapterError, LowRank, read_adapter

Floats = npt.NDArray[np.float32]


def by_a_loop(weight: Floats, A: Floats, B: Floats, scale: float) -> Floats:
    """Each operation by itself in float32, rank after rank."""
    total = B[:, 0:1] * A[0:1]
    for rank in range(1, A.shape[0]):
        total = total + B[:, rank : rank + 1] * A[rank : rank + 1]
    merged: Floats = total * np.float32(scale) + weight
    return merged


@settings(deadline=None, max_examples=40)
@given(
    shape=st.tuples(st.integers(1, 300), st.integers(1, 700)),
    rank=st.integers(1, 40),
    scale=st.sampled_from([0.1, 1.0, 2.0, 1 / 3]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_sum_has_the_bits_of_a_plain_loop(
    shape: tuple[int, int], rank: int, scale: float, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator).to(dtype)
    A, B = torch.randn(rank, shape[1], generator=generator), torch.randn(shape[0], rank, generator=generator)
    expected = torch.from_numpy(by_a_loop(weight.float().numpy(), A.numpy(), B.numpy(), scale))
    merged = LowRank(A, B, scale).added_to(weight)
    assert merged.dtype == torch.float32
    assert torch.equal(merged.view(torch.int32), expected.view(torch.int32))


def test_neither_threads_nor_the_division_into_rows_change_a_bit() -> None:
    weight, A, B = torch.randn(300, 1100), torch.randn(16, 1100), torch.randn(300, 16)
    adapter = LowRank(A, B, 2.0)
    before = torch.get_num_threads()
    sums = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            sums.append(adapter.added_to(weight))
    finally:
        torch.set_num_threads(before)
    rows = [LowRank(A, B[row : row + 7], 2.0).added_to(weight[row : row + 7]) for row in range(0, 300, 7)]
    assert torch.equal(sums[0], sums[1]) and torch.equal(sums[0], torch.cat(rows))


def write_adapter(folder: Path, tensors: dict[str, Floats], **config: object) -> None:
    folder.mkdir()
    content = {"base_model_name_or_path": "/models/base", "r": 2, "lora_alpha": 4} | config
    (folder / "adapter_config.json").write_text(json.dumps(content))
    save_file(
        {f"base_model.model.{name}": tensor for name, tensor in tensors.items()}, folder / "adapter_model.safetensors"
    )


def test_an_adapter_is_read_by_the_names_of_the_weights_that_it_is_beside(tmp_path: Path) -> None:
    A, B = np.ones((2, 3), np.float32), np.full((5, 2), 7, np.float32)
    write_adapter(tmp_path / "a", {"layer.0.q_proj.lora_A.weight": A, "layer.0.q_proj.lora_B.weight": B})
    base, [(name, added)] = read_adapter(tmp_path / "a")[0], read_adapter(tmp_path / "a")[1].items()
    assert (base, name, added.scale) == (Path("/models/base"), "layer.0.q_proj.weight", 2.0)
    assert added.A.tolist() == A.tolist() and added.B.tolist() == B.tolist()


ONES = np.ones((2, 3), np.float32)


@pytest.mark.parametrize(
    ("tensors", "config", "words"),
    [
        ({"q.lora_A.weight": ONES}, {}, "nothing for q"),
        ({"q.lora_A.weight": ONES, "q.lora_B.weight": ONES}, {}, r"\[2, 3\] and \[2, 3\] for q"),
        ({"q.lora_B.weight": ONES}, {}, "changes q.lora_B.weight, too"),
        ({"score.weight": ONES}, {}, "changes score.weight, too"),
        ({}, {"r": 0}, "ZeroDivisionError"),
        ({}, {"lora_alpha": "much"}, "ValueError"),
    ],
)
def test_what_is_no_adapter_of_low_rank_alone_is_refused(
    tmp_path: Path, tensors: dict[str, Floats], config: dict[str, object], words: str
) -> None:
    write_adapter(tmp_path / "a", tensors, **config)
    with pytest.raises(AdapterError, match=words):
        read_adapter(tmp_path / "a")


def test_a_missing_or_torn_file_of_an_adapter_is_named(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="adapter_config.json"):
        read_adapter(tmp_path / "nothing")
    write_adapter(tmp_path / "a", {"q.lora_A.weight": ONES})
    (tmp_path / "a" / "adapter_model.safetensors").write_bytes(b"torn")
    with pytest.raises(AdapterError, match="SafetensorError"):
        read_adapter(tmp_path / "a")
