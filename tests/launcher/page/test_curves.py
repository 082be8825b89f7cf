"""What the page draws of whatever metrics there are."""

import json
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from corral.launcher.page.view import curves_of, thinned
from corral.launcher.trial.metrics import headline, last_lines, newest_of, read_metrics


def test_a_step_that_was_trained_twice_counts_once_and_the_last_time(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}, {"step": 1, "loss": 9.0}, {"step": 1, "x": 0.5}]
    path.write_text("\n".join(map(json.dumps, lines)))
    assert read_metrics(path) == [{"step": 1, "loss": 9.0, "x": 0.5}, {"step": 2, "loss": 2.0}]
    told = curves_of(read_metrics(path), most=100)
    assert told["curves"]["loss"] == {"steps": [1, 2], "values": [9.0, 2.0]} and told["shown"] == ["loss"]


def test_what_is_no_number_has_no_point() -> None:
    values = [float("nan"), float("inf"), None, True, "1"]
    told = curves_of([{"step": step, "loss": value} for step, value in enumerate(values)], most=100)
    assert told["curves"] == {} and told["shown"] == []
    assert curves_of([], most=100)["axes"] == {"step": [], "time": [], "tokens": []}


@given(st.lists(st.floats(-100, 100), max_size=300), st.integers(2, 40))
def test_a_thinned_curve_keeps_its_extremes_and_its_order(values: list[float], most: int) -> None:
    kept = thinned(np.array(values), most=most).tolist()
    assert len(kept) <= most and kept == sorted(set(kept)) and set(kept) <= set(range(len(values)))
    if values:
        assert {min(values), max(values)} <= {values[at] for at in kept}


def test_a_step_has_its_time_and_all_tokens_up_to_it_however_few_steps_stand_for_the_rest() -> None:
    lines = [{"step": step, "time": 10.0 * step, "train/tokens": 5.0} for step in range(1, 102)]
    axes = curves_of(lines, most=20)["axes"]
    assert len(axes["step"]) == 20 and (axes["step"][0], axes["step"][-1]) == (1, 101)
    assert axes["time"] == [10.0 * step for step in axes["step"]]
    assert axes["tokens"] == [5.0 * step for step in axes["step"]]


def test_metrics_are_read_past_torn_and_foreign_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [{"step": 1, "eval/accuracy": 0.5}, {"step": 2, "ppo/reward/mean": 0.25}]
    path.write_text("\n".join([json.dumps(lines[0]), "[1]", '{"x": 1}', json.dumps(lines[1]), '{"step": 3, "los']))
    assert [line["step"] for line in read_metrics(path)] == [1, 2]
    assert newest_of(last_lines(path)) == {"step": 2, "eval/accuracy": 0.5, "ppo/reward/mean": 0.25}
    assert headline(newest_of(last_lines(path))) == "accuracy 0.5  reward 0.25"
    assert newest_of(last_lines(tmp_path / "none")) == {}


def test_an_accuracy_of_0_beside_rewards_says_that_no_answer_reaches_what_counts_as_right() -> None:
    doubt = "accuracy 0 (no answer reaches evaluation.correct)"
    assert headline({"eval/accuracy": 0.0, "eval/reward/mean": 0.4}) == doubt
    assert headline({"eval/accuracy": 0.0, "eval/reward/mean": 0.0}) == "accuracy 0"
    assert headline({"eval/accuracy": 0.1, "eval/reward/mean": 0.4}) == "accuracy 0.1"


def test_an_evaluation_that_ended_after_later_steps_belongs_to_its_own(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    trained = [{"step": step, "time": 10.0 * step, "train/tokens": 5.0} for step in (1, 2)]
    path.write_text("".join(json.dumps(line) + "\n" for line in [*trained, {"step": 1, "time": 99.0, "eval/x": 0.5}]))
    assert read_metrics(path) == [{**trained[0], "eval/x": 0.5}, trained[1]]
    assert newest_of(last_lines(path)) == {**trained[1], "eval/x": 0.5}
