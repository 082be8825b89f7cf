"""New weights for a live model: read, check and build everything aside; the model itself is never written into.

    directory -> names, shapes, dtypes -> finite values -> tensors -> a model like the live one, with them in it
                 any failure: WeightsRejectedError, and the old weights serve on untouched

All of it may run in another thread while the engine generates. Values are converted to the engine's dtype, exactly as
at the start of the server. Which weights it computes with is said as SGLang's /weights_checker says it:

    new weights, the old ones generate on --Checksums.of--> hashed, and kept beside the tensor's count of writes
    between two steps, live by now ---------Checksums.of--> the same, not hashed but for what was written into since
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn

from corral.workers.engine.stored_tensors import StoredTensor, fingerprint, stored_tensors

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_TIED_HEAD = "lm_head.weight"
_NAMES_IN_MESSAGE = 5

# What `from_pretrained` would convert without loss of meaning; quantised or integer weights need their scales.
_LOADABLE_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class WeightsRejectedError(ValueError):
    """A weight directory is unreadable or does not fit the model; the old weights are still in place."""


def _as_stored(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Views of parameters by the names in files: transformers has all experts of a layer in one tensor, and files have
    them one by one."""
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        mixture, _, fused = name.rpartition(".")
        if not mixture.endswith(".experts"):
            stored[name] = tensor
            continue
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[fused]
        for expert, weights in enumerate(tensor):
            for part, weight in zip(parts, weights.chunk(len(parts)), strict=True):
                stored[f"{mixture}.{expert}.{part}.weight"] = weight
    return stored


