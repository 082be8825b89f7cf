"""The embedded generation engine: a model directory, a continuous batch over it, and weights that change under way.

    model directory --> module --> Decoder (same tensors, or their rounding) --> ContinuousBatch: add, step, pause, ...
                           ^
    weight directory --> stage_weights (any thread: read, check, build) --> apply_weights (between two steps)

Each token carries the version tag of the weights that made it.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from corral.workers.engine.answer_text import text_decoder
from corral.workers.engine.batch import ContinuousBatch
from corral.workers.engine.decoder import Decoder, Quantization, check_supported
from corral.workers.engine.weights import Checksums, model_with, stage_weights

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class StagedModel:
    """New weights of an engine, ready to compute with; beside the live ones they take the same memory once more."""

    directory: Path
    model: nn.Module
    decoder: Decoder
    checksums: Checksums


class GenerationEngine(ContinuousBatch):
    """Serves one model. Not thread-safe, but for `check`, `stage_weights` and the counters.

    Example:
        engine = GenerationEngine(Path("models/qwen2-tiny"), version="1.0")
        request = GenerationRequest(request_id="a", prompt=(5, 6, 7), sampling=SamplingParams(max_new_tokens=16))
        [output] = engine.generate([request])     # output.output_ids, .output_logprobs, .weight_versions
        engine.apply_weights(engine.stage_weights(Path("weights/v1")), version="1.1")
    """

    def __init__(
        self,
        model_directory: Path,
        *,
        device: str = "cpu",
        dtype: str = "float32",
        quantization: Quantization | None = None,
        max_running_requests: int = 64,
        max_total_tokens: int = 131_072,
        seed: int = 0,
        version: str = "default",
        read_lag: Literal[0, 1] | None = None,
    ) -> None:
        """Load a Hugging Face model directory; nothing is downloaded.

        Args:
            model_directory: with config.json and safetensors, and with a tokenizer.json for stop strings and
                texts of answers.
            device: "cpu", "cuda" or "cuda:N".
            dtype: float32, bfloat16 or float16; log-probabilities are float32 in any case.
            quantization: int8 multiplies by rounded weights (see linear.py), made from what is loaded here and
                from each update; None by the weights themselves.
            max_running_requests: rows of a decode step.
            max_total_tokens: cache positions in all, rows x longest; bounds the cache's memory.
            seed: of requests that bring no seed of their own.
            version: tag of the weights that are loaded here.
            read_lag: see `ContinuousBatch`.

        Raises:
            UnsupportedModelError: if the architecture cannot be run exactly.
            ValueError: if there is no such dtype, or none that can be quantised.
        """
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
        self.model_directory = Path(model_directory)
        self._model, eos_token_ids = load_model(self.model_directory, dtype=DTYPES[dtype], device=device)
        self.checksums = Checksums(self._model)
        """Of the live weights."""
        self._quantization = quantization
        decode, no_text_because = None, "the model has no tokenizer.json"
        if (self.model_directory / "tokenizer.json").is_file():
            try:
                decode = text_decoder(self.model_directory)
            except ValueError as error:
                no_text_because = str(error)
                logger.warning("answers come without their text: %s", error)
        super().__init__(
            Decoder(self._model, quantization=quantization),
            eos_token_ids=eos_token_ids,
            max_running_requests=max_running_requests,
            max_total_tokens=max_total_tokens,
            seed=seed,
            version=version,
            decode=decode,
            no_text_because=no_text_because,
            read_lag=read_lag,
        )
        self._decoder.pack_weights()

    @property
    def model_type(self) -> str:
        config: Any = self._model.config
        return str(config.model_type)

    def stage_weights(self, directory: Path) -> StagedModel:
        """Read, check and pack new weights without touching the live ones; any thread may call it.

        Raises:
            WeightsRejectedError: if they are unreadable, incomplete or of another model.
        """
        live = self._model
        model = model_with(stage_weights(directory, dict(live.named_parameters())), live)
        decoder = Decoder(model, quantization=self._quantization)
        decoder.pack_weights()
        return StagedModel(directory, model, decoder, Checksums(model))

    def apply_weights(self, staged: StagedModel, *, version: str) -> StagedModel:
        """Change over to staged weights, without a copy; the next token is made by them, whatever the cache holds.

        Returns:
            The weights of before: giving back their memory takes time, and is left to whoever drops them.
        """
        before = StagedModel(self.model_directory, self._model, copy.copy(self._decoder), self.checksums)
        self._model, self.checksums = staged.model, staged.checksums
        self._decoder.adopt(staged.decoder)
        self.forget_prefixes()
        self.model_directory = staged.directory
        self.version = version
        return before


def load_model(directory: Path, *, dtype: torch.dtype, device: str) -> tuple[nn.Module, frozenset[int]]:
    """The model in evaluation mode, and its end-of-sequence ids."""
    from transformers import AutoConfig, AutoModelForCausalLM  # seconds to import: only who loads a model pays

    # A directory with code or pickled weights of its own is refused: loading it would run what somebody else wrote.
    config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    check_supported(config)
    model: Any = AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, local_files_only=True, trust_remote_code=False, use_safetensors=True
    )
    model = model.to(device).eval().requires_grad_(False)
    declared = [getattr(source, "eos_token_id", None) for source in (model.config, model.generation_config)]
    ids = [token_id for entry in declared for token_id in (entry if isinstance(entry, list) else [entry])]
    return model, frozenset(token_id for token_id in ids if token_id is not None)
