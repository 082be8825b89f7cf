"""Condition: which rows are taken, in a line over their fields: `difficulty <= 3 and len(prompt) < 500`.

text ──parse──► syntax tree, of which only comparisons, and, or, not, len and constants are let through ──► function

What a file says can so neither call nor reach anything: it compares values of a row with constants, and no more.
"""

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

from pydantic import AfterValidator

from corral.scheduling.errors import RuleError

_LET_THROUGH = (
    ast.BoolOp, ast.boolop, ast.UnaryOp, ast.Not, ast.USub, ast.Compare, ast.cmpop,
    ast.Name, ast.Load, ast.Constant, ast.List, ast.Tuple,
)  # fmt: skip
_MAX_LENGTH = 1000  # characters; deeper than Python's own parser goes no line of so many is
_RULE = "a condition has names of fields, constants, comparisons, in, and, or, not and len(); use transform for others"


@dataclass(frozen=True, slots=True)
class Condition:
    """
    >>> where = Condition.parse("level <= 3 and len(prompt) < 500")
    >>> where.fields, where.holds("1+1=", 2)
    (('prompt', 'level'), True)
    """

    fields: tuple[str, ...]
    """The names of those it reads."""
    holds: Callable[..., object]
    """Of the values of these fields in this order, None for one that a row does not have: something true or false.
    Raises whatever Python does: TypeError for `None <= 3`."""

    @classmethod
    @lru_cache(maxsize=64)
    def parse(cls, text: str) -> "Condition":
        """
        Raises:
            ValueError: if it is none, with the way out after a semicolon.
        """
        if len(text) > _MAX_LENGTH:
            raise RuleError(f"a condition has at most {_MAX_LENGTH} characters, this one {len(text)}", "use transform")
        try:
            tree = ast.parse(text.strip(), mode="eval")
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            if re.search(r"(?<![<>=!])=(?!=)", text):
                raise RuleError(f"{text!r} is no condition", "write == to compare") from error
            raise RuleError(f"{text!r} is no condition ({error})", _RULE) from error
        fields = tuple(dict.fromkeys(_fields(tree.body)))
        if not fields:
            raise RuleError(f"{text!r} reads no field of a row", _RULE)
        names = ast.arguments([], [ast.arg(name) for name in fields], None, [], [], None, [])
        function = ast.fix_missing_locations(ast.Expression(ast.Lambda(names, tree.body)))
        # The tree has nothing but what `_fields` has let through.
        holds = eval(compile(function, "<where>", "eval"), {"__builtins__": {}, "len": len})
        return cls(fields, holds)


def _fields(node: ast.AST) -> Iterator[str]:
    """The names in a tree; refuses all else that is not let through."""
    match node:
        case ast.Call(func=ast.Name(id="len"), args=[argument], keywords=[]):
            yield from _fields(argument)
        case ast.Name(id=name):
            yield name
        case _ if isinstance(node, _LET_THROUGH):
            for child in ast.iter_child_nodes(node):
                yield from _fields(child)
        case _:
            raise RuleError(f"{ast.unparse(node)!r} cannot be asked of a row", _RULE)


# Regular expressions in a configuration, and what they find.


def check_pattern(pattern: str) -> str:
    """The pattern; ValueError if it is no regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"must be a regular expression: {error}") from error
    return pattern


def _with_group(pattern: str) -> str:
    if re.compile(check_pattern(pattern)).groups < 1:
        raise RuleError(f"{pattern!r} has no group", "put parentheses around what is looked for")
    return pattern


Pattern = Annotated[str, AfterValidator(check_pattern)]
"""A regular expression of Python's `re`."""

FindingPattern = Annotated[str, AfterValidator(_with_group)]
"""One whose first group is what is looked for."""


def last_found(pattern: str, text: str) -> str | None:
    """What the first group of the last match is; None without a match, or where the group has no part in it."""
    return next(reversed([match[1] for match in re.finditer(pattern, text)]), None)
