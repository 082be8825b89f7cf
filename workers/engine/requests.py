"""Requests to the embedded engine and their outputs: GenerationRequest -> ActiveRequest -> RequestOutput.

    request --ContinuousBatch.check--> ValueError with the value and the limit, before it is queued

Every output token has its log-probability and belongs to one span of `weight_versions`, the tag of the weights that
made it. An interrupted request has several spans; together they cover the output without gap or overlap.

An answer ends where its text has a stop string:

    output ids  ... 17 4 | 88 12 5 |     window of as many tokens as the longest string has bytes, and one more
                         v
    decoded text       "...\\n\\nQuestion"     contains "\\n\\n": the answer ends with the token that completed it

The window moves with every token, so a string is seen with its last token, and the tokens that spell it stay in the
output, as in SGLang. That one's window is of as many tokens as its tokenizer makes of the string, and one more: it can
miss a string that the model spells in smaller pieces.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from corral.experiments.prompts.tokens import load_tokenizer
from corral.scheduling.policy_version import VersionSpan
from corral.workers.engine.sampling import SamplingParams, TokenUniforms

ExpertRows = npt.NDArray[np.int16]
"""The experts that made an answer, as SGLang counts them: [tokens, layers of the model, top_k]. Row t is of token t:
who computed it when it was read, and so made token t + 1."""


class StopStrings:
    """The stop strings of one request."""

    def __init__(self, strings: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        """decode: token ids -> text, special tokens included."""
        self._strings = strings
        self._decode = decode
        # A token stands for a byte at least. One more, since decoders may strip what the first token begins with.
        self._num_tokens = max(len(string.encode(errors="surrogatepass")) for string in strings) + 1

    def matched(self, output_ids: Sequence[int]) -> str | None:
        """The first of the strings that the end of the output has; to be asked after every token."""
        text = self._decode(output_ids[-self._num_tokens :])
        return next((string for string in self._strings if string in text), None)


class StopFinish(msgspec.Struct, frozen=True, tag="stop"):
    """A stop token or end of sequence, which is the last of the output; or a stop string, which its text has."""

    matched: int | str


class LengthFinish(msgspec.Struct, frozen=True, tag="length"):
    """max_new_tokens reached."""

    length: int


class AbortFinish(msgspec.Struct, frozen=True, tag="abort"):
    """Ended by a caller or by a weight update; the output holds what was generated so far."""

    message: str = "Aborted"
    status_code: None = None
    """As SGLang says it, and so the next one."""
    err_type: str | None = None
    """`NOT_FINITE` of one that the engine has ended by itself."""


# As JSON they are what SGLang says, by "type".
FinishReason = StopFinish | LengthFinish | AbortFinish


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One prompt, one answer."""

    request_id: str
    """Unique among the requests in flight."""
    prompt: tuple[int, ...]
    sampling: SamplingParams
    input_logprobs_from: int | None = None
    """First prompt position whose log-probability is wanted; None wants none."""
    wants_original_logprobs: bool = False
    """Whether those of the answer are wanted at temperature 1, too."""
    experts_from: int | None = None
    """First token of prompt and answer whose experts are wanted; None wants none."""
    is_streamed: bool = False
    """Whether its tokens are given while it runs, each once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """The tokens of a request; of a streamed request, those since its last output."""

    request_id: str
    prompt: tuple[int, ...]
    start: int
    """Output tokens that came before."""
    output_ids: tuple[int, ...]
    output_logprobs: tuple[float, ...]
    """One per output token, under softmax(logits / temperature) of the weights of its span, see sampling.py."""
    original_logprobs: tuple[float, ...]
    """The same at temperature 1, where they were asked for; else none."""
    input_logprobs: tuple[float | None, ...]
    """Of prompt[input_logprobs_from:] at temperature 1; the first is None: nothing was predicted there."""
    finish_reason: FinishReason | None
    """None while it runs."""
    weight_version: str
    """The version at the end of the request, or now."""
    weight_versions: tuple[VersionSpan, ...]
    """Of all output tokens, those that came before too."""
    num_retractions: int
    cached_tokens: int
    """Prompt tokens that were not computed, since another request had begun with them."""
    experts: ExpertRows | None = None
    """Of the tokens from `experts_from` to the one before the last; None where they were not asked for, or nothing was
    computed."""


class ChosenExperts:
    """The rows of one request, from the first token that is asked for.

    A request that is read again by later weights keeps the rows that it has. The last token of an answer has none:
    nobody has read it.
    """

    def __init__(self, first: int) -> None:
        self._first = first
        self._end = first
        self._pieces: list[ExpertRows] = []

    def note(self, rows: ExpertRows, *, start: int) -> None:
        """Take in the rows of the tokens from `start` on, but for those that are known."""
        assert start <= self._end or not self._pieces, "tokens are read in order"
        new = rows[max(0, self._end - start) :]
        if len(new):
            self._pieces.append(new)
            self._end += len(new)

    def know(self, first: int, end: int) -> bool:
        """Whether it has the rows of the tokens from `first` to the one before `end`."""
        return self._first <= first and end <= self._end

    def between(self, first: int, end: int) -> ExpertRows:
        """The rows of tokens that it knows."""
        return np.concatenate(self._pieces)[first - self._first : end - self._first]

    def before(self, end: int) -> ExpertRows | None:
        """The rows of the tokens before `end`; None if nothing was read yet."""
        return np.concatenate(self._pieces)[: max(0, end - self._first)] if self._pieces else None


@dataclass(slots=True, kw_only=True)
class ActiveRequest:
    """A request inside the engine: queued or running."""

    request: GenerationRequest
    stop_token_ids: frozenset[int]
    """The request's own and the model's."""
    stop_strings: StopStrings | None
    uniforms: TokenUniforms
    output_ids: list[int] = field(default_factory=list)
    output_logprobs: list[float] = field(default_factory=list)
    original_logprobs: list[float] = field(default_factory=list)
    input_logprobs: tuple[float | None, ...] | None = None
    version_starts: list[tuple[str, int]] = field(default_factory=list)
    """(version, first output token that it made), in order."""
    num_retractions: int = 0
    cached_tokens: int = 0
    experts: ChosenExperts | None = None
    """None where nobody asks."""
    num_given: int = 0
    """Output tokens that an output has brought already."""
    is_shareable: bool = False
    """Whether its keys and values are what the present weights make of its tokens."""
    num_unread: int = 0
    """Tokens that were sampled on the device, and are not known here yet."""
    has_ended: bool = False
    """Whether its output was given; what is still on its way then belongs to nobody."""

    @property
    def reserved_tokens(self) -> int:
        return len(self.request.prompt) + self.request.sampling.max_new_tokens

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt) + len(self.output_ids)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt and output so far: what must be in the cache before the next token."""
        return (*self.request.prompt, *self.output_ids)

    @property
    def newest_position(self) -> int:
        """Where its newest token belongs in the cache, known here or not; all before it are in there."""
        return self.num_tokens + self.num_unread - 1

    @property
    def may_go_on(self) -> bool:
        """Whether one more token can be of use, as far as is known."""
        return len(self.output_ids) + self.num_unread < self.request.sampling.max_new_tokens

    @property
    def has_news(self) -> bool:
        """Whether it has as many tokens to give as its stream brings at a time; the first comes at once."""
        num_new, interval = len(self.output_ids) - self.num_given, self.request.sampling.stream_interval
        return num_new >= (interval if self.num_given else 1) and self.request.is_streamed

    def append(self, token_id: int, logprob: float, *, version: str) -> FinishReason | None:
        """Record one token; returns the reason if it ends the request."""
        self.output_ids.append(token_id)
        self.output_logprobs.append(logprob)
        end = len(self.output_ids)
        if not self.version_starts or self.version_starts[-1][0] != version:
            self.version_starts.append((version, end - 1))
        if self.stop_strings is not None and (string := self.stop_strings.matched(self.output_ids)) is not None:
            return StopFinish(string)
        if token_id in self.stop_token_ids and not self.request.sampling.ignore_eos:
            return StopFinish(token_id)
        if end >= self.request.sampling.max_new_tokens:
            return LengthFinish(end)
        return None

    def note_experts(self, rows: ExpertRows, *, start: int) -> None:
        """Who computed the tokens from `start` on; forgotten where nobody asks."""
        if self.experts is not None:
            self.experts.note(rows, start=start)

    def output(self, reason: FinishReason | None, *, version: str) -> RequestOutput:
        """What it has since its last output, ended by `reason` or (None) running."""
        start, self.num_given = self.num_given, len(self.output_ids)
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self.request.prompt,
            start=start,
            output_ids=tuple(self.output_ids[start:]),
            output_logprobs=tuple(self.output_logprobs[start:]),
            original_logprobs=tuple(self.original_logprobs[start:]),
            input_logprobs=(self.input_logprobs or ()) if start == 0 else (),
            finish_reason=reason,
            weight_version=version,
            weight_versions=self._spans(),
            num_retractions=self.num_retractions,
            cached_tokens=self.cached_tokens,
            experts=None if self.experts is None or reason is None else self.experts.before(self.num_tokens - 1),
        )

    def _spans(self) -> tuple[VersionSpan, ...]:
        if not self.version_starts:
            return ()
        ends = [*(start for _, start in self.version_starts[1:]), len(self.output_ids)]
        return tuple(
            VersionSpan(version, start, end) for (version, start), end in zip(self.version_starts, ends, strict=True)
        )


