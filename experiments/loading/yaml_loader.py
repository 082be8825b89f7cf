"""Strict YAML: bytes -> events of libyaml -> plain values, with the line of every key kept for error messages.

Scalars follow YAML 1.2's core schema: 24:00:00, yes, no, on, off and 2024-01-01 are strings, 1e-5 is a float, and only
true and false are booleans. What could mean something else than what is read is refused: duplicate keys, aliases and
anchors, tags, several documents, control characters, numbers that no field can hold. Values are built from events, not
by a recursive constructor, so that a hostile file costs neither stack nor memory.
"""

import math
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import yaml

from corral.experiments.errors import ConfigError, ConfigProblem, KeyPath, display_path, dotted, shorten, split_remedy
from corral.experiments.inputs.regular_file import open_regular

MAX_FILE_BYTES = 1 << 20
MAX_DEPTH = 20  # mappings and lists inside each other; the schema needs five

_Parser = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_WORDS = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_INT = re.compile(r"[-+]?[0-9]+")
_PREFIXED_INT = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NON_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_MAX_INT_BITS = 63
_MAX_DIGITS = 400  # int() of more digits is slow, and above 4300 an error of its own
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f]")


EXPERIMENT_FILE = "experiment file"
_HINTS = {
    EXPERIMENT_FILE: (
        "give the path of a YAML file, such as experiments/recipes/arithmetic_sft.yaml",
        "start with 'experiment: sft' or 'experiment: async_ppo'",
    )
}
_OTHER_HINTS = ("give the path of a YAML file", "start with 'cluster:' or 'launch:'")


def read_yaml(path: Path, *, what: str = EXPERIMENT_FILE) -> tuple[Any, dict[KeyPath, int]]:
    """The content of a file, and the line (from 1) of each key; `what` names the kind of file in errors.

    Raises:
        ConfigError: if the file cannot be read or is not YAML of the strict kind.
    """
    try:
        with open_regular(path) as stream:
            content = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError.of(
            f"cannot read the {what}: {error.strerror or error}",
            place=display_path(path),
            hint=_HINTS.get(what, _OTHER_HINTS)[0],
        ) from error
    return parse_yaml(content, file=path, what=what)


def parse_yaml(content: bytes, *, file: Path, what: str = EXPERIMENT_FILE) -> tuple[Any, dict[KeyPath, int]]:
    """As `read_yaml`, of content that was read from `file`. The top level must be a mapping."""
    name = display_path(file)
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError.of(
            f"the {what} is larger than {MAX_FILE_BYTES} bytes",
            place=name,
            hint="keep data out of it; name files by path instead",
        )
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError.of(
            f"the {what} is not UTF-8 text: {error.reason}", place=f"{name}:{line}", hint="save it as UTF-8"
        ) from error
    builder = _Builder(name=name)
    value = builder.build(text)
    if not isinstance(value, dict):
        raise ConfigError.of(
            f"the {what} must hold a mapping of keys to values",
            place=f"{name}:1",
            hint=_HINTS.get(what, _OTHER_HINTS)[1],
        )
    return value, builder.line_by_path


def parse_value(text: str, *, place: str) -> Any:
    """One value as it would stand in the file: `1e-5`, `null`, `[a, b]`; `place` names it in errors."""
    return _Builder(name=place).build(text)


def plain_scalar(text: str) -> str | int | float | bool | None:
    """The value of an unquoted scalar by YAML 1.2's core schema.

    Raises:
        ValueError: for a number that is not finite or does not fit 64 bits.
    """
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text) or _PREFIXED_INT.fullmatch(text):
        return _integer(text)
    if _NON_FINITE.fullmatch(text):
        raise ValueError(f"numbers must be finite, got {text}; leave the key out where no bound is meant")
    if _FLOAT.fullmatch(text):
        number = float(text)
        if not math.isfinite(number):
            raise ValueError(f"numbers must be finite, got {shorten(text)}; quote it if it is text")
        return number
    return text


def _integer(text: str) -> int:
    number = int(text, {"0o": 8, "0x": 16}.get(text[:2], 10)) if len(text) <= _MAX_DIGITS else None
    if number is None or number.bit_length() > _MAX_INT_BITS:
        raise ValueError(f"integers must fit 64 bits, got {shorten(text)}; quote it if it is text")
    return number


@dataclass(slots=True)
class _Container:
    """A mapping or list that is still open; `key` is the mapping's key whose value comes next."""

    value: dict[str, Any] | list[Any]
    path: KeyPath
    line_by_key: dict[str, int] = field(default_factory=dict)
    key: str | None = None

    def expects_key(self) -> bool:
        return isinstance(self.value, dict) and self.key is None

    def next_path(self) -> KeyPath:
        return (*self.path, self.key if isinstance(self.value, dict) and self.key is not None else len(self.value))

    def put(self, item: Any) -> None:
        if isinstance(self.value, list):
            self.value.append(item)
        elif self.key is not None:
            self.value[self.key] = item
            self.key = None


