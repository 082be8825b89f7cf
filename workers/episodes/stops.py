"""Texts and tokens that end an answer, wherever it is made: the token that completes one is its last.

    tokens come ──► decoded: the new ones, and as many before as a text may reach back ──found──► PartialAnswer.cut

No server is asked to: it may see token ids only. What was sampled is cut, never changed, so that each token that is
left has the log-probability that it was drawn with.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

from corral.experiments.prompts.tokens import answer_text
from corral.workers.episodes.partial_answer import PartialAnswer

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
