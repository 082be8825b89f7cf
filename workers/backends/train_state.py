"""What training resumes from: parameters, AdamW's moments and the step, as safetensors and one JSON file.

    train_state.json                       step, seed, number of ranks
    train_state-00000-of-00002.safetensors parameter.<name>, exp_avg.<name>, exp_avg_sq.<name>, step.<name>: rank 0
    train_state-00001-of-00002.safetensors                        ... rank 1

Parameters are cut along dimension 0, so a file's rows concatenated in rank order are the whole tensor, and another
number of ranks can cut them anew. There is no random state to keep: every step seeds itself from (seed, step).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from corral.workers.backends.sharding import cut_like, local

MANIFEST = "train_state.json"
_FORMAT = 1
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainStateHeader:
    """The JSON file beside the tensors."""

    step: int
    seed: int
    num_ranks: int
    format: int = _FORMAT


def shard_name(rank: int, num_ranks: int) -> str:
    """File of one rank's rows."""
    return f"train_state-{rank:05d}-of-{num_ranks:05d}.safetensors"


def write_shard(
    directory: Path,
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    *,
    rank: int,
    num_ranks: int,
) -> None:
    """Write this rank's rows of every parameter and moment."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        tensors[f"parameter.{name}"] = local(parameter)
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{key}.{name}"] = local(value)
    save_file({name: t.contiguous().cpu() for name, t in tensors.items()}, directory / shard_name(rank, num_ranks))


def write_header(directory: Path, header: TrainStateHeader) -> None:
    """Write the JSON file; the shards must all be there before."""
    (directory / MANIFEST).write_text(json.dumps(asdict(header), indent=1) + "\n", encoding="utf-8")


def read_header(directory: Path) -> TrainStateHeader:
    """Read the JSON file.

    Raises:
        ValueError: if it is of another format than this version of corral writes.
    """
    fields: dict[str, Any] = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
    if fields.get("format") != _FORMAT:
        raise ValueError(f"{directory / MANIFEST} has format {fields.get('format')}; this version reads {_FORMAT}")
    return TrainStateHeader(**fields)


@torch.no_grad()
def read_shards(
    directory: Path,
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    *,
    num_ranks: int,
    on_progress: Callable[[], None] = lambda: None,
) -> None:
    """Load parameters and moments that `num_ranks` ranks wrote; each rank keeps the rows it holds now.

    `on_progress` is called after every parameter.

    Raises:
        ValueError: if the files' parameters are not exactly this model's.
    """
    with ExitStack() as stack:
        paths = [directory / shard_name(rank, num_ranks) for rank in range(num_ranks)]
        shards = [stack.enter_context(safe_open(path, framework="pt")) for path in paths]
        stored = set(shards[0].keys())
        _check_names(
            directory, {n.removeprefix("parameter.") for n in stored if n.startswith("parameter.")}, parameters
        )
        for name, parameter in parameters.items():
            on_progress()
            whole = _whole(shards, f"parameter.{name}", parameter)
            local(parameter).copy_(local(whole))
            if f"step.{name}" not in stored:
                optimizer.state.pop(parameter, None)
                continue
            state: dict[str, Tensor] = {key: _whole(shards, f"{key}.{name}", parameter) for key in _MOMENTS}
            optimizer.state[parameter] = {"step": shards[0].get_tensor(f"step.{name}"), **state}


def _whole(shards: Sequence[Any], name: str, like: Tensor) -> Tensor:
    """The tensor of all shards' rows, cut as `like` is."""
    full = torch.cat([shard.get_tensor(name) for shard in shards]) if len(shards) > 1 else shards[0].get_tensor(name)
    try:
        return cut_like(full, like)
    except ValueError as error:
        raise ValueError(f"stored {name} is of another model: {error}") from error


def _check_names(directory: Path, stored: set[str], parameters: Mapping[str, nn.Parameter]) -> None:
    missing, unknown = sorted(parameters.keys() - stored), sorted(stored - parameters.keys())
    if missing or unknown:
        raise ValueError(
            f"training state in {directory} is of another model: {len(missing)} parameters are missing there "
            f"{missing[:3]}, {len(unknown)} are unknown here {unknown[:3]}"
        )
