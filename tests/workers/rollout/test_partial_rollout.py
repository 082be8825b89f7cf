"""Partial answers keep their tokens and the version of each, whatever happens between two chunks."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.scheduling.policy_version import PolicyVersion
from corral.workers.rollout.partial_rollout import MalformedChunkError, PartialAnswer


def chunk(ids: list[int], versions: list[str], reason: str = "length") -> dict[str, Any]:
    spans: list[dict[str, Any]] = []
    for position, version in enumerate(versions):
        if spans and spans[-1]["version"] == version:
            spans[-1]["end"] = position + 1
        else:
            spans.append({"version": version, "start": position, "end": position + 1})
    return {
        "output_ids": ids,
        "meta_info": {
            "output_token_logprobs": [[-0.5, token, None] for token in ids],
            "weight_versions": spans,
            "finish_reason": {"type": reason},
        },
    }


@given(st.lists(st.lists(st.sampled_from(["1.1", "1.2", "2.3"]), max_size=5), max_size=6))
def test_each_token_keeps_its_version_however_the_answer_was_cut(chunks: list[list[str]]) -> None:
    answer = PartialAnswer(max_new_tokens=100)
    for versions in chunks:
        answer.extend(chunk(list(range(len(versions))), versions, "abort"))
    flat = [PolicyVersion.parse(version) for versions in chunks for version in versions]
    assert answer.versions() == flat
    assert len(answer.output_ids) == len(answer.logprobs) == len(flat)
    assert all(left[0] != right[0] for left, right in zip(answer.spans, answer.spans[1:], strict=False))


def test_a_stop_token_ends_the_answer_and_an_abort_does_not() -> None:
    answer = PartialAnswer(max_new_tokens=10)
    answer.extend(chunk([1, 2], ["1.1", "1.1"], "abort"))
    assert not answer.finished and answer.remaining == 8
    answer.extend(chunk([3], ["1.2"], "stop"))
    assert answer.finished and answer.stopped


@pytest.mark.parametrize(
    "damage",
    [
        lambda reply: reply.pop("output_ids"),
        lambda reply: reply["output_ids"].append(7),
        lambda reply: reply["meta_info"]["output_token_logprobs"].pop(),
        lambda reply: reply["meta_info"]["weight_versions"][0].update(start=1),
        lambda reply: reply["meta_info"]["weight_versions"][0].update(version="default"),
        lambda reply: reply["meta_info"].update(finish_reason=None),
        lambda reply: reply["output_ids"].extend([7] * 50),
    ],
)
def test_a_garbled_reply_changes_nothing(damage: Any) -> None:
    answer = PartialAnswer(max_new_tokens=10)
    answer.extend(chunk([1], ["1.1"], "abort"))
    reply = chunk([1, 2], ["1.1", "1.1"])
    damage(reply)
    with pytest.raises(MalformedChunkError):
        answer.extend(reply)
    assert answer.output_ids == [1] and len(answer.versions()) == 1
