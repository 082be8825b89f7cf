"""What the megatron backend cannot hold or divide, said at submission: each with the numbers that would do.

allocation "actor=megatron:t2p2c2" ──► model type, heads, layers, vocabulary ──► ConfigProblems
                                  └──► adapters, optimizer, installation
"""

import importlib.util
from collections.abc import Iterable, Iterator

from corral.experiments.config.model import ModelConfig, TrainedModelConfig
from corral.experiments.errors import ConfigProblem, display_path
from corral.experiments.inputs.decoder_config import decoder_sizes
from corral.experiments.inputs.model_directory import read_config
from corral.experiments.inputs.model_kinds import megatron_refusals
from corral.experiments.inputs.parameters import adapted_layers
from corral.scheduling.memory.decoder_sizes import DecoderSizes, tensor_shapes
from corral.scheduling.parallel import ParallelDims, stage_layers

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
    yield from check_shares(divided, of=name)
    if not all(stage_layers(sizes.num_layers, dims.pp)):
        able = [str(p) for p in range(1, 2 * dims.pp + 1) if all(stage_layers(sizes.num_layers, p))]
        yield ConfigProblem(
            f"p{dims.pp} leaves a stage without one of the {sizes.num_layers} layers of {name}",
            f"p may be {', '.join(able)}",
        )


def heads_left(dims: ParallelDims, num_heads: int) -> tuple[str, int, str, int]:
    """What context-parallel ranks share, for `check_shares`."""
    left_by_t = f" left by t{dims.tp}" if dims.tp > 1 else ""
    return "c", dims.cp, f"attention heads{left_by_t}", num_heads // dims.tp


def check_shares(divided: Iterable[tuple[str, int, str, int]], *, of: str) -> Iterator[ConfigProblem]:
    """Things that ranks cannot share equally.

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
    """What ranks of t share of the layers that there are."""
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
