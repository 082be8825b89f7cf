"""What no engine of these layers goes below: their products, the keys and values that they read, attention and prompts.

    products    every decode step's matrix products, the language model's head among them; no attention, no prompts
    reads       the same, and one plain read of the keys and values of every step, by torch's sum over as many numbers
    necessary   products with torch's attention over a cache that grows as the engine's does, and those of the prompts

`products` is the measure that is quoted elsewhere. No engine reaches it: keys and values have to be read, and where the
cache is larger than the processor's they evict the weights, which stay there while products alone are run. `reads` is
what an attention at the memory's speed, whose arithmetic took no time, would leave.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

PROMPT_TOKENS = 32
NEW_TOKENS = 128


def run_products(model: Any, batch_size: int) -> None:
    """By torch's own linear layers, nothing between them."""
    _run_steps(model, batch_size, lengths=range(NEW_TOKENS), attend=lambda layer, length: None)


def run_reads(model: Any, batch_size: int) -> None:
    """Beside the products, keys and values as contiguous as no cache with room to grow has them."""
    cache = _random_cache(model, batch_size).flatten(2)
    per_position = cache.shape[-1] // (PROMPT_TOKENS + NEW_TOKENS)

    def read(layer: int, length: int) -> None:
        for numbers in cache[layer]:
            numbers[: length * per_position].sum()

    _run_steps(model, batch_size, lengths=range(PROMPT_TOKENS, PROMPT_TOKENS + NEW_TOKENS), attend=read)


def run_necessary(model: Any, batch_size: int) -> None:
    """Products of prompts and decode steps, and torch's attention over a cache that holds random numbers already."""
    *layers_linears, head = _linears(model)
    cache = _random_cache(model, batch_size)
    config = model.config
    queries = torch.randn(
        (*cache.shape[2:4], config.num_attention_heads // config.num_key_value_heads, cache.shape[-1]),
        dtype=cache.dtype,
        device=cache.device,
    )

    def attend(layer: int, length: int) -> None:
        keys, values = cache[layer, :, :, :, :length]
        F.scaled_dot_product_attention(queries, keys, values)

    prompts, last = (_inputs(_linears(model), num_rows=rows) for rows in (batch_size * PROMPT_TOKENS, batch_size))
    with torch.inference_mode():
        for linear in layers_linears:
            linear(prompts[linear.in_features])
        head(last[head.in_features])
    lengths = range(PROMPT_TOKENS + 1, PROMPT_TOKENS + NEW_TOKENS)  # the prompts gave the first token
    _run_steps(model, batch_size, lengths=lengths, attend=attend)


def _run_steps(model: Any, batch_size: int, *, lengths: Iterable[int], attend: Callable[[int, int], None]) -> None:
    """One decode step per length: attend(layer, length) after the products of each layer, and the head's at the end."""
    linears = _linears(model)
    *layers_linears, head = linears
    num_layers = model.config.num_hidden_layers
    per_layer = len(layers_linears) // num_layers
    inputs = _inputs(linears, num_rows=batch_size)
    with torch.inference_mode():
        for length in lengths:
            for layer in range(num_layers):
                for linear in layers_linears[layer * per_layer : (layer + 1) * per_layer]:
                    linear(inputs[linear.in_features])
                attend(layer, length)
            head(inputs[head.in_features])


def _random_cache(model: Any, batch_size: int) -> Tensor:
    """[layers, keys and values, batch_size, num_kv_heads, positions, head_dim]"""
    config, weight = model.config, _linears(model)[-1].weight
    head_dim = config.hidden_size // config.num_attention_heads
    shape = (config.num_hidden_layers, 2, batch_size, config.num_key_value_heads, PROMPT_TOKENS + NEW_TOKENS, head_dim)
    return torch.randn(shape, dtype=weight.dtype, device=weight.device)


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
