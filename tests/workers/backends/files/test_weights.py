"""Weights that several ranks write together are those that transformers and the embedded engine load, bit for bit."""

import json
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from corral.workers.backends.files.tensors import write_tensors
from corral.workers.backends.files.weights import WeightBase, as_stored, copy_own, write_weights
from corral.workers.checkpoint.durable_file import FileEntry
from corral.workers.checkpoint.file_delta import apply_delta, read_header
from corral.workers.engine.weights import model_with, stage_weights
from tests.workers.backends.trained_versions import publish, random_weights, stepped
from tests.workers.backends.training_helpers import load_reference, read_weights, save_tiny_model
from tests.workers.checkpoint.sealing import describe

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool]


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    bits = torch.randint(0, 2, shape) if dtype == torch.bool else torch.randint(-100, 100, shape)
    return bits.to(dtype)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3)), min_size=1, max_size=8))
def test_a_file_holds_what_the_format_s_own_reader_finds(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[tuple[torch.dtype, list[int]]]
) -> None:
    path = tmp_path_factory.mktemp("tensors") / "x.safetensors"
    tensors = {f"t{index}": random_tensor(tuple(shape), dtype) for index, (dtype, shape) in enumerate(kinds)}
    entry = write_tensors(path, tensors)
    assert {"x.safetensors": entry} == describe(path.parent)
    found = load_file(path)
    assert found.keys() == tensors.keys()
    assert all(
        found[name].dtype == tensor.dtype and torch.equal(found[name], tensor) for name, tensor in tensors.items()
    )
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_transposed_tensor_is_written_row_by_row(tmp_path: Path) -> None:
    tensor = torch.arange(6.0).reshape(2, 3).T
    write_tensors(tmp_path / "x.safetensors", {"t": tensor})
    assert torch.equal(load_file(tmp_path / "x.safetensors")["t"], tensor)


def test_a_type_that_the_format_has_not_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tensor t is of torch.complex128"):
        write_tensors(tmp_path / "x.safetensors", {"t": torch.zeros(1, dtype=torch.complex128)})
    assert not list(tmp_path.iterdir())


def parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from ((name, parameter.detach()) for name, parameter in model.named_parameters())


def write(directory: Path, model: Any, *, num_ranks: int, max_shard_bytes: int) -> dict[str, FileEntry]:
    """All ranks, one after the other."""
    files: dict[str, FileEntry] = {}
    for rank in range(num_ranks):
        weights = as_stored(model, parameters(model), dtype=torch.float32)
        own = write_weights(directory, weights, rank=rank, num_ranks=num_ranks, max_shard_bytes=max_shard_bytes)
        assert not files.keys() & own.keys()
        files |= own
    return files


@pytest.mark.parametrize("max_shard_bytes", [2_000, 10**9])
def test_what_was_copied_to_be_written_later_makes_the_same_files(max_shard_bytes: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(6)])
    for name in ("at once", "later"):
        (tmp_path / name).mkdir()
    at_once = write(tmp_path / "at once", model, num_ranks=2, max_shard_bytes=max_shard_bytes)
    copies = [copy_own(parameters(model), rank=rank, num_ranks=2, max_shard_bytes=max_shard_bytes) for rank in (0, 1)]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    later: dict[str, FileEntry] = {}
    for rank, copy in enumerate(copies):
        later |= write_weights(tmp_path / "later", copy, rank=rank, num_ranks=2, max_shard_bytes=max_shard_bytes)
    assert later == at_once and describe(tmp_path / "later") == later
    held = [sum(tensor.nbytes for _, tensor in copy if not tensor.is_meta) for copy in copies]
    assert sum(held) == sum(parameter.nbytes for parameter in model.parameters())  # each tensor in one rank's memory


@pytest.mark.parametrize(("num_ranks", "max_shard_bytes"), [(1, 2**30), (3, 2**30), (1, 20_000), (3, 20_000), (2, 1)])
def test_files_of_any_number_of_ranks_are_one_model(num_ranks: int, max_shard_bytes: int, tmp_path: Path) -> None:
    source = save_tiny_model(tmp_path / "model")
    model = load_reference(source)
    directory = tmp_path / "written"
    directory.mkdir()
    files = write(directory, model, num_ranks=num_ranks, max_shard_bytes=max_shard_bytes)
    assert files == describe(directory)
    assert ("model.safetensors" in files) == (max_shard_bytes == 2**30)
    expected = read_weights(source)
    found = read_weights(directory)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    for name in files:
        if name.endswith(".safetensors"):
            sizes = [tensor.nbytes for tensor in load_file(directory / name).values()]
            assert len(sizes) == 1 or sum(sizes) <= max_shard_bytes

    (directory / "config.json").write_bytes((source / "config.json").read_bytes())
    loaded = load_reference(directory)
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.zero_()
    loaded = model_with(stage_weights(directory, dict(loaded.named_parameters())), loaded)
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))


