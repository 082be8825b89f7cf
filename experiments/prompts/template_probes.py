"""What a chat template does, found by showing it conversations that are known: no model is known by its name.

a call ──────► its text ──► how calls are written           SAID, THOUGHT: texts that no model says
reasoning ───► its text ──► what stands around it
an answer ───► its text ──► what ends it
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

from corral.experiments.prompts.chat_template import ASKED, ChatTemplate
from corral.experiments.prompts.spelled_calls import SpelledCallForm, spelled_form_in
from corral.experiments.prompts.tool_calls import PROBE, JsonCallForm, json_form_in

ToolCallForm = JsonCallForm | SpelledCallForm
SAID, THOUGHT = "stand-in-of-what-was-said", "stand-in-of-what-was-thought"
_THINK = ("<think>", "</think>")
_MARK = r"(<[^<>\s]+>|\[[^\[\]\s]+\])"
_LAST_MARK, _FIRST_MARK = re.compile(_MARK + r"\s*\Z"), re.compile(r"\A\s*" + _MARK)


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


def tool_call_form(template: ChatTemplate, *, ends: Collection[str]) -> ToolCallForm | None:
    """How a template writes calls; None if in no form that is known.

    Args:
        ends: the texts of what ends an answer.
    """
    begun = around_answer(template)[0].rstrip()
    try:
        text = template.render([ASKED, PROBE], asks=False)
    except ValueError:
        return None
    behind = text.removeprefix(begun)
    end = min((at for each in ends if (at := behind.find(each)) >= 0), default=len(behind))
    called = behind[:end]
    return (json_form_in(called) or spelled_form_in(called)) if text.startswith(begun) else None
