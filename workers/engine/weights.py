"""New weights for a live model: read, check and build everything aside; the model itself is never written into.

    directory -> names, shapes, dtypes -> finite values -> StagedWeights -> a model like the live one, with them in it
                 any failure: WeightsRejectedError, and the old weights serve on untouched

All of it may run in another thread while the engine generates. Values are converted to the engine's dtype, exactly as
at the start of the server. Which weights it computes with is asked as of SGLang's /weights_checker:

    new weights, the old ones generate on --Checksums.of--> hashed, and kept beside the tensor's count of writes
    between two steps, live by now ---------Checksums.of--> the same, not hashed but for what was written into since
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_TIED_HEAD = "lm_head.weight"
_NAMES_IN_MESSAGE = 5

# What `from_pretrained` would convert without loss of meaning; quantised or integer weights need their scales.
_LOADABLE_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class WeightsRejectedError(ValueError):
    """A weight directory is unreadable or does not fit the model; the old weights are still in place."""


@dataclass(frozen=True, slots=True)
class StagedWeights:
    """Checked weights by parameter name, on the CPU, in the engine's dtype."""

    directory: Path
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a parameter that has a tensor of its own in files: an expert's."""

    parameter: str
    expert: int
    rows: slice


@dataclass(frozen=True, slots=True)
class WeightLayout:
    """The names, shapes and dtype that a weight directory must have."""

    shapes: Mapping[str, tuple[int, ...]]
    """By the names in files."""
    pieces: Mapping[str, Piece]
    """By the names in files, of those tensors that are parts of a parameter; all others are parameters."""
    fused: Mapping[str, tuple[int, ...]]
    """The shapes of the parameters that consist of pieces."""
    dtype: torch.dtype
    has_tied_head: bool

    @classmethod
    def of(cls, model: nn.Module) -> WeightLayout:
        shapes: dict[str, tuple[int, ...]] = {}
        pieces: dict[str, Piece] = {}
        fused: dict[str, tuple[int, ...]] = {}
        for name, parameter in model.named_parameters():
            own = dict(_pieces_of(name, parameter.shape))
            shapes |= {stored: _shape_of(piece, parameter.shape) for stored, piece in own.items()}
            pieces |= own
            (fused if own else shapes)[name] = tuple(parameter.shape)
        any_parameter = next(model.parameters())
        return cls(shapes, pieces, fused, dtype=any_parameter.dtype, has_tied_head=_TIED_HEAD not in shapes)


def _pieces_of(parameter: str, shape: torch.Size) -> Iterator[tuple[str, Piece]]:
    """transformers has all experts of a layer in one tensor, and files have them one by one."""
    mixture, _, name = parameter.rpartition(".")
    if not mixture.endswith(".experts"):
        return
    num_rows = shape[1]
    parts = {
        "gate_up_proj": {"gate_proj": slice(0, num_rows // 2), "up_proj": slice(num_rows // 2, num_rows)},
        "down_proj": {"down_proj": slice(0, num_rows)},
    }
    for expert in range(shape[0]):
        for part, rows in parts[name].items():
            yield f"{mixture}.{expert}.{part}.weight", Piece(parameter, expert, rows)


def _shape_of(piece: Piece, shape: torch.Size) -> tuple[int, ...]:
    return (piece.rows.stop - piece.rows.start, shape[2])


def stage_weights(directory: Path, layout: WeightLayout) -> StagedWeights:
    """Read a Hugging Face safetensors directory completely, or refuse it.

    That the files are those that were published is for the worker to see, whatever engine reads them then: see
    `workers/generation/weight_updates.py`.

    Raises:
        WeightsRejectedError: naming the file or tensor, what was expected and what was found.
    """
    with _rejecting(directory):
        files = _weight_files(directory)
        _check_names(layout, files)
        tensors = _assembled(_read_tensors(directory, layout, files), layout)
    if layout.has_tied_head:
        _take_out_tied_head(tensors)
    return StagedWeights(directory=directory, tensors=tensors)


def model_with(staged: StagedWeights, model: nn.Module) -> nn.Module:
    """A model of the same modules with these parameters, on the same device; it shares the buffers, and no parameter.

    Parameters that are one in `model`, such as a tied head and its embedding, are one in it, too.
    """
    new_by_id: dict[int, object] = {id(buffer): buffer for buffer in model.buffers()}
    for name, parameter in model.named_parameters():
        new_by_id[id(parameter)] = nn.Parameter(staged.tensors[name].to(parameter.device), requires_grad=False)
    return copy.deepcopy(model, new_by_id)


@contextmanager
def _rejecting(directory: Path) -> Iterator[None]:
    try:
        yield
    except WeightsRejectedError as error:
        raise WeightsRejectedError(f"weights in {directory} were rejected: {error}") from error.__cause__
    except (OSError, SafetensorError, ValueError) as error:
        raise WeightsRejectedError(f"weights in {directory} could not be read: {error}") from error


def _weight_files(directory: Path) -> dict[str, str]:
    """File name by tensor name."""
    index_path = directory / _INDEX_FILE
    if not index_path.exists():
        with safe_open(directory / _SINGLE_FILE, framework="pt") as file:
            return dict.fromkeys(file.keys(), _SINGLE_FILE)
    weight_map = json.loads(index_path.read_bytes()).get("weight_map")
    if not isinstance(weight_map, dict):
        raise WeightsRejectedError(f"{_INDEX_FILE} has no weight_map")
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise WeightsRejectedError(f"{_INDEX_FILE} places {name} in {file_name!r}, which is no plain file name")
    return weight_map


def _check_names(layout: WeightLayout, files: Mapping[str, str]) -> None:
    expected = set(layout.shapes)
    found = set(files) - ({_TIED_HEAD} if layout.has_tied_head else set())
    if missing := sorted(expected - found):
        raise WeightsRejectedError(f"{len(missing)} tensors are missing: {_some(missing)}")
    if unknown := sorted(found - expected):
        raise WeightsRejectedError(f"{len(unknown)} tensors are not the model's: {_some(unknown)}")


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_NAMES_IN_MESSAGE])
    return shown if len(names) <= _NAMES_IN_MESSAGE else f"{shown}, ..."


