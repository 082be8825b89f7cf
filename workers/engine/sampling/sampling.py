"""Logits -> sampled token ids and their log-probabilities.

    logits [B, V] --penalties--> / temperature --> log_softmax --> logprob of the token (untruncated distribution)
                                                        |
                    the row's own uniform --> inverse CDF <-- top_k, top_p, min_p mask
                                                   |
                                                   +--> token --> counted by the penalties

The returned log-probability is log_softmax(logits / temperature) of the whole vocabulary, before top_k, top_p and
min_p: this is what the trainer computes again from its own logits, so the ratio pi_theta / pi_behaviour starts at
exactly one. A greedy row (temperature 0) reports log_softmax(logits). Penalties change the logits first, as SGLang has
it: the log-probability of a penalized row is that of the penalized logits, which no trainer computes again.

Beside it, for the rows that ask, log_softmax(logits): what SGLang calls the original log-probability, before the
temperature.

Each row brings its own uniform number, so a request draws the same tokens whoever shares the batch with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from corral.workers.engine.sampling.penalties import PenaltyBatch
from corral.workers.engine.to_device import to_device

# Below this a temperature only overflows the logits: the row is greedy, as SGLang has it.
_GREEDY_BELOW = 1e-6

WHOLE_VOCABULARY = -1
"""The value of `top_k` that keeps every token."""

_LARGEST_UNIFORM = 1 - 2.0**-24  # the largest float32 below 1; times any normal float32 it is less than that one
_LARGEST_PENALTY = 2.0  # SGLang's and OpenAI's range
_MOST_STOP_STRINGS = 32  # SGLang's limit; each is looked for after every token


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends; names, ranges and meaning are SGLang's.

    Example:
        SamplingParams(max_new_tokens=256, temperature=1.0, top_p=0.95, stop_token_ids=frozenset({151645}))
    """

    max_new_tokens: int = 128
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """Keeps the smallest set of most likely tokens whose probability reaches this, in (0, 1]."""
    top_k: int = WHOLE_VOCABULARY
    """Keeps this many most likely tokens; -1 keeps all. With `top_p` and `min_p`, a token must pass all."""
    min_p: float = 0.0
    """Keeps tokens that are at least this many times as likely as the most likely one, in [0, 1]."""
    frequency_penalty: float = 0.0
    """Taken from a token's logit for each time that it stands in the output, in [-2, 2]."""
    presence_penalty: float = 0.0
    """Taken from the logit of each token that stands in the output, in [-2, 2]."""
    repetition_penalty: float = 1.0
    """Divides positive logits of the tokens of the output and multiplies negative ones (Keskar et al. 2019,
    https://arxiv.org/abs/1909.05858, section 4.1), in (0, 2]; unlike there, tokens of the prompt are left alone."""
    min_new_tokens: int = 0
    """Before this many, no token that would stop the answer has any probability (a stop string still ends it)."""
    stop: tuple[str, ...] = ()
    """Generation ends when the output's text has one of these; the tokens that spell it stay in the output."""
    stop_token_ids: frozenset[int] = frozenset()
    """Generation ends after one of these; it stays in the output."""
    ignore_eos: bool = False
    """True generates on past every stop token, the model's own and `stop_token_ids`; stop strings still end."""
    sampling_seed: int | None = None
    """With a token's position in its sequence it decides that token's random number, so a request that continues
    another's answer under its seed draws what that one would have drawn; None derives one from the engine's seed."""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature must be a finite number >= 0 (0 is greedy), got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.top_k != WHOLE_VOCABULARY and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, or -1 for the whole vocabulary, got {self.top_k}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p}")
        for name in ("frequency_penalty", "presence_penalty"):
            if not -_LARGEST_PENALTY <= (value := getattr(self, name)) <= _LARGEST_PENALTY:
                raise ValueError(f"{name} must be in [-2, 2], got {value}")
        if not 0 < self.repetition_penalty <= _LARGEST_PENALTY:
            raise ValueError(f"repetition_penalty must be in (0, 2], 1 for none, got {self.repetition_penalty}")
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens must be in [0, max_new_tokens], which is {self.max_new_tokens}, got "
                f"{self.min_new_tokens}"
            )
        if len(self.stop) > _MOST_STOP_STRINGS:
            raise ValueError(f"stop may list {_MOST_STOP_STRINGS} strings, got {len(self.stop)}")
        if "" in self.stop:
            raise ValueError("stop has an empty string, which every text contains; leave it out")

    @property
    def is_greedy(self) -> bool:
        return self.temperature < _GREEDY_BELOW

    @property
    def is_truncated(self) -> bool:
        return not self.is_greedy and (self.top_p < 1 or self.top_k != WHOLE_VOCABULARY or self.min_p > 0)

    @property
    def is_penalized(self) -> bool:
        """Whether the choice of a token depends on those before it otherwise than through the model."""
        return bool(
            self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1 or self.min_new_tokens
        )


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The sampling parameters of one batch as tensors: built once per change of membership, used at every step."""

    temperature: Tensor | None
    """[B, 1] float32; 1 in greedy rows. None where all are 1."""
    greedy_rows: Tensor
    """[B] bool."""
    is_any_greedy: bool
    is_all_greedy: bool
    truncated_rows: Tensor | None
    """[R] int64 indices of rows with a top_k, top_p or min_p, None when there are none."""
    top_p: Tensor
    """[R, 1] float32."""
    min_p: Tensor
    """[R, 1] float32."""
    top_k: Tensor
    """[R, 1] int64, clipped to the vocabulary."""
    longest_top_k: int
    penalties: PenaltyBatch | None
    """None when no row has any."""
    original_rows: Tensor | None
    """[O] int64 indices of rows whose log-probabilities at temperature 1 are wanted, too; None when there are none."""

    @classmethod
    def of(
        cls,
        rows: Sequence[SamplingParams],
        *,
        vocab_size: int,
        device: torch.device,
        penalties: PenaltyBatch | None = None,
        original_rows: Sequence[int] = (),
    ) -> SamplingBatch:
        truncated = [row for row, params in enumerate(rows) if params.is_truncated]
        top_k = [vocab_size if rows[row].top_k < 1 else min(rows[row].top_k, vocab_size) for row in truncated]
        greedy = [params.is_greedy for params in rows]
        temperature = [1.0 if params.is_greedy else params.temperature for params in rows]
        is_tempered = any(value != 1 for value in temperature)
        return cls(
            temperature=to_device(temperature, device).unsqueeze(-1) if is_tempered else None,
            greedy_rows=to_device(greedy, device),
            is_any_greedy=any(greedy),
            is_all_greedy=all(greedy),
            truncated_rows=to_device(truncated, device) if truncated else None,
            top_p=to_device([[rows[row].top_p] for row in truncated], device),
            min_p=to_device([[rows[row].min_p] for row in truncated], device),
            top_k=to_device([[k] for k in top_k], device, dtype=torch.int64),
            longest_top_k=max(top_k, default=0),
            penalties=penalties,
            original_rows=to_device(original_rows, device) if original_rows else None,
        )


class SampledTokens(NamedTuple):
    """One token for each row of a batch."""

    token_ids: Tensor
    """[B] int64."""
    logprobs: Tensor
    """[B] float32, under softmax(logits / temperature), untruncated."""
    original_logprobs: Tensor | None
    """[O] float32, under softmax(logits), of `original_rows`; None where there are none."""


def sample_tokens(logits: Tensor, batch: SamplingBatch, uniforms: Tensor) -> SampledTokens:
    """Draw one token per row, and let the penalties of `batch` count it.

    Args:
        logits: [B, V] float32; overwritten.
        batch: parameters of these B rows.
        uniforms: [B] float32 in [0, 1], one independent draw per row (greedy rows ignore theirs).
    """
    if batch.penalties is not None:
        batch.penalties.apply_(logits)
    rows = batch.original_rows
    originals = None if rows is None else torch.log_softmax(logits[rows], dim=-1)  # the temperature overwrites logits
    token_ids, logprobs = _draw(logits, batch, uniforms)
    if batch.penalties is not None:
        batch.penalties.count(token_ids)
    picked = None if originals is None else _pick(originals, token_ids[rows])
    return SampledTokens(token_ids, _pick(logprobs, token_ids), picked)


def _draw(logits: Tensor, batch: SamplingBatch, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """(token ids [B], log-probabilities of the whole vocabulary [B, V])

    In place wherever it can be: [64, 151936] is 39 MB, and for each further such tensor the system clears new pages.
    """
    if batch.is_all_greedy:
        return logits.argmax(dim=-1), torch.log_softmax(logits, dim=-1)
    if batch.temperature is not None:
        logits.div_(batch.temperature)
    logprobs = torch.log_softmax(logits, dim=-1)
    probabilities = logprobs.exp()
    rows = batch.truncated_rows
    truncated = None if rows is None else _sample_truncated(probabilities[rows], batch, uniforms[rows])
    token_ids = _inverse_cdf(probabilities, uniforms)
    if rows is not None and truncated is not None:
        token_ids[rows] = truncated
    if batch.is_any_greedy:
        token_ids = torch.where(batch.greedy_rows, logits.argmax(dim=-1), token_ids)
    return token_ids, logprobs


def _pick(logprobs: Tensor, token_ids: Tensor) -> Tensor:
    return logprobs.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)


def _inverse_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    """[B] index of the first entry whose running sum exceeds uniform * total.

    Args:
        weights: [B, W], which need not sum to 1; overwritten.
    """
    cumulative = weights.cumsum_(dim=-1)
    # A uniform that rounds to 1.0 stays one step below the total: on an entry with weight, never past the end.
    threshold = uniforms.clamp(max=_LARGEST_UNIFORM).unsqueeze(-1) * cumulative[:, -1:]
    # The clamp only acts on NaN weights: their row is ended by whoever sees its log-probability, not by an index error.
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(-1).clamp_(max=weights.shape[-1] - 1)


def _sample_truncated(probabilities: Tensor, batch: SamplingBatch, uniforms: Tensor) -> Tensor:
    """[R] token ids; all limits apply to the untruncated distribution, so their order does not matter."""
    if batch.longest_top_k < probabilities.shape[-1]:
        ordered, token_ids = probabilities.topk(batch.longest_top_k, dim=-1)
    else:
        ordered, token_ids = probabilities.sort(dim=-1, descending=True)
    mass_before = ordered.cumsum(dim=-1) - ordered
    rank = torch.arange(ordered.shape[-1], device=ordered.device)
    is_kept = (rank < batch.top_k) & (mass_before < batch.top_p) & (ordered >= batch.min_p * ordered[:, :1])
    # The most likely token always stays, also where its rounding error makes `mass_before` nonzero.
    is_kept[:, 0] = True
    choice = _inverse_cdf(ordered * is_kept, uniforms)
    return token_ids.gather(-1, choice.unsqueeze(-1)).squeeze(-1)
