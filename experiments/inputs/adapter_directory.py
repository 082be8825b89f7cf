"""An adapter on disk in peft's format, before it is started from: directory, role's settings -> what does not fit.

adapter_config.json and the header of adapter_model.safetensors are read; no tensor is.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from corral.experiments.config.model import LoraConfig
from corral.experiments.errors import ConfigProblem, display_path, show_value
from corral.experiments.inputs.model_directory import Shapes, read_object, weight_shapes

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
