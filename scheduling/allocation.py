"""Allocation string -> who generates and who trains, on how many GPUs.

Example:
    "sglang:d4t2+megatron:d2t2p2"      4 SGLang servers of 2 GPUs; every role trains on 8 GPUs
    "hf:d2+fsdp:d1"                    2 embedded engines; one training rank
    "fsdp:d2"                          training only
    "actor=fsdp:d4t2,critic=fsdp:d4"   one layout per role; "*" stands for the roles that are not named
    "sglang.d4m1p1+d2m2p1"             the reference system's spelling
"""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from corral.scheduling.parallel import ParallelDims

GENERATION_BACKENDS = ("sglang", "hf")
TRAINING_BACKENDS = ("fsdp", "megatron")
DEFAULT_TRAINING_BACKEND = "fsdp"
EVERY_ROLE = "*"

ALLOCATION_GRAMMAR = f"""\
allocation := [generation "+"] training | generation
generation := {" | ".join(f'"{name}"' for name in GENERATION_BACKENDS)} ":" layout
training   := engine | role "=" engine {{"," role "=" engine}}      role "*": every role that is not named
engine     := [{" | ".join(f'"{name}"' for name in TRAINING_BACKENDS)} ":"] layout       "." may stand for ":"
layout     := "d" size, "t" (or "m") size, "p" size, each at most once; one that is missing counts 1"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAllocation:
    """One engine: its backend and its parallel layout."""

    backend: str
    dims: ParallelDims

    def __str__(self) -> str:
        return f"{self.backend}:{self.dims}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """What an allocation string says.

    Example:
        allocation = parse_allocation("sglang:d4t2+fsdp:d8")
        allocation.num_generation_servers       # 4
        allocation.training_of("actor").dims    # ParallelDims(dp=8, tp=1, pp=1)
    """

    generation: EngineAllocation | None
    training: Mapping[str, EngineAllocation]
    """Layout by role; "*" for the roles that are not named."""

    @property
    def num_generation_servers(self) -> int:
        return self.generation.dims.dp if self.generation else 0

    def training_of(self, role: str) -> EngineAllocation:
        """The layout that trains `role`."""
        engine = self.training.get(role) or self.training.get(EVERY_ROLE)
        if engine is None:
            raise ValueError(
                f"allocation {str(self)!r} has no layout for role {role!r}; "
                f"add {role}=... or *=... (it names {', '.join(self.training) or 'no role'})"
            )
        return engine

    def __str__(self) -> str:
        parts = [str(self.generation)] if self.generation else []
        if set(self.training) == {EVERY_ROLE}:
            parts.append(str(self.training[EVERY_ROLE]))
        elif self.training:
            parts.append(",".join(f"{role}={engine}" for role, engine in self.training.items()))
        return "+".join(parts)


def parse_allocation(text: str) -> Allocation:
    """Read an allocation string; see the module for examples.

    Raises:
        ValueError: showing the position of the first thing that does not fit, and the grammar.
    """
    sides = _Scanner(text).sides()
    generations = [side for side in sides if side[0].engine.backend in GENERATION_BACKENDS]
    trainings = [side for side in sides if side[0].engine.backend not in GENERATION_BACKENDS]
    if len(generations) > 1:
        _fail(text, generations[1][0].position, 'both sides of "+" generate; one must be a training backend')
    if len(trainings) > 1:
        _fail(text, trainings[1][0].position, 'both sides of "+" train; one must be a generation backend')
    return Allocation(
        generation=_generation(text, generations[0]) if generations else None,
        training=_training(text, trainings[0]) if trainings else {},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """One `[role "="] engine` and where it stands in the text."""

    position: int
    role: str | None
    engine: EngineAllocation


def _generation(text: str, side: list[_Part]) -> EngineAllocation:
    part = side[0]
    if part.role is not None:
        _fail(text, part.position, f"{part.engine.backend} generates, and cannot train role {part.role!r}")
    if len(side) > 1:
        _fail(text, side[1].position, 'the generation side is one engine; training goes after "+"')
    if part.engine.dims.pp != 1:
        _fail(
            text,
            part.position,
            f"a generation server has no pipeline stages: p must be 1, got {part.engine.dims.pp}; use t",
        )
    return part.engine


def _training(text: str, side: list[_Part]) -> dict[str, EngineAllocation]:
    if len(side) == 1 and side[0].role is None:
        return {EVERY_ROLE: side[0].engine}
    training: dict[str, EngineAllocation] = {}
    for part in side:
        if part.role is None:
            _fail(text, part.position, '"," separates roles: role "=" must come here')
        if part.engine.backend in GENERATION_BACKENDS:
            _fail(text, part.position, f"{part.engine.backend} generates, and cannot train role {part.role!r}")
        if part.role in training:
            _fail(text, part.position, f"role {part.role!r} has a layout already")
        training[part.role] = part.engine
    return training


_SPACE = re.compile(r"[ \t]*")
_ROLE = re.compile(r"(\*|[A-Za-z_][A-Za-z0-9_]*)[ \t]*=[ \t]*")
_BACKEND = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)[:.]")
_LAYOUT = re.compile(r"[A-Za-z0-9_]+")


class _Scanner:
    """Reads the text from left to right into the parts of its one or two sides."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._position = 0

    def sides(self) -> list[list[_Part]]:
        sides = [self._side()]
        if self._take("+"):
            sides.append(self._side())
        if self._position < len(self._text):
            _fail(self._text, self._position, "nothing may follow here")
        return sides

    def _side(self) -> list[_Part]:
        parts = [self._part()]
        while self._take(","):
            parts.append(self._part())
        return parts

    def _part(self) -> _Part:
        self._match(_SPACE)
        start = self._position
        role = self._match(_ROLE)
        engine_start = self._position
        backend = self._match(_BACKEND)
        name = backend[1] if backend else DEFAULT_TRAINING_BACKEND
        known = (*GENERATION_BACKENDS, *TRAINING_BACKENDS)
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
            _fail(self._text, engine_start, f"unknown backend {name!r}; {hint}")
        engine = EngineAllocation(backend=name, dims=self._dims())
        return _Part(position=start, role=role[1] if role else None, engine=engine)

    def _dims(self) -> ParallelDims:
        start = self._position
        layout = self._match(_LAYOUT)
        if layout is None:
            _fail(self._text, start, "a layout such as d4t2p1 must come here")
        try:
            return ParallelDims.parse(layout[0])
        except ValueError as error:
            _fail(self._text, start, str(error))

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        match = pattern.match(self._text, self._position)
        if match:
            self._position = match.end()
        return match

    def _take(self, symbol: str) -> bool:
        self._match(_SPACE)
        if not self._text.startswith(symbol, self._position):
            return False
        self._position += len(symbol)
        return True


def _fail(text: str, position: int, reason: str) -> NoReturn:
    shown = "".join(character if character.isprintable() else "?" for character in text)
    raise ValueError(
        f"allocation {text!r}, position {position}: {reason}\n  {shown}\n  {' ' * position}^\n{ALLOCATION_GRAMMAR}"
    )
