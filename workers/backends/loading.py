"""A directory in Hugging Face's format ──► a model in memory, whole, with the head that its role needs.

    weights of this head     ──► as they are
    a language model's       ──► its layers, and a `score` layer of zeros for a critic or a reward model
    anything else is missing ──► an error: transformers would draw it at random and say so in its log only

A new score layer is zero because nothing is known yet: every value and score is 0, so that the first advantages are the
returns themselves, on every rank and for every layout without a number drawn. Its gradient is not zero.
"""

import logging
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig

from corral.workers.backends.heads import Head
from corral.workers.backends.packed_attention import PACKED_ATTENTION, register_packed_attention

logger = logging.getLogger(__name__)

_SCORE = "score"
_SCORE_WEIGHT = f"{_SCORE}.weight"
_CLASSIFIERS = ("ForTokenClassification", "ForSequenceClassification")


def load_model(directory: Path, head: Head[Any]) -> Any:
    """A transformers model with float32 weights and packed attention, on the CPU.

    Raises:
        ValueError: if the directory lacks weights other than those of a new score layer, its head gives more than one
            number, or transformers has no model of this kind with a `score` layer.
    """
    register_packed_attention()
    config = AutoConfig.from_pretrained(directory, local_files_only=True)
    if head.has_score_layer:
        _prepare_for_one_score(config, directory)
    model, report = head.model_class.from_pretrained(
        directory,
        config=config,
        dtype=torch.float32,
        attn_implementation=PACKED_ATTENTION,
        local_files_only=True,
        use_safetensors=True,  # the other format is pickle
        output_loading_info=True,
    )
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
    replacement = _Float32Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
    replacement.weight, replacement.bias = layer.weight, layer.bias
    setattr(model, _SCORE, replacement)


class _Float32Linear(nn.Linear):
    """Computes in float32 under autocast, too: bfloat16 would round a score of 10 to a multiple of 1/16."""

    def forward(self, input: Tensor) -> Tensor:
        with torch.autocast(input.device.type, enabled=False):
            return F.linear(input.float(), self.weight, self.bias)
