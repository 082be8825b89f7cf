"""What comes out of held-out problems: means over all answers, however they were put together, and pass@k."""

import itertools
from functools import reduce
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.experiments.config.data import DatasetConfig, EvaluationConfig
from corral.workers.data.held_out import added, majority_of, means, pass_at, sums_of

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


@given(st.lists(st.tuples(st.sampled_from([0.0, 1.0]), st.sampled_from(["7", "8", "9", None])), max_size=7))
def test_the_majority_is_what_a_voter_would_find_who_draws_among_the_most_frequent_answers(
    answers: list[tuple[float, str | None]],
) -> None:
    votes = [vote for _, vote in answers if vote is not None]
    winners = [vote for vote in set(votes) if all(votes.count(vote) >= votes.count(other) for other in votes)]
    right = [mean([reward for reward, vote in answers if vote == winner]) for winner in winners]
    found = sums_of([reward for reward, _ in answers], [1] * len(answers), asked=7, votes=[vote for _, vote in answers])
    assert found["majority"] == pytest.approx(mean(right) if right else 0.0)


def test_the_majority_is_a_mean_over_problems_beside_pass_at_k() -> None:
    assert majority_of([0.0, 1.0, 1.0], ["7", "8", "8"]) == 1.0
    wrong = sums_of([0.0, 0.0, 1.0, 0.5], [1] * 4, asked=4, votes=["7", "7", "8", "9"])
    tied = sums_of([0.0, 1.0], [1] * 2, asked=4, votes=["7", "8"])
    found = means(reduce(added, [wrong, tied, sums_of([], [], asked=4)]))
    assert (found["majority"], found["pass@4"]) == (0.25, 1.0)


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


def test_accuracy_is_by_what_is_said_to_be_right_and_missing_where_nobody_knows_it() -> None:
    config = EvaluationConfig(dataset=DatasetConfig(), correct="right")
    assert [config.is_correct(0.97, parts) for parts in ({"right": 1.0}, {"right": 0.0}, {})] == [True, False, None]
    assert [EvaluationConfig(dataset=DatasetConfig(), correct=0.9).is_correct(value, {}) for value in (0.97, 0.5)] == [
        True,
        False,
    ]
    said = sums_of([0.97, 0.3], [1, 1], are_correct=[True, False], asked=2, votes=["7", "8"])
    unknown = sums_of([0.97, 0.3], [1, 1], are_correct=[True, None], asked=2, votes=["7", "8"])
    assert {name: means(said)[name] for name in ("accuracy", "pass@2", "majority")} == {
        "accuracy": 0.5,
        "pass@2": 1.0,
        "majority": 0.5,
    }
    assert means(unknown).keys() == {"problems", "unjudged", "reward/mean", "response_length/mean"}
