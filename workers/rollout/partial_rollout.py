"""PartialAnswer: one answer that grows chunk by chunk, over weight updates and lost servers.

    prompt ──► chunk ──► chunk ──► ... ──► finished (stop token, or the token limit)
                 │  aborted or server lost: the tokens that came back stay, the rest is asked for again
                 └─ every token keeps the policy version that made it

Pure; the HTTP client around it is in generation_client.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from corral.scheduling.policy_version import PolicyVersion, VersionSpan
from corral.workers.rollout.routed_experts import AnswerExperts


class MalformedChunkError(ValueError):
    """A generation server answered with something that does not fit its own token counts."""


@dataclass
class PartialAnswer:
    """An answer in the making.

    Example:
        answer = PartialAnswer(max_new_tokens=4)
        answer.extend({"output_ids": [5, 6], "meta_info": {...}})   # answer.remaining == 2
    """

    max_new_tokens: int
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    """Positions within the answer."""
    stopped: bool = False
    """Whether a stop token ended it."""
    sampling_seed: int | None = None
    """Sent with each chunk, so that chunks draw what the answer would have drawn in one go; None: the server's choice.
    """
    experts: AnswerExperts | None = None
    """Who computed its tokens and the prompt's; None where nobody asks."""

    @property
    def remaining(self) -> int:
        """Tokens that may still be generated."""
        return self.max_new_tokens - len(self.output_ids)

    @property
    def finished(self) -> bool:
        return self.stopped or self.remaining <= 0

    def versions(self) -> list[PolicyVersion]:
        """The version of each token."""
        return [PolicyVersion.parse(span.version) for span in self.spans for _ in range(span.start, span.end)]

    def extend(self, chunk: Mapping[str, Any], *, num_prompt_tokens: int = 0, experts_from: int = 0) -> None:
        """Take in one reply of /generate, complete or aborted.

        Args:
            num_prompt_tokens: of the answer's prompt; they count where experts do.
            experts_from: first token whose experts were asked for.

        Raises:
            MalformedChunkError: if ids, logprobs, version spans and experts disagree; nothing was taken in.
        """
        try:
            ids: Sequence[int] = chunk["output_ids"]
            meta = chunk["meta_info"]
            triples: Sequence[Sequence[Any]] = meta["output_token_logprobs"]
            logprobs = [float(triple[0]) for triple in triples]
            spans = [
                VersionSpan(str(PolicyVersion.parse(span["version"])), int(span["start"]), int(span["end"]))
                for span in meta["weight_versions"]
            ]
            reason = meta["finish_reason"]["type"]
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise MalformedChunkError(f"a reply of /generate lacks or garbles a field: {error!r}") from error
        self._check(ids, logprobs, spans)
        offset = len(self.output_ids)
        self._take_in_experts(
            meta, start=experts_from, num_tokens=num_prompt_tokens + offset + len(ids), is_aborted=reason == "abort"
        )
        self.output_ids.extend(ids)
        self.logprobs.extend(logprobs)
        for span in spans:
            self._add_span(span._replace(start=span.start + offset, end=span.end + offset))
        self.stopped = reason == "stop"

    def _check(self, ids: Sequence[int], logprobs: list[float], spans: list[VersionSpan]) -> None:
        covered = 0
        for _, start, end in spans:
            if start != covered or end < start:
                raise MalformedChunkError(f"version spans {spans} leave a gap or overlap at token {covered}")
            covered = end
        if not len(ids) == len(logprobs) == covered:
            raise MalformedChunkError(
                f"{len(ids)} token ids, {len(logprobs)} logprobs and version spans over {covered} tokens disagree"
            )
        if len(ids) > self.remaining:
            raise MalformedChunkError(f"{len(ids)} tokens came back where at most {self.remaining} were asked for")

    def _take_in_experts(self, meta: Mapping[str, Any], *, start: int, num_tokens: int, is_aborted: bool) -> None:
        """An aborted request may have come to an end before anybody could say them; the next chunk says them."""
        text = meta.get("routed_experts")
        if self.experts is None or (text is None and is_aborted):
            return
        if text is None:
            raise MalformedChunkError(
                "a reply of /generate lacks routed_experts, which were asked for; a server of SGLang needs "
                "--enable-return-routed-experts"
            )
        try:
            self.experts.append(self.experts.rows_in(text, start=start, num_tokens=num_tokens))
        except ValueError as error:
            raise MalformedChunkError(f"a reply of /generate garbles a field: {error}") from error

    def _add_span(self, span: VersionSpan) -> None:
        if span.start == span.end:
            return
        if self.spans and self.spans[-1].version == span.version:
            self.spans[-1] = self.spans[-1]._replace(end=span.end)
        else:
            self.spans.append(span)
