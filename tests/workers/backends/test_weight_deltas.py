"""Ranks write beside their files what has changed since the version before; applied to it, that gives the new files."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from corral.workers.backends.weight_deltas import WeightBase
from corral.workers.backends.weight_files import write_weights
from corral.workers.checkpoint.durable_file import FileEntry
from corral.workers.checkpoint.file_delta import apply_delta, read_header
from corral.workers.checkpoint.manifest import write_manifest
from tests.workers.checkpoint.sealing import describe

NAMES = [f"layer.{index}.weight" for index in range(6)]


def weights_of(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(40, 50, generator=generator).bfloat16() * 0.02 for name in NAMES}


def stepped(weights: dict[str, Tensor], *, share: float, seed: int) -> dict[str, Tensor]:
    """Some of the values go to the next larger one."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (tensor.view(torch.int16) + (torch.rand(tensor.shape, generator=generator) < share)).view(torch.bfloat16)
        for name, tensor in weights.items()
    }


def write(
    directory: Path,
    weights: dict[str, Tensor],
    *,
    base: Path | None = None,
    num_ranks: int = 2,
    max_shard_bytes: int = 8100,
) -> dict[str, FileEntry]:
    """All ranks, one after the other, under a manifest."""
    directory.mkdir()
    files: dict[str, FileEntry] = {}
    for rank in range(num_ranks):
        files |= write_weights(
            directory,
            iter(weights.items()),
            rank=rank,
            num_ranks=num_ranks,
            max_shard_bytes=max_shard_bytes,
            base=None if base is None else WeightBase.of(base),
        )
    write_manifest(directory, files, {})
    return files


def built(base: Path, version: Path) -> Iterator[tuple[bytes, bytes]]:
    """Each file that has a delta, as the delta gives it and as it is."""
    for path in sorted(version.glob("*.delta")):
        name = path.name.removesuffix(".delta")
        with open(path, "rb") as delta, open(base / name, "rb", buffering=0) as old:
            header = read_header(delta)
            assert header.base == describe(base)[name] and header.result == describe(version)[name]
            yield b"".join(apply_delta(old, delta, header)), (version / name).read_bytes()


@pytest.mark.parametrize(("num_ranks", "max_shard_bytes"), [(1, 2**30), (2, 8100), (3, 1)])
def test_a_version_and_the_deltas_of_the_next_give_the_next_bit_for_bit(
    num_ranks: int, max_shard_bytes: int, tmp_path: Path
) -> None:
    first = weights_of(0)
    second = stepped(first, share=0.02, seed=1)
    write(tmp_path / "1", first, num_ranks=num_ranks, max_shard_bytes=max_shard_bytes)
    files = write(tmp_path / "2", second, base=tmp_path / "1", num_ranks=num_ranks, max_shard_bytes=max_shard_bytes)
    assert {name: entry for name, entry in describe(tmp_path / "2").items() if name != "manifest.json"} == files
    pairs = list(built(tmp_path / "1", tmp_path / "2"))
    assert len(pairs) == len(list((tmp_path / "2").glob("*.safetensors"))) > 0
    assert all(given == expected for given, expected in pairs)


def test_weights_that_changed_everywhere_have_no_delta_and_the_base_says_why(tmp_path: Path) -> None:
    write(tmp_path / "1", weights_of(0), num_ranks=1)
    base = WeightBase.of(tmp_path / "1")
    assert base is not None
    (tmp_path / "2").mkdir()
    files = write_weights(
        tmp_path / "2", iter(weights_of(1).items()), rank=0, num_ranks=1, max_shard_bytes=8100, base=base
    )
    assert files == describe(tmp_path / "2") and not any(name.endswith(".delta") for name in files)
    assert set(base.given_up) == {f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)}
    assert all("too much has changed" in reason for reason in base.given_up.values())


def test_weights_that_are_cut_otherwise_have_no_delta(tmp_path: Path) -> None:
    first = weights_of(0)
    write(tmp_path / "1", first, max_shard_bytes=8100)
    assert not [
        name for name in write(tmp_path / "2", first, base=tmp_path / "1", max_shard_bytes=4100) if "delta" in name
    ]
    larger = first | {"another.weight": torch.zeros(8, dtype=torch.bfloat16)}
    files = write(tmp_path / "3", larger, base=tmp_path / "1", max_shard_bytes=2**30)
    assert not [name for name in files if "delta" in name]


def test_a_version_before_that_is_gone_or_was_never_sealed_costs_the_deltas_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights = weights_of(0)
    write(tmp_path / "1", weights)
    (tmp_path / "1" / "model-00002-of-00003.safetensors").unlink()
    files = write(tmp_path / "2", weights, base=tmp_path / "1")
    assert sorted(name for name in files if "delta" in name) == [
        "model-00001-of-00003.safetensors.delta",
        "model-00003-of-00003.safetensors.delta",
    ]
    with caplog.at_level(logging.WARNING):
        assert WeightBase.of(tmp_path / "never") is None
    assert "never/manifest.json cannot be read" in caplog.text
