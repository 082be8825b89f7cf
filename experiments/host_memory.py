"""What a generation server takes of its host's memory -> what its task has to ask for.

    model's files ──► bytes of a version as it is served ──┬──► 2 of them in weights.host_directory, if that is memory
                                                           └──► in the server itself, if it has no GPU
    backend ──► its processes

The versions are there once per host, however many servers read them. But pages of /dev/shm count to the step that wrote
them, and whichever server of the host comes first writes: so each one's memory has to have room for them.
"""

from collections.abc import Mapping
from pathlib import Path

from corral.experiments.config.model import TrainedModelConfig
from corral.experiments.config.rollout import SPARE_STAGING_MB, EngineConfig, WeightsConfig
from corral.experiments.inputs.parameters import (
    ITEM_SIZES,
    adapted_bytes,
    adapter_bytes,
    count_parameters,
    served_bytes,
)

EMBEDDED_MB = 400
"""What a worker with the embedded engine takes before it holds any weights, as measured on a CPU."""
SGLANG_PROCESSES_MB = 1400
"""What a server of SGLang takes on a CPU before it holds any weights: three processes that have imported it."""
SGLANG_RANK_MB = 500
"""What each further process of a tensor-parallel server takes."""
VERSIONS_HELD = 2
"""Versions in a host's memory while the next one is written: the present one, and it."""

_MEMORY_FILE_SYSTEM = Path("/dev/shm")
_MB = 2**20


def server_memory(
    model: TrainedModelConfig, *, weights: WeightsConfig, engine: EngineConfig, backend: str, ranks: int, has_gpus: bool
) -> dict[str, int]:
    """The least that one server takes, in MB by what for; its cache of keys and values is not among it.

    Args:
        model: the policy.
        backend: `hf` or `sglang`.
        ranks: processes that share each layer.
        has_gpus: whether its weights are on GPUs, and not in the host's memory.
    """
    needed = {"its processes": EMBEDDED_MB if backend == "hf" else SGLANG_PROCESSES_MB + SGLANG_RANK_MB * (ranks - 1)}
    needed |= _staged(model, weights)
    counts = count_parameters(model.weights_alone(), head="lm")
    if not has_gpus and counts is not None:
        own = _in_mb(counts.frozen * ITEM_SIZES[engine.dtype])
        needed |= {"its weights, old and new in an update": 2 * own} if backend == "hf" else {"its weights": own}
    return needed


def _staged(model: TrainedModelConfig, weights: WeightsConfig) -> dict[str, int]:
    """What lies in the host's memory for all of its servers."""
    if weights.transport == "disk" or not weights.host_directory.is_relative_to(_MEMORY_FILE_SYSTEM):
        return {}
    # Adapters travel with whole versions; where they travel alone, what they are beside is kept.
    beside = 0 if weights.transport == "lora" else adapter_bytes(model)
    versions = VERSIONS_HELD * _in_mb(served_bytes(model) + beside) + SPARE_STAGING_MB
    staged = {f"{VERSIONS_HELD} versions of the weights in {weights.host_directory}": versions}
    if weights.transport == "lora":
        staged["the adapted weights of the base beside them"] = _in_mb(adapted_bytes(model))
    return staged


def _in_mb(num_bytes: int) -> int:
    return -(-num_bytes // _MB)


def memory_warning(needed_mb: Mapping[str, int], *, key: str, asked_mb: int, weights: WeightsConfig) -> str | None:
    """Of a server that asks for less memory than it takes, with the sum and the way out.

    Args:
        needed_mb: by what for.
        key: what says how much it asks for.
    """
    total = sum(needed_mb.values())
    if asked_mb >= total:
        return None
    parts = " + ".join(f"{size} MB for {what}" for what, size in needed_mb.items())
    otherwise = (
        ""
        if weights.transport == "disk"
        else ", or keep no version in memory: by weights.transport: disk, or a weights.host_directory on a host's disk"
    )
    return (
        f"{key} is {asked_mb} MB, and a server takes at least {total} MB: {parts}; a cluster that keeps jobs to their "
        f"memory ends it. Raise it to {total}M or more{otherwise}"
    )
