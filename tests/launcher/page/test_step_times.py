"""Where the time of steps goes: from the numbers that the master writes to bars."""

from typing import Any

import pytest

from corral.launcher.page.view import CallSeconds, bars_of, mean_of, step_times_of

CALLS = ("ref_inf", "actor_train")


def line(step: int, **seconds: tuple[float, float, float]) -> dict[str, Any]:
    """A line of metrics.jsonl: inputs, ranks, run of each call."""
    numbers: dict[str, Any] = {"step": step, "time/commit_s": 0.5, "time/wait_s": 0.25}
    for name, (inputs, ranks, run) in seconds.items():
        numbers |= {f"time/{name}/inputs_s": inputs, f"time/{name}/ranks_s": ranks, f"time/{name}_s": run}
    return numbers


def test_times_are_read_by_call_in_the_order_in_which_calls_end() -> None:
    (step,) = step_times_of([line(3, actor_train=(2.0, 0.5, 4.0), ref_inf=(0.0, 0.0, 2.0))], calls=CALLS)
    assert list(step.calls) == ["ref_inf", "actor_train"]
    assert step.calls["actor_train"] == CallSeconds(inputs_s=2.0, ranks_s=0.5, run_s=4.0)
    assert (step.step, step.wait_s, step.run_s, step.commit_s) == (3, 0.25, 6.5, 0.5)


def test_lines_without_times_are_no_steps() -> None:
    lines = [
        {"step": 0, "eval/accuracy": 0.5},
        {"step": 2, "time/ref_inf_s": 1.0},
        line(1, ref_inf=(0.0, 0.0, 1.0)),
        {"step": 3, "time/ref_inf_s": None, "time/ref_inf/inputs_s": 0.0, "time/ref_inf/ranks_s": 0.0},
    ]
    (step,) = step_times_of(lines, calls=CALLS)
    assert step.calls["ref_inf"].run_s == 1.0


def test_a_mean_step_counts_each_call_where_it_is() -> None:
    steps = step_times_of(
        [line(1, ref_inf=(0.0, 0.0, 1.0), actor_train=(1.0, 0.0, 1.0)), line(2, ref_inf=(0.0, 2.0, 3.0))], calls=CALLS
    )
    mean = mean_of(steps)
    assert mean.calls["ref_inf"] == CallSeconds(inputs_s=0.0, ranks_s=1.0, run_s=2.0)
    assert mean.calls["actor_train"] == CallSeconds(inputs_s=1.0, ranks_s=0.0, run_s=1.0)
    assert mean.step == 1.5


@pytest.mark.parametrize("count", [0, 1, 60, 150])
def test_however_many_steps_there_are_bars_have_room(count: int) -> None:
    steps = step_times_of([line(step, ref_inf=(0.0, 0.25, 1.0)) for step in range(1, count + 1)], calls=CALLS)
    bars = bars_of(steps)
    assert len(bars) == (50 if count == 150 else count)
    assert [bar.step for bar in bars[:1]] == ([2.0] if count == 150 else [1.0] * bool(count))
    assert all(bar.calls["ref_inf"].run_s == 1.0 for bar in bars)
