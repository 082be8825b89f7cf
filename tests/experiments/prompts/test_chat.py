"""Conversations as token ids: what transformers renders, what comes behind an answer, and what an answer says."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from corral.experiments.prompts.chat import ChatRenderer
from corral.experiments.prompts.messages import plain_messages
from tests.chat_models import ADD, CHARACTERS, ENDS, TEMPLATES, ids_of, write_chat_tokenizer

RENDERERS: dict[str, ChatRenderer] = {}
REFERENCES: dict[str, Any] = {}


@pytest.fixture(scope="module", autouse=True)
def models(tmp_path_factory: pytest.TempPathFactory) -> None:
    for form in TEMPLATES:
        directory = write_chat_tokenizer(tmp_path_factory.mktemp(form), form)
        RENDERERS[form] = ChatRenderer.of_model(directory)
        REFERENCES[form] = PreTrainedTokenizerFast.from_pretrained(directory)


def call(name: str = "add", **arguments: object) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]}


_TEXT = st.text(st.sampled_from(CHARACTERS), max_size=6)
_ANSWERS = st.one_of(
    st.builds(lambda text: {"role": "assistant", "content": text}, _TEXT),
    st.builds(lambda text, why: {"role": "assistant", "content": text, "reasoning_content": why}, _TEXT, _TEXT),
    st.builds(lambda a, b: call(a=a, b=b), st.integers(), _TEXT),
)
_OTHERS = st.builds(lambda role, text: {"role": role, "content": text}, st.sampled_from(["user", "tool"]), _TEXT)
_CONVERSATIONS = st.builds(
    lambda system, rest: [*system, {"role": "user", "content": "1+1?"}, *rest],
    st.lists(st.builds(lambda text: {"role": "system", "content": text}, _TEXT), max_size=1),
    st.lists(_ANSWERS | _OTHERS, max_size=6),
)


@pytest.mark.parametrize("form", TEMPLATES)
@given(messages=_CONVERSATIONS, tools=st.sampled_from([[], [ADD]]))
@settings(max_examples=60, deadline=None)
def test_messages_are_rendered_as_transformers_does(form: str, messages: list[Any], tools: list[Any]) -> None:
    reference = REFERENCES[form].apply_chat_template(messages, tools=tools or None, add_generation_prompt=True)
    expected = reference["input_ids"] if not isinstance(reference, list) else reference
    ids = RENDERERS[form].render(messages, tools=tools)
    assert ids == list(expected)
    assert ids.count(ids_of("<bos>")[0]) == (form == "llama")


def test_arguments_of_calls_may_be_json_text_as_openai_gives_them() -> None:
    asked = {"role": "user", "content": "1+1?"}
    as_text = call()
    as_text["tool_calls"][0]["function"]["arguments"] = '{"a": 1}'
    for renderer in RENDERERS.values():
        assert renderer.render([asked, as_text]) == renderer.render([asked, call(a=1)])
    as_text["tool_calls"][0]["function"]["arguments"] = deep = "[" * 5000  # of the model, and no JSON that is read
    assert plain_messages([as_text])[0]["tool_calls"][0]["function"]["arguments"] == deep


def follow(form: str, *answer: str, then: dict[str, Any], tools: Sequence[Any] = (), stopped: bool = True) -> Any:
    """What comes behind an answer; None where there is no bridge; the same with the history and without it."""
    renderer, asked = RENDERERS[form], [{"role": "user", "content": "1+1?"}]
    output = ids_of(*answer)
    ids = [*renderer.render(asked, tools=tools), *output]
    said = renderer.parse(output, stopped=stopped, tools=tools).as_message()
    bridged = renderer.bridge(ids, stopped=stopped, messages=[then], tools=tools, history=[*asked, said])
    assert bridged == renderer.bridge(ids, stopped=stopped, messages=[then], tools=tools)
    if bridged is None:
        return None
    assert bridged[: len(ids)] == ids
    return bridged[len(ids) :]


QUESTION = {"role": "user", "content": "2+2?"}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "2"}
QWEN_QUESTION = ["\n", "<|im_start|>", "user\n2+2?", "<|im_end|>", "\n", "<|im_start|>", "assistant\n"]
QWEN_RESULT = ["\n", "<|im_start|>", "user\n[2]", "<|im_end|>", "\n", "<|im_start|>", "assistant\n"]
LLAMA_QUESTION = ["<|head|>", "user", "<|body|>", "\n\n2+2?", "<|eot|>", "<|head|>", "assistant", "<|body|>", "\n\n"]
LLAMA_RESULT = ["<|head|>", "ipython", "<|body|>", '\n\n"2"', "<|eot|>", "<|head|>", "assistant", "<|body|>", "\n\n"]


def test_behind_an_answer_comes_what_the_template_writes_there() -> None:
    assert follow("qwen", "It is 2.", "<|im_end|>", then=QUESTION) == ids_of(*QWEN_QUESTION)
    assert follow("llama", " It is 2. ", "<|eot|>", then=QUESTION) == ids_of(*LLAMA_QUESTION)
    called = '{"name": "add", "parameters": {"a":1,   "b":1}}'  # not as the template would space it
    assert follow("llama", called, "<|eot|>", then=RESULT, tools=[ADD]) == ids_of(*LLAMA_RESULT)


def test_an_answer_that_was_cut_is_ended_as_the_template_ends_it() -> None:
    assert follow("qwen", "It is", then=QUESTION, stopped=False) == ids_of("<|im_end|>", *QWEN_QUESTION)
    assert follow("llama", "It is", then=QUESTION, stopped=False) == ids_of("<|eot|>", *LLAMA_QUESTION)
    # By a text that was to stop it, which is no token that ends answers.
    assert follow("llama", "It is", then=QUESTION, stopped=True) == ids_of("<|eot|>", *LLAMA_QUESTION)
    assert follow("qwen", "<think>", "\nIs it", then=RESULT, stopped=False) is None


def test_reasoning_is_gone_on_from_until_the_template_leaves_it_out() -> None:
    thought = ["<think>", "\nOne and one.\n", "</think>", "\n\n"]
    called = ["<tool_call>", '\n{"name": "add", "arguments": {"a": 1, "b": 1}}\n', "</tool_call>"]
    assert follow("qwen", *thought, *called, "<|im_end|>", then=RESULT, tools=[ADD]) == ids_of(*QWEN_RESULT)
    assert follow("qwen", *thought, "2", "<|im_end|>", then=QUESTION) is None


def test_reasoning_of_a_turn_before_the_last_breaks_the_bridge_as_well() -> None:
    renderer, asked = RENDERERS["qwen"], {"role": "user", "content": "1+1?"}
    history = [asked, {**call(a=1), "reasoning_content": "hm"}, RESULT]
    ids = [*renderer.render(history), *ids_of("2", "<|im_end|>")]
    history.append({"role": "assistant", "content": "2"})
    assert renderer.bridge(ids, stopped=True, messages=[RESULT], history=history) is not None
    for known in (history, []):
        assert renderer.bridge(ids, stopped=True, messages=[QUESTION], history=known) is None


def test_an_answer_that_the_template_would_add_reasoning_to_is_not_gone_on_from() -> None:
    renderer = RENDERERS["qwen"]
    history = [QUESTION, {"role": "assistant", "content": "4"}]  # that it is the last shows as an empty <think>
    ids = [*renderer.render([QUESTION]), *ids_of("4", "<|im_end|>")]
    assert renderer.bridge(ids, stopped=True, messages=[], history=history) is None
    assert renderer.bridge(ids, stopped=True, messages=[QUESTION], history=history) is not None


def test_a_block_without_reasoning_is_gone_on_from_only_where_the_template_keeps_it() -> None:
    renderer, asked = RENDERERS["qwen"], {"role": "user", "content": "1+1?"}
    block = ids_of("<think>", "\n\n", "</think>", "\n\n", "4", "<|im_end|>")
    for before in ([asked], [asked, {**call(a=1), "reasoning_content": "hm"}, RESULT]):  # that one has some
        ids = [*renderer.render(before), *block]
        said = renderer.parse(block, stopped=True).as_message()
        for then in (RESULT, QUESTION):
            assert renderer.bridge(ids, stopped=True, messages=[then], history=[*before, said]) is None
    assert renderer.bridge(ids, stopped=True, messages=[QUESTION]) is None


def test_a_template_that_begins_reasoning_and_drops_it_later_has_no_bridge(tmp_path: Path) -> None:
    directory = write_chat_tokenizer(tmp_path, "llama")
    (directory / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ '<|head|>' + message.role + '<|body|>' }}"
        "{{ message.content.split('</think>')[-1] if not loop.last else message.content }}<|eot|>{% endfor %}"
        "{% if add_generation_prompt %}<|head|>assistant<|body|><think>\n{% endif %}"
    )
    renderer = ChatRenderer.of_model(directory)
    prompt = renderer.render([QUESTION])
    assert prompt[-2:] == ids_of("<think>", "\n")
    answer = ids_of("hm\n", "</think>", "\n\n4", "<|eot|>")
    said = renderer.parse(answer, stopped=True)
    assert (said.reasoning, said.content) == ("hm", "4")
    assert renderer.parse(answer[:2], stopped=False).as_message()["reasoning_content"] == "hm"
    history = [QUESTION, said.as_message()]
    assert renderer.bridge([*prompt, *answer], stopped=True, messages=[QUESTION], history=history) is None


def test_a_template_that_writes_the_beginning_in_another_way_has_no_bridge(tmp_path: Path) -> None:
    directory = write_chat_tokenizer(tmp_path, "qwen")
    for beginning, is_bridged in (("1", True), ("{{ messages | length }}", False)):
        (directory / "chat_template.jinja").write_text(beginning + TEMPLATES["qwen"])
        renderer = ChatRenderer.of_model(directory)
        ids = [*renderer.render([QUESTION]), *ids_of("4", "<|im_end|>")]
        assert (renderer.bridge(ids, stopped=True, messages=[QUESTION]) is not None) is is_bridged


def test_an_answer_that_ended_in_another_way_than_the_templates_is_not_gone_on_from(tmp_path: Path) -> None:
    directory = write_chat_tokenizer(tmp_path, "qwen")
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ids_of("<|eot|>")}))
    renderer = ChatRenderer.of_model(directory)
    assert set(renderer.stop_token_ids) == set(ids_of("<|eot|>", "<|im_end|>"))
    for end, is_bridged in (("<|im_end|>", True), ("<|eot|>", False)):
        ids = [*renderer.render([QUESTION]), *ids_of("4", end)]
        assert (renderer.bridge(ids, stopped=True, messages=[QUESTION]) is not None) is is_bridged


def test_answers_are_taken_apart_in_the_form_of_the_template() -> None:
    qwen, llama = RENDERERS["qwen"], RENDERERS["llama"]
    calls = ["<tool_call>", '\n{"name": "add", "arguments": {"a": 1}}\n', "</tool_call>"]
    answer = ids_of("<think>", "\nhm\n", "</think>", "\n\nLet me see.\n", *calls, "\n", *calls, "<|im_end|>")
    said = qwen.parse(answer, stopped=True, tools=[ADD])
    assert (said.reasoning, said.content) == ("hm", "Let me see.")
    assert [(one.name, one.arguments) for one in said.tool_calls] == [("add", {"a": 1})] * 2
    assert len({one.id for one in said.tool_calls}) == 2
    assert qwen.parse(answer, stopped=True, tools=[ADD]) == said
    assert said.text.startswith("<think>\nhm\n</think>\n\nLet me") and said.text.endswith("</tool_call>")
    first = ids_of('{"name": "add", "parameters": {"a": 1}}', "<|eot|>")
    for answer in (first, ids_of("<|python_tag|>") + first):
        (found,) = llama.parse(answer, stopped=True, tools=[ADD]).tool_calls
        assert (found.name, found.arguments) == ("add", {"a": 1})


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("qwen", ["<tool_call>", '\n{"name": "add", "arguments": {"a": 1}\n', "</tool_call>"]),  # a brace is missing
        ("qwen", ["<tool_call>", '\n{"name": "add", "arguments": "a"}\n', "</tool_call>"]),
        ("qwen", ["<tool_call>", "[" * 5000]),  # deeper than JSON is read
        ("qwen", ['{"name": "add", "arguments": {}}']),
        ("llama", ['{"name": "sub", "parameters": {}}']),
        ("llama", ['It is {"name": "add", "parameters": {}}']),
        ("llama", ["7"]),
    ],
)
def test_what_is_no_call_is_what_the_model_said(form: str, text: list[str]) -> None:
    said = RENDERERS[form].parse(ids_of(*text, ENDS[form]), stopped=True, tools=[ADD])
    assert (said.content, said.tool_calls) == ("".join(text), ())


def test_without_tools_nothing_is_a_call() -> None:
    text = '{"name": "add", "parameters": {}}'
    assert RENDERERS["llama"].parse(ids_of(text, "<|eot|>"), stopped=True).tool_calls == ()


def test_reasoning_that_was_cut_is_reasoning() -> None:
    said = RENDERERS["qwen"].parse(ids_of("<think>", "\nIs it"), stopped=False)
    assert (said.reasoning, said.content, said.text) == ("Is it", "", "<think>\nIs it")
    assert said.as_message() == {"role": "assistant", "content": "", "reasoning_content": "Is it"}


def test_a_call_as_a_message_is_openais() -> None:
    (found,) = (
        RENDERERS["llama"]
        .parse(ids_of('{"name": "add", "parameters": {}}', "<|eot|>"), stopped=True, tools=[ADD])
        .tool_calls
    )
    assert found.id.isalnum() and len(found.id) == 9


@pytest.mark.parametrize(
    ("message", "rule"),
    [
        ("hello", "is no object but str"),
        ({"role": "robot", "content": "x"}, "has role 'robot'"),
        ({"role": "user"}, "has no content"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "neither text nor a list of text parts"),
        ({"role": "assistant", "tool_calls": [{"name": "add"}]}, "has a tool call that is no"),
        ({"role": "assistant", "tool_calls": 1}, "has tool_calls that are no list"),
    ],
)
def test_a_message_that_is_none_is_refused_by_its_place(message: Any, rule: str) -> None:
    with pytest.raises(ValueError, match=rf"messages\[1\] .*{rule}"):
        RENDERERS["qwen"].render([{"role": "system", "content": "s"}, message])


def test_what_the_template_refuses_is_refused_in_its_words() -> None:
    with pytest.raises(ValueError, match="the system speaks first"):
        RENDERERS["qwen"].render([QUESTION, {"role": "system", "content": "s"}])


def test_a_template_cannot_leave_its_sandbox(tmp_path: Path) -> None:
    directory = write_chat_tokenizer(tmp_path, "qwen")
    (directory / "chat_template.jinja").write_text("{{ messages.__class__.__mro__ }}")
    with pytest.raises(ValueError, match="refuses these messages: access to attribute '__class__'"):
        ChatRenderer.of_model(directory)


def test_a_model_without_a_template_is_refused_by_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no chat template: neither chat_template.jinja nor"):
        ChatRenderer.of_model(write_chat_tokenizer(tmp_path, None))


def test_a_template_of_its_own_file_comes_before_the_configurations(tmp_path: Path) -> None:
    directory = write_chat_tokenizer(tmp_path, "qwen")
    (directory / "chat_template.jinja").write_text(TEMPLATES["llama"])
    assert ChatRenderer.of_model(directory).render([QUESTION]) == RENDERERS["llama"].render([QUESTION])
    (directory / "chat_template.jinja").unlink()
    named = [{"name": name, "template": TEMPLATES[form]} for name, form in (("default", "qwen"), ("tool_use", "llama"))]
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": named, "bos_token": "<bos>"}))
    both = ChatRenderer.of_model(directory)
    assert both.render([QUESTION]) == RENDERERS["qwen"].render([QUESTION])
    assert both.render([QUESTION], tools=[ADD]) == RENDERERS["llama"].render([QUESTION], tools=[ADD])


def test_arguments_of_a_template_are_its_variables_and_those_of_a_request_go_before_those_of_the_trial(
    tmp_path: Path,
) -> None:
    directory = write_chat_tokenizer(tmp_path, None)
    source = (
        TEMPLATES["qwen"]
        + "{% if add_generation_prompt and not thinks %}{{ '<think>' + mood + '</think>' }}{% endif %}"
    )
    (directory / "chat_template.jinja").write_text(source)
    renderer = ChatRenderer.of_model(directory, arguments={"thinks": False, "mood": "sad"})
    asked, reference = [{"role": "user", "content": "1+1?"}], PreTrainedTokenizerFast.from_pretrained(directory)
    for asked_for, rest in (({}, "sad</think>"), ({"mood": "glad"}, "glad</think>"), ({"thinks": True}, "assistant\n")):
        other = renderer.with_arguments(asked_for)
        everything = {"thinks": False, "mood": "sad", **asked_for}
        expected = reference.apply_chat_template(asked, add_generation_prompt=True, return_dict=False, **everything)
        assert other.render(asked) == expected
        assert other.tokenizer.decode(expected, skip_special_tokens=False).endswith(rest)
    assert ChatRenderer.of_model(directory, arguments={"thinks": True}).tool_calls == renderer.tool_calls


@pytest.mark.parametrize("name", ["thinkz", "messages", "tools", "add_generation_prompt"])
def test_an_argument_that_the_template_does_not_take_is_refused_with_those_that_it_takes(name: str) -> None:
    with pytest.raises(ValueError, match=f"takes no argument '{name}'; it takes"):
        RENDERERS["qwen"].with_arguments({name: True})
