"""Low-rank adapters beside weights that stay: what is trained of a model, and the weights that it amounts to.

    x ─┬─► W0 x ──────────────────────────────┬─► + ──► y        W0: frozen, held in the type of the products
       └─► dropout ─► A [r, in] ─► B [out, r] ─► alpha / r       A, B: float32, trained; B begins at zero

    W0, A, B ── merged_weight ──► W0 + (B A) alpha / r           made anew from W0 each time, kept nowhere

Adapters come into the model before it is cut over the ranks: FSDP2 reduces the gradients of the parameters that it has
cut, and would leave those of an adapter that comes later as each rank has them, without a word. W0 is written by
nothing, so that no sum of roundings grows in it: after any number of exports it is what the base model's files say.
"""

import json
import math
import zlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from corral.experiments.config.model import LoraConfig
from corral.workers.backends.low_precision import CastingLinear
from corral.workers.backends.sharding import each_once, is_cut_by_tensor, layers_of, local, start_of, whole
from corral.workers.checkpoint.low_rank import ADAPTER_PREFIX, ADAPTER_TENSORS, LowRank

_ADAPTER_PARTS: Final = (".lora_A.weight", ".lora_B.weight")
_SUM_MODULUS: Final = 2**32  # sums of as many as 2**20 ranks are whole numbers of a float64


