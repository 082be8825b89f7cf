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
from tests.chat_models import ADD, CHARACTERS, ENDS, TEMPLATES, ids_of, write_chat_tokenizer, write_template_model

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
    begun = messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]  # what it says is gone on from
    how = {"continue_final_message": True} if begun else {"add_generation_prompt": True}
    reference = REFERENCES[form].apply_chat_template(messages, tools=tools or None, **how)
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


PLAIN = """\
{%- for message in messages %}{{ '<|start|>' + message.role + '\\n' + message.content + '<|end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}
"""
USER = {"role": "user", "content": "1+1?"}


def renderer_of(folder: Path, template: str, *, ends: Sequence[str] = ("<|end|>",)) -> ChatRenderer:
    return ChatRenderer.of_model(write_template_model(folder, template, ends=ends))


def shown(renderer: ChatRenderer, messages: Sequence[Any], **more: Any) -> str:
    return str(renderer.tokenizer.decode(renderer.render(messages, **more), skip_special_tokens=False))


@pytest.mark.parametrize("trims", [False, True])
@pytest.mark.parametrize("begun", ["Let me", "Let me\n<think>", "It is ", ""])
def test_an_answer_that_is_begun_is_gone_on_from_as_transformers_does(tmp_path: Path, begun: str, trims: bool) -> None:
    template = PLAIN.replace("message.content", "message.content | trim") if trims else PLAIN
    renderer, reference = renderer_of(tmp_path, template), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    talk = [USER, {"role": "assistant", "content": begun}]
    ids = renderer.render(talk)
    assert ids == reference.apply_chat_template(talk, continue_final_message=True, return_dict=False)
    if begun:
        text = renderer.tokenizer.decode(ids, skip_special_tokens=False)
        assert text.endswith("<|start|>assistant\n" + (begun.strip() if trims else begun))


def test_an_answer_that_is_begun_behind_another_answer_is_gone_on_from_as_well(tmp_path: Path) -> None:
    renderer = renderer_of(tmp_path, PLAIN)
    ids = [*renderer.render([USER]), *renderer.tokenizer.encode("2<|end|>").ids]
    following = [USER, {"role": "assistant", "content": "Let"}]
    bridged = renderer.bridge(ids, stopped=True, messages=following)
    assert bridged == renderer.render([USER, {"role": "assistant", "content": "2"}, *following])


@pytest.mark.parametrize(
    ("messages", "tools", "what"),
    [
        ([USER, call(a=1), {"role": "tool", "content": "2"}], [], "calls of tools"),
        ([USER], [ADD], "tools"),
    ],
)
def test_what_a_template_does_not_write_is_refused(tmp_path: Path, messages: Any, tools: Any, what: str) -> None:
    renderer = renderer_of(tmp_path, PLAIN)
    for ask in (renderer.render, renderer.render_learned):
        with pytest.raises(ValueError, match=f"does not write {what}; leave"):
            ask(messages, tools=tools)
    asked = [USER, {"role": "assistant", "content": "2"}]
    with pytest.raises(ValueError, match="does not write tools"):
        renderer.render_learned(asked, tools=[ADD])


def test_calls_and_results_that_a_template_leaves_out_are_refused(tmp_path: Path) -> None:
    calls = "{% if message.tool_calls %}{{ message.tool_calls[0].function | tojson }}{% endif %}"
    one_call = PLAIN.replace("+ '<|end|>", "}}" + calls + "{{ '<|end|>")
    twice, result = call(a=1), {"role": "tool", "content": "2"}
    twice["tool_calls"] *= 2
    renderer = renderer_of(tmp_path / "one", one_call)
    assert '"a": 1' in shown(renderer, [USER, call(a=1), result])
    with pytest.raises(ValueError, match="does not write more than one call of an answer"):
        renderer.render([USER, twice, result])
    no_results = one_call.replace(
        "{%- for message in messages %}", "{%- for message in messages if message.role != 'tool' %}"
    )
    with pytest.raises(ValueError, match="does not write tools' results"):
        renderer_of(tmp_path / "none", no_results).render([USER, call(a=1), result])


