"""Texts that end answers: found wherever tokens are cut into events, at the token that completes the first of them."""

from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from corral.workers.episodes.partial_answer import PartialAnswer, stopper

WORDS = ("a", "b", "ab", "", "\u00e9", "c")  # of the tokens 0 to 5; some are part of a text, and one is nothing


class Words:
    """A tokenizer."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(WORDS[token] for token in ids)

    def id_to_token(self, token: int) -> str:
        return WORDS[token]


@given(
    st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=12), max_size=8),
    st.lists(st.sampled_from(["aba", "bb", "\u00e9a", "c"]), max_size=2),
    st.sets(st.sampled_from([3, 5]), max_size=1),
)
def test_an_answer_ends_with_the_token_that_completes_a_text_whatever_came_at_once(
    events: list[list[int]], texts: list[str], token_ids: set[int]
) -> None:
    every = [token for event in events for token in event]
    said = list(accumulate((WORDS[token] for token in every), initial=""))[1:]
    ends = (
        any(text in so_far for text in texts) or token in token_ids for so_far, token in zip(said, every, strict=True)
    )
    expected = next((number for number, is_end in enumerate(ends, 1) if is_end), None)
    answer, cut = PartialAnswer(max_new_tokens=1000), stopper(Words(), texts, token_ids)
    assert (cut is None) == (not texts and not token_ids)
    for event in events:
        answer.output_ids += event
        answer.logprobs += [-1.0] * len(event)
        if cut:
            cut(answer)
        if answer.stopped:
            break
    assert answer.stopped == (expected is not None)
    assert answer.output_ids == every[:expected]
    assert len(answer.logprobs) == len(answer.output_ids)
