"""Logits -> sampled token ids and their log-probabilities.

    logits [B, V] --> / temperature --> log_softmax --> logprob of the token (untruncated distribution)
                                             |
         the row's own uniform --> inverse CDF <-- top_k, top_p, min_p mask
                                        |
                                        +--> token

The returned log-probability is log_softmax(logits / temperature) of the whole vocabulary, before top_k, top_p and
min_p: this is what the trainer computes again from its own logits, so the ratio pi_theta / pi_behaviour starts at
exactly one. A greedy row (temperature 0) reports log_softmax(logits).

Beside it, for the rows that ask, log_softmax(logits): what SGLang calls the original log-probability, before the
temperature.

    sampling seed --of()--> TokenUniforms --token_uniforms(position)--> u in [0, 1) --> the token at that position
    engine seed   --of()--> TokenUniforms --seed(number)--> sampling seed of a request that brings none

Each row brings its own uniform number, a function of its seed and of where its token stands. There is no state: the
same seed and position give the same number. So an answer that is made in chunks, is retracted and computed
again, moves to another server, outlives an engine or shares the batch with others draws what it would have drawn alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator
from torch import Tensor


def to_device(values: Sequence[Any], device: torch.device, *, dtype: torch.dtype | None = None) -> Tensor:
    """`torch.tensor(values, device=device)`, which on a GPU would wait for all that was asked of it before.

    The copy is ordered with the work that follows on the device, and the pinned memory is kept until it is done.
    """
    tensor = torch.tensor(values, dtype=dtype)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


_MASK = 2**64 - 1
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15  # the odd number nearest to 2**64 / golden ratio
_FEWEST_BIT_CHANGES = 24  # below this a step of the counter changes too little for the mixer (the paper, section 5)
_ALTERNATING_BITS = 0xAAAAAAAAAAAAAAAA


@dataclass(frozen=True, slots=True)
class TokenUniforms:
    """SplitMix64 read at any place: 64-bit numbers mix(start + place * gamma), with a start and a gamma per seed.

    Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators",
    https://doi.org/10.1145/2660193.2660195, with the mixer of their reference implementation. Two answers have
    different gammas, so that one never repeats a stretch of the other; neighbouring seeds and positions are
    independent as far as tests can tell. Not for secrets.

    Example:
        uniforms = TokenUniforms.of(7)
        uniforms.seed(12)     # the same wherever and whenever it is asked
    """

    start: int
    gamma: int
    """Odd, so that no two places within 2**64 have the same number."""

    @classmethod
    def of(cls, seed: int) -> TokenUniforms:
        """Of a seed; those that differ by a multiple of 2**64 are one."""
        gamma = _mix(seed + 2 * _GOLDEN_GAMMA) | 1
        if (gamma ^ (gamma >> 1)).bit_count() < _FEWEST_BIT_CHANGES:
            gamma ^= _ALTERNATING_BITS
        return cls(start=_mix(seed + _GOLDEN_GAMMA), gamma=gamma)

    @property
    def on_device(self) -> tuple[int, int]:
        """Start and gamma as int64, which is what tensors have: the same 64 bits."""
        return _signed(self.start), _signed(self.gamma)

    def seed(self, number: int) -> int:
        """In [0, 2**63), for the `number`-th of those that share this seed."""
        return _mix(self.start + number * self.gamma) >> 1


def token_uniforms(starts: Tensor, gammas: Tensor, positions: Tensor) -> Tensor:
    """The random numbers of tokens: float64 in [0, 1), multiples of 2**-53, where the tensors are.

    Args:
        starts, gammas: int64, as `TokenUniforms.on_device` gives them.
        positions: int64, the tokens before each, of prompt and answer. All three are broadcast.
    """
    value = starts + positions * gammas  # int64 wraps around, and its lower bits are those of unsigned numbers
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        value = (value ^ _shifted(value, shift)) * _signed(multiplier)
    return _shifted(value ^ _shifted(value, 31), 11).to(torch.float64) * 2.0**-53


def _shifted(value: Tensor, shift: int) -> Tensor:
    """`value` >> `shift` with zeros coming in; the shift of int64 brings in the sign."""
    return (value >> shift) & (_MASK >> shift)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _mix(value: int) -> int:
    value &= _MASK
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        value = ((value ^ (value >> shift)) * multiplier) & _MASK
    return value ^ (value >> 31)


# Below this a temperature only overflows the logits: the row is greedy, as SGLang has it.
_GREEDY_BELOW = 1e-6

WHOLE_VOCABULARY = -1
"""The value of `top_k` that keeps every token."""

_LARGEST_UNIFORM = 1 - 2.0**-24  # the largest float32 below 1; times any normal float32 it is less than that one
_MOST_STOP_STRINGS = 32  # SGLang's limit; each is looked for after every token


def _several(value: object) -> object:
    """One string for a list of one."""
    return (value,) if isinstance(value, str) else value


class SamplingParams(BaseModel):
    """How the tokens of one request are chosen, and when it ends; names, ranges and meaning are SGLang's.

    Example:
        SamplingParams(max_new_tokens=256, temperature=1.0, top_p=0.95, stop_token_ids=frozenset({151645}))
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    max_new_tokens: int = Field(default=128, ge=1)
    temperature: float = Field(default=1.0, ge=0)
    """0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Keeps the smallest set of most likely tokens whose probability reaches this, in (0, 1]."""
    top_k: int = WHOLE_VOCABULARY
    """Keeps this many most likely tokens; -1 keeps all. With `top_p` and `min_p`, a token must pass all."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Keeps tokens that are at least this many times as likely as the most likely one, in [0, 1]."""
    stop: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_several)] = Field(
        default=(), strict=False, max_length=_MOST_STOP_STRINGS
    )
    """Generation ends when the output's text has one of these; the tokens that spell it stay in the output."""
    stop_token_ids: frozenset[int] = Field(default=frozenset(), strict=False)
    """Generation ends after one of these; it stays in the output."""
    ignore_eos: bool = False
    """True generates on past every stop token, the model's own and `stop_token_ids`; stop strings still end."""
    sampling_seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    """With a token's position in its sequence it decides that token's random number, so a request that continues
    another's answer under its seed draws what that one would have drawn; None derives one from the engine's seed."""
    skip_special_tokens: bool = True
    """Whether the answer's text leaves them out."""
    no_stop_trim: bool = False
    """Whether the answer's text keeps what has stopped it."""
    stream_interval: int = Field(default=1, ge=1)
    """Tokens that a stream brings at a time; the first comes by itself."""

    @model_validator(mode="before")
    @classmethod
    def _null_is_the_default(cls, value: Any) -> Any:
        """As in SGLang."""
        return {name: entry for name, entry in value.items() if entry is not None} if isinstance(value, dict) else value

    @field_validator("top_k")
    @classmethod
    def _some_tokens_are_kept(cls, value: int) -> int:
        if value != WHOLE_VOCABULARY and value < 1:
            raise ValueError("top_k must be at least 1, or -1 for the whole vocabulary")
        return value

    @property
    def is_greedy(self) -> bool:
        return self.temperature < _GREEDY_BELOW

    @property
    def is_truncated(self) -> bool:
        return not self.is_greedy and (self.top_p < 1 or self.top_k != WHOLE_VOCABULARY or self.min_p > 0)