@dataclass(slots=True)
class _Builder:
    """Events -> values; collects what is wrong in `problems` as far as reading can go on."""

    name: str
    line_by_path: dict[KeyPath, int] = field(default_factory=dict)
    problems: list[ConfigProblem] = field(default_factory=list)
    open: list[_Container] = field(default_factory=list)
    documents: int = 0
    root: Any = None

    def build(self, text: str) -> Any:
        """The value of the one document in `text`; ConfigError if anything was wrong."""
        if match := _CONTROL.search(text):
            line = text.count("\n", 0, match.start()) + 1
            self._stop(f"control character {match[0]!r} is not allowed", line=line, hint="remove it")
        for event in self._events(text):
            self._take(event)
        if self.problems:
            raise ConfigError(self.problems)
        return self.root

    def _events(self, text: str) -> Iterator[yaml.Event]:
        try:
            yield from yaml.parse(text, Loader=_Parser)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            reason = error.problem or error.context or "syntax error"
            tabs = "cannot start any token" in reason and "\t" in text
            hint = "indent with spaces, not tabs" if tabs else "check the indentation, the colons and the quotes there"
            self._stop(f"not valid YAML: {reason}", line=mark.line + 1 if mark else 1, hint=hint, cause=error)
        except yaml.YAMLError as error:
            self._stop(f"not valid YAML: {shorten(str(error))}", line=1, hint="save it as plain text", cause=error)

    def _take(self, event: yaml.Event) -> None:
        line = event.start_mark.line + 1 if event.start_mark is not None else 1
        if isinstance(event, yaml.DocumentStartEvent):
            self.documents += 1
            if self.documents > 1:
                self._stop("only one YAML document is allowed", line=line, hint="remove what follows '---'")
        elif isinstance(event, yaml.AliasEvent):
            self._stop(
                f"YAML aliases are not allowed: *{event.anchor}", line=line, hint="write the value out, or quote it"
            )
        elif isinstance(event, yaml.ScalarEvent):
            self._refuse_decorations(event, line)
            self._take_scalar(event, line)
        elif isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
            self._refuse_decorations(event, line)
            self._open_container(event, line)
        elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
            self._put(self.open.pop().value)

    def _refuse_decorations(self, event: yaml.NodeEvent, line: int) -> None:
        if event.anchor is not None:
            self._stop(
                f"YAML anchors are not allowed: &{event.anchor}", line=line, hint="write the value out, or quote it"
            )
        tag = getattr(event, "tag", None)
        if tag is not None:
            self._stop(
                f"YAML tags are not allowed: {shorten(str(tag))}", line=line, hint="remove it, or quote the value"
            )

    def _open_container(self, event: yaml.Event, line: int) -> None:
        parent = self.open[-1] if self.open else None
        if parent is not None and parent.expects_key():
            self._stop("a key must be plain text, not a list or a mapping", line=line, hint="put text before the colon")
        if len(self.open) >= MAX_DEPTH:
            self._stop(f"more than {MAX_DEPTH} levels inside each other", line=line, hint="no key is that deep")
        path = parent.next_path() if parent is not None else ()
        self.line_by_path.setdefault(path, line)
        self.open.append(_Container(value={} if isinstance(event, yaml.MappingStartEvent) else [], path=path))

    def _take_scalar(self, event: yaml.ScalarEvent, line: int) -> None:
        container = self.open[-1] if self.open else None
        if container is not None and container.expects_key():
            self._take_key(container, event.value, line)
            return
        path = container.next_path() if container is not None else ()
        self.line_by_path.setdefault(path, line)
        self._put(self._scalar(event, path, line))

    def _take_key(self, container: _Container, key: str, line: int) -> None:
        path = (*container.path, key)
        first_line = container.line_by_key.get(key)
        container.line_by_key.setdefault(key, line)
        if first_line is not None:
            self._note(
                f"key {shorten(key)!r} is given twice, on lines {first_line} and {line}", "keep one of them", path, line
            )
        if not key or not key.isprintable():
            self._note("a key must be printable text", "name a key before the colon", container.path, line)
        container.key = key
        self.line_by_path.setdefault(path, line)

    def _scalar(self, event: yaml.ScalarEvent, path: KeyPath, line: int) -> Any:
        if event.implicit[0]:  # written without quotes
            try:
                return plain_scalar(event.value)
            except ValueError as error:
                rule, remedy = split_remedy(str(error))
                self._note(rule, remedy, path, line)
                return None
        for character in event.value:
            if unicodedata.category(character) in ("Cc", "Zl", "Zp"):
                hint = "write it on one line; in a block, use '>-' instead of '|'"
                self._note(f"control character {character!r} is not allowed in {dotted(path)}", hint, path, line)
                break
        return event.value

    def _put(self, value: Any) -> None:
        if self.open:
            self.open[-1].put(value)
        else:
            self.root = value

    def _note(self, message: str, hint: str, path: KeyPath, line: int) -> None:
        place = f"{self.name}:{line}"
        self.problems.append(ConfigProblem(message=message, hint=hint, path=path, place=place))

    def _stop(self, message: str, *, line: int, hint: str, cause: BaseException | None = None) -> NoReturn:
        problem = ConfigProblem(message=message, hint=hint, place=f"{self.name}:{line}")
        raise ConfigError([*self.problems, problem]) from cause
