"""What a request must fit into, before it is queued: request --check--> ValueError with the value and the limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from corral.workers.engine.requests import GenerationRequest
from corral.workers.engine.sampling.sampling import SamplingParams


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
