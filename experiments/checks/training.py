"""Checks of the training side: who trains which role, in which layout -> ConfigProblems, each with the key to change.

allocation "actor=fsdp:d2c2" ──► backend and layout of each role ──┬── built in this version
                                                                   └── the role's model: it can be divided so
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from corral.experiments.checks.megatron import check_megatron
from corral.experiments.config.model import ModelConfig, TrainedModelConfig
from corral.experiments.errors import ConfigProblem, display_path, split_remedy
from corral.experiments.inputs.model_directory import attention_heads, model_type, transformer_shape
from corral.experiments.inputs.model_kinds import TENSOR_PARALLEL_MODELS
from corral.scheduling.allocation import EVERY_ROLE, Allocation
from corral.scheduling.mesh import Mesh
from corral.scheduling.parallel import ParallelDims


def check_training_side(allocation: Allocation, *, roles: tuple[str, ...]) -> Iterator[ConfigProblem]:
    """Roles that there are not, and what this version cannot do of who trains."""
    if not allocation.training:
        yield ConfigProblem("the allocation has no training side", "add one: fsdp:d1")
        return
    named = ", ".join(roles)
    for share in allocation.training:
        engine = share.engine
        for role in share.roles:
            if role != EVERY_ROLE and role not in roles:
                yield ConfigProblem(f"the allocation names role {role!r}; this experiment has {named}", "remove it")
        if engine.dims.pp > 1 and engine.backend != "megatron":
            message = f"the {engine.backend} backend has no pipeline parallel training ({engine.dims})"
            yield ConfigProblem(message, f"use d, t and c, or megatron:{engine.dims.short}")
        if engine.dims.ep > 1 and engine.backend != "megatron":
            message = f"the {engine.backend} backend does not spread experts over ranks ({engine.dims})"
            yield ConfigProblem(
                message, f"leave e out: d cuts experts as all else; or use megatron:{engine.dims.short}"
            )
    try:
        allocation.meshes(roles)
    except ValueError as error:
        message, hint = split_remedy(str(error))
        yield ConfigProblem(message, hint)


def check_layouts(
    allocation: Allocation,
    meshes: Mapping[str, Mesh],
    models: Mapping[str, ModelConfig],
    *,
    key_of: Callable[[str], str] = str,
) -> Iterator[ConfigProblem]:
    """Models that the layouts of their roles cannot divide.

    Args:
        meshes: the ranks of each role.
        models: by role, but for replicas, which have that of another one; what cannot be read of a model is not checked
            here.
        key_of: what the file calls the model of a role.
    """
    for role, model in models.items():
        dims, backend = meshes[role].dims, allocation.training_of(role).backend
        found = [
            *_of_offload(role, model, backend=backend),
            *(check_megatron(role, model, dims) if backend == "megatron" else _of_fsdp(role, model, dims)),
        ]
        for problem in found:
            yield replace(problem, path=(key_of(role), *problem.path) if problem.path else ("allocation",))


def _of_offload(role: str, model: ModelConfig, *, backend: str) -> Iterator[ConfigProblem]:
    """A state of an optimizer that is to lie in host memory, and is not there, or not the fsdp backend's."""
    if model.offload != "optimizer":
        return
    if not isinstance(model, TrainedModelConfig):
        yield ConfigProblem(
            f"{role} is not trained, and has no optimizer whose state could lie in host memory",
            "set none or between_calls",
            path=("offload",),
        )
    elif backend != "fsdp":
        yield ConfigProblem(
            f"the {backend} backend keeps the state of its optimizer on the device while it trains",
            "use fsdp in the allocation, or set none or between_calls",
            path=("offload",),
        )


def _of_fsdp(role: str, model: ModelConfig, dims: ParallelDims) -> Iterator[ConfigProblem]:
    for problem in (*_of_sizes(model, dims), *_of_kind(model, dims)):
        yield replace(problem, message=f"{problem.message} ({role}, {dims.short})")


def _of_sizes(model: ModelConfig, dims: ParallelDims) -> Iterator[ConfigProblem]:
    """Heads and inner sizes of layers that the ranks cannot share equally."""
    heads, shape = attention_heads(model.path), transformer_shape(model.path)
    if heads is None:
        return
    name = display_path(model.path)
    queries, keys = heads
    shared_by_t = math.gcd(queries, keys, 0 if shape is None else shape.intermediate_size)
    if shared_by_t % dims.tp:
        inner = "" if shape is None else f", and an inner size of {shape.intermediate_size},"
        yield ConfigProblem(
            f"{dims.tp} tensor-parallel ranks cannot share the {queries} attention heads ({keys} of keys and "
            f"values){inner} of {name} equally",
            which_divide("t", shared_by_t),
        )
    elif queries // dims.tp % dims.cp:
        left = f"the {queries // dims.tp} that t{dims.tp} leaves of " if dims.tp > 1 else ""
        yield ConfigProblem(
            f"{dims.cp} context-parallel ranks cannot share {left}the {queries} attention heads of {name} equally",
            which_divide("c", queries // dims.tp),
        )


def _of_kind(model: ModelConfig, dims: ParallelDims) -> Iterator[ConfigProblem]:
    """Models whose layers cannot be cut."""
    if dims.tp == 1:
        return
    kind = model_type(model.path)
    if kind is not None and kind not in TENSOR_PARALLEL_MODELS:
        yield ConfigProblem(
            f"model {display_path(model.path)} is a {kind}, whose layers tensor-parallel ranks cannot share",
            f"use d and c alone; t works with {', '.join(TENSOR_PARALLEL_MODELS)}",
        )


def which_divide(letter: str, number: int) -> str:
    fitting = [f"{letter}{size}" for size in range(1, number + 1) if number % size == 0]
    return f"{' or '.join(fitting)} {'divide' if len(fitting) > 1 else 'divides'} them"


def dtype_warnings(models: Mapping[str, ModelConfig]) -> Iterator[str]:
    """Of models, by role, whose products take GPUs far longer than they have to."""
    slow = [f"{role}.dtype" for role, model in models.items() if model.dtype == "float32"]
    if slow:
        yield (
            f"products in float32 ({', '.join(slow)}) take a GPU about 15 times as long as in bfloat16 (A100: 19.5 and "
            "312 TFLOP/s), and activations twice the memory; set dtype: bfloat16, or tf32 for float32 weights"
        )