# The text of an answer, as SGLang gives it: output ids -> text, without what has stopped it.
#
# output ids  ... 88 12 | 5 |          a stop token is left out, and other special tokens where they are skipped
#                      v
# text        "... yes" | "\n\nQuestion"       a stop string is left out, and what its last token has behind it


class DecodeText(Protocol):
    """Token ids -> text; any thread may call it."""

    def __call__(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str: ...


def text_decoder(directory: Path) -> DecodeText:
    """By the tokenizer of a model directory.

    Raises:
        ValueError: if its tokenizer.json cannot be used.
    """
    tokenizer = load_tokenizer(directory)

    def decode(token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return str(tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    return decode


def answer_text(
    output_ids: Sequence[int], reason: FinishReason | None, sampling: SamplingParams, decode: DecodeText
) -> str:
    """The text of an answer that ended for `reason`.

    Example:
        answer_text([17, 4, 2], StopFinish(2), SamplingParams(), decode)        # decode([17, 4])
    """
    matched = reason.matched if isinstance(reason, StopFinish) else None
    if isinstance(matched, int) and not sampling.no_stop_trim:
        output_ids = output_ids[:-1]
    text = decode(output_ids, skip_special_tokens=sampling.skip_special_tokens)
    if isinstance(matched, str):
        before, found, _ = text.partition(matched)
        return before + found if sampling.no_stop_trim else before
    return text


# Which requests run together: continuous batching as a pure state machine, no tensors.
#
#     add() -> WAITING --admit()--> RUNNING (row 0..B-1) --remove()--> gone
#                 ^                    |
#                 +----- retract() ----+            (to the front)
#
# Admission is first come, first served, and never passes over a request: a long one waits for rows to empty, but cannot
# be starved by short ones. The budget counts the rectangle that the cache will need, rows x the longest reservation, so
# memory is bounded whatever the lengths are.
#
# Rows stay roughly in order of length, longest first: those that came first have grown most. So that a gap does not end
# this, a row of like length moves into it, and one like that into the gap it leaves; where attention reads all rows at
# once and order is of no use, the last row fills the gap.
#
# Example:
#     scheduler = BatchScheduler(max_running_requests=2, max_total_tokens=100)
#     for request in (a, b, c): scheduler.add(request)      # each reserves 40 tokens
#     scheduler.admit()                                     # [a, b]; c waits: 2 rows are the limit
#     scheduler.remove(0)                                   # [(1, 0)]: b, the last, is now row 0


class BatchScheduler:
    """Orders requests and assigns rows; the engine moves the tensors accordingly."""

    def __init__(self, *, max_running_requests: int, max_total_tokens: int, least_likeness: float = 0.0) -> None:
        """least_likeness: fraction of a row's length that another must have to move into its gap; 0.0 takes any."""
        if max_running_requests < 1:
            raise ValueError(f"max_running_requests must be at least 1, got {max_running_requests}")
        if max_total_tokens < 1:
            raise ValueError(f"max_total_tokens must be at least 1, got {max_total_tokens}")
        self.max_running_requests = max_running_requests
        self.max_total_tokens = max_total_tokens
        self._least_likeness = least_likeness
        self.running: list[ActiveRequest] = []
        self.waiting: deque[ActiveRequest] = deque()

    @property
    def longest_reserved(self) -> int:
        return max((request.reserved_tokens for request in self.running), default=0)

    def add(self, request: ActiveRequest) -> None:
        """Queue a request. The caller has checked that it fits into `max_total_tokens`, or it would never run."""
        self.waiting.append(request)

    def admit(self) -> list[ActiveRequest]:
        """Move waiting requests to running while rows and cache allow; they take the rows after the present ones."""
        admitted: list[ActiveRequest] = []
        longest = self.longest_reserved
        while self.waiting and len(self.running) < self.max_running_requests:
            longest = max(longest, self.waiting[0].reserved_tokens)
            if (len(self.running) + 1) * longest > self.max_total_tokens:
                break
            request = self.waiting.popleft()
            self.running.append(request)
            admitted.append(request)
        return admitted

    def remove(self, row: int) -> list[tuple[int, int]]:
        """End the request in `row`; others move up, so that rows stay contiguous.

        Returns:
            (source, target) rows whose content must move, in this order; none where `row` was the last one.
        """
        moves: list[tuple[int, int]] = []
        gap = row
        while gap < len(self.running) - 1:
            source = self._row_like(gap)
            self.running[gap] = self.running[source]
            moves.append((source, gap))
            gap = source
        self.running.pop()
        return moves

    def _row_like(self, row: int) -> int:
        """The last of the later rows that is of like length, or the next."""
        least = self._least_likeness * self.running[row].num_tokens
        later = range(len(self.running) - 1, row, -1)
        return next((other for other in later if self.running[other].num_tokens >= least), row + 1)

    def retract(self) -> list[ActiveRequest]:
        """Send every running request back to the front of the queue, in the order given by `running`."""
        retracted = list(self.running)
        self.running.clear()
        self.waiting.extendleft(reversed(retracted))
        return retracted

    def withdraw(self, is_wanted: Callable[[ActiveRequest], bool]) -> list[ActiveRequest]:
        """Take matching requests out of the queue (not out of the running ones)."""
        withdrawn = [request for request in self.waiting if is_wanted(request)]
        self.waiting = deque(request for request in self.waiting if not is_wanted(request))
        return withdrawn
