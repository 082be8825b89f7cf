"""Fields of a row -> prompt, answers, name; by the columns of its source, and by the form that rows must have.

    prompts         prompt, and an answer if there is one
    answers         prompt, answer
    conversations   prompt, answer               or messages
    preferences     prompt, chosen, rejected     or chosen and rejected, which begin alike and then differ

A prompt is text, messages or token ids. Of the last two kinds the answers are learned; they may be messages, too. An
answer that is a number is the text of that number.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from itertools import takewhile
from typing import Any

from corral.experiments.config.data import Columns, RowKind, column
from corral.experiments.errors import closest, show_value
from corral.experiments.prompts.messages import ToolSchema, check_tools, from_json_text, json_text, plain_messages
from corral.experiments.prompts.row_prompts import Answer, Prompt, is_ids
from corral.scheduling.errors import RuleError

_MAX_ID_LENGTH = 128
_TEMPERATURES = (0.01, 10.0)
"""Below, a draw is the likeliest token, or logits overflow; above, all tokens are as good as equally likely."""
_MESSAGE = 'a message is {"role": "user", "content": "..."}, and a token id is a whole number'


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetRow:
    """One problem.

    row_id: unique in the data; with the dataset epoch it makes the sample's uid.
    prompt: text, messages, or token ids; no messages at all before an answer that is a whole conversation.
    teacher_prompt: what teachers read in its place; the same, where the row says nothing else.
    tools: the tools that the model may call, beside messages.
    answers: the reference answer if there is one, or the chosen and the rejected answer.
    fields: everything that the row says, for rewards and agents of one's own.
    place: where it stands, for people: train.jsonl:41.
    source: name of where it comes from, if the data has several.
    temperature: that answers are sampled with; None is the trial's.
    """

    row_id: str
    prompt: Prompt
    teacher_prompt: Prompt
    answers: tuple[Answer, ...]
    fields: dict[str, Any]
    place: str
    tools: tuple[ToolSchema, ...] = ()
    source: str = ""
    temperature: float | None = None


class RowError(RuleError):
    """An error in a row."""


@dataclass(frozen=True, slots=True)
class RowParser:
    """Of one source."""

    columns: Columns
    kind: RowKind

    @property
    def learns_answers(self) -> bool:
        """Whether answers of rows are what is learned, and so may be messages."""
        return self.kind in ("conversations", "preferences")

    def parse(self, fields: object, *, row_id: str, place: str, source: str) -> DatasetRow:
        """
        Raises:
            RowError: if it is no row of this kind.
        """
        if not isinstance(fields, dict):
            hint = "write {" + ", ".join(f'"{what}": ...' for what in ("prompt", *self._answer_columns)) + "}"
            raise RowError(f"row is no JSON object but {show_value(fields)}", hint)
        prompt, answers = self._prompt_and_answers(fields)
        key = self.columns.get("teacher_prompt")
        has_messages = not isinstance(prompt, str) and not is_ids(prompt)
        if has_messages and prompt and plain_messages(prompt) in [list(answer[: len(prompt)]) for answer in answers]:
            hint = "take it out of the answer; or name a field that no row has with columns.prompt"
            raise RowError("the answer begins with the prompt, which would be there twice", hint)
        return DatasetRow(
            row_id=row_id,
            prompt=prompt,
            teacher_prompt=prompt if key is None or fields.get(key) is None else self._prompt(fields, key),
            answers=answers,
            fields=fields,
            place=place,
            tools=self._tools(fields) if has_messages else (),
            source=source,
            temperature=self._temperature(fields),
        )

    @property
    def _answer_columns(self) -> dict[str, str]:
        """The field of each answer that a row has, by what it is."""
        if self.kind == "preferences":
            return {"chosen": column(self.columns, "chosen"), "rejected": column(self.columns, "rejected")}
        return {"answer": column(self.columns, "answer")}

    def _prompt_and_answers(self, fields: Mapping[str, Any]) -> tuple[Prompt, tuple[Answer, ...]]:
        has_prompt = fields.get(column(self.columns, "prompt")) is not None
        if self.kind == "conversations" and not has_prompt and fields.get(column(self.columns, "messages")) is not None:
            return (), (self._messages(fields, column(self.columns, "messages")),)
        if self.kind != "preferences" or has_prompt:
            return self._prompt(fields, column(self.columns, "prompt")), self._answers(fields)
        if any(fields.get(key) is None for key in self._answer_columns.values()):
            raise _missing(fields, column(self.columns, "prompt"), "prompt", "")
        return _common_beginning(*self._answers(fields))

    def _prompt(self, fields: Mapping[str, Any], key: str) -> Prompt:
        prompt = _messages_or(fields.get(key))
        if isinstance(prompt, str) and prompt:
            return prompt
        if not isinstance(prompt, list) or not prompt:
            hint = "the prompt must be text with at least one character, a list of messages, or a list of token ids"
            raise _missing(fields, key, "prompt", hint)
        if is_ids(prompt):
            return prompt
        try:
            plain_messages(prompt)
        except ValueError as error:
            raise RowError(f"{key!r} is neither messages nor token ids: {error}", _MESSAGE) from error
        return prompt

    def _messages(self, fields: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
        """With something in them that the assistant says."""
        try:
            messages = plain_messages(fields[key])
        except ValueError as error:
            raise RowError(f"{key!r} is no conversation: {error}", _MESSAGE) from error
        if not any(message["role"] == "assistant" for message in messages):
            raise RowError(f"in {key!r} the assistant says nothing", "remove the row: nothing is learned from it")
        return messages

    def _tools(self, fields: Mapping[str, Any]) -> tuple[ToolSchema, ...]:
        key = column(self.columns, "tools")
        try:
            return check_tools(fields.get(key) or ())
        except ValueError as error:
            hint = f"name another field with columns.tools if {key!r} is not what the model may call"
            raise RowError(f"{key!r} {error}", hint) from error

    def _temperature(self, fields: Mapping[str, Any]) -> float | None:
        key, (least, most) = self.columns.get("temperature"), _TEMPERATURES
        given = None if key is None or self.learns_answers else fields.get(key)
        if given is None:
            return None
        if isinstance(given, bool) or not isinstance(given, int | float) or not least <= given <= most:
            rule = f"{key!r} must be a temperature, a number from {least:g} to {most:g}, got {show_value(given)}"
            raise RowError(rule, "leave it out of a row whose answers are sampled as the trial says")
        return float(given)

    def _answers(self, fields: Mapping[str, Any]) -> tuple[Answer, ...]:
        columns = self._answer_columns
        if self.kind == "prompts" and fields.get(columns["answer"]) is None:
            return ()
        answers = tuple(self._answer(fields, what, key) for what, key in columns.items())
        if self.kind == "preferences" and answers[0] == answers[1]:
            hint = "remove the row: it says of no answer that it is the better one"
            raise RowError(f"the chosen answer is the rejected one: {show_value(answers[0])}", hint)
        return answers

    def _answer(self, fields: Mapping[str, Any], what: str, key: str) -> Answer:
        answer = fields.get(key)
        if answer is None:
            raise _missing(fields, key, what, "write it as text")
        if self.learns_answers and isinstance(_messages_or(answer), list):
            return self._messages(fields, key)
        if not self.learns_answers and isinstance(answer, bool | list | dict):
            return json_text(answer)  # for people: rewards read the field itself
        if isinstance(answer, bool) or not isinstance(answer, str | int | float) or answer != answer:
            hint = f'write it as text: "{show_value(answer)}"'
            raise RowError(f"{key!r} must be text or a number, got {show_value(answer)}", hint)
        return f"{Decimal(str(answer)):f}" if isinstance(answer, float) else str(answer)


def _messages_or(value: Any) -> Any:
    """Messages as JSON text, which CSV has them as, are messages; everything else as it is."""
    data = from_json_text(value)
    return data if isinstance(data, list) and all(isinstance(one, dict) and "role" in one for one in data) else value


def row_id_of(given: object, number: int, key: str) -> str:
    """The name of a row.

    Args:
        given: what stands in its field, if anything does.
        number: the row's, from 0.

    Raises:
        RowError: if it can be none.
    """
    if given is None:
        return str(number)
    if isinstance(given, bool) or not isinstance(given, str | int):
        raise RowError(f"{key!r} must be text or a whole number, got {show_value(given)}", "give each row its own")
    row_id = str(given)
    if not 0 < len(row_id) <= _MAX_ID_LENGTH or not row_id.isprintable():
        rule = f"{key!r} must have 1 to {_MAX_ID_LENGTH} printable characters, got {show_value(row_id)}"
        raise RowError(rule, "shorten it")
    return row_id


def _common_beginning(chosen: Answer, rejected: Answer) -> tuple[Prompt, tuple[Answer, ...]]:
    """What both begin with is the prompt: whole messages, or text up to the space before the word in which they differ,
    whose tokens are the answer's."""
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise RowError("one answer is text, and the other one messages", "write both in the same way")
    both: list[tuple[Any, Any]] = list(zip(chosen, rejected, strict=False))
    length = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both))
    if isinstance(chosen, str):
        length = max((at for at in range(length) if chosen[at].isspace()), default=0)
    if not length:
        hint = "add a prompt, or begin both with it"
        raise RowError("the row has no prompt, and its answers have no beginning in common", hint)
    if not chosen[length:] or not rejected[length:]:
        raise RowError("one answer is the beginning of the other one", "give the prompt in a field of its own")
    return chosen[:length], (chosen[length:], rejected[length:])


def _missing(fields: Mapping[str, Any], key: str, what: str, hint: str) -> RowError:
    """Of a row without something at a key, or, with the hint, with something of another form."""
    if key in fields:
        return RowError(f"{key!r} is no {what}: {show_value(fields[key])}", hint)
    if len(fields) == 1 and (other := next((mark for mark in ";|\t" if mark in next(iter(fields))), None)):
        hint = f"save the file with commas between its columns; it has {other!r} there, as far as its first line tells"
        return RowError(f"row has no {what}: the file has one column, named {show_value(next(iter(fields)))}", hint)
    near = closest(key, list(fields))
    known = f"it has {', '.join(map(repr, list(fields)[:8]))}" if fields else "it is empty"
    hint = f"did you mean columns.{what}: {near}?" if near else f"name the row's field with columns.{what}; {known}"
    return RowError(f"row has no {what} (no field {key!r})", hint)
