"""Checks of the training side: roles, their ranks and layouts -> ConfigProblems, each with the key to change.

allocation "actor=fsdp:d2c2" ──► backend and layout of each role ──┬── built in this version
                                                                   └── the role's model: it can be divided so
"""

import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from corral.experiments.config.model import ModelConfig, TrainedModelConfig
from corral.experiments.errors import ConfigProblem, display_path
from corral.experiments.inputs.decoder_config import TENSOR_PARALLEL_MODELS, decoder_sizes, megatron_refusals
from corral.experiments.inputs.model_directory import attention_heads, model_type, read_config, transformer_shape
from corral.experiments.inputs.parameters import adapted_layers
from corral.scheduling.allocation import EVERY_ROLE, Allocation
from corral.scheduling.errors import message_and_hint
from corral.scheduling.memory.decoder_sizes import DecoderSizes, tensor_shapes
from corral.scheduling.parallel import Mesh, ParallelDims, stage_layers

# What the megatron backend cannot hold or divide, said at submission: each with the numbers that would do.
#
# allocation "actor=megatron:t2p2c2" ──► model type, heads, layers, vocabulary ──► ConfigProblems
#                                   └──► adapters, optimizer, installation

_PACKAGES = ("megatron.core", "mbridge")


def check_megatron(role: str, model: ModelConfig, dims: ParallelDims) -> Iterator[ConfigProblem]:
    """Mistakes of one role whose backend is megatron; what cannot be read of its model is not checked here.

    Their keys are relative to the model's; those without one are the allocation's.
    """
    name = display_path(model.path)
    config = read_config(model.path)
    for refused in () if config is None else megatron_refusals(config):
        yield ConfigProblem(
            f"the megatron backend does not compute a model with {refused} as transformers does ({role}, {name})",
            "use the fsdp backend",
        )
    if isinstance(model, TrainedModelConfig):
        yield from _of_training(model)
        yield from _of_adapters(model, dims)
    yield from _of_sizes(role, model, dims)
    missing = [package for package in _PACKAGES if not _is_installed(package)]
    if missing:
        yield ConfigProblem(
            f"the allocation has a megatron backend, and {missing[0]} is not installed",
            "run make megatron, or pip install 'corral-rl[megatron]'",
            is_of_running=True,
        )


def _of_training(model: TrainedModelConfig) -> Iterator[ConfigProblem]:
    if model.optimizer.type != "adamw":
        yield ConfigProblem(
            f"the megatron backend trains with adamw, not with {model.optimizer.type}",
            "set adamw, or use fsdp in the allocation",
            path=("optimizer", "type"),
        )


def _of_adapters(model: TrainedModelConfig, dims: ParallelDims) -> Iterator[ConfigProblem]:
    sizes = decoder_sizes(model.path)
    if model.lora is None or sizes is None:
        return
    if sizes.num_experts:
        yield ConfigProblem(
            "adapters beside a mixture of experts are trained by the fsdp backend only",
            "use fsdp in the allocation, or leave lora out",
            path=("lora",),
        )
        return
    adapted = [name for name, _ in adapted_layers(model.lora, tensor_shapes(sizes))]
    with_adapter = {int(name.split(".")[2]) for name in adapted}
    stages = [layers for layers in stage_layers(sizes.num_layers, dims.pp) if layers]
    if with_adapter and (idle := [layers for layers in stages if with_adapter.isdisjoint(layers)]):
        yield ConfigProblem(
            f"p{dims.pp} has a stage with the layers {idle[0][0]} to {idle[0][-1]}, none of which has an "
            "adapter: it would train nothing",
            "name a layer of each stage in lora.targets, or lower p",
            path=("lora", "targets"),
        )


def _of_sizes(role: str, model: ModelConfig, dims: ParallelDims) -> Iterator[ConfigProblem]:
    sizes = decoder_sizes(model.path)
    if sizes is None:
        return
    name = f"{display_path(model.path)} ({role})"
    if dims.ep > 1 and not sizes.num_experts:
        yield ConfigProblem(f"e{dims.ep} spreads experts over ranks, and {name} has none", "leave e out")
        return
    divided = (
        ("t", dims.tp, "key and value heads", sizes.num_key_value_heads),
        ("t", dims.tp, "tokens of the vocabulary", sizes.vocab_size),
        *(("t", dims.tp, f"columns of {what}", columns) for what, columns in _inner_sizes(sizes)),
        heads_left(dims, sizes.num_heads),
        ("e", dims.ep, "experts", sizes.num_experts),
    )
    yield from check_divisible(divided, of=name)
    if not all(stage_layers(sizes.num_layers, dims.pp)):
        able = [str(p) for p in range(1, 2 * dims.pp + 1) if all(stage_layers(sizes.num_layers, p))]
        yield ConfigProblem(
            f"p{dims.pp} leaves a stage without one of the {sizes.num_layers} layers of {name}",
            f"p may be {', '.join(able)}",
        )


def heads_left(dims: ParallelDims, num_heads: int) -> tuple[str, int, str, int]:
    """The attention heads that context-parallel ranks share, for `check_divisible`."""
    left_by_t = f" left by t{dims.tp}" if dims.tp > 1 else ""
    return "c", dims.cp, f"attention heads{left_by_t}", num_heads // dims.tp


def check_divisible(divided: Iterable[tuple[str, int, str, int]], *, of: str) -> Iterator[ConfigProblem]:
    """Heads, rows, columns and experts that ranks cannot share equally.

    Args:
        divided: letter of the allocation, its number, what is divided by it, and how many of these there are.
        of: the model and its role.
    """
    for letter, size, what, number in divided:
        if number % size:
            nearest = [str(n) for n in range(1, number + 1) if number % n == 0 and n <= 2 * size]
            yield ConfigProblem(
                f"{letter}{size} cannot divide the {number} {what} of {of}", f"{letter} may be {', '.join(nearest)}"
            )


def _inner_sizes(sizes: DecoderSizes) -> Iterator[tuple[str, int]]:
    """Inner sizes of layers, by name, that tensor-parallel ranks share."""
    if len(sizes.sparse_layers) < sizes.num_layers:
        yield "the MLP", sizes.intermediate_size
    if sizes.sparse_layers:
        yield "an expert", sizes.expert_size
    if sizes.shared_expert_size:
        yield "the shared expert", sizes.shared_expert_size


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # its parent is missing
        return False


def check_training_side(allocation: Allocation, *, roles: tuple[str, ...]) -> Iterator[ConfigProblem]:
    """Roles that there are not, and what this version cannot do of who trains."""
    if not allocation.training:
        yield ConfigProblem("the allocation has no training side", "add one: fsdp:d1")
        return
    named = ", ".join(roles)
    for group in allocation.training:
        engine = group.engine
        for role in group.roles:
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
        message, hint = message_and_hint(error)
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
        yield from check_divisible([*shared, heads_left(dims, queries)], of=name)
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
