"""Seeds of answers: one per answer, whoever derives it."""

from hypothesis import given
from hypothesis import strategies as st

from corral.workers.data.answer_seed import AnswerSeeds

COUNTS = st.integers(min_value=0, max_value=10**6)
NAMES = st.tuples(st.integers(min_value=0, max_value=2**63 - 1), st.text(), COUNTS, COUNTS, COUNTS)


@given(st.sets(NAMES, min_size=2))
def test_no_two_answers_have_the_same_seed(names: set[tuple[int, str, int, int, int]]) -> None:
    seeds = {AnswerSeeds(seed, prompt, step).of(answer, call=call) for seed, prompt, step, call, answer in names}
    assert len(seeds) == len(names)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_group_has_the_seeds_of_its_answers() -> None:
    seeds = AnswerSeeds(7, "0:a", 3)
    assert seeds.of_group(2) == [seeds.of(0), seeds.of(1)]
    digits = [(1, 23, 4), (12, 3, 4), (1, 2, 34), (123, 4, 0)]  # the same ones, cut differently
    assert len({AnswerSeeds(1, "0:a", step).of(answer, call=call) for step, call, answer in digits}) == 4
