"""The files of docs/agents.md, run as they stand there."""

import asyncio
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import pytest
from transformers.utils import get_json_schema

from corral.agents import (
    Episode,
    EpisodeEndedError,
    Outcome,
    Session,
    Task,
    ToolCall,
    Turn,
    feedback,
    single_turn,
    tools,
)
from corral.experiments.inputs.users_code import TriedRow
from corral.experiments.prompts.chat import ChatRenderer
from corral.experiments.prompts.tokens import load_tokenizer
from corral.workers.agents.contract import AsksOnError, Words
from corral.workers.agents.session import ModelLanguage, Reply
from corral.workers.agents.shipped import calculator, run_tool, schema_of
from corral.workers.user_code.checks import check_agent, try_reward
from tests import chat_models
from tests.workers.data.tiny_tokenizer import EOS, ids_of, write_tokenizer

DOCUMENT = Path(__file__).parents[1] / "docs" / "agents.md"
FILES = {name: text for name, text in re.findall(r"```python\n# (\w+)\.py\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)}
TASK = Task({"answer": "3"}, "1+2=", ids_of("1+2="), 0)


@pytest.fixture(autouse=True)
def users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The folder that a user submits from, with the files of the document."""
    for name, text in FILES.items():
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "words.txt").write_text("mountain: a high hill\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in FILES:
        sys.modules.pop(name, None)


class Script:
    """A model that answers as it is told, and says what it was asked."""

    def __init__(self, *answers: str) -> None:
        self.answers, self.asked = list(answers), list[list[int]]()

    async def __call__(self, ids: Sequence[int], sampling: Mapping[str, Any]) -> Reply:
        self.asked.append(list(ids))
        if not self.answers:
            raise EpisodeEndedError("turns", "the script is over")
        made = [*ids_of(self.answers.pop(0)), EOS]
        return Reply(len(self.asked) - 1, made, [-0.5] * len(made), "stop")


def session_of(model: Script, folder: Path) -> Session:
    language = ModelLanguage(load_tokenizer(write_tokenizer(folder / "model")), stop_token_ids={EOS}, renderer=None)

    async def judge(answer: str) -> float:
        return float(answer == "3")

    return Session(model, language, judge, TASK.prompt_ids)


def test_there_are_four_files_and_each_is_short() -> None:
    assert FILES.keys() == {"second_look", "lookup", "shortest", "play"}
    assert all(len(text.splitlines()) < 30 for text in FILES.values())


def test_the_agent_asks_twice_and_notes_what_it_gained(tmp_path: Path) -> None:
    solve = import_module("second_look").solve
    check_agent(solve, {"ask": "="})
    model = Script("4", "3")
    session = session_of(model, tmp_path)
    outcome = asyncio.run(solve(TASK, session, ask="="))
    assert outcome == Outcome(1.0, metrics={"gained": 1.0})
    assert session.record.turn_rewards == [(0, 0.0)]
    assert model.asked == [ids_of("1+2="), [*ids_of("1+2=4"), EOS, *ids_of("=")]]


def test_the_tool_has_a_schema_and_answers_calls() -> None:
    meaning = import_module("lookup").meaning
    schema = schema_of(meaning)["function"]
    assert (schema["name"], schema["description"]) == ("meaning", "What a word means.")
    assert schema["parameters"] == {
        "type": "object",
        "properties": {"word": {"type": "string"}},
        "required": ["word"],
    }

    def asked(name: str, **arguments: str) -> str:
        return asyncio.run(run_tool({"meaning": meaning}, ToolCall(name, arguments)))

    assert asked("meaning", word="Mountain") == "a high hill"
    assert asked("meaning", word="hill") == "KeyError: 'hill'"
    assert asked("meaning", words="hill").startswith("TypeError: ")
    assert asked("means", word="hill") == "LookupError: there is no tool 'means'; there are meaning"


def weather(
    city: str,
    days: int | None = None,
    mode: Literal["short", "long"] = "short",
    tags: list[str] | None = None,
    by: dict[str, float] | None = None,
    at: int | str = 0,
    *,
    deep: bool = False,
) -> str:
    """The weather.

    More of it.

    Args:
        city: where
            it is
        days: from now on
        mode: how much
        tags: what of
        by: how it counts
        at: when
        deep: all of it
    """
    return f"{city} {days} {mode} {tags} {by} {at} {deep}"


def test_the_schema_of_a_function_is_that_of_transformers() -> None:
    reference = get_json_schema(weather)["function"]["parameters"]
    schema = schema_of(weather)["function"]
    assert schema["description"] == "The weather."
    assert schema["parameters"] == reference


def test_parameters_that_a_model_cannot_name_are_not_shown() -> None:
    def look(city: str, *rest: str, **more: object) -> str:
        """Look.

        Args:
            city (str): where
        """
        return f"{city} {rest} {more}"

    schema = schema_of(look)["function"]
    city = {"type": "string", "description": "where"}
    assert schema["parameters"] == {"type": "object", "properties": {"city": city}, "required": ["city"]}


def test_the_judge_of_groups_prefers_fewer_turns() -> None:
    judge = import_module("shortest").judge
    try_reward(judge, TriedRow(place="a row", problem={"answer": "3"}, right=("3",), others=("",)))
    episodes = [Episode(["4", "3"]), Episode(["3"]), Episode(["4"])]
    assert judge({"answer": "3"}, episodes) == [1.0, 1.5, 0.0]


def test_feedback_asks_until_the_answer_is_right_or_an_episode_ends(tmp_path: Path) -> None:
    for answers, asked, expected in (
        (["3"], 1, Outcome(1.0)),
        (["4", "3"], 2, Outcome(1.0)),
        (["4", "5", "6", "3"], 3, Outcome(0.0)),
        (["4"], 2, Outcome(0.0, ended="turns")),
    ):
        model = Script(*answers)
        outcome = asyncio.run(feedback(TASK, session_of(model, tmp_path), feedback="+", max_turns=3))
        assert (len(model.asked), outcome) == (asked, expected)


def test_single_turn_asks_once(tmp_path: Path) -> None:
    model = Script("3")
    asyncio.run(single_turn(TASK, session_of(model, tmp_path)))
    assert model.asked == [ids_of("1+2=")]


def test_tools_are_called_in_the_form_of_a_pattern(tmp_path: Path) -> None:
    model = Script("1+2=", "3")
    settings = {
        "tools": ["corral.workers.agents.shipped:calculator"],
        "call": r"(?P<expression>[0-9+]+)=",
        "reply": "{output}",
    }
    check_agent(tools, settings)
    outcome = asyncio.run(tools(TASK, session_of(model, tmp_path), **settings))  # type: ignore[arg-type]
    assert outcome == Outcome(None, metrics={"tool_calls": 1.0})
    assert model.asked[1] == [*ids_of("1+2=1+2="), EOS, *ids_of("3")]


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@pytest.mark.parametrize("prompt", ["1+2?", [{"role": "user", "content": "1+2?"}]], ids=["text", "messages"])
def test_tools_are_called_and_answered_as_the_chat_template_writes_it(prompt: Words, tmp_path: Path) -> None:
    directory = chat_models.write_chat_tokenizer(tmp_path, "qwen")
    renderer = ChatRenderer.of_model(directory)
    language = ModelLanguage(renderer.tokenizer, stop_token_ids=(), renderer=renderer)
    called = '\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n'
    texts = [("<tool_call>", called, "</tool_call>", "<|im_end|>"), ("3", "<|im_end|>")]
    answers = [chat_models.ids_of(*text) for text in texts]
    asked: list[list[int]] = []

    async def model(ids: Sequence[int], sampling: Mapping[str, Any]) -> Reply:
        assert sampling == {"stop_token_ids": list(renderer.stop_token_ids)}
        asked.append(list(ids))
        made = answers[len(asked) - 1]
        return Reply(len(asked) - 1, made, [-0.5] * len(made), "stop")

    async def judge(answer: str) -> float:
        raise AssertionError("it is not asked")

    session = Session(model, language, judge, [5])
    played = tools(Task({}, prompt, [5], 0), session, tools=[f"{__name__}:add"])
    assert asyncio.run(played) == Outcome(None, metrics={"tool_calls": 1.0})
    first = renderer.render([{"role": "user", "content": "1+2?"}], tools=[schema_of(add)])
    assert asked[0] == first and "Adds two numbers." in renderer.tokenizer.decode(first, skip_special_tokens=False)
    assert asked[1][: len(first) + len(answers[0])] == [*first, *answers[0]]
    assert "[3]" in renderer.tokenizer.decode(asked[1][len(first) + len(answers[0]) :], skip_special_tokens=False)


@pytest.mark.parametrize(("expression", "value"), [("12+34*2", "80"), ("1-2-3", "-4"), ("7", "7")])
def test_the_calculator_computes(expression: str, value: str) -> None:
    assert calculator(expression) == value


def test_the_calculator_runs_no_program() -> None:
    with pytest.raises(ValueError, match="cannot compute"):
        calculator("__import__('os')")


def test_an_agent_that_asks_on_for_ever_fails(tmp_path: Path) -> None:
    async def play() -> None:
        session = session_of(Script(), tmp_path)
        while True:
            with suppress(Exception):
                await session.generate()

    with pytest.raises(AsksOnError, match="the script is over"):
        asyncio.run(play())


def test_a_branch_goes_on_behind_a_turn_and_leaves_the_rest_as_it_is(tmp_path: Path) -> None:
    async def play() -> tuple[Session, Session, Turn]:
        session = session_of(Script("4", "5", "6"), tmp_path)
        first = await session.generate()
        await session.say("+")
        await session.generate()
        branch = session.branch(first)
        words: Words = ids_of("=")
        await branch.say(words)
        return session, branch, await branch.generate(train=False)

    session, branch, turn = asyncio.run(play())
    assert list(branch.ids) == [*ids_of("1+2=4"), EOS, *ids_of("=6"), EOS]
    assert list(session.ids) == [*ids_of("1+2=4"), EOS, *ids_of("+5"), EOS]
    assert turn.number == 2 and session.record is branch.record and branch.record.untrained == [2]
    with pytest.raises(KeyError, match="no turn 3"):
        session.reward(1.0, turn=3)
    with pytest.raises(ValueError, match="must be a finite number"):
        session.reward(float("nan"), turn=0)
    session.note(loss=float("nan"), size=10**400)  # a note costs no episode, whatever its number
    assert math.isnan(session.record.notes["loss"]) and session.record.notes["size"] == math.inf
    with pytest.raises(ValueError, match="a model with a chat template"):
        asyncio.run(session.say([{"role": "user", "content": "3"}]))
