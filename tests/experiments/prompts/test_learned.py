"""What is learned of conversations: the ids of transformers, and a mask on what the assistant says, written by hand."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from corral.experiments.prompts.row_prompts import LearnedSequence, PromptEncoder
from tests.chat_models import ids_of, write_chat_tokenizer, write_template_model

GEMMA = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
    {%- set role = 'model' if message.role == 'assistant' else message.role %}
    {{- '<|im_start|>' + role + '\\n' + message.content | trim + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>model\\n' }}{% endif %}
"""
ASKED, SAID = {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "It is 2."}
AGAIN, YES = {"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes"}
TURNS = [ASKED, SAID, AGAIN, YES]
HEADS = {
    "qwen": ("", "<|im_start|>user\n", "<|im_start|>assistant\n", "<|im_end|>", "\n"),
    "gemma": ("<bos>", "<|im_start|>user\n", "<|im_start|>model\n", "<|im_end|>", "\n"),
    "llama": (
        "<bos><|head|>system<|body|>\n\n100%<|eot|>",
        "<|head|>user<|body|>\n\n",
        "<|head|>assistant<|body|>\n\n",
        "<|eot|>",
        "",
    ),
}


def model_of(folder: Path, form: str) -> tuple[PromptEncoder, Any]:
    directory = write_chat_tokenizer(folder, "qwen" if form == "gemma" else form)
    if form == "gemma":
        path = directory / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": GEMMA}))
    return PromptEncoder(directory), PreTrainedTokenizerFast.from_pretrained(directory)


def pieces(sequence: LearnedSequence, reference: Any) -> list[tuple[bool, str]]:
    """Neighbours that are all given, or all learned, as text."""
    found: list[tuple[bool, list[int]]] = []
    for token, is_given in zip(sequence.ids, sequence.is_given, strict=True):
        if not found or found[-1][0] != is_given:
            found.append((is_given, []))
        found[-1][1].append(token)
    return [(is_given, reference.decode(ids)) for is_given, ids in found]


@pytest.mark.parametrize("form", HEADS)
def test_of_a_conversation_what_the_assistant_says_is_learned_with_its_end(tmp_path: Path, form: str) -> None:
    encoder, reference = model_of(tmp_path, form)
    sequence = encoder.encode_learned((), TURNS)
    expected = reference.apply_chat_template(TURNS, tokenize=True, return_dict=False)
    assert sequence.ids == expected and sequence.ids.count(ids_of("<bos>")[0]) == (form != "qwen")
    begin, user, assistant, end, behind = HEADS[form]
    thought = "<think>\n\n</think>\n\n" if form == "qwen" else ""  # the template's own, before the last answer
    assert pieces(sequence, reference) == [
        (True, f"{begin}{user}1+1?{end}{behind}{assistant}"),
        (False, f"It is 2.{end}"),
        (True, f"{behind}{user}Sure?{end}{behind}{assistant}"),
        (False, f"{thought}Yes{end}"),
        *([(True, behind)] if behind else []),
    ]


@pytest.mark.parametrize("form", HEADS)
@pytest.mark.parametrize("answer", [[YES], "Yes"])
def test_of_what_stands_before_an_answer_nothing_is_learned(tmp_path: Path, form: str, answer: Any) -> None:
    encoder, reference = model_of(tmp_path, form)
    sequence = encoder.encode_learned(TURNS[:3], answer)
    assert sequence.ids == encoder.encode_learned((), TURNS).ids
    learned = [text for is_given, text in pieces(sequence, reference) if not is_given]
    assert len(learned) == 1 and learned[0].endswith(f"Yes{HEADS[form][3]}") and "2." not in learned[0]


def test_reasoning_that_a_template_leaves_out_of_earlier_turns_is_not_learned_there(tmp_path: Path) -> None:
    encoder, reference = model_of(tmp_path, "qwen")
    thinking = {**SAID, "reasoning_content": "1 and 1"}
    asked_tool = {"role": "assistant", "content": "Look.", "reasoning_content": "look first"}
    told = {"role": "tool", "content": "2"}
    turns = [ASKED, asked_tool, told, thinking, AGAIN, YES]
    sequence = encoder.encode_learned((), turns)
    assert sequence.ids == reference.apply_chat_template(turns, tokenize=True, return_dict=False)
    learned = [text for is_given, text in pieces(sequence, reference) if not is_given]
    assert learned == ["Look.<|im_end|>", "It is 2.<|im_end|>", "<think>\n\n</think>\n\nYes<|im_end|>"]


def test_a_beginning_is_never_there_twice(tmp_path: Path) -> None:
    encoder, _ = model_of(tmp_path, "llama")
    assert encoder.encode("1+1?").count(ids_of("<bos>")[0]) == 1
    with pytest.raises(ValueError, match="begins with <bos>, which the tokenizer puts before every text.*remove it"):
        encoder.encode("<bos>1+1?")


def test_a_template_that_is_missing_is_named(tmp_path: Path) -> None:
    encoder = PromptEncoder(write_chat_tokenizer(tmp_path, None))
    with pytest.raises(ValueError, match="has no chat template"):
        encoder.encode_learned((), TURNS)


