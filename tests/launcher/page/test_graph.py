"""The graph of a train step: what goes from which call to which."""

import pytest

from corral.launcher.page.graph import Graph, graph_of
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
