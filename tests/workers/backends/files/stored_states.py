"""A training state on disk, put together by a slow loop: an independent reading of the format of train_state.py."""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor


def whole_state(directory: Path) -> dict[str, Tensor]:
    """Every tensor of a state, whole, by kind and parameter; what is one number of a parameter is a scalar."""
    header = json.loads((directory / "train_state.json").read_text())
    whole = {name: torch.full(size, torch.nan) for name, size in header["sizes"].items()}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for stored in file.keys():
                name, start = stored[:-1].split("[")
                values = file.get_tensor(stored)
                assert values.dtype == torch.float32, stored
                box = tuple(
                    slice(int(at), int(at) + size) for at, size in zip(start.split(","), values.shape, strict=True)
                )
                known = whole[name][box]
                assert bool((known.isnan() | (known == values)).all()), f"{stored} of {path.name} contradicts another"
                whole[name][box] = values
    for name, tensor in whole.items():
        assert not bool(tensor.isnan().any()), f"{name} has gaps"
    return whole | {name: torch.tensor(number) for name, number in header["scalars"].items()}
