"""A judged group becomes a sample whose values stand where their tokens were predicted."""

import math
from dataclasses import replace

import numpy as np
import pytest

from corral.experiments.datasets.row_parser import DatasetRow
from corral.scheduling.policy_version import VersionSpan
from corral.workers.episodes.partial_answer import PartialAnswer
from corral.workers.episodes.trajectories import REWARD_SECONDS, group_statistics, make_sample
from corral.workers.master.sample_source import BufferedSample, mean_scalars
from corral.workers.rollout.group_maker import Group, statistics_of
from tests.workers.episodes.one_turn import judged_answers


def test_values_stand_at_the_position_before_their_token() -> None:
    old, new = "1.3", "1.4"
    long = PartialAnswer(
        5, [7, 8, 9], [-0.1, -0.2, -0.3], [VersionSpan(old, 0, 1), VersionSpan(new, 1, 3)], stopped=True
    )
    short = PartialAnswer(5, [6], [-0.5], [VersionSpan(new, 0, 1)], stopped=False)
    sample = make_sample("0:a", judged_answers(prompt_ids=[1, 2], answers=[long, short], rewards=[1.0, 0.0]))
    assert sample.seqlens["input_ids"] == [[5, 3]]
    np.testing.assert_array_equal(sample.data["input_ids"], [1, 2, 7, 8, 9, 1, 2, 6])
    np.testing.assert_array_equal(sample.data["prompt_mask"], [1, 1, 0, 0, 0, 1, 1, 0])
    np.testing.assert_allclose(sample.data["old_logprobs"], [0, -0.1, -0.2, -0.3, 0, -0.5], rtol=1e-6)
    np.testing.assert_array_equal(sample.data["versions"], [-1, 3, 4, 4, -1, 4])
    np.testing.assert_array_equal(sample.data["rewards"], [1, 0])
    np.testing.assert_array_equal(sample.data["seq_no_eos_mask"], [False, True])


def test_what_parts_of_a_reward_say_is_a_mean_of_the_group_and_then_of_the_step_but_for_the_longest_wait() -> None:
    answer = PartialAnswer(5, [7], [-0.1], [VersionSpan("1.3", 0, 1)], stopped=True)
    said = [{REWARD_SECONDS: seconds, "reward/part/right": seconds / 2} for seconds in (1.0, 3.0)]
    right, wrong = judged_answers([1, 2], [answer] * 2, [1.0, 0.0])
    group = [replace(right, parts=said[0]), replace(wrong, parts=said[1])]
    means = group_statistics(group)
    assert means.pop("response_duplicates") == 1.0
    assert means == {"reward/seconds": 2.0, "reward/seconds/max": 3.0, "reward/part/right": 1.0}
    assert group_statistics(judged_answers([1, 2], [answer], [1.0])) == {}
    sample = make_sample("0:a", group, parts=("right", "absent"))
    np.testing.assert_array_equal(sample.data["reward_parts"], [0.5, np.nan, 1.5, np.nan])
    slower = {name: value + 4.0 for name, value in means.items()}
    nothing = {"order": 0, "owner": 0, "num_tokens": (), "versions": frozenset(), "keys": frozenset()}
    samples = [BufferedSample(uid="0:a", scalars=each, **nothing) for each in (means, slower, {})]
    assert mean_scalars(samples) == {"reward/seconds": 4.0, "reward/seconds/max": 7.0, "reward/part/right": 3.0}


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_mean_leaves_out_numbers_that_are_not_finite_and_counts_them(odd: float) -> None:
    answer = PartialAnswer(5, [7], [-0.1], [VersionSpan("1.3", 0, 1)], stopped=True)
    said = [{"a": 1.0, "b": odd, "c": 1e308}, {"a": odd, "b": -odd, "c": 1e308}, {"a": 3.0, "b": math.inf}]
    episodes = judged_answers([1, 2], [answer] * 3, [1.0, 0.0, 0.0])
    by_parts = group_statistics([replace(each, parts=parts) for each, parts in zip(episodes, said, strict=True)])
    row = DatasetRow(row_id="a", prompt="", teacher_prompt="", answers=(), fields={}, place="rows.jsonl:1")
    noted = [replace(each, metrics=notes) for each, notes in zip(episodes, said, strict=True)]
    by_notes = {name.removeprefix("notes/"): value for name, value in statistics_of(Group(row, noted, ())).items()}
    expected = {"a": 2.0, "a/not_finite": 1.0, "b/not_finite": 3.0, "c": 1e308}
    for means in (by_parts, by_notes):
        assert {name: value for name, value in means.items() if name[0] in "abc"} == expected
    sample = make_sample("0:a", [replace(each, parts={"reward/part/a": 1e300}) for each in episodes], parts=("a",))
    assert np.isinf(sample.data["reward_parts"]).all()


def test_what_is_said_of_an_answer_in_words_goes_along_as_far_as_there_is_room() -> None:
    answer = PartialAnswer(5, [7], [-0.1], [VersionSpan("1.3", 0, 1)], stopped=True)
    one, other = judged_answers([1, 2], [answer] * 2, [1.0, 0.0])
    assert "remarks" not in make_sample("0:a", [one, other]).data
    group = [replace(one, said="good: \u00fc\ud800", metrics={"calls": 2.0}, ended="turns"), other]
    said = make_sample("0:a", group, remarks_bytes=40).data["remarks"].reshape(2, 40)
    expected = "good: \u00fc?\nnoted: calls 2\nended: turns".encode()
    assert [row.tobytes() for row in said] == [expected.ljust(40, b"\0"), bytes(40)]
    assert make_sample("0:a", group, remarks_bytes=4).data["remarks"].tobytes() == b"good" + bytes(4)


def test_where_an_agent_may_make_several_sequences_each_answer_of_a_group_is_an_episode() -> None:
    answer = PartialAnswer(5, [7, 8], [-0.1, -0.2], [VersionSpan("1.3", 0, 2)], stopped=True)
    group = judged_answers([1, 2], [answer, answer], [1.0, 0.0])
    assert not {"episodes", "turn_rewards"} & make_sample("0:a", group).data.keys()
    sample = make_sample("0:a", group, says_episodes=True)
    np.testing.assert_array_equal(sample.data["episodes"], [0, 1])
    np.testing.assert_array_equal(sample.data["turn_rewards"], np.zeros(6))
