"""Conversations: what one episode's program has said and heard, so that nothing of it becomes tokens twice.

    messages ──begin with a conversation that was answered──► its ids, bridged to the messages behind the answer
       └──begin with none, or with one that is written in another way by now──► rendered from the beginning

A program sends all messages each time. What it sends is known again if it says what it was told: fields that are None
or nobody reads may be missing, and the arguments of a call may be spaced in another way. If it has changed anything,
such as left the reasoning out, that is another history, and another branch of the episode.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from corral.experiments.prompts.chat import ChatRenderer
from corral.experiments.prompts.messages import Message, ToolSchema, plain_messages
from corral.workers.episodes.log import Turn

_FIELDS = ("role", "content", "reasoning_content", "name", "tool_call_id")  # of those that say something


@dataclass(slots=True)
class Conversations:
    """Of one episode."""

    renderer: ChatRenderer
    _known: dict[str, tuple[list[int], bool]] = field(default_factory=dict)
    """Conversations up to an answer of the model, as tokens, and whether it came to an end of its own; by what was
    said."""

    def prompt_ids(self, messages: Sequence[Message], *, tools: Sequence[ToolSchema]) -> list[int]:
        """What the model is to go on from.

        Raises:
            ValueError: if they are no messages, or the model's template refuses them.
        """
        plain = plain_messages(messages)
        keys = list(_keys(plain, tools))
        end = next((end for end in range(len(plain), 0, -1) if keys[end - 1] in self._known), None)
        if end is not None:
            ids, stopped = self._known[keys[end - 1]]
            bridged = self.renderer.bridge(ids, stopped=stopped, messages=plain[end:], tools=tools, history=plain[:end])
            if bridged is not None:
                return bridged
        return self.renderer.render(plain, tools=tools)

    def add(self, messages: Sequence[Message], answer: Message, turn: Turn, *, tools: Sequence[ToolSchema]) -> None:
        """An answer was given."""
        *_, key = _keys(plain_messages([*messages, answer]), tools)
        self._known[key] = [*turn.prompt_ids, *turn.answer.output_ids], turn.answer.stopped


def _keys(messages: Sequence[Mapping[str, Any]], tools: Sequence[ToolSchema]) -> Iterator[str]:
    """What has been said up to each message."""
    digest = hashlib.blake2b(_canonical(list(tools)))
    for message in messages:
        said = {name: message[name] for name in _FIELDS if message.get(name)}
        calls = [(call.get("id"), call["function"]) for call in message.get("tool_calls", ())]
        digest.update(_canonical([said, calls]))
        yield digest.hexdigest()


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True).encode() + b"\n"