def stage_weights(directory: Path, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Read a Hugging Face safetensors directory completely, or refuse it.

    That the files are those that were published is for the worker to see, whatever engine reads them then: see
    `workers/generation/weight_updates.py`. Read, not mapped: the values must be here now, and not when the engine
    stands still.

    Args:
        parameters: of the live model, whose names, shapes and dtypes are wanted.

    Returns:
        By parameter name, on the CPU.

    Raises:
        WeightsRejectedError: naming the file or tensor, what was expected and what was found.
    """
    try:
        return _read_all(directory, parameters)
    except WeightsRejectedError as error:
        raise WeightsRejectedError(f"weights in {directory} were rejected: {error}") from error.__cause__
    except (OSError, ValueError) as error:
        raise WeightsRejectedError(f"weights in {directory} could not be read: {error}") from error


def _read_all(directory: Path, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    stored = _stored_tensors(directory)
    _check(_as_stored(parameters), stored)  # all headers before the first value: a wrong model is refused at once
    tensors = {name: torch.empty(live.shape, dtype=live.dtype) for name, live in parameters.items()}
    targets = _as_stored(tensors)
    if (second := stored.get(_TIED_HEAD)) is not None:
        targets.setdefault(_TIED_HEAD, torch.empty(second.shape, dtype=next(iter(tensors.values())).dtype))
    for name, place in stored.items():
        _read(name, place, targets[name])
    if _TIED_HEAD in targets and _TIED_HEAD not in tensors:
        _check_tied_head(targets[_TIED_HEAD], tensors)
    return tensors


def model_with(tensors: Mapping[str, Tensor], model: nn.Module) -> nn.Module:
    """A model of the same modules with these parameters, on the same device; it shares the buffers, and no parameter.

    Parameters that are one in `model`, such as a tied head and its embedding, are one in it, too.
    """
    new_by_id: dict[int, object] = {id(buffer): buffer for buffer in model.buffers()}
    for name, parameter in model.named_parameters():
        new_by_id[id(parameter)] = nn.Parameter(tensors[name].to(parameter.device), requires_grad=False)
    return copy.deepcopy(model, new_by_id)


def _stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    index_path = directory / _INDEX_FILE
    if not index_path.exists():
        return stored_tensors(directory / _SINGLE_FILE)
    weight_map = json.loads(index_path.read_bytes()).get("weight_map")
    if not isinstance(weight_map, dict):
        raise WeightsRejectedError(f"{_INDEX_FILE} has no weight_map")
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise WeightsRejectedError(f"{_INDEX_FILE} places {name} in {file_name!r}, which is no plain file name")
    files = {file_name: stored_tensors(directory / file_name) for file_name in sorted(set(weight_map.values()))}
    if absent := sorted(name for name, file_name in weight_map.items() if name not in files[file_name]):
        raise WeightsRejectedError(f"{len(absent)} tensors are not in the files of {_INDEX_FILE}: {_some(absent)}")
    return {name: files[file_name][name] for name, file_name in weight_map.items()}


def _check(wanted: Mapping[str, Tensor], stored: Mapping[str, StoredTensor]) -> None:
    if missing := sorted(wanted.keys() - stored.keys()):
        raise WeightsRejectedError(f"{len(missing)} tensors are missing: {_some(missing)}")
    if unknown := sorted(stored.keys() - wanted.keys() - {_TIED_HEAD}):
        raise WeightsRejectedError(f"{len(unknown)} tensors are not the model's: {_some(unknown)}")
    for name, place in stored.items():
        if name in wanted and (shape := tuple(wanted[name].shape)) != place.shape:
            raise WeightsRejectedError(f"tensor {name} has shape {place.shape}, the model's is {shape}")
        if place.dtype not in _LOADABLE_DTYPES:
            raise WeightsRejectedError(
                f"tensor {name} has dtype {place.dtype}, expected one of {', '.join(sorted(_LOADABLE_DTYPES))}"
            )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_NAMES_IN_MESSAGE])
    return shown if len(names) <= _NAMES_IN_MESSAGE else f"{shown}, ..."


def _read(name: str, place: StoredTensor, target: Tensor) -> None:
    """Into a contiguous tensor of its shape."""
    dtype = _LOADABLE_DTYPES[place.dtype]
    values = target if target.dtype == dtype else torch.empty(place.shape, dtype=dtype)
    place.read_into(values.view(-1).view(torch.uint8).numpy().data)
    if values is not target:
        target.copy_(values)
    if not bool(torch.isfinite(target).all()):
        raise WeightsRejectedError(f"tensor {name} holds NaN or infinity as {target.dtype}")


def _check_tied_head(head: Tensor, tensors: Mapping[str, Tensor]) -> None:
    """Some writers store the tied head a second time; a different one would silently not be used."""
    if not any(torch.equal(head, tensor) for name, tensor in tensors.items() if "embed_tokens" in name):
        raise WeightsRejectedError(f"the model ties {_TIED_HEAD} to its embedding, but the file's two differ")


_HASH_THREADS: Final = 2  # two large tensors are what is asked for with every update


class Checksums:
    """SHA-256 of the bytes of each parameter of one model, its first 8 bytes. Any thread may ask."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = dict(model.named_parameters())
        self._known: dict[str, tuple[int, str]] = {}
        """By name: the tensor's count of writes when it was hashed, and what came out."""

    def names(self, *, skipped: Sequence[str]) -> list[str]:
        """Of the parameters whose names contain none of `skipped`."""
        return [name for name in self._parameters if not any(part in name for part in skipped)]

    def of(self, names: Iterable[str]) -> dict[str, str]:
        """By name, as 16 hexadecimal digits."""
        wanted = list(names)
        written = {name: self._parameters[name]._version for name in wanted}
        if unknown := [name for name in wanted if self._known.get(name, ("", ""))[0] != written[name]]:
            with ThreadPoolExecutor(_HASH_THREADS) as pool:
                self._known.update(zip(unknown, pool.map(self._hashed, unknown), strict=True))
        return {name: self._known[name][1] for name in wanted}

    def _hashed(self, name: str) -> tuple[int, str]:
        tensor = self._parameters[name]
        num_writes = tensor._version  # of before: a write meanwhile is seen the next time
        data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        return num_writes, fingerprint(data.data)