class SamplingBatch:
    """The sampling parameters of one batch as tensors: built once per change of membership, used at every step."""

    def __init__(
        self,
        rows: Sequence[SamplingParams],
        *,
        vocab_size: int,
        device: torch.device,
        original_rows: Sequence[int] = (),
    ) -> None:
        """
        Args:
            rows: B of them.
            original_rows: indices of O rows whose log-probabilities at temperature 1 are wanted, too.
        """
        truncated = [row for row, params in enumerate(rows) if params.is_truncated]
        top_k = [vocab_size if rows[row].top_k < 1 else min(rows[row].top_k, vocab_size) for row in truncated]
        greedy = [params.is_greedy for params in rows]
        temperature = [1.0 if params.is_greedy else params.temperature for params in rows]
        is_tempered = any(value != 1 for value in temperature)
        self.temperature = to_device(temperature, device).unsqueeze(-1) if is_tempered else None  # [B, 1], or all are 1
        self.greedy_rows = to_device(greedy, device)  # [B] bool
        self.is_any_greedy, self.is_all_greedy = any(greedy), all(greedy)
        self.truncated_rows = to_device(truncated, device) if truncated else None  # [R] int64
        self.top_p = to_device([[rows[row].top_p] for row in truncated], device)  # [R, 1] float32
        self.min_p = to_device([[rows[row].min_p] for row in truncated], device)  # [R, 1] float32
        self.top_k = to_device([[k] for k in top_k], device, dtype=torch.int64)  # [R, 1], clipped to the vocabulary
        self.longest_top_k = max(top_k, default=0)
        self.original_rows = to_device(original_rows, device) if original_rows else None  # [O] int64


class SampledTokens(NamedTuple):
    """One token for each row of a batch."""

    token_ids: Tensor
    """[B] int64."""
    logprobs: Tensor
    """[B] float32, under softmax(logits / temperature), untruncated."""
    original_logprobs: Tensor | None
    """[O] float32, under softmax(logits), of `original_rows`; None where there are none."""


def sample_tokens(logits: Tensor, batch: SamplingBatch, uniforms: Tensor) -> SampledTokens:
    """Draw one token per row.

    Args:
        logits: [B, V] float32; overwritten.
        batch: parameters of these B rows.
        uniforms: [B] float32 in [0, 1], one independent draw per row (greedy rows ignore theirs).
    """
    rows = batch.original_rows
    originals = None if rows is None else torch.log_softmax(logits[rows], dim=-1)  # the temperature overwrites logits
    token_ids, logprobs = _draw(logits, batch, uniforms)
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
    # The clamp only acts on NaN weights: the log-probability, which is not finite, ends their row, not an index error.
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