def _read_tensors(directory: Path, layout: WeightLayout, files: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
    """All headers are checked before the first value is read: a wrong model is refused in milliseconds."""
    for file_name in sorted(set(files.values())):
        with safe_open(directory / file_name, framework="pt") as file:
            for name in _names_in(files, file_name):
                _check_header(name, file.get_slice(name), layout)
    for file_name in sorted(set(files.values())):
        for name, stored in _read_values(directory / file_name, _names_in(files, file_name)):
            tensor = stored.to(layout.dtype)
            if not bool(torch.isfinite(tensor).all()):
                raise WeightsRejectedError(f"tensor {name} holds NaN or infinity as {layout.dtype}")
            yield name, tensor


def _assembled(stored: Iterable[tuple[str, Tensor]], layout: WeightLayout) -> dict[str, Tensor]:
    """The parameters, from the tensors of the files."""
    tensors = {name: torch.empty(shape, dtype=layout.dtype) for name, shape in layout.fused.items()}
    for name, tensor in stored:
        piece = layout.pieces.get(name)
        if piece is None:
            tensors[name] = tensor
        else:
            tensors[piece.parameter][piece.expert, piece.rows] = tensor
    return tensors


def _read_values(path: Path, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """The values of a file whose header was checked.

    Read, not mapped: the values must be here now, and not when the engine stands still. And by ourselves: each tensor
    of `safe_open` leaves some 60 bytes behind for good, and a server reads hundreds of them for every train step.
    """
    with open(path, "rb") as file:
        header_size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_size))
        for name in names:
            tensor = torch.empty(header[name]["shape"], dtype=_LOADABLE_DTYPES[header[name]["dtype"]])
            file.seek(8 + header_size + header[name]["data_offsets"][0])
            values = tensor.view(-1).view(torch.uint8).numpy()
            if file.readinto(values.data) != values.nbytes:
                raise OSError(f"{path} ends within tensor {name}")
            yield name, tensor


def _names_in(files: Mapping[str, str], file_name: str) -> list[str]:
    return [name for name, holder in files.items() if holder == file_name]


def _check_header(name: str, header: Any, layout: WeightLayout) -> None:
    shape, dtype = tuple(header.get_shape()), header.get_dtype()
    if name in layout.shapes and shape != layout.shapes[name]:
        raise WeightsRejectedError(f"tensor {name} has shape {shape}, the model's is {layout.shapes[name]}")
    if dtype not in _LOADABLE_DTYPES:
        raise WeightsRejectedError(
            f"tensor {name} has dtype {dtype}, expected one of {', '.join(sorted(_LOADABLE_DTYPES))}"
        )


def _take_out_tied_head(tensors: dict[str, Tensor]) -> None:
    """Some writers store the tied head a second time; a different one would silently not be used."""
    head = tensors.pop(_TIED_HEAD, None)
    if head is not None and not any(
        torch.equal(head, tensor) for name, tensor in tensors.items() if "embed_tokens" in name
    ):
        raise WeightsRejectedError(f"the model ties {_TIED_HEAD} to its embedding, but the file's two differ")


_HASH_THREADS: Final = 2  # two large tensors are what is asked for with every update
_HASH_BYTES: Final = 8


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
        if unknown := [name for name in wanted if not self._is_known(name)]:
            with ThreadPoolExecutor(_HASH_THREADS) as pool:
                self._known.update(zip(unknown, pool.map(self._hashed, unknown), strict=True))
        return {name: self._known[name][1] for name in wanted}

    def _is_known(self, name: str) -> bool:
        return name in self._known and self._known[name][0] == self._parameters[name]._version

    def _hashed(self, name: str) -> tuple[int, str]:
        tensor = self._parameters[name]
        num_writes = tensor._version  # of before: a write meanwhile is seen the next time
        return num_writes, _checksum(tensor)


def _checksum(tensor: Tensor) -> str:
    data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return hashlib.sha256(data.data).digest()[:_HASH_BYTES].hex()
