"""What has ended is started again as often as its budget says, after pauses that grow."""

from hypothesis import given
from hypothesis import strategies as st

from corral.scheduling.restarts import RestartBudget, growing_pause


@given(max_restarts=st.integers(0, 5), lives_s=st.lists(st.floats(0, 1000), max_size=30))
def test_a_budget_counts_the_deaths_since_the_last_long_life(max_restarts: int, lives_s: list[float]) -> None:
    budget = RestartBudget(max_restarts=max_restarts, healthy_after_s=600.0)
    for index, life_s in enumerate(lives_s):
        healthy = [number for number in range(index + 1) if lives_s[number] >= 600.0]
        deaths_since = index + 1 - (healthy[-1] if healthy else 0)
        is_restarted = budget.take(ran_s=life_s)
        assert is_restarted == (deaths_since <= max_restarts)
        if not is_restarted:
            return


def test_a_pause_doubles_with_each_failure_in_a_row_up_to_the_longest() -> None:
    assert [growing_pause(failures, first_s=0.2, longest_s=1.0) for failures in (1, 2, 3, 4, 10**6)] == [
        0.2,
        0.4,
        0.8,
        1.0,
        1.0,
    ]
