"""Which models say the same of answers that share their prompt as of answers that each have their own.

model, layout, adapters, products ── why_not_shared ──► None: rows may have prompts once, or the reason why not
"""

from typing import Any

import torch
from torch import nn

from corral.experiments.config.model import LoraConfig

_ATTENTION = "full_attention"  # what transformers calls a layer in which a token sees all before it
_KERNEL_TYPES = (torch.bfloat16, torch.float16)  # of Flash Attention on a GPU


def why_not_shared(
    model: Any, lora: LoraConfig | None, *, ranks_of_row: int, device: torch.device, compute_dtype: torch.dtype
) -> str | None:
    """Why rows of this model must have each answer whole; None where they need not.

    Args:
        ranks_of_row: among which the tokens of a row are dealt out.
    """
    config = model.config
    if ranks_of_row > 1:
        return f"c{ranks_of_row} cuts rows by their tokens, and answers must be whole for that"
    if (window := getattr(config, "sliding_window", None)) is not None:
        return f"its layers see {window} tokens back (sliding_window), and not all of a prompt"
    if others := sorted(set(getattr(config, "layer_types", None) or ()) - {_ATTENTION}):
        return f"it has layers of the kind {', '.join(others)}"
    if _has_dropout(model, lora):
        return "it has dropout, which draws anew for each answer"
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if device.type != "cpu" and (compute_dtype not in _KERNEL_TYPES or head_dim % 8):
        kind = str(compute_dtype).removeprefix("torch.")
        return f"on a GPU products must be bfloat16 and heads a multiple of 8, and these are {kind} and {head_dim}"
    return None


def _has_dropout(model: nn.Module, lora: LoraConfig | None) -> bool:
    of_attention = getattr(model.config, "attention_dropout", 0.0) or 0.0
    of_layers = any(isinstance(module, nn.Dropout) and module.p > 0.0 for module in model.modules())
    return of_layers or of_attention > 0.0 or (lora is not None and lora.dropout > 0.0)
