"""Continuous batching of one causal language model, one decode step at a time.

    add() --> BatchScheduler --admit--> prefill (what no row has of it) -----+
                                                                             +--> sample ==> read --> RequestOutput
                                every running row, one token per step -------+      |
                                          ^---------- DecodeRows (on the device) <--+

    RUNNING --pause(mode)--> PAUSED --resume()--> RUNNING
              abort:    every request ends now, with the tokens it has
              retract:  running requests lose their cache and are computed again, under the weights of then, at resume
              in_place: running requests keep their cache, made by the weights of before

Requests join and leave between steps. A GPU computes a step while the tokens of the one before are read: what a request
gets beyond its end is thrown away, so outputs, versions and counters are those of reading each step at once, which is
what a CPU does. Nothing here knows threads or sockets: engine.py runs it, server.py serves it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor

from corral.experiments.config.rollout import UpdateMode
from corral.workers.engine.attention import KVCache, RowSpans, TokenAttention, call_cost
from corral.workers.engine.decoder import Decoder
from corral.workers.engine.device_rows import DecodeRows, UnreadTokens
from corral.workers.engine.prefill import Prefill, SharedPrefixes
from corral.workers.engine.requests import (
    AbortFinish,
    ActiveRequest,
    BatchScheduler,
    ChosenExperts,
    DecodeText,
    FinishReason,
    GenerationRequest,
    RequestOutput,
    StopStrings,
)
from corral.workers.engine.sampling import SamplingBatch, TokenUniforms, sample_tokens
from corral.workers.episodes.stream_events import NOT_FINITE


class ContinuousBatch:
    """A decoder, its cache and its requests. Not thread-safe, but for `check` and the counters."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        eos_token_ids: Collection[int],
        max_running_requests: int,
        max_total_tokens: int,
        seed: int,
        version: str,
        decode: DecodeText | None = None,
        no_text_because: str = "",
        read_lag: Literal[0, 1] | None = None,
    ) -> None:
        """
        Args:
            decode: turns tokens into text; None where nothing can, for a reason.
            read_lag: steps on the device whose tokens are not read yet when the next one is begun; None: 1 on a GPU,
                which computes meanwhile, and 0 on a CPU.
        """
        self.version = version
        self.tokens_generated = 0
        self.steps = 0
        self._request_seeds = TokenUniforms.of(seed)
        self._num_unseeded = 0
        self.is_paused = False
        self._eos_token_ids = frozenset(eos_token_ids)
        self.decode = decode
        self._no_text_because = no_text_because
        self._decoder = decoder
        self._cache = KVCache(
            decoder.empty_keys,
            num_layers=decoder.num_layers,
            max_rows=max_running_requests,
            max_total_tokens=max_total_tokens,
        )
        self._spans = RowSpans(call_cost=call_cost(self._cache))
        self._scheduler = BatchScheduler(
            max_running_requests=max_running_requests,
            max_total_tokens=max_total_tokens,
            least_likeness=self._spans.least_likeness,
        )
        self._prefill = Prefill(decoder, self._cache)
        self._prefixes = SharedPrefixes(self._cache)
        self._rows = DecodeRows(max_rows=max_running_requests, device=decoder.device)
        self._read_lag = int(decoder.device.type != "cpu") if read_lag is None else read_lag
        self._unread: deque[UnreadTokens] = deque()
        self._sampling: SamplingBatch | None = None

    @property
    def max_running_requests(self) -> int:
        return self._scheduler.max_running_requests

    @property
    def num_running(self) -> int:
        return len(self._scheduler.running)

    @property
    def num_queued(self) -> int:
        return len(self._scheduler.waiting)

    @property
    def has_work(self) -> bool:
        """Whether `step` would do something."""
        return not self.is_paused and bool(self._scheduler.running or self._scheduler.waiting)

    def add(self, request: GenerationRequest) -> None:
        """Queue a request; it starts with the next step that has room.

        Without a seed of its own it gets one from the engine's seed and the number of such requests so far: an engine
        that starts again repeats them.

        Raises:
            ValueError: if it does not fit the limits, or has stop strings and the tokenizer cannot be used.
        """
        self.check(request)
        sampling = request.sampling
        seed = sampling.sampling_seed
        if seed is None:
            seed = self._request_seeds.seed(self._num_unseeded)
            self._num_unseeded += 1
        self._scheduler.add(
            ActiveRequest(
                request=request,
                stop_token_ids=sampling.stop_token_ids | self._eos_token_ids,
                stop_strings=StopStrings(sampling.stop, self.decode) if sampling.stop and self.decode else None,
                uniforms=TokenUniforms.of(seed),
                experts=None if request.experts_from is None else ChosenExperts(request.experts_from),
            )
        )

    def check(self, request: GenerationRequest) -> None:
        """Refuse a request that the model cannot run; any thread may ask.

        Raises:
            ValueError: naming the value and the limit.
        """
        decoder = self._decoder
        prompt, sampling, experts_from = request.prompt, request.sampling, request.experts_from
        if not prompt:
            raise ValueError("the prompt is empty; input_ids needs at least one token id")
        lowest, highest = min(prompt), max(prompt)
        if lowest < 0 or highest >= decoder.vocab_size:
            outside = lowest if lowest < 0 else highest
            raise ValueError(
                f"token id {outside} at position {prompt.index(outside)} of the prompt is outside the vocabulary "
                f"[0, {decoder.vocab_size})"
            )
        if sampling.stop and self.decode is None:
            raise ValueError(
                f"stop={list(sampling.stop)} needs the text of the answer, and {self._no_text_because}; "
                "send stop_token_ids"
            )
        asked = len(prompt) + sampling.max_new_tokens
        for limit, name in (
            (decoder.context_length, "the model's context length"),
            (self._scheduler.max_total_tokens, "max_total_tokens"),
        ):
            if asked > limit:
                raise ValueError(
                    f"a prompt of {len(prompt)} tokens with max_new_tokens={sampling.max_new_tokens} may reach {asked} "
                    f"tokens, more than {name} of {limit}"
                )
        if experts_from is not None and not decoder.expert_layers:
            raise ValueError("return_routed_experts needs a mixture of experts, and the model has no experts")
        if experts_from is not None and experts_from > len(prompt):
            raise ValueError(
                f"routed_experts_start_len must be at most the prompt's {len(prompt)} tokens, got {experts_from}"
            )

    def step(self) -> list[RequestOutput]:
        """Admit and prefill what fits, then make one token for every running request; returns those known to have
        ended."""
        if self.is_paused:
            return []
        self.steps += 1
        with torch.inference_mode():
            ended = self._admit()
            return ended + self._decode()

    def news(self) -> list[RequestOutput]:
        """What streamed requests that run have to give."""
        return [active.output(None, version=self.version) for active in self._scheduler.running if active.has_news]

    def generate(self, requests: Iterable[GenerationRequest]) -> list[RequestOutput]:
        """Run requests to their end, in this thread; outputs in the order of the requests."""
        order = []
        for request in requests:
            self.add(request)
            order.append(request.request_id)
        outputs: dict[str, RequestOutput] = {}
        while self.has_work:
            outputs.update((output.request_id, output) for output in self.step())
        return [outputs[request_id] for request_id in order]

    def abort(self, request_ids: frozenset[str] | None) -> list[RequestOutput]:
        """End these requests (None: all), running or queued, with the tokens they have. Unknown ids are ignored.

        Returns:
            Their outputs, and those of requests whose last token was still to be read.
        """

        def is_wanted(active: ActiveRequest) -> bool:
            return request_ids is None or active.request.request_id in request_ids

        with torch.inference_mode():
            ended = self._read()
            rows = [(row, AbortFinish()) for row, active in enumerate(self._scheduler.running) if is_wanted(active)]
            ended += self._end_rows(rows, version=self.version)
        return ended + [
            active.output(AbortFinish(), version=self.version) for active in self._scheduler.withdraw(is_wanted)
        ]

    def pause(self, mode: UpdateMode) -> list[RequestOutput]:
        """Stop stepping, with all tokens read; whatever changes meanwhile, each has the version that made it.

        Returns:
            Outputs of requests that the mode aborts, or whose last token was still to be read. Pausing twice applies
            both modes.
        """
        self.is_paused = True
        if mode == "abort":
            return self.abort(None)
        with torch.inference_mode():
            ended = self._read()
        if mode == "retract":
            for active in self._scheduler.retract():
                active.num_retractions += 1
            self._sampling = None
        return ended

    def resume(self) -> None:
        self.is_paused = False

    def flush_cache(self) -> bool:
        """Give the cache memory back; False, and nothing done, while a request needs it or is about to."""
        if self._scheduler.running or self.has_work:
            return False
        with torch.inference_mode():
            self._cache.release()
        self._prefixes.forget()
        return True

    def forget_prefixes(self) -> None:
        """Other weights compute from now on: what the cache holds is of no use to requests that come."""
        self._prefixes.forget()
        for active in self._scheduler.running:
            active.is_shareable = False

    def _admit(self) -> list[RequestOutput]:
        first_row = self.num_running
        admitted = self._scheduler.admit()
        if not admitted:
            return []
        self._sampling = None
        self._reserve(max(request.num_tokens for request in self._scheduler.running) + 1)
        self._rows.join(admitted, first_row=first_row)
        shared = self._prefixes.share(admitted, running=self._scheduler.running[:first_row])
        logits = self._prefill.run(admitted, first_row=first_row, shared=shared)
        self._sample(admitted, logits, self._sampling_batch(admitted), first_row=first_row)
        return self._read(but=self._read_lag)

    def _reserve(self, length: int) -> None:
        if self._cache.reserve(
            num_rows=self.num_running, length=length, longest_reserved=self._scheduler.longest_reserved
        ):
            self._prefixes.resized()

    def _decode(self) -> list[RequestOutput]:
        running = self._scheduler.running
        if not any(active.may_go_on for active in running):
            return self._read()
        # The newest token of a row is sampled but not in the cache yet; its position is the number of tokens before it.
        lengths = [active.newest_position + 1 for active in running]
        self._reserve(max(lengths))
        chosen: list[Tensor] | None = [] if any(active.experts is not None for active in running) else None
        logits = self._next_logits(lengths, chosen)
        if chosen is not None:
            rows = self._decoder.expert_rows(chosen)
            for row, (active, length) in enumerate(zip(running, lengths, strict=True)):
                active.note_experts(rows[row : row + 1], start=length - 1)
        if self._sampling is None:
            self._sampling = self._sampling_batch(running)
        self._sample(running, logits, self._sampling)
        return self._read(but=self._read_lag)

    def _next_logits(self, lengths: Sequence[int], chosen: list[Tensor] | None) -> Tensor:
        """[B, V] float32 of what comes after the newest token of each row, which is written into the cache."""
        decoder, num_rows = self._decoder, len(lengths)
        decoder.reserve_positions(max(lengths))
        token_ids, positions = self._rows.newest(num_rows)
        attend = TokenAttention(
            self._cache,
            positions=positions,
            spans=self._spans.of(lengths),
            dtype=decoder.dtype,
            softmax_scale=decoder.softmax_scale,
        )
        hidden = decoder.hidden_states(token_ids, positions, attend, chosen=chosen)
        return decoder.logits(hidden)

    def _sampling_batch(self, requests: Sequence[ActiveRequest]) -> SamplingBatch:
        return SamplingBatch(
            [active.request.sampling for active in requests],
            vocab_size=self._decoder.vocab_size,
            device=self._decoder.device,
            original_rows=[row for row, active in enumerate(requests) if active.request.wants_original_logprobs],
        )

    def _sample(
        self, requests: Sequence[ActiveRequest], logits: Tensor, sampling: SamplingBatch, *, first_row: int = 0
    ) -> None:
        """Sample one token for each of `requests`, which hold the rows from `first_row` on."""
        uniforms = self._rows.next_uniforms(len(requests), first_row=first_row)
        sampled = sample_tokens(logits, sampling, uniforms)
        self._rows.take(sampled.token_ids, first_row=first_row)
        self._unread.append(UnreadTokens(sampled, requests, version=self.version))

    def _read(self, *, but: int = 0) -> list[RequestOutput]:
        """Take in the tokens of all steps but this many of the newest; ends the requests that are done."""
        ended: list[RequestOutput] = []
        while len(self._unread) > but:
            ended += self._take_in(self._unread.popleft())
        if not self._scheduler.running:
            self._unread.clear()  # nothing but tokens beyond the ends of requests
        return ended

    def _take_in(self, unread: UnreadTokens) -> list[RequestOutput]:
        reasons: dict[int, FinishReason] = {}
        for active, token_id, logprob, original_logprob in unread.read():
            if not math.isfinite(logprob):
                active.is_shareable = False
                reasons[id(active)] = AbortFinish("the model's logits are not finite", err_type=NOT_FINITE)
                continue
            self.tokens_generated += 1
            if original_logprob is not None:
                active.original_logprobs.append(original_logprob)
            reason = active.append(token_id, logprob, version=unread.version)
            if reason is not None:
                reasons[id(active)] = reason
        if not reasons:
            return []
        ended = [
            (row, reasons[id(active)]) for row, active in enumerate(self._scheduler.running) if id(active) in reasons
        ]
        for row, reason in ended:
            if isinstance(reason, AbortFinish):
                self._cache.clear(row)
        return self._end_rows(ended, version=unread.version)

    def _end_rows(self, ended: Sequence[tuple[int, FinishReason]], *, version: str) -> list[RequestOutput]:
        """Take rows (ascending) out of the batch; others move into the gaps."""
        outputs = []
        for row, reason in reversed(ended):  # descending, so that no row that moves is one about to end
            active = self._scheduler.running[row]
            active.has_ended = True
            outputs.append(active.output(reason, version=version))
            moves = self._scheduler.remove(row)
            # Who waits takes the free row at once.
            is_kept = active.is_shareable and not self._scheduler.waiting
            content = self._cache.content(row, length=active.num_tokens - 1) if is_kept and moves else None
            for source, target in moves:
                length = self._scheduler.running[target].newest_position
                self._cache.move(source=source, target=target, length=length)
                self._rows.move(source=source, target=target)
            if is_kept:
                self._prefixes.keep(active, content, row=self.num_running)
            self._sampling = None
        outputs.reverse()
        return outputs


def generate_all(
    decoder: Decoder, requests: Sequence[GenerationRequest], *, batch_size: int, version: str = ""
) -> list[RequestOutput]:
    """Run requests to their end on weights that stay, `batch_size` of them at a time.

    Only their own stop tokens end them: the model's end-of-sequence ids are not consulted.

    Args:
        version: tag of the weights.
    """
    if not requests:
        return []
    num_rows = min(len(requests), batch_size)
    longest = max(len(request.prompt) + request.sampling.max_new_tokens for request in requests)
    batch = ContinuousBatch(
        decoder,
        eos_token_ids=(),
        max_running_requests=num_rows,
        max_total_tokens=num_rows * longest,
        seed=0,  # of requests that bring none
        version=version,
    )
    return batch.generate(requests)
