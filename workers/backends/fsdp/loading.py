"""A directory in Hugging Face's format ──► a model whose weights lie in its files, with the head that its role needs.

    weights of this head     ──► as they are
    a language model's       ──► its layers, and a `score` layer of zeros for a critic or a reward model
    anything else is missing ──► an error: transformers would draw it at random and say so in its log only

    load_model: in the files' type, mapped ──► cut over ranks: own rows are copied ──► hold_weights: those, in float32
                experts: on `meta` (StoredExperts)                                     own parts of experts are read

What is mapped takes no memory before it is read, and a rank that keeps its rows of a weight reads no others: so none
ever has the whole model in memory, where all weights of the files are of one type. Experts are read so from any type.

A new score layer is zero because nothing is known yet: every value and score is 0, so that the first advantages are the
returns themselves, on every rank and for every layout without a number drawn. Its gradient is not zero.

What a rank has of a model with its head and adapters, in the layout of its mesh, is made in this order:

load_model ──► add_adapters ──► head ──► cut_layers (t) ──► share_attention (c) ──► shard (d x c) ──► hold_weights
in its files        │                    parts of layers                            rows of what is left  in float32
                    └─ adapters first: FSDP2 would leave the gradients of those that come later
"""

import copy
import logging
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig

from corral.experiments.config.model import LoraConfig
from corral.workers.backends.chunked_head import install_chunked_head
from corral.workers.backends.fsdp.experts import (
    GROUPED_EXPERTS,
    StoredExperts,
    expert_matrices,
    register_grouped_experts,
)
from corral.workers.backends.fsdp.tensor_parallel import cut_layers
from corral.workers.backends.heads import Head
from corral.workers.backends.lora import add_adapters, frozen_products, read_adapter, trained
from corral.workers.backends.low_precision import cast_per_use
from corral.workers.backends.packed_attention import PACKED_ATTENTION, register_packed_attention, share_attention
from corral.workers.backends.parallel_context import ParallelContext
from corral.workers.backends.router_replay import install_router_replay
from corral.workers.backends.sharding import TENSOR, device_mesh, layers_of, shard

logger = logging.getLogger(__name__)

_SCORE = "score"
_SCORE_WEIGHT = f"{_SCORE}.weight"
_TYPES: Final = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # in safetensors' words
_CLASSIFIERS = ("ForTokenClassification", "ForSequenceClassification")


def load_model(directory: Path, head: Head, stored: StoredExperts) -> Any:
    """A transformers model with packed attention, on the CPU; its weights are to be cut, and then held in their types.

    Args:
        stored: the same directory; what it reads later is on `meta`.

    Raises:
        ValueError: if the directory lacks weights other than those of a new score layer, its head gives more than one
            number, or transformers has no model of this kind with a `score` layer.
    """
    register_packed_attention()
    register_grouped_experts()
    config = AutoConfig.from_pretrained(directory, local_files_only=True)
    if head.has_score_layer:
        _prepare_for_one_score(config, directory)
    weights = stored.state_dict()
    mapped = _TYPES.get(stored.only_type() or "", torch.float32)  # what is of several types cannot be mapped
    model, report = _from_files(directory, head, config, mapped, weights)
    if weights is not None and not stored.find_pieces(model):
        weights = None  # of a kind that changes more than where the numbers are: transformers does it, with all of them
        model, report = _from_files(directory, head, config, mapped)
    if any(buffer.is_floating_point() and buffer.dtype != torch.float32 for buffer in model.buffers()):
        # Made by the model's own code, which rounds it to the type of the weights: it is in no file to be read again.
        model, report = _from_files(directory, head, config, torch.float32, weights)
    model.config.dtype = torch.float32
    _train_every_embedding(model)
    missing = set(report["missing_keys"])
    if head.has_score_layer:
        is_new = _SCORE_WEIGHT in missing and not _is_classifier(config)
        _install_score_layer(model, directory, is_new=is_new)
        missing -= {_SCORE_WEIGHT} if is_new else set()
    if missing:
        raise ValueError(
            f"model {directory} lacks {len(missing)} weights of a {type(model).__name__}, such as {min(missing)!r}; "
            "give a directory that has all of them, or a role whose head it has"
        )
    return model


