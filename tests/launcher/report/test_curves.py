"""The picture at the end: which curves it has, and that it is drawn from whatever metrics there are."""

import json
import struct
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from corral.launcher.report.curves import curves_of, draw_curves, smooth, span_of
from corral.launcher.trial.metrics import headline, last_lines, newest_of, read_metrics


def test_a_step_that_was_trained_twice_counts_once_and_the_last_time(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}, {"step": 1, "loss": 9.0}, {"step": 1, "x": 0.5}]
    path.write_text("\n".join(map(json.dumps, lines)))
    assert read_metrics(path) == [{"step": 1, "loss": 9.0, "x": 0.5}, {"step": 2, "loss": 2.0}]
    (curve,) = curves_of(read_metrics(path))
    assert (curve.steps, curve.values) == ((1, 2), (9.0, 2.0))


def test_non_numbers_have_no_point() -> None:
    assert curves_of([{"step": 1, "loss": float("nan")}, {"step": 2, "loss": None}, {"step": 3, "loss": True}]) == []


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=50), st.integers(1, 20))
def test_smoothing_stays_between_the_extremes(values: list[float], window: int) -> None:
    smoothed = smooth(values, window=window)
    assert len(smoothed) == len(values)
    assert all(min(values) - 1e-9 <= value <= max(values) + 1e-9 for value in smoothed)


def test_the_picture_is_drawn_with_and_without_times(tmp_path: Path) -> None:
    lines = [
        {
            "step": step,
            "time": 100.0 + 30 * step,
            "eval/accuracy": step / 50,
            "ppo/reward/mean": 0.1,
            "staleness/mean": 0.5,
            "gap/of_allowed": 0.0 if step < 3 else 10.0 ** (step % 7 - 7),
        }
        for step in range(40)
    ]
    titles = [curve.panel.title.partition(" ")[0] for curve in curves_of(lines)]
    assert titles == ["accuracy", "reward", "staleness", "generator"]
    for name, some in (("all", lines), ("one", [{"step": 0, "loss": 1.0}])):
        path = tmp_path / f"{name}.png"
        assert draw_curves(some, title="exp/trial", path=path) == [path]
        data = path.read_bytes()
        width, height = struct.unpack(">II", data[16:24])
        assert data.startswith(b"\x89PNG") and width > 500 and height > 300


def test_all_panels_show_the_same_steps_however_few_points_they_have() -> None:
    lines = [{"step": step, "time": 10.0 * step, "ppo/loss": 0.1} for step in range(101)]
    lines[1]["gap/of_allowed"] = 1e-6
    assert [len(curve.steps) for curve in curves_of(lines)] == [101, 1]
    assert span_of(curves_of(lines)) == (-4.0, 104.0)
    assert span_of(curves_of(lines[1:2])) == (0.0, 2.0)


def test_without_metrics_there_is_no_picture(tmp_path: Path) -> None:
    assert not draw_curves([], title="exp/trial", path=tmp_path / "curves.png")
    assert list(tmp_path.iterdir()) == []


def test_metrics_are_read_past_torn_and_foreign_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [{"step": 1, "eval/accuracy": 0.5}, {"step": 2, "ppo/reward/mean": 0.25}]
    path.write_text("\n".join([json.dumps(lines[0]), "[1]", '{"x": 1}', json.dumps(lines[1]), '{"step": 3, "los']))
    assert [line["step"] for line in read_metrics(path)] == [1, 2]
    assert newest_of(last_lines(path)) == {"step": 2, "eval/accuracy": 0.5, "ppo/reward/mean": 0.25}
    assert headline(newest_of(last_lines(path))) == "accuracy 0.5  reward 0.25"
    assert newest_of(last_lines(tmp_path / "none")) == {}


def test_an_evaluation_that_ended_after_later_steps_belongs_to_its_own(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    trained = [{"step": step, "time": 10.0 * step, "train/tokens": 5.0} for step in (1, 2)]
    path.write_text("".join(json.dumps(line) + "\n" for line in [*trained, {"step": 1, "time": 99.0, "eval/x": 0.5}]))
    assert read_metrics(path) == [{**trained[0], "eval/x": 0.5}, trained[1]]
    assert newest_of(last_lines(path)) == {**trained[1], "eval/x": 0.5}