def test_the_truncation_and_padding_that_a_tokenizer_was_saved_with_change_no_prompt(tmp_path: Path) -> None:
    whole, cut = (PromptEncoder(write_chat_tokenizer(tmp_path / name, "qwen")) for name in ("whole", "cut"))
    saved = Tokenizer.from_file(str(cut.directory / "tokenizer.json"))
    saved.enable_truncation(4, direction="left")
    saved.enable_padding(length=40, direction="left")
    saved.save(str(cut.directory / "tokenizer.json"))
    reference = PreTrainedTokenizerFast.from_pretrained(cut.directory)
    assert cut.encode("1+1?") == whole.encode("1+1?") == reference("1+1?")["input_ids"]
    assert cut.encode([ASKED]) == whole.encode([ASKED])
    assert cut.encode_learned((), TURNS) == whole.encode_learned((), TURNS)


CHANNELS = """\
{%- for message in messages %}
    {{- '<|start|>' + message.role + '<|message|>' + message.content }}
    {{- '<|return|>' if message.role == 'assistant' and loop.last else '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant<|message|>' }}{% endif %}
"""
ROLES = """\
{%- for message in messages %}{{ '<|' + message.role + '|>\\n' + message.content }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}<|x|>
"""
THINKING = """\
{%- for message in messages %}
    {{- '<|start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' and loop.last %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
    {{- message.content + '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant\\n<think>\\n' }}{% endif %}
"""


def learned_of(folder: Path, template: str, *, ends: list[str], turns: list[Any]) -> list[str]:
    directory = write_template_model(folder, template, ends=ends)
    encoder, reference = PromptEncoder(directory), PreTrainedTokenizerFast.from_pretrained(directory)
    sequence = encoder.encode_learned((), turns)
    expected = reference.apply_chat_template(turns, tokenize=True, return_dict=False)
    assert sequence.ids[: len(expected)] == expected and len(sequence.ids) <= len(expected) + 1
    return [text for is_given, text in pieces(sequence, reference) if not is_given]


def test_an_answer_ends_within_its_own_message_however_the_template_ends_it(tmp_path: Path) -> None:
    learned = learned_of(tmp_path, CHANNELS, ends=["<|return|>"], turns=TURNS)
    assert learned == ["It is 2.<|end|>", "Yes<|return|>"]


def test_an_answer_that_the_next_message_ends_is_ended_where_it_is_the_last(tmp_path: Path) -> None:
    template = ROLES.replace("<|x|>\n", "").replace("%}{{ '<|' +", "%}{# <|user|> <|tool|> #}{{ '<|' +")
    learned = learned_of(tmp_path, template, ends=["<|pad|>", "<|user|>", "<|tool|>"], turns=TURNS)
    assert learned == ["It is 2.<|user|>", "Yes<|user|>"]


def test_answers_that_no_token_ends_are_refused_in_a_conversation_and_ended_at_its_end(tmp_path: Path) -> None:
    template = "{% for message in messages %}{{ message.role + ': ' + message.content + '\\n' }}{% endfor %}"
    template += "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    assert learned_of(tmp_path / "one", template, ends=["<|eos|>"], turns=TURNS[:2]) == ["It is 2.\n<|eos|>"]
    with pytest.raises(ValueError, match="ends an answer with no token of its own; write each answer as a row"):
        learned_of(tmp_path / "two", template, ends=["<|eos|>"], turns=TURNS)


@pytest.mark.parametrize("num_turns", [4, 6])
def test_answers_of_a_history_that_begin_otherwise_are_refused_however_many_there_are(
    tmp_path: Path, num_turns: int
) -> None:
    turns = [*TURNS, *TURNS][:num_turns]
    with pytest.raises(ValueError, match="does not begin an answer in a conversation as it does behind a prompt"):
        learned_of(tmp_path, THINKING, ends=["<|end|>"], turns=turns)
    encoder = PromptEncoder(tmp_path)
    sequence = encoder.encode_learned(turns[:-1], turns[-1:])
    reference = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert pieces(sequence, reference)[1] == (False, f"\n</think>\n\n{turns[-1]['content']}<|end|>")


def test_what_the_assistant_says_and_the_template_leaves_out_is_refused(tmp_path: Path) -> None:
    template = THINKING.replace("message.content +", "(message.content if loop.first else '') +")
    with pytest.raises(ValueError, match=r"does not write what messages\[1\] says"):
        learned_of(tmp_path, template, ends=["<|end|>"], turns=TURNS[:2])


@pytest.mark.parametrize("form", ["qwen", "gemma"])
@pytest.mark.parametrize("rest", [[{"role": "assistant", "content": "s 2."}], "s 2."])
def test_of_an_answer_that_the_prompt_begins_only_the_rest_is_learned(tmp_path: Path, form: str, rest: Any) -> None:
    encoder, reference = model_of(tmp_path, form)
    begun = [ASKED, {"role": "assistant", "content": "It i"}]
    sequence = encoder.encode_learned(begun, rest)
    assert sequence.ids == encoder.encode_learned((), TURNS[:2]).ids
    assert [text for is_given, text in pieces(sequence, reference) if not is_given] == ["s 2.<|im_end|>"]
    assert sequence.ids[: sum(sequence.is_given) - 1] == encoder.encode(begun)  # a line feed is behind the end
