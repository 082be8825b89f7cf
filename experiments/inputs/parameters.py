"""Shapes of a model's tensors, and what its role trains of them -> how many numbers are trained, and how many stay.

Headers of files are read, and no tensor. What is adapted in memory is decided there, by the modules; names of files and
of modules are the same but for experts, which are no linear layers, and are left out.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from corral.experiments.config.model import LoraConfig, ModelConfig, TrainedModelConfig
from corral.experiments.errors import ConfigProblem, closest, display_path, show_value
from corral.experiments.inputs.decoder_config import decoder_sizes
from corral.experiments.inputs.model_directory import Shapes, has_tied_output, read_object, weight_shapes
from corral.experiments.worker_specs import Head, ParameterCounts
from corral.scheduling.memory.decoder_sizes import tensor_shapes

_WEIGHT = ".weight"
_OUTPUT = "lm_head.weight"
_SCORE = "score.weight"
_EMBEDDINGS = "embed_tokens.weight"
_COMPANIONS = (".json", ".txt", ".model", ".jinja")
ITEM_SIZES = {"float32": 4, "tf32": 4, "bfloat16": 2}
"""Bytes of a number, by its type."""
_IN_A_LAYER = re.compile(r"(?:^|\.)layers\.\d+\.")
_NOT_LINEAR = (".experts.", ".gate.weight")  # of mixtures of experts: computed together, or by the router


# An adapter on disk in peft's format, before it is started from: directory, role's settings -> what does not fit.
#
# adapter_config.json and the header of adapter_model.safetensors are read; no tensor is.

_CONFIG = "adapter_config.json"
_REMEDY = "give a directory that peft's save_pretrained has written"
_PREFIX = "base_model.model."
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "use_rslora": (None, False),
    "use_dora": (None, False),
    "fan_in_fan_out": (None, False),
    "bias": (None, "none"),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
}
"""What an adapter's settings must be for W0 + (B A) alpha / rank to be what it means; None where it does not say."""


def check_adapter(directory: Path, lora: LoraConfig, adapted: Shapes) -> Iterator[ConfigProblem]:
    """Why an adapter cannot be started from.

    Args:
        adapted: [out, in] of each layer that the role adapts, by name.
    """
    name = display_path(directory)
    config, problems = read_object(directory / _CONFIG, missing=_REMEDY, what="adapter", remedy=_REMEDY)
    yield from problems
    if config is not None:
        yield from _setting_problems(name, config, lora)
        yield from _tensor_problems(name, weight_shapes(directory), lora, adapted)


def _setting_problems(name: str, config: Mapping[str, Any], lora: LoraConfig) -> Iterator[ConfigProblem]:
    for key, stored_key, own in (("rank", "r", lora.rank), ("alpha", "lora_alpha", lora.alpha)):
        if (stored := config.get(stored_key)) != own:
            message = f"adapter {name} has {stored_key}: {show_value(stored)}, and lora.{key} is {own:g}"
            yield ConfigProblem(message, f"set lora.{key} to what the adapter has")
    for key, plain in _PLAIN.items():
        if config.get(key) not in plain:
            yield ConfigProblem(
                f"adapter {name} has {key}: {show_value(config.get(key))}, which is not built in this version",
                "merge it into its model with peft's merge_and_unload, and start from that with a new adapter",
            )


def _tensor_problems(name: str, shapes: Shapes, lora: LoraConfig, adapted: Shapes) -> Iterator[ConfigProblem]:
    """The first tensor that is missing, unknown or of another shape."""
    if not shapes:
        message = f"adapter {name} has no adapter_model.safetensors that can be read"
        yield ConfigProblem(message, "save it with safetensors, or copy it again")
        return
    wanted = {
        f"{_PREFIX}{layer}.{part}.weight": shape
        for layer, (rows, columns) in adapted.items()
        for part, shape in (("lora_A", (lora.rank, columns)), ("lora_B", (rows, lora.rank)))
    }
    stored = {key: shape for key, shape in shapes.items() if not key.startswith(f"{_PREFIX}score.")}
    for key in sorted(wanted.keys() | stored.keys()):
        if wanted.get(key) != stored.get(key):
            expected, got = (list(shape) if shape else "no such tensor" for shape in (wanted.get(key), stored.get(key)))
            yield ConfigProblem(
                f"adapter {name} does not fit: {key} is expected as {expected}, and there is {got}",
                "let lora.targets name the layers that it adapts, beside the model that it was trained beside",
            )
            return


