"""Checks of the training side: who trains which role, in which layout -> ConfigProblems, each with the key to change.

allocation "actor=fsdp:d2c2" ──► backend and layout of each role ──┬── built in this version
                                                                   └── the role's model: it can be divided so
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from corral.experiments.checks.megatron import check_megatron, check_shares, heads_left
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


WITHOUT_PACKED_ATTENTION = frozenset(
    "big_bird bigbird_pegasus bloom codegen cpmant deepseek_v4 falcon_mamba flint gemma2 git got_ocr2 gpt_neo "
    "gpt_neox_japanese gpt_oss gptj granite_swa granitemoe_swa hy_v4 inkling2_text mamba mamba2 megatron-bert "
    "mimo_v2_flash mpt mvp openai-gpt prophetnet reformer rembert roformer rwkv trocr vaultgemma xglm xlm xlnet "
    "xlstm".split()
)
"""Types of models whose code in transformers takes no other attention than its own (`_supports_sdpa`)."""


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
    """Heads and inner sizes of layers that the ranks cannot share equally, and layers that cannot be cut."""
    name = f"{display_path(model.path)} ({role}, {dims.short})"
    if (heads := attention_heads(model.path)) is not None:
        queries, keys = heads
        shape = transformer_shape(model.path)
        inner = () if shape is None else (("t", dims.tp, "columns of the MLP", shape.intermediate_size),)
        shared = (("t", dims.tp, "attention heads", queries), ("t", dims.tp, "key and value heads", keys), *inner)
        yield from check_shares([*shared, heads_left(dims, queries)], of=name)
    kind = model_type(model.path)
    if kind in WITHOUT_PACKED_ATTENTION:
        yield ConfigProblem(
            f"{name} is a {kind}, and transformers cannot compute the attention of that over packed sequences, as the "
            "fsdp backend does",
            "take a model of another type, such as llama, qwen3 or gemma3",
            path=("path",),
        )
    if dims.tp > 1 and kind is not None and kind not in TENSOR_PARALLEL_MODELS:
        yield ConfigProblem(
            f"{name} is a {kind}, whose layers tensor-parallel ranks cannot share",
            f"use d and c alone; t works with {', '.join(TENSOR_PARALLEL_MODELS)}",
        )


def dtype_warnings(models: Mapping[str, ModelConfig]) -> Iterator[str]:
    """Of models, by role, whose products take GPUs far longer than they have to."""
    slow = [f"{role}.dtype" for role, model in models.items() if model.dtype == "float32"]
    if slow:
        yield (
            f"products in float32 ({', '.join(slow)}) take a GPU about 15 times as long as in bfloat16 (A100: 19.5 and "
            "312 TFLOP/s), and activations twice the memory; set dtype: bfloat16, or tf32 for float32 weights"
        )
