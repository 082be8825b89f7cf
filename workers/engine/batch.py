"""Continuous batching of one causal language model, one decode step at a time.

    add() --> BatchScheduler --admit--> prefill (rectangle of new prompts) --+
                                                                             +--> sample --> append --> RequestOutput
                                every running row, one token per step -------+

    RUNNING --pause(mode)--> PAUSED --resume()--> RUNNING
              abort:    every request ends now, with the tokens it has
              retract:  running requests lose their cache and are computed again, under the weights of then, at resume
              in_place: running requests keep their cache, made by the weights of before

Requests join and leave between steps. Nothing here knows threads or sockets: loop.py runs it, http serves it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor, nn

from corral.workers.engine.answer_text import DecodeText
from corral.workers.engine.decoder.attention import TokenAttention
from corral.workers.engine.decoder.chosen_experts import ChosenExperts
from corral.workers.engine.decoder.decoder import Decoder
from corral.workers.engine.prefill import Prefill
from corral.workers.engine.requests import AbortFinish, ActiveRequest, FinishReason, GenerationRequest, RequestOutput
from corral.workers.engine.sampling.penalties import PenaltyBatch
from corral.workers.engine.sampling.sampling import SamplingBatch, SamplingParams, sample_tokens
from corral.workers.engine.sampling.stop_strings import StopStrings
from corral.workers.engine.sampling.uniforms import TokenUniforms
from corral.workers.engine.scheduler import BatchScheduler


class PauseMode(Enum):
    """What a pause does to the running requests; see the module's drawing."""

    ABORT = "abort"
    RETRACT = "retract"
    IN_PLACE = "in_place"


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What a request must fit into; constant, so any thread may check against it."""

    vocab_size: int
    context_length: int
    max_total_tokens: int
    has_tokenizer: bool
    has_experts: bool

    def check_experts(self, request: GenerationRequest) -> None:
        """ValueError if a request asks for experts that there are not."""
        if request.experts_from is None:
            return
        if not self.has_experts:
            raise ValueError("return_routed_experts needs a mixture of experts, and the model has no experts")
        if request.experts_from > len(request.prompt):
            raise ValueError(
                f"routed_experts_start_len must be at most the prompt's {len(request.prompt)} tokens, got "
                f"{request.experts_from}"
            )

    def check(self, prompt: Sequence[int], sampling: SamplingParams) -> None:
        """Refuse a request that the model cannot run.

        Raises:
            ValueError: naming the value and the limit.
        """
        if not prompt:
            raise ValueError("the prompt is empty; input_ids needs at least one token id")
        lowest, highest = min(prompt), max(prompt)
        if lowest < 0 or highest >= self.vocab_size:
            outside = lowest if lowest < 0 else highest
            raise ValueError(
                f"token id {outside} at position {list(prompt).index(outside)} of the prompt is outside the vocabulary "
                f"[0, {self.vocab_size})"
            )
        if sampling.stop and not self.has_tokenizer:
            raise ValueError(
                f"stop={list(sampling.stop)} needs the text of the answer, and the model has no tokenizer.json; "
                "send stop_token_ids"
            )
        asked = len(prompt) + sampling.max_new_tokens
        for limit, name in (
            (self.context_length, "the model's context length"),
            (self.max_total_tokens, "max_total_tokens"),
        ):
            if asked > limit:
                raise ValueError(
                    f"a prompt of {len(prompt)} tokens with max_new_tokens={sampling.max_new_tokens} may reach {asked} "
                    f"tokens, more than {name} of {limit}"
                )


class ContinuousBatch:
    """A decoder, its cache and its requests. Not thread-safe, but for `limits` and the counters."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        eos_token_ids: Collection[int],
        max_running_requests: int,
        max_total_tokens: int,
        seed: int,
        version: str,
        load_text_decoder: Callable[[], DecodeText] | None = None,
    ) -> None:
        """load_text_decoder: gives what turns tokens into text, ValueError if it cannot; from any thread."""
        self.version = version
        self.tokens_generated = 0
        self.steps = 0
        self._request_seeds = TokenUniforms.of(seed)
        self._num_unseeded = 0
        self.is_paused = False
        self._eos_token_ids = frozenset(eos_token_ids)
        self.load_text_decoder = load_text_decoder
        self._decoder = decoder
        self._scheduler: BatchScheduler[ActiveRequest] = BatchScheduler(
            max_running_requests=max_running_requests, max_total_tokens=max_total_tokens
        )
        self._cache = decoder.new_cache(max_rows=max_running_requests, max_total_tokens=max_total_tokens)
        self._prefill = Prefill(decoder, self._cache)
        self._sampling: SamplingBatch | None = None
        self.limits = EngineLimits(
            vocab_size=decoder.vocab_size,
            context_length=decoder.context_length,
            max_total_tokens=max_total_tokens,
            has_tokenizer=load_text_decoder is not None,
            has_experts=bool(decoder.expert_layers),
        )

    @property
    def max_running_requests(self) -> int:
        return self._scheduler.max_running_requests

    @property
    def num_running(self) -> int:
        return len(self._scheduler.running)

    @property
    def num_queued(self) -> int:
        return self._scheduler.num_queued

    @property
    def num_used_tokens(self) -> int:
        return sum(request.num_tokens for request in self._scheduler.running)

    @property
    def has_work(self) -> bool:
        """Whether `step` would do something."""
        return not self.is_paused and bool(self._scheduler.running or self._scheduler.waiting)

    @property
    def is_drained(self) -> bool:
        return self._scheduler.is_drained

    def add(self, request: GenerationRequest) -> None:
        """Queue a request; it starts with the next step that has room.

        Without a seed of its own it gets one from the engine's seed and the number of such requests so far: an engine
        that starts again repeats them.

        Raises:
            ValueError: if it does not fit the limits, or has stop strings and the tokenizer cannot be used.
        """
        self.limits.check(request.prompt, request.sampling)
        self.limits.check_experts(request)
        sampling = request.sampling
        seed = sampling.sampling_seed
        if seed is None:
            seed = self._request_seeds.seed(self._num_unseeded)
            self._num_unseeded += 1
        self._scheduler.add(
            ActiveRequest(
                request=request,
                stop_token_ids=sampling.stop_token_ids | self._eos_token_ids,
                stop_strings=self._stop_strings(sampling),
                uniforms=TokenUniforms.of(seed),
                experts=None if request.experts_from is None else ChosenExperts(request.experts_from),
            )
        )

    def step(self) -> list[RequestOutput]:
        """Admit and prefill what fits, then make one token for every running request; returns those that ended."""
        if self.is_paused:
            return []
        self.steps += 1
        with torch.inference_mode():
            ended = self._admit()
            if self._scheduler.running:
                ended += self._decode()
        return ended

    def outputs_so_far(self, request_ids: Container[str]) -> list[RequestOutput]:
        """What those of these requests have that are running."""
        return [
            active.output(None, version=self.version)
            for active in self._scheduler.running
            if active.request.request_id in request_ids
        ]

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
        """End these requests (None: all), running or queued, with the tokens they have. Unknown ids are ignored."""
        with torch.inference_mode():
            return self._end_where(lambda active: request_ids is None or active.request.request_id in request_ids)

    def pause(self, mode: PauseMode) -> list[RequestOutput]:
        """Stop stepping; returns the outputs of requests that the mode aborts. Pausing twice applies both modes."""
        self.is_paused = True
        if mode is PauseMode.ABORT:
            return self.abort(None)
        if mode is PauseMode.RETRACT:
            for active in self._scheduler.retract():
                active.num_retractions += 1
            self._sampling = None
        return []

    def resume(self) -> None:
        self.is_paused = False

    def begin_drain(self) -> None:
        """Hold requests that come from now on, until `end_drain`."""
        self._scheduler.begin_drain()

    def end_drain(self) -> None:
        self._scheduler.end_drain()

    def flush_cache(self) -> bool:
        """Give the cache memory back; False, and nothing done, while a request needs it or is about to."""
        if self._scheduler.running or self.has_work:
            return False
        with torch.inference_mode():
            self._cache.release()
        return True

    def _admit(self) -> list[RequestOutput]:
        first_row = self.num_running
        admitted = self._scheduler.admit()
        if not admitted:
            return []
        self._sampling = None
        self._cache.reserve(
            num_rows=self.num_running,
            length=max(request.num_tokens for request in self._scheduler.running) + 1,
            longest_reserved=self._scheduler.longest_reserved,
        )
        logits = self._prefill.run(admitted, first_row=first_row)
        return self._append(admitted, logits, self._sampling_batch(admitted), first_row=first_row)

    def _decode(self) -> list[RequestOutput]:
        running = self._scheduler.running
        # The newest token of a row is known but not in the cache yet; its position is the number of tokens before it.
        newest_positions = [request.num_tokens - 1 for request in running]
        longest = max(newest_positions) + 1
        self._cache.reserve(num_rows=len(running), length=longest, longest_reserved=self._scheduler.longest_reserved)
        self._decoder.reserve_positions(longest)
        positions = torch.tensor(newest_positions, device=self._decoder.device)
        token_ids = torch.tensor([request.output_ids[-1] for request in running], device=self._decoder.device)
        attend = TokenAttention(
            self._cache,
            positions=positions,
            shortest=min(newest_positions) + 1,
            longest=longest,
            dtype=self._decoder.dtype,
            softmax_scale=self._decoder.softmax_scale,
        )
        chosen: list[Tensor] | None = [] if any(active.experts is not None for active in running) else None
        logits = self._decoder.logits(self._decoder.hidden_states(token_ids, positions, attend, chosen=chosen))
        if chosen is not None:
            rows = self._decoder.expert_rows(chosen)
            for row, active in enumerate(running):
                active.note_experts(rows[row : row + 1], start=newest_positions[row])
        if self._sampling is None:
            self._sampling = self._sampling_batch(running)
        return self._append(list(running), logits, self._sampling, first_row=0)

    def _sampling_batch(self, requests: Sequence[ActiveRequest]) -> SamplingBatch:
        params = [active.request.sampling for active in requests]
        penalized = [
            active.penalized(row) for row, active in enumerate(requests) if active.request.sampling.is_penalized
        ]
        vocab_size, device = self.limits.vocab_size, self._decoder.device
        penalties = PenaltyBatch(penalized, vocab_size=vocab_size, device=device) if penalized else None
        originals = [row for row, active in enumerate(requests) if active.request.wants_original_logprobs]
        return SamplingBatch.of(
            params, vocab_size=vocab_size, device=device, penalties=penalties, original_rows=originals
        )

    def _stop_strings(self, sampling: SamplingParams) -> StopStrings | None:
        if not sampling.stop or self.load_text_decoder is None:
            return None
        return StopStrings(sampling.stop, self.load_text_decoder())

    def _append(
        self, requests: Sequence[ActiveRequest], logits: Tensor, sampling: SamplingBatch, *, first_row: int
    ) -> list[RequestOutput]:
        """Sample one token for each of `requests`, which hold the rows from `first_row` on; end those that are done."""
        uniforms = [0.0 if sampling.is_all_greedy else active.next_uniform for active in requests]
        sampled = sample_tokens(logits, sampling, torch.tensor(uniforms, device=logits.device))
        originals = iter(() if sampled.original_logprobs is None else sampled.original_logprobs.tolist())
        tokens = zip(sampled.token_ids.tolist(), sampled.logprobs.tolist(), strict=True)
        ended: list[tuple[int, FinishReason]] = []
        for offset, (token_id, logprob) in enumerate(tokens):
            original = next(originals) if requests[offset].request.wants_original_logprobs else None
            if not math.isfinite(logprob):
                self._cache.clear(first_row + offset)
                ended.append((first_row + offset, AbortFinish("the model's logits are not finite")))
                continue
            self.tokens_generated += 1
            if original is not None:
                requests[offset].original_logprobs.append(original)
            reason = requests[offset].append(token_id, logprob, version=self.version)
            if reason is not None:
                ended.append((first_row + offset, reason))
        return self._end_rows(ended)

    def _end_where(self, is_wanted: Callable[[ActiveRequest], bool]) -> list[RequestOutput]:
        queued = self._scheduler.withdraw(is_wanted)
        rows = [(row, AbortFinish()) for row, active in enumerate(self._scheduler.running) if is_wanted(active)]
        ended = self._end_rows(rows)
        return ended + [active.output(AbortFinish(), version=self.version) for active in queued]

    def _end_rows(self, ended: Sequence[tuple[int, FinishReason]]) -> list[RequestOutput]:
        """Take rows (ascending) out of the batch; the last row fills each gap."""
        outputs = []
        for row, reason in reversed(ended):  # descending, so that the row that moves is never one about to end
            outputs.append(self._scheduler.running[row].output(reason, version=self.version))
            moved_from = self._scheduler.remove(row)
            if moved_from is not None:
                length = self._scheduler.running[row].num_tokens - 1
                self._cache.move(source=moved_from, target=row, length=length)
            self._sampling = None
        outputs.reverse()
        return outputs