def test_experts_are_stored_one_by_one_as_transformers_stores_them(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=16,
        intermediate_size=24,
        moe_intermediate_size=8,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        vocab_size=32,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "model")
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    (tmp_path / "written").mkdir()
    write(tmp_path / "written", model, num_ranks=2, max_shard_bytes=4000)
    expected, found = read_weights(tmp_path / "model"), read_weights(tmp_path / "written")
    assert "model.layers.1.mlp.experts.3.gate_proj.weight" in expected
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_file_that_cannot_be_written_is_an_error_after_all_weights_were_seen(tmp_path: Path) -> None:
    seen: list[str] = []

    def weights() -> Iterator[tuple[str, Tensor]]:
        for name in ("a", "b", "c"):
            seen.append(name)
            yield name, torch.zeros(4)

    (tmp_path / ".model-00001.part").touch()
    with pytest.raises(FileExistsError):
        write_weights(tmp_path, weights(), rank=0, num_ranks=1, max_shard_bytes=16)
    assert seen == ["a", "b", "c"]


def test_the_index_says_how_large_the_model_is(tmp_path: Path) -> None:
    weights = [("a", torch.zeros(4)), ("b", torch.zeros(4, dtype=torch.bfloat16))]
    write_weights(tmp_path, weights, rank=0, num_ranks=1, max_shard_bytes=16)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 24
    assert index["weight_map"] == {
        "a": "model-00001-of-00002.safetensors",
        "b": "model-00002-of-00002.safetensors",
    }


# --- deltas ---------------------------------------------------------------------------------------------------------

SHARD_BYTES = 8100  # two tensors of a version


def built(base: Path, version: Path) -> Iterator[tuple[bytes, bytes]]:
    """Each file that has a delta, as the delta gives it and as it is."""
    for path in sorted(version.glob("*.delta")):
        name = path.name.removesuffix(".delta")
        with open(path, "rb") as delta, open(base / name, "rb", buffering=0) as old:
            header = read_header(delta)
            assert header.base == describe(base)[name] and header.result == describe(version)[name]
            yield b"".join(map(bytes, apply_delta(old, delta, header))), (version / name).read_bytes()


@pytest.mark.parametrize(("num_ranks", "max_shard_bytes"), [(1, 2**30), (2, SHARD_BYTES), (3, 1)])
def test_a_version_and_the_deltas_of_the_next_give_the_next_bit_for_bit(
    num_ranks: int, max_shard_bytes: int, tmp_path: Path
) -> None:
    first = random_weights(0)
    second = stepped(first, share=0.02, seed=1)
    publish(tmp_path / "1", first, num_ranks=num_ranks, max_shard_bytes=max_shard_bytes)
    sealed = publish(tmp_path / "2", second, base=tmp_path / "1", num_ranks=num_ranks, max_shard_bytes=max_shard_bytes)
    assert describe(tmp_path / "2") == sealed.files
    pairs = list(built(tmp_path / "1", tmp_path / "2"))
    assert len(pairs) == len(list((tmp_path / "2").glob("*.safetensors"))) > 0
    assert all(given == expected for given, expected in pairs)


def test_weights_that_changed_everywhere_have_no_delta_and_the_base_says_why(tmp_path: Path) -> None:
    publish(tmp_path / "1", random_weights(0), max_shard_bytes=SHARD_BYTES)
    base = WeightBase.of(tmp_path / "1")
    assert base is not None
    (tmp_path / "2").mkdir()
    weights = iter(random_weights(1).items())
    files = write_weights(tmp_path / "2", weights, rank=0, num_ranks=1, max_shard_bytes=SHARD_BYTES, base=base)
    assert files == describe(tmp_path / "2") and deltas(files) == []
    assert set(base.given_up) == {f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)}
    assert all("too much has changed" in reason for reason in base.given_up.values())


def deltas(files: Iterable[str]) -> list[str]:
    return sorted(name for name in files if name.endswith(".delta"))


def test_weights_that_are_cut_otherwise_have_no_delta(tmp_path: Path) -> None:
    first = random_weights(0)
    publish(tmp_path / "1", first, max_shard_bytes=SHARD_BYTES)
    larger = first | {"another.weight": torch.zeros(8, dtype=torch.bfloat16)}
    for name, weights, max_shard_bytes in (("2", first, SHARD_BYTES // 2), ("3", larger, 2**30)):
        files = publish(tmp_path / name, weights, base=tmp_path / "1", max_shard_bytes=max_shard_bytes).files
        assert deltas(files) == []


def test_a_version_before_that_is_gone_or_was_never_sealed_costs_the_deltas_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights = random_weights(0)
    publish(tmp_path / "1", weights, max_shard_bytes=SHARD_BYTES)
    (tmp_path / "1" / "model-00002-of-00003.safetensors").unlink()
    files = publish(tmp_path / "2", weights, base=tmp_path / "1", max_shard_bytes=SHARD_BYTES).files
    assert deltas(files) == [f"model-0000{number}-of-00003.safetensors.delta" for number in (1, 3)]
    with caplog.at_level(logging.WARNING):
        assert WeightBase.of(tmp_path / "never") is None
    assert "never/manifest.json cannot be read" in caplog.text
