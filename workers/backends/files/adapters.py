"""An adapter as peft stores it, so that peft, SGLang and others load it as it is.

    model's name                               tensor in adapter_model.safetensors
    model.layers.0.self_attn.q_proj.lora_A.weight  ──►  base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight
    score.weight, where it is trained              ──►  base_model.model.score.weight

    adapter_config.json: rank, alpha, which layers, beside which model

The two files lie in a folder of their own within a version of the weights: whoever loads a model takes every file of
its folder that ends in safetensors, and transformers takes a model with adapter_config.json for the adapter alone.
"""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from corral.experiments.config.model import LoraConfig
from corral.workers.backends.sharding import each_once
from corral.workers.checkpoint.low_rank import ADAPTER_PREFIX, ADAPTER_TENSORS

_TASKS: Final = {"lm": "CAUSAL_LM", "value": "TOKEN_CLS", "scalar": "SEQ_CLS"}


def adapter_config(layers: Collection[str], config: LoraConfig, *, base: Path, head: str) -> bytes:
    """The content of adapter_config.json, beside `adapter_model.safetensors` in the folder of an adapter.

    Args:
        layers: names of those that have adapters.
        base: directory of the model without them.
    """
    content = {
        "peft_type": "LORA",
        "task_type": _TASKS[head],
        "base_model_name_or_path": str(base),
        "r": config.rank,
        "lora_alpha": int(config.alpha) if config.alpha.is_integer() else config.alpha,
        "lora_dropout": config.dropout,
        "target_modules": sorted(config.targets or {layer.rpartition(".")[2] for layer in layers}),
        "modules_to_save": None if head == "lm" else ["score"],
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
    }
    return json.dumps(content, indent=2).encode()


@torch.no_grad()
def read_adapter(directory: Path, parameters: Mapping[str, Tensor]) -> None:
    """Start from an adapter in peft's format; its rank and alpha were compared at submission.

    Args:
        parameters: all that are trained, whole; they are overwritten.

    Raises:
        ValueError: if its tensors are not exactly these, naming one that differs.
    """
    path = directory / ADAPTER_TENSORS
    wanted = {f"{ADAPTER_PREFIX}{name}": parameter for name, parameter in parameters.items()}
    shapes = {name: tuple(parameter.shape) for name, parameter in wanted.items()}
    try:
        with safe_open(path, framework="pt") as file:
            stored = ((name, file.get_tensor(name)) for name in file.keys())
            for name, tensor in each_once(shapes, stored, eta=1.0):
                wanted[name].copy_(tensor)
    except (OSError, SafetensorError, ValueError) as error:
        raise ValueError(
            f"cannot start from the adapter {path}: {error}; give a directory that peft has written beside this model, "
            "its rank, and in lora.targets the layers that it adapts"
        ) from error