def generate_greedily(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_token_ids: Collection[int] = (),
    batch_size: int = 64,
) -> list[list[int]]:
    """Most likely continuations by a module that is already loaded: how a model worker evaluates its own weights.

    Ends an answer after one of `stop_token_ids` (which it keeps) or `max_new_tokens`; the model's own end-of-sequence
    ids are not consulted. `batch_size` answers are decoded at a time: past 64 a CPU gains nothing. Sharded parameters
    are gathered first: then every rank that holds a shard must make this call, be it without prompts.
    """
    sampling = SamplingParams(max_new_tokens=max_new_tokens, temperature=0, stop_token_ids=frozenset(stop_token_ids))
    with torch.no_grad():
        decoder = Decoder(model)
    if not prompts:
        return []
    num_rows = min(len(prompts), batch_size)
    batch = ContinuousBatch(
        decoder,
        eos_token_ids=(),
        max_running_requests=num_rows,
        max_total_tokens=num_rows * (max(len(prompt) for prompt in prompts) + max_new_tokens),
        seed=0,
        version="",
    )
    outputs = batch.generate(
        GenerationRequest(request_id=str(index), prompt=tuple(prompt), sampling=sampling)
        for index, prompt in enumerate(prompts)
    )
    return [list(output.output_ids) for output in outputs]
