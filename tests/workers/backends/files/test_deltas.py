"""Ranks write beside their files what has changed since the version before; applied to it, that gives the new files."""

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch

from corral.workers.backends.files.weights import WeightBase, write_weights
from corral.workers.checkpoint.file_delta import apply_delta, read_header
from tests.workers.backends.trained_versions import publish, random_weights, stepped
from tests.workers.checkpoint.sealing import describe

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