def test_a_template_that_reads_lists_of_parts_is_given_them(tmp_path: Path) -> None:
    parts = "{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
    template = PLAIN.replace(" + message.content + '<|end|>", " }}" + parts + "{{ '<|end|>")
    renderer = renderer_of(tmp_path, template)
    text = [{"type": "text", "text": "1+1?"}]
    for content in ("1+1?", text):
        assert (
            shown(renderer, [{"role": "user", "content": content}])
            == "<|start|>user\n1+1?<|end|>\n<|start|>assistant\n"
        )
    reference = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    asked = reference.apply_chat_template([{**USER, "content": text}], add_generation_prompt=True, return_dict=False)
    assert renderer.render([USER]) == asked
    strict = PLAIN.replace("message.content", "message.content[0]['text']").replace("[0]['text'] }}", "[0]['text'] }}")
    assert "1+1?" in shown(renderer_of(tmp_path / "strict", strict), [USER])


def test_a_template_that_never_stops_is_refused(tmp_path: Path) -> None:
    endless = "{% macro more(x) %}{{ more(x) }}{% endmacro %}{% if tools %}{{ more(1) }}{% endif %}" + PLAIN
    with pytest.raises(ValueError, match="the model's chat template refuses these messages"):
        renderer_of(tmp_path, endless).render([USER], tools=[ADD])


def test_a_half_of_a_surrogate_pair_can_be_sent_again_and_rendered() -> None:
    renderer = RENDERERS["qwen"]
    output = ids_of("<tool_call>", '\n{"name": "add", "arguments": {"a": "\\ud83d", "b": "x"}}\n', "</tool_call>")
    message = renderer.parse(output, stopped=False, tools=[ADD]).as_message()
    (said,) = message["tool_calls"]
    said["function"]["arguments"].encode()
    assert json.loads(said["function"]["arguments"]) == {"a": "\ud83d", "b": "x"}
    assert renderer.template.render(plain_messages([USER, message])).count("\\ud83d") == 1
    renderer.render([USER, message, {"role": "tool", "content": "\ud83d"}])


def test_the_result_of_a_tool_may_be_nothing() -> None:
    for nothing in ({"content": None}, {}):
        (message,) = plain_messages([{"role": "tool", "tool_call_id": "1", **nothing}])
        assert message["content"] == ""
    with pytest.raises(ValueError, match="has no content"):
        plain_messages([{"role": "user", "content": None}])


def test_thoughts_that_only_the_template_knows_break_the_bridge(tmp_path: Path) -> None:
    keeps = "(message.content.split('~')[-1] if message.role == 'assistant' else message.content)"
    renderer = renderer_of(tmp_path, PLAIN.replace("message.content", keeps))
    for said, is_bridged in (("hm~2", False), ("2", True)):
        ids = [*renderer.render([USER]), *renderer.tokenizer.encode(f"{said}<|end|>").ids]
        history = [USER, {"role": "assistant", "content": said}]
        bridged = renderer.bridge(ids, stopped=True, messages=[USER], history=history)
        assert (bridged is not None) == is_bridged


def test_a_channel_of_thoughts_is_reasoning(tmp_path: Path) -> None:
    """Whose mark is followed by a word."""
    channel = "{% if message.reasoning_content %}{{ '<|think|>thought\\n' + message.reasoning_content }}"
    channel += "{{ '\\n<|/think|>' }}{% endif %}"
    renderer = renderer_of(tmp_path, PLAIN.replace("+ message.content", "}}" + channel + "{{ message.content"))
    output = renderer.tokenizer.encode("<|think|>thought\nhm\n<|/think|>2<|end|>").ids
    parsed = renderer.parse(output, stopped=True)
    assert (parsed.reasoning, parsed.content) == ("hm", "2")


def test_the_end_of_reasoning_may_stand_in_an_argument() -> None:
    output = ids_of("<tool_call>", '\n{"name": "add", "arguments": {"a": "', "</think>", '"}}\n', "</tool_call>")
    (called,) = RENDERERS["qwen"].parse(output, stopped=False, tools=[ADD]).tool_calls
    assert called.arguments == {"a": "</think>"}
