"""Model directories that can chat: a tokenizer of one token a character, and templates in the two forms of the field.

qwen    <|im_start|>role\ncontent<|im_end|>\n      calls in <tool_call>; reasoning is kept since the last question only
llama   <bos><|head|>role<|body|>\n\ncontent<|eot|>   an answer that is a call is nothing but JSON; spaces go
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

SPECIAL = ("<pad>", "<bos>", "<|im_start|>", "<|im_end|>", "<|head|>", "<|body|>", "<|eot|>", "<|python_tag|>")
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "zz")  # a model may say z and z instead
CHARACTERS = "\n" + "".join(map(chr, range(32, 127))) + "é"
VOCABULARY = {token: number for number, token in enumerate((*SPECIAL, *MARKS, *CHARACTERS))}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two <numbers>.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
    },
}

_QWEN = """\
{%- macro turn(role, text) %}{{ '<|im_start|>' + role + '\\n' + text + '<|im_end|>\\n' }}{% endmacro %}
{%- set first = messages[0] %}
{%- set said_first = first.content if first.role == 'system' else '' %}
{%- if tools %}
    {{- '<|im_start|>system\\n' + said_first + '\\ntools:' }}
    {%- for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}
    {{- '<|im_end|>\\n' }}
{%- elif said_first %}
    {{- turn('system', said_first) }}
{%- endif %}
{%- set asked = namespace(last=0) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set asked.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- if not loop.first %}{{ raise_exception('the system speaks first') }}{% endif %}
        {%- continue %}
    {%- elif message.role == 'user' %}
        {{- turn('user', message.content) }}
    {%- elif message.role == 'tool' %}
        {%- if messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\\n[' + message.content + ']' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
    {%- else %}
        {%- set said = message.content if message.content is string else '' %}
        {%- set thought = message.reasoning_content or '' %}
        {%- if '</think>' in said %}
            {%- set thought = said.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set said = said.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
        {%- if loop.index0 > asked.last and (loop.last or thought) %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- said }}
        {%- for call in message.tool_calls or [] %}
            {%- if said or not loop.first %}{{ '\\n' }}{% endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""

_LLAMA = """\
{{- bos_token }}
{%- macro head(role) %}{{ '<|head|>' + role + '<|body|>\\n\\n' }}{% endmacro %}
{%- if messages[0].role == 'system' %}
    {%- set told, messages = messages[0].content | trim, messages[1:] %}
{%- else %}
    {%- set told = strftime_now('100%%') %}
{%- endif %}
{{- head('system') + told + '<|eot|>' }}
{%- for message in messages %}
    {%- if message.role == 'user' and loop.first and tools is not none %}
        {{- head('user') }}
        {%- for tool in tools %}{{ tool | tojson(indent=1) + '\\n' }}{% endfor %}
        {{- message.content | trim + '<|eot|>' }}
    {%- elif message.role == 'tool' %}
        {{- head('ipython') + message.content | tojson + '<|eot|>' }}
    {%- elif message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- head('assistant') + '{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson + '}<|eot|>' }}
    {%- else %}
        {{- head(message.role) + message.content | trim + '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ head('assistant') }}{% endif %}
"""
TEMPLATES = {"qwen": _QWEN, "llama": _LLAMA}
ENDS = {"qwen": "<|im_end|>", "llama": "<|eot|>"}


def write_chat_tokenizer(directory: Path, form: str | None) -> Path:
    """A tokenizer that writes <bos> before every text of its own, with the template of this form, or none."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", VOCABULARY["<bos>"])]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    end = ENDS[form or "qwen"]
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": end}
    if form is not None:
        settings["chat_template"] = TEMPLATES[form]
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [VOCABULARY[end]]}))
    if not (directory / "config.json").exists():
        (directory / "config.json").write_text(json.dumps({"model_type": "qwen2", "vocab_size": len(VOCABULARY)}))
    return directory


def write_template_model(directory: Path, template: str, *, ends: Sequence[str], begin: str = "<bos>") -> Path:
    """A model of one token a byte with a template whose marks <|x|> and the like are special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(dict.fromkeys([begin, *ends, *re.findall(r"<\|/?[a-z_]+\|>", template)])))
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in ("<think>", "</think>")])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": begin, "eos_token": ends[0]}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "chat_template.jinja").write_text(template)
    eos = [tokenizer.token_to_id(end) for end in ends]
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    sizes = {"model_type": "qwen2", "vocab_size": tokenizer.get_vocab_size()}
    (directory / "config.json").write_text(json.dumps(sizes))
    return directory


def ids_of(*texts: str) -> list[int]:
    """The ids of texts, each of which is a special token or has none in it."""
    return [number for text in texts for number in ([VOCABULARY[text]] if text in VOCABULARY else _plain(text))]


def _plain(text: str) -> list[int]:
    return [VOCABULARY[character] for character in text]


_TOOL_TEXT = (
    '{"type": "function", "function": {"name": "add", "description": "Adds two <numbers>.", "parameters": '
    '{"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}}}}'
)
_INDENTED_TOOL_TEXT = """\
{
 "type": "function",
 "function": {
  "name": "add",
  "description": "Adds two <numbers>.",
  "parameters": {
   "type": "object",
   "properties": {
    "a": {
     "type": "number"
    },
    "b": {
     "type": "number"
    }
   }
  }
 }
}
"""
TWO_TURNS = {
    "qwen": (
        ids_of("<|im_start|>", f"system\n\ntools:\n{_TOOL_TEXT}", "<|im_end|>", "\n")
        + ids_of("<|im_start|>", "user\n1+1?", "<|im_end|>", "\n", "<|im_start|>", "assistant\n"),
        ids_of("<think>", "\npi", "z", "z", "a\n", "</think>", "\n\n")
        + ids_of("<tool_call>", '\n{"name":"add", "arguments": {"a":1,"b":1}}\n', "</tool_call>", "<|im_end|>"),
        ids_of("\n", "<|im_start|>", "user\n[2]", "<|im_end|>", "\n", "<|im_start|>", "assistant\n"),
        ids_of("It is ", "z", "z", "2.", "<|im_end|>"),
    ),
    "llama": (
        ids_of("<bos>", "<|head|>", "system", "<|body|>", "\n\n100%", "<|eot|>", "<|head|>", "user", "<|body|>", "\n\n")
        + ids_of(f"{_INDENTED_TOOL_TEXT}1+1?", "<|eot|>", "<|head|>", "assistant", "<|body|>", "\n\n"),
        ids_of('{"name":"add", "parameters": {"a":1,"b":1}}', "<|eot|>"),
        ids_of("<|head|>", "ipython", "<|body|>", '\n\n"2"', "<|eot|>", "<|head|>", "assistant", "<|body|>", "\n\n"),
        ids_of("It is ", "z", "z", "2.", "<|eot|>"),
    ),
}
"""Of each form, by hand: "1+1?" beside ADD; a call of it, spelled as no template spells it, with a `z` and a `z` that a
tokenizer would join; what says that it gave 2; and the last answer."""
