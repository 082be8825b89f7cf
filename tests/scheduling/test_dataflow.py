"""The dataflow graph: edges follow from keys, and a graph that could not run is refused with the reason."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from corral.scheduling.dataflow import DataflowGraph, build_dataflow
from corral.scheduling.model_function_call import (
    CallType,
    MFCDef,
    ModelFunctionCall,
    ModelName,
    OffloadHook,
    PublishWeightsHook,
    PullWeightsHook,
    PushWeightsHook,
    parse_model_name,
)
from corral.scheduling.packing import MicroBatchSpec


def call(name: str, call_type: str = "inference", role: str | ModelName = "actor", **fields: Any) -> ModelFunctionCall:
    return ModelFunctionCall.model_validate(
        {"name": name, "model_name": role, "call_type": call_type, "implementation": "ppo", "n_seqs": 4} | fields
    )


def asynchronous_ppo() -> list[ModelFunctionCall]:
    """In an order that is not topological."""
    return [
        call(
            "actor_train",
            "train_step",
            input_keys=("input_ids", "rewards", "proximal_logprobs", "ref_logprobs", "values"),
        ),
        call("actor_inf", input_keys=("input_ids",), output_keys=("proximal_logprobs",)),
        call("ref_inf", role="ref", input_keys=("input_ids",), output_keys=("ref_logprobs",)),
        call("critic_inf", role="critic", input_keys=("input_ids",), output_keys=("values",)),
        call("critic_train", "train_step", role="critic", input_keys=("input_ids", "rewards", "values")),
    ]


def levels_of(graph: DataflowGraph) -> tuple[tuple[str, ...], ...]:
    """Names of a step's calls, in their order, by how many calls each has to wait for one after the other."""
    level_by_name: dict[str, int] = {}
    for each in graph.step_calls:
        level_by_name[each.name] = 1 + max(map(level_by_name.__getitem__, graph.predecessors(each.name)), default=-1)
    return tuple(tuple(names) for _, names in itertools.groupby(level_by_name, key=level_by_name.__getitem__))


def test_edges_follow_from_keys() -> None:
    graph = build_dataflow(asynchronous_ppo(), ["input_ids", "rewards"])
    assert graph.producer_by_key == {
        "input_ids": None,
        "rewards": None,
        "proximal_logprobs": "actor_inf",
        "ref_logprobs": "ref_inf",
        "values": "critic_inf",
    }
    assert graph.predecessors("critic_train") == ("critic_inf",)
    assert levels_of(graph) == (("actor_inf", "ref_inf", "critic_inf"), ("actor_train", "critic_train"))


def test_a_graph_knows_whom_a_call_waits_for() -> None:
    graph = build_dataflow(asynchronous_ppo(), ["input_ids", "rewards"])
    assert graph.predecessors("actor_train") == ("actor_inf", "ref_inf", "critic_inf")
    with pytest.raises(ValueError, match="no call is named 'nobody'; there are actor_inf"):
        graph.call("nobody")


def test_synchronous_ppo_has_three_levels() -> None:
    generate = call("actor_gen", "generate", input_keys=("prompts",), output_keys=("input_ids",))
    reward = call("rew_inf", role="reward", input_keys=("input_ids",), output_keys=("rewards",))
    graph = build_dataflow([*asynchronous_ppo(), reward, generate], ["prompts"])
    assert [len(level) for level in levels_of(graph)] == [1, 4, 2]


def test_an_unknown_key_names_the_closest_one_and_its_producer() -> None:
    calls = [call("rew_inf", role="reward", input_keys=("input_ids",), output_keys=("rewards",)),
             call("actor_train", "train_step", input_keys=("input_ids", "reward"))]  # fmt: skip
    with pytest.raises(ValueError) as refusal:
        build_dataflow(calls, ["input_ids"])
    message = str(refusal.value)
    assert "call 'actor_train' reads key 'reward'" in message
    assert "did you mean 'rewards', which rew_inf makes?" in message
    assert "the dataset has input_ids" in message


def test_a_key_has_one_producer() -> None:
    first = call("first", output_keys=("values",))
    second = call("second", role="critic", output_keys=("values",))
    with pytest.raises(ValueError, match="'values' is made by first and by second"):
        build_dataflow([first, second], [])
    with pytest.raises(ValueError, match="'values' is made by the dataset and by first"):
        build_dataflow([first], ["values"])


def test_a_circle_is_shown() -> None:
    calls = [
        call("source", role="ref", output_keys=("x",)),
        call("a", input_keys=("x", "kc"), output_keys=("ka",)),
        call("b", input_keys=("ka",), output_keys=("kb",)),
        call("c", input_keys=("kb",), output_keys=("kc",)),
    ]
    with pytest.raises(ValueError, match="in a circle: a -> c -> b -> a"):
        build_dataflow(calls, [])
    with pytest.raises(ValueError, match="in a circle: self_made -> self_made"):
        build_dataflow([call("self_made", input_keys=("x",), output_keys=("x",))], [])


def test_names_train_steps_and_replicas_are_checked() -> None:
    with pytest.raises(ValueError, match="twice occurs more than once"):
        build_dataflow([call("twice", output_keys=("a",)), call("twice", output_keys=("b",))], [])
    with pytest.raises(ValueError, match=r"'actor' has 2 train steps \(one, two\)"):
        build_dataflow([call("one", "train_step"), call("two", "train_step")], [])
    with pytest.raises(ValueError, match=r"replica ids of role 'actor' must be 0..1, got \[0, 2\]"):
        build_dataflow([call("a", output_keys=("a",)), call("b", role=ModelName("actor", 2), output_keys=("b",))], [])
    with pytest.raises(ValueError, match="at least one call"):
        build_dataflow([], ["input_ids"])


