"""The graph of a train step: what its picture and its chart say, and that nothing lies on anything else."""

import itertools
from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.patches import Rectangle
from matplotlib.transforms import Bbox

from corral.launcher.report.graph import Graph, draw_graph, graph_of
from corral.launcher.report.style import save
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


def _graph(step: StepPlan) -> Graph:
    return graph_of(step, samples="dataset", published_to="servers")


@STEPS
def test_words_and_boxes_do_not_lie_on_each_other_and_no_line_runs_through_a_word(step: StepPlan) -> None:
    figure = draw_graph(_graph(step), title="exp/trial")
    FigureCanvasAgg(figure).draw()
    (axes,) = figure.axes
    words = [text.get_window_extent() for text in axes.texts]
    boxes = [patch.get_window_extent() for patch in axes.patches if isinstance(patch, Rectangle)]
    for one, other in itertools.combinations(words, 2):
        assert not _overlap(one, other), (one, other)
    for word, box in itertools.product(words, boxes):
        assert not _overlap(word, box) or box.x0 < word.x0 and word.x1 < box.x1
    for line in axes.lines:
        points = list(map(tuple, axes.transData.transform(line.get_xydata())))
        for (x0, y0), (x1, y1) in itertools.pairwise(points):
            segment = Bbox([[min(x0, x1), min(y0, y1)], [max(x0, x1), max(y0, y1)]])
            assert not any(_overlap(segment, area) for area in (*words, *boxes)), line.get_xydata()


def _overlap(one: Bbox, other: Bbox) -> bool:
    return one.x0 < other.x1 - 1 and other.x0 < one.x1 - 1 and one.y0 < other.y1 - 1 and other.y0 < one.y1 - 1


@STEPS
def test_keys_go_to_later_calls_and_end_at_those_that_read_them(step: StepPlan) -> None:
    nodes, edges = _graph(step)
    place = {node.name: number for number, node in enumerate(nodes)}
    keys = [edge for edge in edges if not edge.is_weights]
    assert all(place[edge.start] < place[end] for edge in keys for end in edge.ends)
    for each in step.graph.step_calls:
        read = {key for edge in keys if each.name in edge.ends for key in edge.label.split(", ")}
        assert read - {"prompts"} == set(each.input_keys)


def test_weights_go_to_the_call_that_computes_with_them() -> None:
    weights = {(edge.start, edge.ends, edge.label) for edge in _graph(PPO)[1] if edge.is_weights}
    assert weights == {
        ("actor_train", ("servers",), "weights"),
        ("actor_train", ("ref_inf",), "0.1 of the weights"),
    }


def test_a_model_that_no_call_runs_has_a_box_all_the_same() -> None:
    push = PushWeightsHook(target=ModelName("average"), eta=0.5)
    step = plan([call("actor_train", "train_step", input_keys=PROMPT, post_hooks=(push,))], "fsdp:d2")
    assert "average/0" in {node.name for node in _graph(step)[0]}


@STEPS
def test_the_picture_says_every_word(step: StepPlan, tmp_path: Path) -> None:
    svg, png = save(draw_graph(_graph(step), title="exp/trial"), tmp_path / "dataflow", formats=("svg", "png"))
    words = " ".join(ElementTree.parse(svg).getroot().itertext())
    for each in step.graph.calls:
        assert each.name in words and str(each.model_name) in words
        assert all(key in words for key in each.input_keys)
    assert png.read_bytes().startswith(b"\x89PNG")
