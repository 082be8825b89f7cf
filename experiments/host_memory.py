"""Host memory of generation servers and training ranks -> the memory that their tasks must request.

    model's files ──► bytes of a version as it is served ──┬──► 2 of them in weights.host_directory, if that is memory
                                                           └──► in the server itself, if it has no GPU
    backend ──► its processes

    a role's parameters ──► its weights, moments ──► / ranks of its mesh ──► the copy of a commit, while it is written

The versions are there once per host, however many servers read them. But pages of /dev/shm count to the step that wrote
them, and whichever server of the host comes first writes: so each one's memory has to have room for them.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from corral.experiments.config.model import ModelConfig, TrainedModelConfig
from corral.experiments.config.rollout import SPARE_STAGING_MB, EngineConfig, WeightsConfig
from corral.experiments.inputs.parameters import (
    ITEM_SIZES,
    adapted_bytes,
    adapter_bytes,
    count_parameters,
    served_bytes,
)
from corral.experiments.worker_specs import Head
from corral.scheduling.parallel import Mesh

EMBEDDED_MB = 400
"""What a worker with the embedded engine takes before it holds any weights, as measured on a CPU."""
SGLANG_PROCESSES_MB = 1400
"""What a server of SGLang takes on a CPU before it holds any weights: three processes that have imported it."""
SGLANG_RANK_MB = 500
"""What each further process of a tensor-parallel server takes."""
VERSIONS_HELD = 2
"""Versions in a host's memory while the next one is written: the present one, and it."""

BESIDE_MB = 8 * 1024
"""For requests and samples under way, and all that is not in the sum of what a worker takes at least."""

_MEMORY_FILE_SYSTEM = Path("/dev/shm")
_MB = 2**20
_STATE_BYTES: Mapping[str, int] = {"adamw": 12, "muon": 8}  # per parameter: itself, and one moment or two, in float32


def server_memory(
    model: ModelConfig, *, weights: WeightsConfig, engine: EngineConfig, backend: str, ranks: int, has_gpus: bool
) -> dict[str, int]:
    """The least that one server takes, in MB by what for; its cache of keys and values is not among it.

    Args:
        model: the policy, of which new versions come, or a judge.
        backend: `hf` or `sglang`.
        ranks: processes that share each layer.
        has_gpus: whether its weights are on GPUs, and not in the host's memory.
    """
    needed = {"its processes": EMBEDDED_MB if backend == "hf" else SGLANG_PROCESSES_MB + SGLANG_RANK_MB * (ranks - 1)}
    needed |= _staged(model, weights) if isinstance(model, TrainedModelConfig) else {}
    counts = count_parameters(model.weights_alone(), head="lm")
    if not has_gpus and counts is not None:
        own = _in_mb(counts.frozen * ITEM_SIZES[engine.dtype])
        is_twice = backend == "hf" and isinstance(model, TrainedModelConfig)
        needed |= {"its weights, old and new in an update": 2 * own} if is_twice else {"its weights": own}
    return needed


def _staged(model: TrainedModelConfig, weights: WeightsConfig) -> dict[str, int]:
    """Host memory in MB for all servers of a host, by purpose."""
    if weights.place == "shared" or not weights.host_directory.is_relative_to(_MEMORY_FILE_SYSTEM):
        return {}
    # Adapters travel with whole versions; where they travel alone, what they are beside is kept.
    beside = 0 if weights.encoding == "lora" else adapter_bytes(model)
    versions = VERSIONS_HELD * _in_mb(served_bytes(model) + beside) + SPARE_STAGING_MB
    staged = {f"{VERSIONS_HELD} versions of the weights in {weights.host_directory}": versions}
    if weights.encoding == "lora":
        staged["the adapted weights of the base beside them"] = _in_mb(adapted_bytes(model))
    return staged


def copied_mb(
    models: Mapping[str, ModelConfig], meshes: Mapping[str, Mesh], *, heads: Mapping[str, Head], published: str
) -> int:
    """The most that a training rank copies for a commit, in MB: its shard of every role that is trained there.

    Args:
        models: by role.
        meshes: by role; empty if nothing is known of them.
        heads: of roles that are no language models.
        published: the role whose weights are on disk by then, and are not copied.
    """
    by_rank: Counter[int] = Counter()
    for role, model in models.items():
        counts = count_parameters(model, head=heads.get(role, "lm"))
        if role not in meshes or counts is None or not isinstance(model, TrainedModelConfig):
            continue
        copied = counts.trained * _STATE_BYTES[model.optimizer.type]
        if role != published:
            copied += (counts.trained + counts.frozen) * ITEM_SIZES[model.dtype]
        for rank in meshes[role].ranks:
            by_rank[rank] += copied // len(meshes[role].ranks)
    return _in_mb(max(by_rank.values(), default=0))


def _in_mb(num_bytes: int) -> int:
    return -(-num_bytes // _MB)


def memory_warning(
    needed_mb: Mapping[str, int], *, of: str, key: str, asked_mb: int, beside_mb: int = 0, otherwise: str = ""
) -> Iterator[str]:
    """Of a worker that asks for less memory than it takes, with the sum and the way out; nothing if it asks for enough.

    Args:
        needed_mb: by what for.
        of: what the worker is.
        key: what says how much it asks for.
        beside_mb: for what is not in the sum.
        otherwise: another way out.
    """
    total = sum(needed_mb.values())
    if asked_mb < total:
        parts = " + ".join(f"{size} MB for {what}" for what, size in needed_mb.items())
        yield (
            f"{key} is {asked_mb} MB, and {of} takes at least {total} MB: {parts}; a cluster that keeps jobs to their "
            f"memory ends it. Raise it to {total + beside_mb}M or more{otherwise}"
        )
