"""Numbers of workers as text, and back."""

from hypothesis import given
from hypothesis import strategies as st

from corral.scheduling.worker_information import fold_numbers, planned_workers, unfold_numbers


@given(st.lists(st.integers(0, 50)))
def test_what_is_folded_is_unfolded(numbers: list[int]) -> None:
    assert unfold_numbers(fold_numbers(numbers)) == numbers


def test_workers_of_a_plan_are_named_kind_by_kind() -> None:
    shared = [
        {"kind": "model_worker", "numbers": "0,2"},
        {"kind": "rollout_worker", "numbers": "0"},
        {"kind": "model_worker", "numbers": "1"},
    ]
    named = ["model_worker/0", "model_worker/1", "model_worker/2", "rollout_worker/0"]
    assert planned_workers(shared) == named
    each_alone = [{"kind": name.partition("/")[0], "index": int(name[-1])} for name in named]
    assert planned_workers(each_alone) == named