class AdaptedLinear(CastingLinear):
    """A linear layer with its frozen weight, and an adapter beside it: `lora_A` and `lora_B`."""

    def __init__(self, base: nn.Linear, config: LoraConfig) -> None:
        """Take over the layer's own parameters, and freeze them. B is zero, so that nothing changes before a step."""
        super().__init__(base.in_features, base.out_features, bias=base.bias is not None, device="meta")
        self.weight, self.bias = base.weight.requires_grad_(False), base.bias
        with torch.device("meta"):  # torch would draw values of its own
            self.lora_A = nn.Linear(base.in_features, config.rank, bias=False).to_empty(device=base.weight.device)
            self.lora_B = nn.Linear(config.rank, base.out_features, bias=False).to_empty(device=base.weight.device)
        nn.init.zeros_(self.lora_B.weight)
        self._scale = config.scale
        self._dropout = config.dropout

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        return super().forward(input) + self.adapted(input)

    def adapted(self, input: Tensor) -> Tensor:
        """The adapter's output, which is added: [..., in] -> [..., out]."""
        seen = self.seen(input, self._dropout) if self._dropout and self.training else input
        output: Tensor = self.lora_B(self.lora_A(seen))
        return output * self._scale

    def seen(self, input: Tensor, dropout: float) -> Tensor:
        """The adapter's input in a train step: a layer's input after dropout."""
        return F.dropout(input, dropout)

    def merged_weight(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[out, in]: W0 and adapter in one, a new tensor; a collective where the model is cut.

        Each rank adds up its own part, which has the same bits in every layout (low_rank.py): W0 and B are cut by rows
        alike, and of A it takes the columns that it has of W0.
        """
        columns = local(self.weight).shape[1]
        A = whole(self.lora_A.weight).narrow(1, min(start_of(self.weight)[1], self.in_features - columns), columns)
        adapter = LowRank(A, local(self.lora_B.weight), self._scale)
        merged = torch.empty_like(self.weight.detach(), dtype=dtype)
        local(merged).copy_(adapter.added_to(local(self.weight)))
        return whole(merged)


def drop_columns(input: Tensor, dropout: float, *, num_columns: int, rank: int) -> Tensor:
    """Dropout of a rank's columns [..., own columns] of an input that has `num_columns`.

    All of them are drawn, on every rank alike: random numbers stay those that other ranks, and one alone, draw.
    """
    all_columns = F.dropout(input.new_ones(*input.shape[:-1], num_columns), dropout)
    width = input.shape[-1]
    return input * all_columns.narrow(-1, rank * width, width)


def add_adapters(model: Any, config: LoraConfig, *, seed: int, has_score_layer: bool) -> None:
    """Freeze a whole model, and put adapters beside the linear layers that the configuration names.

    A score layer is trained whole, as it may be new.

    Args:
        seed: with a layer's name, decides its A: the same on every rank and for every number of ranks.

    Raises:
        ValueError: if no layer is meant.
    """
    model.requires_grad_(False)
    inside = {module for layer in layers_of(model) for module in layer.modules()}
    found = [
        (name, module)
        for name, module in model.named_modules()
        if type(module) is nn.Linear and module in inside and config.adapts(name)
    ]
    if not found:
        raise ValueError(
            f"no linear layer of a {type(model).__name__} has a name that ends in {', '.join(config.targets or ())!r}; "
            "name one in lora.targets, or leave it out to adapt all of them"
        )
    for name, module in found:
        adapted = AdaptedLinear(module, config)
        draw_A(adapted.lora_A.weight, name, seed=seed)
        model.set_submodule(name, adapted)
    if has_score_layer:
        model.score.requires_grad_(True)


def frozen_products(model: Any) -> list[Tensor]:
    """Frozen weights that products alone read: these may be held in the products' type, which changes no number.

    They would be cast to it each time. A weight that an embedding has, too, is none: its rows are added up.
    """
    embedded = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    return [
        module.weight
        for module in model.modules()
        if isinstance(module, CastingLinear) and not module.weight.requires_grad and id(module.weight) not in embedded
    ]


def draw_A(weight: Tensor, layer: str, *, seed: int) -> None:
    """[r, in], whole, as peft draws it: by the layer's name, and not by who has the layer, or which part of it."""
    state = np.random.SeedSequence([seed, zlib.crc32(layer.encode())]).generate_state(1, np.uint64)
    generator = torch.Generator().manual_seed(int(state[0] >> 1))
    nn.init.kaiming_uniform_(weight, a=math.sqrt(5.0), generator=generator)


def adapted_layers(model: nn.Module) -> dict[str, AdaptedLinear]:
    """The linear layers that have an adapter, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, AdaptedLinear)}


def trained(parameters: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Those that an optimizer may change: all of them, or the adapters and the score layer."""
    return {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """How many numbers the model has without its adapters, and how many are trained."""
    named = list(model.named_parameters())
    own = sum(parameter.numel() for name, parameter in named if not is_adapter(name))
    return own, sum(parameter.numel() for _, parameter in named if parameter.requires_grad)


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name is part of an adapter: the model that it amounts to has no such parameter."""
    return name.endswith(_ADAPTER_PARTS)


def merged_weights(model: nn.Module, *, dtype: torch.dtype = torch.float32) -> Iterator[tuple[str, Tensor]]:
    """The parameters of the model that a model and its adapters amount to, whole and in this type, one at a time.

    A collective where the model is cut. A parameter that is neither cut nor adapted is given as it is, not copied.
    """
    adapted = adapted_layers(model)
    for name, parameter in model.named_parameters():
        if name.endswith(".weight") and (layer := adapted.get(name.removesuffix(".weight"))) is not None:
            yield name, layer.merged_weight(dtype)
        elif not is_adapter(name):
            yield name, whole(parameter.detach().to(dtype))


def sum_of_frozen(model: nn.Module, *, counts_copies: bool) -> int:
    """This rank's part of a sum over all bits of the frozen parameters, modulo 2**32; 0 if there are none.

    The sum of all ranks' parts, modulo 2**32, is the same for every layout, and another one for another model: adapters
    of one base mean nothing beside another.

    Args:
        counts_copies: whether this rank counts what tensor-parallel ranks have copies of; one of them does.
    """
    total = 0
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad and (counts_copies or is_cut_by_tensor(parameter)):
            total += sum_of_bits(name, local(parameter))
    return total % _SUM_MODULUS


def sum_of_bits(name: str, part: Tensor) -> int:
    """What a part of a frozen parameter of this name counts in `sum_of_frozen`."""
    bits = part.contiguous().view(torch.int32 if part.element_size() == 4 else torch.int16)
    return zlib.crc32(name.encode()) * int(bits.sum(dtype=torch.int64)) % _SUM_MODULUS


def fold_sums(total: float) -> int:
    """The sum of all ranks' parts, as one number below 2**32."""
    return int(total) % _SUM_MODULUS


# An adapter as peft stores it, so that peft, SGLang and others load it as it is.
#
#     model's name                               tensor in adapter_model.safetensors
#     model.layers.0.self_attn.q_proj.lora_A.weight  ──►  base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight
#     score.weight, where it is trained              ──►  base_model.model.score.weight
#
#     adapter_config.json: rank, alpha, which layers, beside which model
#
# The two files lie in a folder of their own within a version of the weights: loaders of a model take every file of
# its folder that ends in safetensors, and transformers takes a model with adapter_config.json for the adapter alone.

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
