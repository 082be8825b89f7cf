"""What comes out of held-out problems: means over all answers, however they were put together, and pass@k."""

import itertools
from functools import reduce

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.workers.data.held_out import added, means, pass_at, sums_of

REWARDS = st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=4, max_size=4)


@given(st.lists(REWARDS, min_size=1, max_size=6))
def test_means_are_those_of_all_answers(rewards: list[list[float]]) -> None:
    sums = reduce(added, (sums_of(one, [3, 4, 5, 6], asked=4) for one in rewards))
    found, every = means(sums), [reward for one in rewards for reward in one]
    assert found["accuracy"] == pytest.approx(sum(reward == 1.0 for reward in every) / len(every))
    assert found["reward/mean"] == pytest.approx(sum(every) / len(every))
    assert (found["response_length/mean"], found["problems"], found["unjudged"]) == (4.5, len(rewards), 0.0)
    assert found["pass@4"] == pytest.approx(sum(1.0 in one for one in rewards) / len(rewards))


@pytest.mark.parametrize(("num", "correct", "k"), [(6, 2, 2), (6, 2, 4), (5, 0, 2), (4, 4, 2), (8, 1, 8)])
def test_pass_at_k_is_the_share_of_all_draws_of_k_answers_that_have_a_right_one(num: int, correct: int, k: int) -> None:
    draws = list(itertools.combinations([True] * correct + [False] * (num - correct), k))
    assert pass_at(k, num=num, correct=correct) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_what_could_not_be_judged_is_counted_and_in_no_mean() -> None:
    unjudged = sums_of([], [], asked=2)
    assert means(unjudged) == {"problems": 1.0, "unjudged": 2.0}
    assert means(added(sums_of([1.0, 0.0], [2, 4], asked=2), unjudged)) == {
        "problems": 2.0,
        "unjudged": 2.0,
        "accuracy": 0.5,
        "reward/mean": 0.5,
        "response_length/mean": 3.0,
        "pass@2": 1.0,
    }
