"""The picture of a train step: what stands where, and that both files hold every call and key."""

import itertools
import struct
from pathlib import Path
from xml.etree import ElementTree

import pytest

from corral.launcher.report.graph_picture import draw_graph
from corral.launcher.report.graph_shapes import KEY_POINTS, Box, Label, Picture, shapes_of, text_width
from corral.scheduling.model_function_call import ModelName, PullWeightsHook, PushWeightsHook
from corral.scheduling.step_plan import StepPlan
from tests.scheduling.test_step_plan import PROMPT, call, plan, ppo_calls

SFT = plan([call("actor_train", "train_step", input_keys=PROMPT)], "fsdp:d2")
PPO = plan(ppo_calls(ema=0.1, n_seqs=4))
SYNCHRONOUS = plan([
    call("actor_gen", "generate", ModelName("actor", 1), input_keys=("prompt_ids",),
         output_keys=(*PROMPT, "old_logprobs"), pre_hooks=(PullWeightsHook(source=ModelName("actor")),)),
    *ppo_calls(),
])  # fmt: skip
STEPS = pytest.mark.parametrize("step", [SFT, PPO, SYNCHRONOUS], ids=["sft", "ppo", "synchronous"])


@STEPS
def test_boxes_and_labels_do_not_lie_on_each_other(step: StepPlan) -> None:
    picture = shapes_of(step, samples="dataset", published_to="servers")
    areas = [_area(shape) for shape in (*picture.boxes, *picture.labels)]
    for one, other in itertools.combinations(areas, 2):
        apart = (
            one[1] <= other[0] + 1e-9 or other[1] <= one[0] + 1e-9,  # left and right of each other
            one[3] <= other[2] + 1e-9 or other[3] <= one[2] + 1e-9,  # below and above
        )
        assert any(apart), (one, other)


def _area(shape: Box | Label) -> tuple[float, float, float, float]:
    """Left, right, bottom, top."""
    if isinstance(shape, Box):
        below, above = shape.middle - shape.height / 2, shape.middle + shape.height / 2
        return shape.left, shape.left + shape.width, below, above
    width = text_width(max(map(len, shape.lines)), KEY_POINTS)
    return shape.left, shape.left + width, shape.bottom, shape.bottom + len(shape.lines) * KEY_POINTS / 72


@STEPS
def test_keys_go_from_left_to_right_and_end_at_the_boxes_that_read_them(step: StepPlan) -> None:
    picture = shapes_of(step, samples="dataset", published_to="servers")
    arrows = [line for line in picture.lines if line.has_arrow and line.shape == "curve" and not line.is_dashed]
    reads = {
        each.name: len({route for route in step.routes if each.name in route.consumers}) for each in step.graph.calls
    }
    ends = dict.fromkeys(reads, 0)
    for line in arrows:
        assert line.points[0][0] < line.points[-1][0]
        ends[_box_at(picture, line.points[-1]).name] += 1
    assert ends == reads


def _box_at(picture: Picture, point: tuple[float, float]) -> Box:
    """The box on whose left edge a line ends."""
    (box,) = [
        box for box in picture.boxes if abs(box.left - point[0]) < 1e-9 and abs(point[1] - box.middle) <= box.height / 2
    ]
    return box


def test_weights_are_dashed_and_go_to_the_call_that_computes_with_them() -> None:
    picture = shapes_of(PPO, samples="rollout workers", published_to="servers")
    (back,) = [line for line in picture.lines if line.shape == "corners"]
    (ref,) = [box for box in picture.boxes if box.name == "ref_inf"]
    x, y = back.points[-1]
    assert back.is_dashed and back.role == "actor"
    assert ref.left < x < ref.left + ref.width and y == pytest.approx(ref.middle - ref.height / 2)
    assert {"weights", "0.1 of the weights"} <= {line for label in picture.labels for line in label.lines}


def test_a_model_that_no_call_runs_has_a_box_all_the_same() -> None:
    push = PushWeightsHook(target=ModelName("average"), eta=0.5)
    calls = [call("actor_train", "train_step", input_keys=PROMPT, post_hooks=(push,))]
    step = plan(calls, "fsdp:d2")
    step = StepPlan(
        graph=step.graph,
        meshes={**step.meshes, ModelName("average"): step.meshes[ModelName("actor")]},
        sample_ranks=step.sample_ranks,
        batch_size=step.batch_size,
    )
    assert "average/0" in {box.name for box in shapes_of(step, samples="dataset", published_to="servers").boxes}


@STEPS
def test_both_files_hold_the_picture_and_the_svg_every_word(step: StepPlan, tmp_path: Path) -> None:
    svg, png = draw_graph(
        step, title="exp/trial", samples="dataset", published_to="servers", path=tmp_path / "dataflow"
    )
    assert (svg.name, png.name) == ("dataflow.svg", "dataflow.png")
    words = " ".join(ElementTree.parse(svg).getroot().itertext())
    for each in step.graph.calls:
        assert each.name in words and str(each.model_name) in words
        assert all(key in words for key in each.input_keys)
    data = png.read_bytes()
    width, height = struct.unpack(">II", data[16:24])
    assert data.startswith(b"\x89PNG") and width > 500 and height > 150
