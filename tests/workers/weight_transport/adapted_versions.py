"""Versions of a base model with adapters, merged by a loop of their own, as a trainer of adapters publishes them."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from corral.workers.checkpoint.manifest import SealedDirectory, write_manifest
from tests.workers.checkpoint.sealing import describe
from tests.workers.checkpoint.test_low_rank import by_a_loop

SCALE = 2.0

Adapter = Mapping[str, tuple[Tensor, Tensor]]
"""A [rank, in] and B [out, rank] by the name of the weight that they are beside."""


def random_adapter(shapes: Mapping[str, Iterable[int]], *, rank: int, generator: torch.Generator) -> Adapter:
    """Beside weights of these shapes; what it adds is about as large as they are."""
    adapter = {}
    for name, (rows, columns) in shapes.items():
        A = torch.randn(rank, columns, generator=generator) * 0.02
        adapter[name] = (A, torch.randn(rows, rank, generator=generator))
    return adapter


def merged(weights: Mapping[str, Tensor], adapter: Adapter, *, dtype: torch.dtype) -> dict[str, Tensor]:
    """What a trainer exports that holds the weights in `dtype`."""
    result = {name: weight.to(dtype) for name, weight in weights.items()}
    for name, (A, B) in adapter.items():
        exact = by_a_loop(result[name].float().numpy(), A.numpy(), B.numpy(), SCALE)
        result[name] = torch.from_numpy(exact).to(dtype)
    return result


def publish_adapted(
    directory: Path, files: Mapping[str, Mapping[str, Tensor]], adapter: Adapter, *, base: Path
) -> SealedDirectory:
    """Write merged weights by file, the adapter in peft's format, and what else the base model's directory has."""
    folder = directory / "adapter"
    folder.mkdir(parents=True)
    for name, tensors in files.items():
        save_file(dict(tensors), directory / name, metadata={"format": "pt"})
    stored: dict[str, Tensor] = {}
    for weight, (A, B) in adapter.items():
        layer = f"base_model.model.{weight.removesuffix('.weight')}"
        stored |= {f"{layer}.lora_A.weight": A, f"{layer}.lora_B.weight": B}
    save_file(stored, folder / "adapter_model.safetensors")
    [rank] = {A.shape[0] for A, _ in adapter.values()}
    settings = {"base_model_name_or_path": str(base), "r": rank, "lora_alpha": SCALE * rank}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    for companion in base.glob("*.json"):
        (directory / companion.name).write_bytes(companion.read_bytes())
    return write_manifest(directory, describe(directory), {})