@pytest.mark.parametrize(
    ("call_type", "fields", "message"),
    [
        ("inference", {}, "must have output_keys"),
        ("generate", {}, "must have output_keys"),
        ("train_step", {"output_keys": ["x"]}, "returns statistics"),
        ("inference", {"output_keys": ["x", "x"]}, "names x more than once"),
        ("inference", {"output_keys": ["x"], "input_key_remap": {"y": "z"}}, "input_key_remap names y"),
        ("inference", {"output_keys": ["x"], "output_key_remap": {"y": "z"}}, "output_key_remap names z"),
        (
            "inference",
            {"output_keys": ["x"], "post_hooks": [{"type": "push_weights", "target": "ref"}]},
            "follows a train_step only",
        ),
        ("inference", {"output_keys": ["x"], "post_hooks": [{"type": "publish_weights"}]}, "follows a train_step only"),
        ("inference", {"output_keys": ["x"], "pre_hooks": [{"type": "offload"}]}, "pull_weights"),
        ("inference", {"output_keys": ["x"], "n_seqs": 0}, "n_seqs"),
        ("inference", {"output_keys": ["x"], "model_name": "a b"}, "role 'a b'"),
        ("train", {}, "call_type"),
    ],
)
def test_a_call_that_contradicts_itself_is_refused(call_type: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as refusal:
        call("name", call_type, **fields)
    assert message in str(refusal.value)


def test_a_call_name_is_a_plain_word() -> None:
    with pytest.raises(ValidationError, match="call name 'a-b' must consist of letters"):
        call("a-b", output_keys=("x",))


def test_a_role_alone_is_its_first_replica() -> None:
    assert call("a", output_keys=("x",)).model_name == ModelName("actor", 0)
    assert call("a", output_keys=("x",), role=ModelName("actor", 1)).role == "actor"
    assert MFCDef is ModelFunctionCall


def test_calls_survive_json_with_their_hooks() -> None:
    train = call(
        "actor_train", "train_step", role=ModelName("actor", 1), input_keys=("x",), input_key_remap={"x": "logprobs"},
        micro_batches=MicroBatchSpec(max_tokens_per_micro_batch=1024, n_min=2),
        pre_hooks=(PullWeightsHook(source="actor"),),
        post_hooks=(PublishWeightsHook(), PushWeightsHook(target="ref", eta=0.1), OffloadHook()),
    )  # fmt: skip
    adapter = TypeAdapter(list[ModelFunctionCall])
    (again,) = adapter.validate_json(adapter.dump_json([train]))
    assert again == train
    assert [type(hook) for hook in again.post_hooks] == [PublishWeightsHook, PushWeightsHook, OffloadHook]
    assert again.pre_hooks[0].source == ModelName("actor")
    assert again.call_type is CallType.TRAIN_STEP


def test_a_train_step_follows_whoever_computes_with_the_weights_that_it_changes() -> None:
    push = PushWeightsHook(target=ModelName("ema"), eta=0.1)
    graph = build_dataflow(
        [
            call("actor_inf", input_keys=("ids",), output_keys=("proximal",)),
            call("ema_inf", role="ema", input_keys=("ids",), output_keys=("ema_logprobs",)),
            call("draft", role=ModelName("actor", 1), input_keys=("ids",), output_keys=("drafts",),
                 pre_hooks=(PullWeightsHook(source=ModelName("actor")),)),
            call("ref_inf", role="ref", input_keys=("ids",), output_keys=("ref",)),
            call("actor_train", "train_step", input_keys=("ids",), post_hooks=(push,)),
            call("critic_train", "train_step", role="critic", input_keys=("ids",)),
            call("evaluate", "evaluate"),
        ],
        ["ids"],
    )  # fmt: skip
    assert set(graph.must_follow("actor_train")) == {"actor_inf", "ema_inf", "draft"}
    assert graph.must_follow("critic_train") == graph.must_follow("ref_inf") == ()
    assert graph.trained_models == (ModelName("actor"), ModelName("critic"))
    assert [call.name for call in graph.evaluate_calls] == ["evaluate"]
    assert "evaluate" not in [call.name for call in graph.step_calls]
    assert graph.reallocations(graph.call("draft")) == ((ModelName("actor"), ModelName("actor", 1)),)
    assert set(graph.model_names) == {ModelName(role) for role in ("actor", "ema", "ref", "critic")} | {
        ModelName("actor", 1)
    }


def test_model_names_read_back() -> None:
    assert [parse_model_name(text) for text in ("ref/2", "actor")] == [ModelName("ref", 2), ModelName("actor")]


@st.composite
def acyclic_calls(draw: st.DrawFn) -> list[ModelFunctionCall]:
    """Call i makes key i and reads keys of earlier calls; then in any order."""
    count = draw(st.integers(1, 7))
    calls = []
    for index in range(count):
        reads = draw(st.sets(st.integers(0, index - 1))) if index else set()
        calls.append(
            call(
                f"call{index}",
                input_keys=["ids", *(f"key{read}" for read in sorted(reads))],
                output_keys=[f"key{index}"],
            )
        )
    return draw(st.permutations(calls))


@given(acyclic_calls())
def test_levels_hold_every_call_once_right_after_what_it_waits_for(calls: list[ModelFunctionCall]) -> None:
    graph: DataflowGraph = build_dataflow(calls, ["ids"])
    assert sorted(call.name for call in graph.calls) == sorted(call.name for call in calls)
    level_of = {name: number for number, level in enumerate(levels_of(graph)) for name in level}
    for name, number in level_of.items():
        before = [level_of[other] for other in graph.predecessors(name)]
        assert number == max(before, default=-1) + 1