def _train_every_embedding(model: nn.Module) -> None:
    """Let the embedding of `pad_token_id` have a gradient: packed rows hold no padding, so there it is a token."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.padding_idx = None


def hold_weights(
    model: nn.Module,
    device: torch.device,
    stored: StoredExperts,
    *,
    low: Iterable[Tensor] = (),
    low_type: torch.dtype = torch.float32,
) -> None:
    """Put every parameter, as far as this rank keeps it, on the device in float32, or in `low_type` if it is of `low`.

    Args:
        stored: has what is on `meta`.
    """
    kept_low = {id(parameter) for parameter in low}
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def held(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            return tensor.to(device)  # a buffer
        dtype = low_type if id(tensor) in kept_low else torch.float32
        if not tensor.is_meta:
            return tensor.to(device).to(dtype)
        part = torch.empty_like(tensor, dtype=dtype, device=device)
        stored.fill(names[id(tensor)], part)
        return part

    model._apply(held)  # type: ignore[no-untyped-call]  # FSDP2 hears of it, as of a model that moves to another device


def _from_files(
    directory: Path, head: Head, config: Any, dtype: torch.dtype, weights: dict[str, Any] | None = None
) -> tuple[Any, dict[str, Any]]:
    """The model, and transformers' report of what it found in the files, or in the weights that it is given instead."""
    kind: Any = head.model_class
    if weights is not None:
        with torch.device("meta"):  # transformers takes weights for a class that it need not look for
            kind = type(kind.from_config(copy.deepcopy(config)))
    model, report = kind.from_pretrained(
        directory if weights is None else None,
        state_dict=weights,
        config=copy.deepcopy(config),  # transformers writes the type into it
        dtype=dtype,
        attn_implementation=PACKED_ATTENTION,
        experts_implementation=GROUPED_EXPERTS,
        local_files_only=True,
        use_safetensors=True,  # the other format is pickle
        output_loading_info=True,
    )
    return model, report


def _is_classifier(config: Any) -> bool:
    return any(name.endswith(_CLASSIFIERS) for name in config.architectures or ())


def _prepare_for_one_score(config: Any, directory: Path) -> None:
    """One label, without the dropout that transformers would add to it, and without bias where none is stored."""
    if not _is_classifier(config):
        config.num_labels = 1
    if config.num_labels != 1:
        raise ValueError(f"model {directory} gives {config.num_labels} numbers; a critic or reward model gives one")
    if getattr(config, "classifier_dropout", None) is None:
        config.classifier_dropout = 0.0
    if not any(name.endswith("ForTokenClassification") for name in config.architectures or ()):
        config.token_classification_bias = False  # as sequence classifiers are, so that either class loads the other's


def _install_score_layer(model: Any, directory: Path, *, is_new: bool) -> None:
    layer = getattr(model, _SCORE, None)
    if not isinstance(layer, nn.Linear):
        raise ValueError(f"{type(model).__name__} of model {directory} has no linear layer {_SCORE!r} to give scores")
    if is_new:
        nn.init.zeros_(layer.weight)
        logger.warning("model %s has no %r layer: its scores start at 0 and have to be trained", directory, _SCORE)
    layer.__class__ = _Float32Linear


class _Float32Linear(nn.Linear):
    """Computes in float32 under autocast, too: bfloat16 would round a score of 10 to a multiple of 1/16."""

    def forward(self, input: Tensor) -> Tensor:
        with torch.autocast(input.device.type, enabled=False):
            return F.linear(input.float(), self.weight, self.bias)


def load_over_ranks(
    model_directory: Path,
    head: Head,
    context: ParallelContext,
    lora: LoraConfig | None,
    *,
    seed: int,
    compute_dtype: torch.dtype,
    is_held_low: bool = False,
) -> Any:
    """This rank's part of a model.

    Args:
        seed: of the adapters' first values.
        compute_dtype: of the products: what frozen weights below adapters are held in, and layers gathered in.
        is_held_low: whether all weights that products alone read are frozen, and held so.

    Raises:
        ValueError: if the layout cannot hold this model, or the directory has not all that the head needs.
    """
    mesh = device_mesh(context) if context.mesh.dims.world_size > 1 else None
    with ExitStack() as stack:
        stored = StoredExperts(model_directory, stack)
        model = load_model(model_directory, head, stored)
        if is_held_low:
            model.requires_grad_(False)
        if lora is not None:
            add_adapters(model, lora, seed=seed, has_score_layer=head.has_score_layer)
            if lora.adapter is not None:
                read_adapter(lora.adapter, trained(dict(model.named_parameters())))
        cast_per_use(model)
        if not head.has_score_layer:
            install_chunked_head(model)
        install_router_replay(model)
        if mesh is not None and context.mesh.dims.tp > 1:
            cut_layers(model, mesh[TENSOR])
        if context.cp_group is not None:
            share_attention(model, context.cp_group)
        if mesh is not None:
            shard(model, mesh, compute_dtype=compute_dtype)
        # Where layers come as they were cut, and never whole.
        experts = [weight for weight, number in expert_matrices(layers_of(model)).items() if number]
        low = [*frozen_products(model), *(weight for weight in experts if not weight.requires_grad)]
        hold_weights(model, context.device, stored, low=low, low_type=compute_dtype)
    return model
