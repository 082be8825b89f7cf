"""Versions of bfloat16 weights as ranks publish them, one after the other: files, deltas, manifest."""

from pathlib import Path

import torch
from torch import Tensor

from corral.workers.backends.files.weights import WeightBase, write_weights
from corral.workers.checkpoint.durable_file import FileEntry
from corral.workers.checkpoint.manifest import SealedDirectory, write_manifest
from tests.workers.checkpoint.sealing import describe


def random_weights(seed: int, *, num_tensors: int = 6, shape: tuple[int, int] = (40, 50)) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        f"layer.{index}.weight": (torch.randn(shape, generator=generator) * 0.02).bfloat16()
        for index in range(num_tensors)
    }


def stepped(weights: dict[str, Tensor], *, share: float, seed: int, size: int = 1) -> dict[str, Tensor]:
    """As an optimizer's step would leave them: a share of the values that are not 0 goes `size` numbers up or down."""
    generator = torch.Generator().manual_seed(seed)

    def step(tensor: Tensor) -> Tensor:
        draw = torch.rand(tensor.shape, generator=generator) + (tensor == 0)  # below 0 there is no number, but NaN
        steps = (draw < share).to(torch.int16) - 2 * (draw < share / 2).to(torch.int16)
        return (tensor.view(torch.int16) + size * steps).view(torch.bfloat16)

    return {name: step(tensor) for name, tensor in weights.items()}


def publish(
    directory: Path,
    weights: dict[str, Tensor],
    *,
    base: Path | None = None,
    num_ranks: int = 2,
    max_shard_bytes: int = 2**30,
    companions: Path | None = None,
) -> SealedDirectory:
    """What all ranks and the master write; with the files of `companions` that are no weights."""
    directory.mkdir(parents=True)
    files: dict[str, FileEntry] = {}
    for rank in range(num_ranks):
        own = write_weights(
            directory,
            iter(weights.items()),
            rank=rank,
            num_ranks=num_ranks,
            max_shard_bytes=max_shard_bytes,
            base=None if base is None else WeightBase.of(base),
        )
        assert not files.keys() & own.keys()
        files |= own
    for path in companions.iterdir() if companions is not None else ():
        if path.suffix == ".json":
            (directory / path.name).write_bytes(path.read_bytes())
            files[path.name] = describe(directory)[path.name]
    return write_manifest(directory, files, {})
