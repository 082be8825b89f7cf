"""What is trained: models of random weights and batches of log-normal lengths, in sizes for a CPU and for a GPU.

Size ── save_random_model ──► directory in Hugging Face's format        the weights do not matter to the clock
Size ── make_sequences ──► token ids of one global batch, the same in every process
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM, Qwen2Config
from transformers.utils import logging as transformers_logging

SEED = 0

Sequences = list[npt.NDArray[np.int64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A model, and the batch of one optimizer step on it."""

    model: Mapping[str, Any]
    """Keys of a Qwen2Config."""
    num_sequences: int
    median: float
    """Of the lengths, in tokens."""
    longest: int
    max_tokens: int
    """Of a packed row."""
    padded_batch: int
    """Sequences of a padded batch: about as many tokens as a packed row has."""
    spread: float = 0.9
    """Standard deviation of the lengths' logarithm."""

    @property
    def num_parameters(self) -> int:
        """A tied embedding counted once."""
        with torch.device("meta"):
            auto_class: Any = AutoModelForCausalLM
            return int(auto_class.from_config(Qwen2Config(**self.model)).num_parameters())


def _model(
    hidden: int, intermediate: int, layers: int, heads: int, key_value_heads: int, vocabulary: int
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    }


CPU_SIZES: Mapping[str, Size] = {
    "tiny": Size(
        model=_model(64, 176, 2, 4, 2, 64), num_sequences=32, median=40, longest=200, max_tokens=512, padded_batch=8
    ),
    "small": Size(
        model=_model(256, 704, 4, 4, 2, 512), num_sequences=16, median=120, longest=600, max_tokens=1024, padded_batch=4
    ),
    "medium": Size(
        model=_model(384, 1024, 6, 6, 2, 4096),
        num_sequences=12,
        median=120,
        longest=600,
        max_tokens=1024,
        padded_batch=4,
    ),
}
GPU_SIZES: Mapping[str, Size] = {
    "0.1B": Size(
        model=_model(768, 2048, 12, 12, 4, 32000),
        num_sequences=128,
        median=700,
        longest=4096,
        max_tokens=16384,
        padded_batch=8,
    ),
    "0.5B": Size(  # as Qwen2.5-0.5B
        model=_model(896, 4864, 24, 14, 2, 151936),
        num_sequences=64,
        median=700,
        longest=4096,
        max_tokens=16384,
        padded_batch=4,
    ),
    "1.5B": Size(  # as Qwen2.5-1.5B
        model=_model(1536, 8960, 28, 12, 2, 151936),
        num_sequences=64,
        median=700,
        longest=4096,
        max_tokens=16384,
        padded_batch=4,
    ),
}
SIZES: Mapping[str, Size] = {**CPU_SIZES, **GPU_SIZES}


def save_random_model(size: Size, directory: Path, *, dtype: torch.dtype = torch.float32) -> None:
    """Write config.json and safetensors; no tokenizer, since nothing is read as text."""
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.manual_seed(SEED)
    auto_class: Any = AutoModelForCausalLM
    model = auto_class.from_config(Qwen2Config(**size.model, eos_token_id=None), dtype=dtype)
    model.save_pretrained(directory)


def make_sequences(size: Size) -> Sequences:
    """Random tokens; lengths are log-normal, at least 2 and at most `longest`."""
    rng = np.random.default_rng(SEED)
    lengths = rng.lognormal(math.log(size.median), size.spread, size.num_sequences)
    return [rng.integers(0, size.model["vocab_size"], int(length)) for length in np.clip(lengths, 2, size.longest)]
