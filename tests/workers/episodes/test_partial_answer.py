"""Partial answers keep their tokens and the version of each, whatever happens between two events."""

from itertools import accumulate
from typing import Any, Literal, NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.scheduling.policy_version import PolicyVersion
from corral.workers.episodes.partial_answer import MalformedEventError, PartialAnswer, stopper
from corral.workers.episodes.stream_events import StreamEvent

End = Literal["lost", "abort", "abort, with tokens said again"]


def event(
    ids: list[int], *, total: int, held: str = "1.1", versions: list[str] | None = None, reason: str | None = None
) -> StreamEvent:
    """versions: of all tokens of the request, if they are told."""
    spans: list[dict[str, Any]] | None = None if versions is None else []
    for position, version in enumerate(versions or ()):
        if spans and spans[-1]["version"] == version:
            spans[-1]["end"] = position + 1
        else:
            assert spans is not None
            spans.append({"version": version, "start": position, "end": position + 1})
    reply = {
        "output_ids": ids,
        "meta_info": {
            "output_token_logprobs": [[-0.5 * token, token, None] for token in ids],
            "completion_tokens": total,
            "weight_version": held,
            "weight_versions": spans,
            "finish_reason": None if reason is None else {"type": reason},
        },
    }
    return msgspec.convert(reply, StreamEvent)


class Request(NamedTuple):
    events: list[list[bool]]
    """Of each token of each event, whether newer weights came before it."""
    end: End
    tells_always: bool
    """As the embedded engine, and not only at the end."""


REQUESTS = st.builds(
    Request,
    st.lists(st.lists(st.sampled_from([False] * 6 + [True]), min_size=1, max_size=5), max_size=5),
    st.sampled_from(["lost", "lost", "abort", "abort, with tokens said again"]),
    st.booleans(),
)


@given(st.lists(REQUESTS, max_size=5))
def test_each_token_is_there_once_with_the_version_that_made_it_whatever_interrupts_the_answer(
    requests: list[Request],
) -> None:
    answer = PartialAnswer(max_new_tokens=1000)
    kept: list[tuple[int, str]] = []
    step = next_id = 0
    for request in requests:
        answer.begin()
        made: list[tuple[int, str]] = []
        changed = False
        for bumps in request.events:
            before = len(made)
            for bump in bumps:
                step += bump
                changed |= bump and bool(made)
                made.append((next_id, f"1.{step}"))
                next_id += 1
            told = [version for _, version in made] if request.tells_always else None
            ids = [token for token, _ in made[before:]]
            answer.extend(event(ids, total=len(made), held=f"1.{step}", versions=told))
        if request.end != "lost":
            again = [token for token, _ in made[-1:]] if "again" in request.end else []
            told = [version for _, version in made]
            answer.extend(event(again, total=len(made), held="9.9", versions=told, reason="abort"))
        answer.settle()
        num_kept = len(answer.output_ids) - len(kept)
        comes_singly = all(len(bumps) == 1 for bumps in request.events[:1])
        if request.end != "lost" or request.tells_always or (comes_singly and not changed):
            assert num_kept == len(made), "what has come stays"
        kept += made[:num_kept]
        assert list(zip(answer.output_ids, map(str, answer.versions()), strict=True)) == kept
        assert answer.logprobs == [-0.5 * token for token, _ in kept]
    assert all(left.version != right.version for left, right in zip(answer.spans, answer.spans[1:], strict=False))


def test_tokens_over_a_change_count_when_the_end_of_the_request_tells_whose_they_are() -> None:
    answer = PartialAnswer(max_new_tokens=20)
    answer.begin()
    answer.extend(event([1], total=1))
    answer.extend(event([2, 3], total=3))
    answer.extend(event([4, 5], total=5, held="1.2"))
    answer.extend(event([6, 7], total=7, held="1.2"))
    assert len(answer.output_ids) == 7 and len(answer.versions()) == 3
    versions = ["1.1"] * 4 + ["1.2"] * 4
    answer.extend(event([8], total=8, held="1.2", versions=versions, reason="stop"))
    answer.settle()
    assert answer.finished and list(map(str, answer.versions())) == versions


def test_a_stop_token_ends_the_answer_and_an_abort_does_not() -> None:
    answer = PartialAnswer(max_new_tokens=10)
    answer.begin()
    answer.extend(event([1, 2], total=2, versions=["1.1", "1.1"], reason="abort"))
    answer.settle()
    assert not answer.finished and answer.remaining == 8
    answer.begin()
    answer.extend(event([3], total=1, versions=["1.2"], reason="stop"))
    answer.settle()
    assert answer.finished and answer.stopped


@pytest.mark.parametrize(
    "damage",
    [
        lambda meta: meta.update(completion_tokens=3),
        lambda meta: meta["output_token_logprobs"].pop(),
        lambda meta: meta["weight_versions"][0].update(start=1),
        lambda meta: meta["weight_versions"][0].update(end=3),
        lambda meta: meta["weight_versions"][0].update(version="default"),
        lambda meta: meta.update(weight_versions=None, weight_version="default", output_token_logprobs=[]),
    ],
)
def test_a_garbled_event_changes_nothing(damage: Any) -> None:
    answer = PartialAnswer(max_new_tokens=10)
    answer.begin()
    answer.extend(event([1], total=1, versions=["1.1"], reason="abort"))
    answer.begin()
    reply = msgspec.to_builtins(event([1, 2], total=2, versions=["1.1", "1.1"]))
    damage(reply["meta_info"])
    with pytest.raises(MalformedEventError):
        answer.extend(msgspec.convert(reply, StreamEvent))
    assert answer.output_ids == [1] and answer.versions() == [PolicyVersion(1, 1)]


def test_more_tokens_than_were_asked_for_are_not_taken() -> None:
    answer = PartialAnswer(max_new_tokens=2)
    answer.begin()
    with pytest.raises(MalformedEventError, match="3 tokens came where at most 2 were asked for"):
        answer.extend(event([1, 2, 3], total=3, versions=["1.1"] * 3))


# --- texts that end answers -----------------------------------------------------------------------------------------

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
