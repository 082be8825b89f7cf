"""Strict YAML: bytes -> libyaml's events, looked through -> its nodes -> plain values, with the line of every key.

Scalars follow YAML 1.2's core schema: 24:00:00, yes, no, on, off and 2024-01-01 are strings, 1e-5 is a float, and only
true and false are booleans. What could mean something else than what is read is refused: duplicate keys, aliases and
anchors, tags, several documents, control characters, numbers that no field can hold. Nodes are made only of
events that are no deeper than `MAX_DEPTH`, so that a hostile file costs neither stack nor memory.
"""

import math
import re
import unicodedata
from pathlib import Path
from typing import Any, NoReturn

import yaml

from corral.experiments.errors import (
    ConfigError,
    ConfigProblem,
    KeyPath,
    Location,
    display_path,
    dotted,
    shorten,
)
from corral.experiments.regular_file import open_regular
from corral.scheduling.errors import RuleError, message_and_hint

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
    ),
    "profile": ("give the path of a YAML file", "start with 'cluster:' or 'launch:'"),
}
"""Where there is no file, and where it holds no mapping, by the kind of file."""


def read_yaml(path: Path, *, what: str = EXPERIMENT_FILE) -> tuple[Any, dict[KeyPath, Location]]:
    """The content of a file, and where each key stands; `what` names the kind of file in errors.

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
            hint=_HINTS[what][0],
        ) from error
    return parse_yaml(content, file=path, what=what)


def parse_yaml(content: bytes, *, file: Path, what: str = EXPERIMENT_FILE) -> tuple[Any, dict[KeyPath, Location]]:
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
    builder = _Builder(name)
    value = builder.build(text)
    if not isinstance(value, dict):
        raise ConfigError.of(
            f"the {what} must hold a mapping of keys to values",
            place=f"{name}:1",
            hint=_HINTS[what][1],
        )
    written = builder.written_by_path
    return value, {path: Location(file, line, written.get(path, "")) for path, line in builder.line_by_path.items()}


def parse_value(text: str, *, place: str) -> Any:
    """One value as it would stand in the file: `1e-5`, `null`, `[a, b]`; `place` names it in errors."""
    return _Builder(place).build(text)


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
        raise RuleError(f"numbers must be finite, got {text}", "leave the key out where no bound is meant")
    if _FLOAT.fullmatch(text):
        number = float(text)
        if not math.isfinite(number):
            raise RuleError(f"numbers must be finite, got {shorten(text)}", "quote it if it is text")
        return number
    return text


def _integer(text: str) -> int:
    number = int(text, {"0o": 8, "0x": 16}.get(text[:2], 10)) if len(text) <= _MAX_DIGITS else None
    if number is None or number.bit_length() > _MAX_INT_BITS:
        raise RuleError(f"integers must fit 64 bits, got {shorten(text)}", "quote it if it is text")
    return number


class _Builder:
    """Events -> values; collects what is wrong in `problems` as far as reading can go on."""

    def __init__(self, name: str) -> None:
        self.line_by_path: dict[KeyPath, int] = {}
        self.written_by_path: dict[KeyPath, str] = {}
        """Scalars without quotes, as they are written."""
        self._name = name
        self._problems: list[ConfigProblem] = []

    def build(self, text: str) -> Any:
        """The value of the one document in `text`; ConfigError if anything was wrong."""
        if match := _CONTROL.search(text):
            line = text.count("\n", 0, match.start()) + 1
            self._stop(f"control character {match[0]!r} is not allowed", line=line, hint="remove it")
        try:
            self._refuse_constructs(text)
            node = yaml.compose(text, Loader=_Parser)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            reason = error.problem or error.context or "syntax error"
            tabs = "cannot start any token" in reason and "\t" in text
            hint = "indent with spaces, not tabs" if tabs else "check the indentation, the colons and the quotes there"
            self._stop(f"not valid YAML: {reason}", line=mark.line + 1 if mark else 1, hint=hint, cause=error)
        except yaml.YAMLError as error:
            self._stop(f"not valid YAML: {shorten(str(error))}", line=1, hint="save it as plain text", cause=error)
        value = None if node is None else self._value(node, ())
        if self._problems:
            raise ConfigError(self._problems)
        return value

    def _refuse_constructs(self, text: str) -> None:
        """What could mean something else than what is read, and what is too deep to be read by recursion."""
        depth = num_documents = 0
        for event in yaml.parse(text, Loader=_Parser):
            line = _line(event)
            num_documents += isinstance(event, yaml.DocumentStartEvent)
            if num_documents > 1:
                self._stop("only one YAML document is allowed", line=line, hint="remove what follows '---'")
            self._refuse_decorations(event, line)
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                self._stop(f"more than {MAX_DEPTH} levels inside each other", line=line, hint="no key is that deep")

    def _value(self, node: yaml.Node, path: KeyPath) -> Any:
        self.line_by_path.setdefault(path, _line(node))
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self._value(item, (*path, number)) for number, item in enumerate(node.value)]
        values: dict[str, Any] = {}
        line_by_key: dict[str, int] = {}
        for key_node, value_node in node.value:
            line = _line(key_node)
            if not isinstance(key_node, yaml.ScalarNode):
                hint = "put text before the colon"
                self._stop("a key must be plain text, not a list or a mapping", line=line, hint=hint)
            key = key_node.value
            if key in values:
                message = f"key {shorten(key)!r} is given twice, on lines {line_by_key[key]} and {line}"
                self._note(message, "keep one of them", (*path, key), line)
            if not key or not key.isprintable():
                self._note("a key must be printable text", "name a key before the colon", path, line)
            line_by_key.setdefault(key, line)
            self.line_by_path.setdefault((*path, key), line)
            values[key] = self._value(value_node, (*path, key))
        return values

    def _refuse_decorations(self, event: yaml.Event, line: int) -> None:
        if (anchor := getattr(event, "anchor", None)) is not None:
            what = f"aliases are not allowed: *{anchor}"
            if not isinstance(event, yaml.AliasEvent):
                what = f"anchors are not allowed: &{anchor}"
            self._stop(f"YAML {what}", line=line, hint="write the value out, or quote it")
        if (tag := getattr(event, "tag", None)) is not None:
            hint = "remove it, or quote the value"
            self._stop(f"YAML tags are not allowed: {shorten(str(tag))}", line=line, hint=hint)

    def _scalar(self, node: yaml.ScalarNode, path: KeyPath) -> Any:
        line = _line(node)
        if not node.style:
            self.written_by_path[path] = node.value
            try:
                return plain_scalar(node.value)
            except ValueError as error:
                rule, remedy = message_and_hint(error)
                self._note(rule, remedy, path, line)
                return None
        for character in node.value:
            if unicodedata.category(character) in ("Cc", "Zl", "Zp"):
                hint = "write it on one line; in a block, use '>-' instead of '|'"
                self._note(f"control character {character!r} is not allowed in {dotted(path)}", hint, path, line)
                break
        return node.value

    def _note(self, message: str, hint: str, path: KeyPath, line: int) -> None:
        place = f"{self._name}:{line}"
        self._problems.append(ConfigProblem(message, hint, path=path, place=place))

    def _stop(self, message: str, *, line: int, hint: str, cause: BaseException | None = None) -> NoReturn:
        problem = ConfigProblem(message, hint, place=f"{self._name}:{line}")
        raise ConfigError([*self._problems, problem]) from cause


def _line(event: yaml.Event | yaml.Node) -> int:
    """Of a file, from 1."""
    return event.start_mark.line + 1 if event.start_mark is not None else 1
