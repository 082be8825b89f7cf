"""Declared keys, and which of them a graph names."""

import pytest

from corral.experiments.specs import graph_keys
from corral.scheduling.keys import BUILT_IN_KEYS, Key, KeyLayout, built_in, merge_keys
from corral.scheduling.model_function_call import CallType, ModelFunctionCall, ModelName

MARGIN = Key("margin", "per_answer", "float32")


def call(name: str, implementation: str, *, reads: tuple[str, ...], makes: dict[str, str]) -> ModelFunctionCall:
    """`makes`: the graph's name by the interface's own."""
    return ModelFunctionCall(
        name=name,
        model_name=ModelName(name),
        call_type=CallType.INFERENCE if makes else CallType.TRAIN_STEP,
        implementation=implementation,
        n_seqs=4,
        input_keys=reads,
        output_keys=tuple(makes.values()),
        output_key_remap={own: graph for own, graph in makes.items() if own != graph},
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("two words", "per_answer", "float32"), "consists of letters"),
        (("margin", "per_prompt", "float32"), "layouts are per_token, per_shifted_token, per_answer"),
        (("margin", "per_answer", "float16"), "types are bool, uint8, int16, int32"),
    ],
)
def test_a_key_that_cannot_be_stored_is_refused(arguments: tuple[str, str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Key(*arguments)


def test_a_declaration_is_a_value() -> None:
    assert MARGIN.layout is KeyLayout.PER_ANSWER
    assert MARGIN == Key("margin", "per_answer", "float32") != Key("margin", "per_token", "float32")
    assert len({MARGIN, Key("margin", "per_answer", "float32")}) == 1


def test_built_in_keys_are_found_by_name_and_misspelt_ones_are_hinted_at() -> None:
    assert [key.name for key in built_in("rewards", "values")] == ["rewards", "values"]
    with pytest.raises(ValueError, match="unknown sample key 'reward'; did you mean 'rewards'"):
        built_in("reward")


def test_a_name_is_declared_in_one_way_only() -> None:
    assert merge_keys([MARGIN, MARGIN]) == {**BUILT_IN_KEYS, "margin": MARGIN}
    with pytest.raises(ValueError, match="'rewards' is declared as per_token float32 and as per_answer float32"):
        merge_keys([Key("rewards", "per_token", "float32")])


def test_the_graph_knows_users_keys_and_renamed_ones() -> None:
    calls = [
        call("judge", "mine:Judge", reads=("input_ids", "difficulty"), makes={"margin": "margin"}),
        call("critic", "ppo_critic", reads=("input_ids",), makes={"values": "teacher_values"}),
        call("actor", "ppo_actor", reads=("input_ids", "margin", "teacher_values"), makes={}),
    ]
    difficulty = Key("difficulty", "per_answer", "int32")
    declared = {"mine:Judge": [MARGIN, difficulty, Key("unused", "per_token", "bool")]}
    assert set(graph_keys(calls, declared, ["input_ids", "difficulty"])) == {
        MARGIN,
        difficulty,
        Key("teacher_values", "per_token", "float32"),
    }


def test_a_key_that_nobody_declares_is_refused_with_the_line_to_write() -> None:
    makes = [call("judge", "mine:Judge", reads=("input_ids",), makes={"margin": "margin"})]
    with pytest.raises(ValueError, match=r"write Key\(\"margin\", .* in the file of 'mine:Judge'"):
        graph_keys(makes, {}, ["input_ids"])
    with pytest.raises(ValueError, match="reads key 'difficulty', whose layout nobody declares"):
        graph_keys([call("actor", "ppo_actor", reads=("difficulty",), makes={})], {}, ["difficulty"])


def test_two_implementations_cannot_mean_different_things_by_one_name() -> None:
    calls = [call("judge", "a:A", reads=("input_ids",), makes={"margin": "margin"})]
    with pytest.raises(ValueError, match="'margin' is declared as"):
        graph_keys(calls, {"a:A": [MARGIN], "b:B": [Key("margin", "per_token", "float32")]})
