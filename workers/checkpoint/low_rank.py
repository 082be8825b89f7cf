"""W0 + (B A) alpha / r, by the same bits on every machine: what a trainer exports, a host can make itself.

    A [r, in], B [out, r] ──► rank by rank: column of B times row of A, added up ──► times alpha / r ──► plus W0
    peft's files of an adapter ──read_adapter──► {weight's name: LowRank}

A matrix product would be faster, and another one on every processor: libraries choose the order of its sums, and fuse
products with them. Here each product, each sum and the scaling are rounded to float32 by themselves, in the order of
the ranks; so trainers and hosts of any kind come to the same digest. A host's result is compared with that digest, so
that this module saves bytes and promises nothing.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

ADAPTER_CONFIG: Final = "adapter_config.json"
ADAPTER_TENSORS: Final = "adapter_model.safetensors"
ADAPTER_PREFIX: Final = "base_model.model."
"""Before each name in peft's files."""

_A: Final = ".lora_A.weight"
_B: Final = ".lora_B.weight"
_CACHED_ELEMENTS: Final = 2**16  # of a sum, which is gone through once per rank


class AdapterError(Exception):
    """Files of an adapter that cannot be read, or are not of low rank alone; names the file and what differs."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """The low-rank term that is added to one weight."""

    A: Tensor
    """[r, in] float32."""
    B: Tensor
    """[out, r] float32."""
    scale: float
    """alpha / r."""

    def added_to(self, weight: Tensor) -> Tensor:
        """weight [out, in], of any floating type, and this; a new tensor, float32."""
        merged = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
        # Elements do not depend on each other, and rows that stay in a processor's cache are summed up faster.
        rows = max(1, _CACHED_ELEMENTS // weight.shape[1]) if weight.device.type == "cpu" else weight.shape[0]
        for first in range(0, weight.shape[0], rows):
            some = slice(first, first + rows)
            _add_up(self.A, self.B[some], merged[some])
            merged[some].mul_(self.scale).add_(weight[some].float())
        return merged


def _add_up(A: Tensor, B: Tensor, total: Tensor) -> None:
    """total [rows, in] = B [rows, r] A [r, in]."""
    product = torch.empty_like(total)
    for rank in range(A.shape[0]):
        into = total if rank == 0 else product
        torch.mul(B[:, rank].unsqueeze(1), A[rank], out=into)
        if rank > 0:
            total.add_(product)


def read_adapter(folder: Path) -> tuple[Path, Mapping[str, LowRank]]:
    """An adapter in peft's format: the directory of its base model, and what is added to each weight, by its name.

    Raises:
        AdapterError: if it changes a model otherwise, too, or a file cannot be read.
    """
    try:
        config = json.loads((folder / ADAPTER_CONFIG).read_bytes())
        base, scale = Path(config["base_model_name_or_path"]), float(config["lora_alpha"]) / int(config["r"])
        with safe_open(folder / ADAPTER_TENSORS, framework="pt") as file:
            tensors = {name.removeprefix(ADAPTER_PREFIX): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise AdapterError(f"cannot read the adapter {folder}: {type(error).__name__}: {error}") from error
    layers = {name.removesuffix(_A) for name in tensors if name.endswith(_A)}
    if others := sorted(tensors.keys() - {f"{layer}{part}" for layer in layers for part in (_A, _B)}):
        raise AdapterError(f"the adapter {folder} changes {others[0]}, too, which is nothing of low rank")
    added: dict[str, LowRank] = {}
    for layer in layers:
        A, B = tensors[f"{layer}{_A}"], tensors.get(f"{layer}{_B}")
        if B is None or A.dim() != 2 or B.dim() != 2 or A.shape[0] != B.shape[1]:
            shapes = f"{list(A.shape)} and {list(B.shape) if B is not None else 'nothing'}"
            raise AdapterError(f"the adapter {folder} has {shapes} for {layer}: not [r, in] and [out, r]")
        added[f"{layer}.weight"] = LowRank(A.float(), B.float(), scale)
    return base, added
