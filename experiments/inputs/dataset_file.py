"""A jsonl dataset: file -> checked rows, one at a time, and the facts that a plan keeps of it (rows, SHA-256).

Rows are checked at submission, where a bad file can be refused while someone is looking. An answer that is a number is
the text of that number.
"""

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any, BinaryIO

import msgspec

from corral.experiments.config.data import DatasetConfig, RowKind
from corral.experiments.errors import ConfigError, ConfigProblem, closest, display_path, show_value
from corral.experiments.prompts.messages import ToolSchema, check_tools, plain_messages
from corral.experiments.prompts.row_prompts import Prompt, is_ids
from corral.experiments.regular_file import open_regular
from corral.experiments.worker_specs import DatasetSpec
from corral.scheduling.worker_information import fold_numbers

_MAX_ID_LENGTH = 128
_MAX_PROBLEMS = 3  # more of the same kind would only scroll the first ones away
_DECODER = msgspec.json.Decoder()
_OTHER_FORMATS = {
    b"PAR1": "Parquet",
    b"ARROW1": "Arrow",
    b"\xff\xff\xff\xff": "Arrow",
    b"\x1f\x8b": "compressed with gzip",
    b"\x28\xb5\x2f\xfd": "compressed with zstd",
    b"PK\x03\x04": "a zip archive",
}
"""By their first bytes."""
_CONVERSION = (
    "convert it once: datasets.load_dataset(...) or pandas.read_...(...), then .to_json(FILE, "
    'orient="records", lines=True)'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetRow:
    """One problem.

    row_id: unique in the file; with the dataset epoch it makes the sample's uid.
    prompt: text, messages, or token ids.
    tools: what the model is told that it may call, beside messages.
    answers: the reference answer if there is one, or the chosen and the rejected answer.
    fields: everything that the row says, for rewards and agents of one's own.
    line: line of the file, from 1.
    """

    row_id: str
    prompt: Prompt
    answers: tuple[str, ...]
    fields: dict[str, Any]
    line: int
    tools: tuple[ToolSchema, ...] = ()


@dataclass(slots=True)
class DatasetReader:
    """Iterates over the rows of a file once; `num_rows`, `sha256` and `problems` are complete afterwards.

    reader = DatasetReader(config, kind="answers")
    rows = list(reader)
    reader.raise_problems()
    """

    config: DatasetConfig
    kind: RowKind
    left_out: Set[int] = frozenset()
    """Lines, from 1, whose rows are passed over."""
    content: bytes | None = None
    """What is read in place of the file, which need not be there then."""
    num_rows: int = 0
    problems: list[ConfigProblem] = field(default_factory=list)
    _digest: Any = field(default_factory=hashlib.sha256)
    _line_by_id: dict[str, int] = field(default_factory=dict)

    @property
    def sha256(self) -> str:
        """Digest of what was read."""
        return str(self._digest.hexdigest())

    @property
    def name(self) -> str:
        """What is read, for people."""
        return "(tasks of the environment)" if self.config.path is None else display_path(self.config.path)

    def _open(self) -> BinaryIO:
        return open_regular(self.config.file) if self.content is None else BytesIO(self.content)

    def __iter__(self) -> Iterator[DatasetRow]:
        name = self.name
        try:
            with self._open() as stream:
                for number, line in enumerate(stream, start=1):
                    if number == 1 and (named := _other_format(line)):
                        message = f"dataset {name} is {named}; rows are read from JSON lines, one object a line"
                        self.problems.append(ConfigProblem(message, _CONVERSION))
                        return
                    self._digest.update(line)
                    row = self._row(line, number) if line.strip() else None
                    if len(self.problems) >= _MAX_PROBLEMS:
                        return
                    if row is not None and number not in self.left_out:
                        self.num_rows += 1
                        yield row
        except OSError as error:
            hint = "check the path; in an experiment file it is relative to that file's folder"
            message = f"cannot read dataset {name}: {(error.strerror or str(error)).lower()}"
            self.problems.append(ConfigProblem(message, hint))
            return
        if self.num_rows == 0 and not self.problems:
            self.problems.append(ConfigProblem(f"dataset {name} has no rows", "write one JSON object a line"))

    def read_to_end(self) -> None:
        """For its facts alone."""
        deque(self, maxlen=0)

    def raise_problems(self) -> None:
        """ConfigError if anything was wrong with the rows read so far."""
        if self.problems:
            raise ConfigError(self.problems)

    def _row(self, line: bytes, number: int) -> DatasetRow | None:
        """The row; None, and a problem more, if something is wrong with it."""
        try:
            fields = self._fields(line)
            prompt = self._prompt(fields)
            return DatasetRow(
                prompt=prompt,
                tools=() if isinstance(prompt, str) or is_ids(prompt) else self._tools(fields),
                answers=self._answers(fields),
                row_id=self._row_id(fields, number),
                fields=fields,
                line=number,
            )
        except _RowError as error:
            message, hint = error.args
            self.problems.append(ConfigProblem(f"{self.name}:{number}: {message}", hint))
            return None

    def _fields(self, line: bytes) -> dict[str, Any]:
        try:
            fields = _DECODER.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            hint = "write one JSON object a line, without line breaks inside"
            raise _RowError(f"row is not JSON: {error}", hint) from error
        if not isinstance(fields, dict):
            hint = "write {" + ", ".join(f'"{what}": ...' for what in ("prompt", *self._answer_keys)) + "}"
            raise _RowError(f"row is no JSON object but {show_value(fields)}", hint)
        return fields

    def _prompt(self, fields: dict[str, Any]) -> Prompt:
        key = self.config.prompt_key
        prompt = fields.get(key)
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
            hint = 'a message is {"role": "user", "content": "..."}, and a token id is a whole number'
            raise _RowError(f"{key!r} is neither messages nor token ids: {error}", hint) from error
        return prompt

    def _tools(self, fields: dict[str, Any]) -> tuple[ToolSchema, ...]:
        key = self.config.tools_key
        try:
            return check_tools(fields.get(key) or ())
        except ValueError as error:
            hint = f"name another field with tools_key if {key!r} is not what the model may call"
            raise _RowError(f"{key!r} {error}", hint) from error

    @property
    def _answer_keys(self) -> dict[str, str]:
        """The field of each answer that a row has, by what it is."""
        if self.kind == "preferences":
            return {"chosen": self.config.chosen_key, "rejected": self.config.rejected_key}
        return {"answer": self.config.answer_key}

    def _answers(self, fields: dict[str, Any]) -> tuple[str, ...]:
        given = {what: fields.get(key) for what, key in self._answer_keys.items()}
        if self.kind == "prompts" and given["answer"] is None:
            return ()
        for what, answer in given.items():
            key = self._answer_keys[what]
            if answer is None:
                raise _missing(fields, key, what, "write it as text")
            if isinstance(answer, bool) or not isinstance(answer, str | int | float):
                hint = f'write it as text: "{show_value(answer)}"'
                raise _RowError(f"{key!r} must be text or a number, got {show_value(answer)}", hint)
        answers = tuple(map(str, given.values()))
        if self.kind == "preferences" and answers[0] == answers[1]:
            hint = "remove the row: it says of no answer that it is the better one"
            raise _RowError(f"the chosen answer is the rejected one: {show_value(answers[0])}", hint)
        return answers

    def _row_id(self, fields: dict[str, Any], number: int) -> str:
        key = self.config.id_key
        given = fields.get(key, number - 1)
        if isinstance(given, bool) or not isinstance(given, str | int):
            rule = f"{key!r} must be text or a whole number, got {show_value(given)}"
            raise _RowError(rule, "give each row its own")
        row_id = str(given)
        if not 0 < len(row_id) <= _MAX_ID_LENGTH or not row_id.isprintable():
            rule = f"{key!r} must have 1 to {_MAX_ID_LENGTH} printable characters, got {show_value(row_id)}"
            raise _RowError(rule, "shorten it")
        first = self._line_by_id.setdefault(row_id, number)
        if first != number:
            hint = f"every {key!r} must be unique; a row without it is known by its line number, from 0"
            raise _RowError(f"{key!r} {row_id!r} is also that of line {first}", hint)
        return row_id


class _RowError(ValueError):
    """What is wrong with a row, and the way out."""


def _missing(fields: dict[str, Any], key: str, what: str, hint: str) -> _RowError:
    """Of a row without something at a key, or, with the hint, with something of another form."""
    if key in fields:
        return _RowError(f"{key!r} is no {what}: {show_value(fields[key])}", hint)
    near = closest(key, list(fields))
    known = f"it has {', '.join(map(repr, list(fields)[:8]))}" if fields else "it is empty"
    hint = f"did you mean {what}_key: {near}?" if near else f"name the row's field with {what}_key; {known}"
    return _RowError(f"row has no {what} (no field {key!r})", hint)


def dataset_spec(
    config: DatasetConfig, *, kind: RowKind, too_long: Iterable[int] = (), content: bytes | None = None
) -> DatasetSpec:
    """Facts of a dataset as it is now.

    Args:
        too_long: lines, from 1, that are left out.
        content: what its file is going to hold, where it does not yet.

    Raises:
        ConfigError: if it cannot be used.
    """
    reader = DatasetReader(config=config, kind=kind, left_out=frozenset(too_long), content=content)
    reader.read_to_end()
    reader.raise_problems()
    lines = fold_numbers(too_long)
    return DatasetSpec(config=config, row_kind=kind, num_rows=reader.num_rows, too_long=lines, sha256=reader.sha256)


def _other_format(first_line: bytes) -> str | None:
    """What a file is that people have rows in, and that is no JSON lines."""
    for beginning, named in _OTHER_FORMATS.items():
        if first_line.startswith(beginning):
            return named
    return "a JSON array" if first_line.strip() == b"[" else None
