"""PartialAnswer: one answer that grows event by event, over weight updates and lost servers.

    prompt ──► begin ──► event ──► event ──► ... ──► finished (stop token, or the token limit)
                 ▲         │  aborted or server lost: the tokens that came back stay
                 └─settle──┘  and the rest is asked for again
                           every token keeps the policy version that made it

Which version that was, a server may say at the end of a request only, as SGLang does. Until then it says which one it
holds: a single token that has just come was made by that, and so were those that came since it said the same before.
What came over a change is of either, and so counts only once the last event has named its version: without that event
it is given back.

Pure; the HTTP client around it is in generation_client.py.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from corral.experiments.prompts.tokens import answer_text
from corral.scheduling.policy_version import PolicyVersion, VersionSpan
from corral.workers.episodes.routed_experts import AnswerExperts
from corral.workers.episodes.stream_events import FinishReason, MetaInfo, StreamEvent


class MalformedEventError(ValueError):
    """A generation server said something that does not fit its own token counts."""


@dataclass
class PartialAnswer:
    """An answer in the making.

    Example:
        answer = PartialAnswer(max_new_tokens=4)
        answer.extend(event)        # of two tokens: answer.remaining == 2
    """

    max_new_tokens: int
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    """Positions within the answer; during a request they may end before the tokens do, see above."""
    stopped: bool = False
    """Whether a stop token ended it."""
    sampling_seed: int | None = None
    """Sent with each request, so that several draw what one would have drawn; None: the server's choice."""
    experts: AnswerExperts | None = None
    """Who computed its tokens and the prompt's; None where nobody asks."""
    _begin: int = 0
    """Where the present request begins."""
    _held: str = ""
    """The version that its server held last."""

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

    def begin(self) -> None:
        """The rest is asked for, in another request."""
        self._begin, self._held = len(self.output_ids), ""

    def settle(self) -> None:
        """The request is over: tokens without a reported version are given back."""
        if len(self.output_ids) > self._num_reported:
            self.stopped = False
            del self.output_ids[self._num_reported :], self.logprobs[self._num_reported :]

    def cut(self, num_tokens: int) -> None:
        """End it before what its server would end it with, after so many of its tokens."""
        del self.output_ids[num_tokens:], self.logprobs[num_tokens:]
        spans = [span._replace(end=min(span.end, num_tokens)) for span in self.spans if span.start < num_tokens]
        self.spans, self.stopped = spans, True

    def extend(self, event: StreamEvent) -> FinishReason | None:
        """Take in the next event of the present request; returns why it ends, if it does.

        Raises:
            MalformedEventError: if ids, logprobs, version spans and experts disagree; nothing was taken in.
        """
        meta = event.meta_info
        if meta is None:
            raise MalformedEventError("an event of /generate has neither meta_info nor an error")
        reason, num_before = meta.finish_reason, len(self.output_ids)
        num_new = meta.completion_tokens - (num_before - self._begin)
        ids, logprobs = event.output_ids, [logprob for logprob, *_ in meta.output_token_logprobs]
        is_aborted = reason is not None and reason.type == "abort"
        if is_aborted and num_new >= 0:  # SGLang says some of those that came before again
            ids, logprobs = ids[:num_new], logprobs[:num_new]
        if not len(ids) == len(logprobs) == num_new:
            raise MalformedEventError(
                f"{len(ids)} token ids and {len(logprobs)} logprobs came where completion_tokens said {num_new} more"
            )
        if num_new > self.remaining:
            raise MalformedEventError(f"{num_new} tokens came where at most {self.remaining} were asked for")
        spans = self._spans(meta, num_new)
        text = meta.routed_experts
        # They come with the end. Nobody may have said them at the end of an aborted request: the next one says them.
        if self.experts is not None and reason is not None and (text is not None or not is_aborted):
            if text is None:
                raise MalformedEventError(
                    "a reply of /generate lacks routed_experts, which were asked for; a server of SGLang needs "
                    "--enable-return-routed-experts"
                )
            try:
                self.experts.append(self.experts.rows_in(text, num_tokens=num_before + num_new))
            except ValueError as error:
                raise MalformedEventError(f"a reply of /generate garbles a field: {error}") from error
        self.output_ids.extend(ids)
        self.logprobs.extend(logprobs)
        self.spans = spans
        self.stopped = reason is not None and reason.type == "stop"
        return reason

    @property
    def _num_reported(self) -> int:
        return self.spans[-1].end if self.spans else 0

    def _spans(self, meta: MetaInfo, num_new: int) -> list[VersionSpan]:
        """With what an event tells of the versions."""
        num_before, spans, begin = len(self.output_ids), meta.weight_versions, self._begin
        if spans is not None:  # of the present request from its first token on, in place of the assumed version
            ends, end = [span.end for span in spans], meta.completion_tokens
            if [*(span.start for span in spans), end] != [0, *ends] or sorted(ends) != ends:
                raise MalformedEventError(f"version spans {spans} are not one after the other over {end} tokens")
            earlier = [span._replace(end=min(span.end, begin)) for span in self.spans if span.start < begin]
            return _joined([*earlier, *(_span(span.version, begin + span.start, begin + span.end) for span in spans)])
        held, before = meta.weight_version, self._held
        if not num_new:
            return self.spans
        self._held = held
        if self._num_reported < num_before or (num_new > 1 and held != before):
            return self.spans
        return _joined([*self.spans, _span(held, num_before, num_before + num_new)])


def _span(version: str, start: int, end: int) -> VersionSpan:
    try:
        return VersionSpan(str(PolicyVersion.parse(version)), start, end)
    except ValueError as error:
        raise MalformedEventError(f"a reply of /generate garbles a version: {error}") from error


def _joined(spans: Sequence[VersionSpan]) -> list[VersionSpan]:
    """Neighbours of one version are one span."""
    joined: list[VersionSpan] = []
    for span in spans:
        if span.start == span.end:
            continue
        if joined and joined[-1].version == span.version:
            joined[-1] = joined[-1]._replace(end=span.end)
        else:
            joined.append(span)
    return joined


# Texts and tokens that end an answer, wherever it is made: the token that completes one is its last.
#
#     tokens come ──► decoded: the new ones, and as many before as a text may reach back ──found──► PartialAnswer.cut
#
# No server is asked to: it may see token ids only. What was sampled is cut, never changed, so that each token that is
# left has the log-probability that it was drawn with.

Watch = Callable[[PartialAnswer], None]
"""Looks at an answer whenever tokens have come, and may cut it."""

_MARGIN = 8  # tokens that a decoder may spend without a byte, or on a blank that it drops in front


def stopper(tokenizer: Any, texts: Sequence[str], token_ids: Collection[int] = ()) -> Watch | None:
    """Who cuts answers behind the first of the tokens, or the one that completes one of the texts; None without any."""
    if not texts and not token_ids:
        return None
    reach = _MARGIN + max((len(text.encode()) for text in texts), default=0)  # a token is a byte or more
    looked_at: dict[int, int] = {}

    def has_stop(ids: Sequence[int]) -> bool:
        text = answer_text(tokenizer, ids) if texts else ""
        return any(stop in text for stop in texts) or any(token in token_ids for token in ids)

    def cut(answer: PartialAnswer) -> None:
        ids = answer.output_ids
        start = max(0, min(looked_at.get(id(answer), 0), len(ids)) - reach)
        looked_at[id(answer)] = len(ids)
        if has_stop(ids[start:]):
            answer.cut(next(end for end in range(start + 1, len(ids) + 1) if has_stop(ids[start:end])))

    return cut
