"""Whatever is asked in whatever order, each made token is trained in one branch, and no history is lost or changed."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.scheduling.policy_version import VersionSpan
from corral.workers.episodes.log import EpisodeLog, Turn
from corral.workers.episodes.trajectories import JudgedEpisode, make_sample

_CUTS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 30), st.lists(st.integers(1, 3), max_size=3)), max_size=12)


def answered(log: EpisodeLog, prompt_ids: Sequence[int], output_ids: list[int], *, version: str = "1.1") -> Turn:
    turn = log.begin(prompt_ids, max_new_tokens=99)
    answer = turn.answer
    answer.output_ids, answer.logprobs = output_ids, [-float(token) for token in output_ids]
    answer.spans, answer.stopped = [VersionSpan(version, 0, len(output_ids))], True
    log.finish(turn)
    return turn


@given(_CUTS)
def test_every_made_token_is_trained_once_and_every_request_is_what_some_branch_has(
    asked: list[tuple[int, int, list[int]]],
) -> None:
    """Of each request: whose history it goes on from, how much of that is cut away, and what is given after it."""
    log, known, num_made, turns = EpisodeLog(), [[1, 2]], 0, []
    for number, (whose, cut, given_ids) in enumerate(asked):
        history = known[whose % len(known)]
        prompt = [*history[: max(1, len(history) - cut)], *given_ids]
        made = list(range(1000 + 10 * number, 1000 + 10 * number + 1 + number % 3))  # each token is made once
        turns.append(answered(log, prompt, made))
        num_made += len(made)
        known.append([*prompt, *made])
    sequences = [branch.ids for branch in log.branches]
    for history in known[1:]:
        assert any(sequence[: len(history)] == history for sequence in sequences)
    trained = [
        token for branch in log.branches for segment in branch.segments if segment.is_trained for token in segment.ids
    ]
    assert len(trained) == len(set(trained)) == num_made == log.num_generated
    assert all(1000 <= token for token in trained)


def test_a_sample_has_what_was_given_and_made_where_it_was() -> None:
    log = EpisodeLog()
    first = answered(log, [1, 2], [7, 8], version="1.3")
    answered(log, [1, 2, 7, 8, 3], [9], version="1.4")
    answered(log, [1, 2, 8, 4], [5], version="1.4")  # another history
    log.reward(0.5, turn=first.number)
    assert log.oldest_version == "1.3"
    episodes = [JudgedEpisode(log.branches, 1.0), JudgedEpisode([], 0.0), JudgedEpisode(log.branches[1:], -1.0)]
    sample = make_sample("0:a", episodes, says_episodes=True)
    data = {key: values.tolist() for key, values in sample.data.items()}
    assert sample.seqlens["input_ids"] == [[6, 5, 5]]
    assert data["input_ids"][:11] == [1, 2, 7, 8, 3, 9, 1, 2, 8, 4, 5]
    assert data["prompt_mask"][:11] == [True, True, False, False, True, False, True, True, True, True, False]
    assert data["old_logprobs"][:5] == [0, -7, -8, 0, -9]
    assert data["versions"][:9] == [-1, 3, 3, -1, 4, -1, -1, -1, 4]
    assert data["turn_rewards"][:5] == [0, 0, 0.5, 0, 0]
    assert data["episodes"] == [0, 0, 1]
    assert data["rewards"] == [1, 1, -1]


def test_two_that_ask_at_the_same_time_do_not_share_a_branch() -> None:
    log = EpisodeLog()
    answered(log, [1], [2])
    first, second = (log.begin([1, 2, 3], max_new_tokens=4) for _ in range(2))
    assert first.branch is not second.branch
    assert (list(first.given_ids), list(second.given_ids)) == ([3], [1, 2, 3])
    log.abandon(first)
    assert log.begin([1, 2], max_new_tokens=4).branch is first.branch
    with pytest.raises(KeyError):
        log.reward(1.0, turn=first.number)
