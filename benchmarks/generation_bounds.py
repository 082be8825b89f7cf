"""What no engine of these layers goes below: their products alone, and with them the attention and the prompts.

    products    every decode step's matrix products, the language model's head among them; no attention, no prompts
    necessary   the same, the attention over a cache that grows as the engine's does, and the products of the prompts

`products` is the measure that is quoted elsewhere. No engine reaches it: attention has products of its own, and where
the cache is larger than the processor's it evicts the weights, which stay there while products alone are run.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

PROMPT_TOKENS = 32
NEW_TOKENS = 128


def run_products(model: Any, batch_size: int) -> None:
    """By torch's own linear layers, nothing between them."""
    linears = _linears(model)
    inputs = _inputs(linears, num_rows=batch_size)
    with torch.inference_mode():
        for _ in range(NEW_TOKENS):
            for linear in linears:
                linear(inputs[linear.in_features])


def run_necessary(model: Any, batch_size: int) -> None:
    """Products of prompts and decode steps, and torch's attention over a cache that holds random numbers already."""
    linears = _linears(model)
    *layers_linears, head = linears
    config = model.config
    num_layers, num_kv_heads = config.num_hidden_layers, config.num_key_value_heads
    head_dim = config.hidden_size // config.num_attention_heads
    kind: Any = {"dtype": head.weight.dtype, "device": head.weight.device}
    cache = torch.randn(num_layers, 2, batch_size, num_kv_heads, PROMPT_TOKENS + NEW_TOKENS, head_dim, **kind)
    queries = torch.randn(batch_size, num_kv_heads, config.num_attention_heads // num_kv_heads, head_dim, **kind)
    per_layer = len(layers_linears) // num_layers
    prompts, inputs = (_inputs(linears, num_rows=rows) for rows in (batch_size * PROMPT_TOKENS, batch_size))
    with torch.inference_mode():
        for linear in layers_linears:
            linear(prompts[linear.in_features])
        head(inputs[head.in_features])
        for length in range(PROMPT_TOKENS + 1, PROMPT_TOKENS + NEW_TOKENS):
            for index, (keys, values) in enumerate(cache):
                for linear in layers_linears[index * per_layer : (index + 1) * per_layer]:
                    linear(inputs[linear.in_features])
                F.scaled_dot_product_attention(queries, keys[:, :, :length], values[:, :, :length])
            head(inputs[head.in_features])


def _linears(model: Any) -> list[torch.nn.Linear]:
    """Layer after layer, the head last."""
    return [module for module in model.modules() if isinstance(module, torch.nn.Linear)]


def _inputs(linears: list[torch.nn.Linear], *, num_rows: int) -> dict[int, Tensor]:
    """[num_rows, width] for each width that a layer takes."""
    return {
        linear.in_features: torch.randn(
            num_rows, linear.in_features, dtype=linear.weight.dtype, device=linear.weight.device
        )
        for linear in linears
    }
