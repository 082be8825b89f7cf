"""Where the time of steps goes: from the numbers that the master writes to bars."""

import struct
from pathlib import Path
from typing import Any

import pytest

from corral.launcher.report.step_times import CallSeconds, draw_step_times, mean_of, step_times_of

COLOURS = {"ref_inf": "#1a7f37", "actor_train": "#0969da"}


def line(step: int, **seconds: tuple[float, float, float]) -> dict[str, Any]:
    """A line of metrics.jsonl: inputs, ranks, run of each call."""
    numbers: dict[str, Any] = {"step": step, "time/commit_s": 0.5, "time/wait_s": 0.25}
    for name, (inputs, ranks, run) in seconds.items():
        numbers |= {f"time/{name}/inputs_s": inputs, f"time/{name}/ranks_s": ranks, f"time/{name}_s": run}
    return numbers


def test_times_are_read_by_call_in_the_order_in_which_calls_end() -> None:
    (step,) = step_times_of([line(3, actor_train=(2.0, 0.5, 4.0), ref_inf=(0.0, 0.0, 2.0))], calls=COLOURS)
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
    (step,) = step_times_of(lines, calls=COLOURS)
    assert step.calls["ref_inf"].run_s == 1.0


def test_a_mean_step_counts_each_call_where_it_is() -> None:
    steps = step_times_of(
        [line(1, ref_inf=(0.0, 0.0, 1.0), actor_train=(1.0, 0.0, 1.0)), line(2, ref_inf=(0.0, 2.0, 3.0))], calls=COLOURS
    )
    mean = mean_of(steps)
    assert mean.calls["ref_inf"] == CallSeconds(inputs_s=0.0, ranks_s=1.0, run_s=2.0)
    assert mean.calls["actor_train"] == CallSeconds(inputs_s=1.0, ranks_s=0.0, run_s=1.0)
    assert mean.step == 1.5


@pytest.mark.parametrize("count", [1, 2, 150])
def test_the_picture_is_drawn_for_few_steps_and_for_many(tmp_path: Path, count: int) -> None:
    lines = [line(step, ref_inf=(0.0, 0.25, 1.0), actor_train=(1.25, 0.0, 2.0)) for step in range(1, count + 1)]
    (path,) = draw_step_times(lines, title="exp/trial", colours=COLOURS, path=tmp_path / "step_times.png")
    data = path.read_bytes()
    width, height = struct.unpack(">II", data[16:24])
    assert data.startswith(b"\x89PNG") and width > 500 and height > 300


def test_without_times_by_call_there_is_no_picture(tmp_path: Path) -> None:
    lines = [{"step": 1, "loss": 1.0, "time/wait_s": 3.0}]
    assert draw_step_times(lines, title="exp/trial", colours=COLOURS, path=tmp_path / "step_times.png") == []
    assert list(tmp_path.iterdir()) == []
