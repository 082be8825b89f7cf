"""Seeds of answers: one per answer, whoever derives it."""

from hypothesis import given
from hypothesis import strategies as st

from corral.workers.data.answer_seed import answer_seed, group_seeds

COUNTS = st.integers(min_value=0, max_value=10**6)


@given(st.sets(st.tuples(st.integers(min_value=0, max_value=2**63 - 1), COUNTS, COUNTS, COUNTS), min_size=2))
def test_no_two_answers_have_the_same_seed(names: set[tuple[int, int, int, int]]) -> None:
    seeds = {answer_seed(seed, order=order, call=call, answer=answer) for seed, order, call, answer in names}
    assert len(seeds) == len(names)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_group_has_the_seeds_of_its_answers() -> None:
    assert group_seeds(7, order=3, group_size=2) == [answer_seed(7, order=3, answer=answer) for answer in range(2)]
    digits = [(1, 23, 4), (12, 3, 4), (1, 2, 34), (123, 4, 0)]  # the same ones, cut differently
    assert len({answer_seed(1, order=order, call=call, answer=answer) for order, call, answer in digits}) == 4