def count_parameters(model: ModelConfig, *, head: Head) -> ParameterCounts | None:
    """What a role trains of a model, and what it leaves; None if the files do not say."""
    stored = dict(weight_shapes(model.path)) or _promised_shapes(model.path)
    if not stored:
        return None
    if head != "lm":
        hidden = next((shape[-1] for name, shape in stored.items() if name.endswith(_EMBEDDINGS)), 0)
        stored.setdefault(_SCORE, (1, hidden))
    if head != "lm" or has_tied_output(model.path):
        stored.pop(_OUTPUT, None)
    in_all = sum(math.prod(shape) for shape in stored.values())
    if not isinstance(model, TrainedModelConfig):
        return ParameterCounts(trained=0, frozen=in_all)
    if model.lora is None:
        return ParameterCounts(trained=in_all, frozen=0)
    score = math.prod(stored[_SCORE]) if head != "lm" else 0
    adapters = sum(model.lora.rank * sum(shape) for _, shape in adapted_layers(model.lora, stored))
    return ParameterCounts(trained=adapters + score, frozen=in_all - score)


def check_lora(model: ModelConfig) -> Iterator[ConfigProblem]:
    """What is wrong with a role's adapters, if it has any; the keys of the problems are relative to the role's."""
    lora = model.lora if isinstance(model, TrainedModelConfig) else None
    if lora is None or not (shapes := weight_shapes(model.path)):
        return
    layers = {name for name, _ in _linear_layers(shapes)}
    for target in lora.targets or ():
        if not any(lora.model_copy(update={"targets": (target,)}).adapts(layer) for layer in layers):
            known = sorted({layer.rpartition(".")[2] for layer in layers})
            near = closest(target, known)
            yield ConfigProblem(
                f"no linear layer of model {display_path(model.path)} has a name that ends in {target!r}",
                f"did you mean {near!r}?" if near else f"its layers have {', '.join(known)}",
                path=("lora", "targets"),
            )
    if lora.adapter is not None:
        adapted = dict(adapted_layers(lora, shapes))
        for problem in check_adapter(lora.adapter, lora, adapted):
            yield replace(problem, path=("lora", "adapter"))


def served_bytes(model: ModelConfig) -> int:
    """Of a version of a model as it is written and served: its weights in `dtype`, and the small files beside them."""
    counts = count_parameters(model.weights_alone(), head="lm")
    small = (path for path in model.path.glob("*") if path.suffix in _COMPANIONS)
    return (0 if counts is None else counts.frozen * ITEM_SIZES[model.dtype]) + sum(map(_size, small))


def adapter_bytes(model: TrainedModelConfig) -> int:
    """Of the adapter in a version, in float32; 0 without."""
    counts = count_parameters(model, head="lm")
    return 0 if model.lora is None or counts is None else counts.trained * ITEM_SIZES["float32"]


def adapted_bytes(model: TrainedModelConfig) -> int:
    """Of the weights that adapters are beside, as the model's files have them: in their type on the average."""
    if model.lora is None:
        return 0
    stored = weight_shapes(model.path)
    shapes = stored or _promised_shapes(model.path)
    numbers = sum(math.prod(shape) for _, shape in adapted_layers(model.lora, shapes))
    if not stored:
        return numbers * ITEM_SIZES[model.dtype]
    in_all = sum(math.prod(shape) for shape in stored.values())
    return numbers * sum(map(_size, model.path.glob("*.safetensors"))) // max(1, in_all)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0  # the directory's error is reported elsewhere


def adapted_layers(lora: LoraConfig, shapes: Shapes) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and [out, in] of each linear layer that has an adapter."""
    return ((name, shape) for name, shape in _linear_layers(shapes) if lora.adapts(name))


def _promised_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """What config.json says that the weights will be, where there are none yet; nothing of an unknown type."""
    sizes = decoder_sizes(directory)
    return {} if sizes is None else tensor_shapes(sizes)


def _linear_layers(shapes: Shapes) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and [out, in] of each linear layer within the model's layers."""
    for name, shape in shapes.items():
        is_linear = name.endswith(_WEIGHT) and len(shape) == 2 and not any(part in name for part in _NOT_LINEAR)
        if is_linear and _IN_A_LAYER.search(name):
            yield name.removesuffix(_WEIGHT), shape
