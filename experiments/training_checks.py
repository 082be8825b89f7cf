"""Checks of the training side: who trains which role, in which layout -> ConfigProblems, each with the key to change.

allocation "actor=fsdp:d2c2" ──► backend and layout of each role ──┬── built in this version
                                                                   └── the role's model: heads that can be divided so
"""

from collections.abc import Iterator, Mapping

from corral.experiments.config.model import ModelConfig
from corral.experiments.errors import ConfigProblem, display_path, split_remedy
from corral.experiments.inputs.model_directory import attention_heads
from corral.scheduling.allocation import EVERY_ROLE, Allocation
from corral.scheduling.mesh import Mesh
from corral.scheduling.parallel import ParallelDims

BUILT_TRAINING_BACKENDS = ("fsdp",)

_ALLOCATION = ("allocation",)


def check_training_side(allocation: Allocation, *, roles: tuple[str, ...]) -> Iterator[ConfigProblem]:
    """Roles that there are not, and what this version cannot do of who trains."""
    if not allocation.training:
        yield ConfigProblem(message="the allocation has no training side", hint="add one: fsdp:d1")
        return
    named = ", ".join(roles)
    for share in allocation.training:
        engine = share.engine
        for role in share.roles:
            if role != EVERY_ROLE and role not in roles:
                yield ConfigProblem(
                    message=f"the allocation names role {role!r}; this experiment has {named}", hint="remove it"
                )
        if engine.backend not in BUILT_TRAINING_BACKENDS:
            message = f"training backend {engine.backend!r} is not built yet in this version"
            yield ConfigProblem(message=message, hint=f"use the PyTorch-native backend: fsdp:d{engine.dims.world_size}")
        if engine.dims.tp > 1 or engine.dims.pp > 1:
            message = f"tensor and pipeline parallel training ({engine.dims}) are not built yet in this version"
            yield ConfigProblem(message=message, hint=f"use pure data parallelism: fsdp:d{engine.dims.world_size}")
    try:
        allocation.meshes(roles)
    except ValueError as error:
        message, hint = split_remedy(str(error))
        yield ConfigProblem(message=message, hint=hint)


def check_layouts(meshes: Mapping[str, Mesh], models: Mapping[str, ModelConfig]) -> Iterator[ConfigProblem]:
    """Models that the layouts of their roles cannot divide.

    Args:
        meshes: the ranks of each role.
        models: by role, but for replicas, which have that of another one; what cannot be read of a model is not checked
            here.
    """
    for role, model in models.items():
        heads, mesh = attention_heads(model.path), meshes[role]
        if heads is not None and not _can_share(heads[0], mesh.dims):
            fitting = [f"c{size}" for size in range(1, heads[0] + 1) if heads[0] % size == 0]
            yield ConfigProblem(
                message=f"{mesh.dims.cp} context-parallel ranks cannot share the {heads[0]} attention heads of "
                f"{display_path(model.path)} ({role}, {mesh.dims.short}) equally",
                hint=f"{' or '.join(fitting)} {'divide' if len(fitting) > 1 else 'divides'} them",
                path=_ALLOCATION,
            )


def _can_share(queries: int, dims: ParallelDims) -> bool:
    """Each rank computes as many heads of queries; keys are repeated as far as they must be."""
    return queries % dims.cp == 0
