"""What a chat template does, found by showing it conversations that are known: no model is known by its name.

a call ──────► its text ──► how calls are written           SAID, THOUGHT: texts that no model says
reasoning ───► its text ──► what stands around it
an answer ───► its text ──► what ends it
"""

import os
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from corral.experiments.prompts.chat_template import ASKED, ChatTemplate
from corral.experiments.prompts.spelled_calls import SpelledCallForm, spelled_form_in
from corral.experiments.prompts.tokens import first_place
from corral.experiments.prompts.tool_calls import (
    PROBED_ARGUMENTS,
    PROBED_ID,
    PROBED_NAME,
    PROBED_NUMBER,
    PROBED_TOOL,
    JsonCallForm,
    call_of,
    json_form_in,
)

ToolCallForm = JsonCallForm | SpelledCallForm
CALLS, SEVERAL_CALLS, RESULTS, TOOLS = "calls of tools", "more than one call of an answer", "tools' results", "tools"
SAID, THOUGHT = "stand-in-of-what-was-said", "stand-in-of-what-was-thought"
_MIXED = {"a": "x\n", "b": 1, "c": True, "d": {"e": [None, "y"]}, "f": False}
_THINK = ("<think>", "</think>")
_MARK = r"(<[^<>\s]+>|\[[^\[\]\s]+\])"
_LAST_MARK, _FIRST_MARK = re.compile(r"((?:<[^<>\s]+>|\[[^\[\]\s]+\])\w*)\s*\Z"), re.compile(r"\A\s*" + _MARK)


def stand_in_for(answer: Mapping[str, Any]) -> dict[str, Any]:
    """The same kind of answer, with nothing in it that the model made."""
    marks = {"content": SAID, "reasoning_content": THOUGHT, "thinking": THOUGHT}
    stand_in = {**answer, **{key: mark for key, mark in marks.items() if answer.get(key)}}
    if "tool_calls" in answer:
        calls = answer["tool_calls"]
        stand_in["tool_calls"] = [{**call, "function": {**call["function"], "arguments": {}}} for call in calls]
    return stand_in


def around_answer(template: ChatTemplate) -> tuple[str, str]:
    """What a template writes before and behind an answer to `ASKED` that is the last message."""
    before, _, behind = template.render([ASKED, {"role": "assistant", "content": SAID}], asks=False).partition(SAID)
    return before, behind


def reasoning_marks(template: ChatTemplate) -> tuple[str, str] | None:
    """What a template writes around reasoning; of one that only takes it out of what was said, what it looks for."""
    apart = {"role": "assistant", "content": SAID, "reasoning_content": THOUGHT, "thinking": THOUGHT}
    before, thought, after = template.render([ASKED, apart], asks=False).partition(THOUGHT)
    begin, end = _LAST_MARK.search(before), _FIRST_MARK.search(after)
    if thought and begin and end:
        # What stands around every message marks no reasoning, as in the channels of gpt-oss.
        is_its_own = begin.group(1) not in template.render([ASKED], asks=False)
        return (begin.group(1), end.group(1)) if is_its_own else None
    within = {"role": "assistant", "content": f"{_THINK[0]}\n{THOUGHT}\n{_THINK[1]}\n\n{SAID}"}
    return None if THOUGHT in template.render([ASKED, within, ASKED], asks=False) else _THINK


def end_of_call(template: ChatTemplate) -> str:
    """What a template writes behind the last call of a conversation; empty if it writes no calls."""
    try:
        text = template.render([ASKED, call_of(PROBED_ARGUMENTS)], tools=template.probed_tools, asks=False)
    except ValueError:
        return ""
    return text.rpartition(next(iter(PROBED_ARGUMENTS.values())))[2]


def unwritten(template: ChatTemplate) -> frozenset[str]:
    """Which of calls, several calls, results and tools a template leaves out of a conversation."""
    asked, called = {"role": "user", "content": SAID}, call_of(PROBED_ARGUMENTS)
    twice = call_of(PROBED_ARGUMENTS, dict.fromkeys(PROBED_ARGUMENTS, THOUGHT))
    result = {"role": "tool", "tool_call_id": PROBED_ID, "name": PROBED_NAME, "content": THOUGHT}
    (value,) = PROBED_ARGUMENTS.values()
    shown = {
        CALLS: ([asked, called], value),
        SEVERAL_CALLS: ([asked, twice], THOUGHT),
        RESULTS: ([asked, called, result], THOUGHT),
    }
    missing = set()
    for what, (messages, text) in shown.items():
        with suppress(ValueError):  # what it refuses, it does not leave out
            if text not in template.render(messages, tools=template.probed_tools):
                missing.add(what)
    with suppress(ValueError):
        if template.render([asked], tools=[PROBED_TOOL]) == template.render([asked]):
            missing.add(TOOLS)
    return frozenset(missing)


def tool_call_form(template: ChatTemplate, *, ends: Collection[str]) -> ToolCallForm | None:
    """How a template writes calls; None if in no form that is known, or if it cannot be read back in that form.

    Args:
        ends: the texts of what ends an answer.
    """
    called = partial(_called, template, ends=ends)
    text = called(PROBED_ARGUMENTS)
    if has_ids := PROBED_NAME not in text and PROBED_ID in text:
        called = partial(called, call_id=f"functions.{PROBED_NAME}:0")
        text = called(PROBED_ARGUMENTS)
    names_of_a_call = text.count(PROBED_NAME)
    number = called(dict.fromkeys(PROBED_ARGUMENTS, PROBED_NUMBER))
    form = json_form_in(text) or spelled_form_in(text, other=number, has_ids=has_ids)
    if form is None:
        return None
    for each in ([_MIXED], [PROBED_ARGUMENTS, _MIXED]):
        text = called(*each)
        read = form.find(text, tools=[PROBED_TOOL])[1]
        if text.count(PROBED_NAME) >= len(each) * names_of_a_call and [call.arguments for call in read] != each:
            return None
    return form


def _called(template: ChatTemplate, *each: Mapping[str, Any], ends: Collection[str], call_id: str = PROBED_ID) -> str:
    """What an answer is that calls `PROBED_NAME`; empty if the template does not write it."""
    tools = template.probed_tools
    try:
        asked = template.render([ASKED], tools=tools)
        text = template.render([ASKED, call_of(*each, call_id=call_id)], tools=tools, asks=False)
    except ValueError:
        return ""
    both = re.sub(r"<[^>]*\Z", "", os.path.commonprefix([asked, text]))  # not in the middle of a mark
    behind = text[len(both) :]
    return behind[: first_place(behind, ends, max(behind.find(PROBED_NAME), 0))]
