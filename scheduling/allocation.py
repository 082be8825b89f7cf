"""Allocation string -> who generates and who trains, on how many GPUs.

Example:
    "sglang:d4t2+megatron:d2t2p2"      4 SGLang servers of 2 GPUs; every role trains on 8 GPUs
    "hf:d2+fsdp:d1"                    2 embedded engines; one training rank
    "fsdp:d2"                          training only; all roles on the same 2 ranks
    "actor,ref=fsdp:d2,critic=fsdp:d2" actor and ref on ranks 0 and 1, critic on 2 and 3, all at the same time
    "actor=fsdp:d4t2,*=fsdp:d4"        "*" stands for the roles that are not named
    "fsdp:d2c2"                        4 training ranks; each pair works on the same sequences, half the tokens each
    "megatron:d4e2"                    4 training ranks; each has half of the experts, which two of them have alike
    "actor=fsdp:d2,critic=fsdp:d2@1"   critic from rank 1 on: rank 1 works for both, in turns
    "sglang.d4m1p1+d2m2p1"             the reference system's spelling
"""

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NoReturn

from corral.scheduling.mesh import Mesh
from corral.scheduling.parallel import ParallelDims

GENERATION_BACKENDS = ("sglang", "hf")
TRAINING_BACKENDS = ("fsdp", "megatron")
DEFAULT_TRAINING_BACKEND = "fsdp"
EVERY_ROLE = "*"

ALLOCATION_GRAMMAR = f"""\
allocation := [generation "+"] training | generation
generation := {" | ".join(f'"{name}"' for name in GENERATION_BACKENDS)} ":" layout
training   := engine | share {{"," share}}
share      := role {{"," role}} "=" engine ["@" first rank]        role "*": every role that is not named
engine     := [{" | ".join(f'"{name}"' for name in TRAINING_BACKENDS)} ":"] layout       "." may stand for ":"
layout     := "d", "t" (or "m"), "p", "c" and "e", each with a size, each at most once; one that is missing counts 1"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAllocation:
    """One engine: its backend and its parallel layout."""

    backend: str
    dims: ParallelDims

    def __str__(self) -> str:
        return f"{self.backend}:{self.dims}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Roles that hold their models on the same ranks."""

    roles: tuple[str, ...]
    """ "*" for the roles that no share names."""
    engine: EngineAllocation
    first_rank: int | None = None
    """Where its ranks begin; None: after those of the shares before it."""

    def __str__(self) -> str:
        place = "" if self.first_rank is None else f"@{self.first_rank}"
        return f"{','.join(self.roles)}={self.engine}{place}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """What an allocation string says.

    Example:
        allocation = parse_allocation("sglang:d4t2+actor,ref=fsdp:d2,critic=fsdp:d4")
        allocation.num_generation_servers               # 4
        allocation.meshes(("actor", "critic"))          # {"actor": ranks 0-1 as d2, "critic": ranks 2-5 as d4}
    """

    generation: EngineAllocation | None
    training: tuple[Share, ...]

    @property
    def num_generation_servers(self) -> int:
        return self.generation.dims.dp if self.generation else 0

    @property
    def gpus_per_server(self) -> int:
        """GPUs of one generation server, which share each layer of its model (tensor parallel)."""
        return self.generation.dims.tp if self.generation else 1

    def training_of(self, role: str) -> EngineAllocation:
        """The backend and layout that hold `role`."""
        return self._share_of(role).engine

    def meshes(self, roles: Iterable[str]) -> dict[str, Mesh]:
        """The ranks of each role.

        Raises:
            ValueError: if a role has no layout, or a rank in between has no role.
        """
        ranks_by_share = dict(zip(self.training, self._ranks(), strict=True))
        shares = {role: self._share_of(role) for role in roles}
        meshes = {role: Mesh(ranks=ranks_by_share[share], dims=share.engine.dims) for role, share in shares.items()}
        used = {rank for mesh in meshes.values() for rank in mesh.ranks}
        if idle := sorted(set(range(max(used, default=-1) + 1)) - used):
            raise ValueError(
                f"allocation {str(self)!r} leaves model_worker/{idle[0]} without a role; "
                f"begin a share at rank {idle[0]} with @{idle[0]}, or remove the @ after it"
            )
        return meshes

    def _ranks(self) -> list[tuple[int, ...]]:
        """The ranks of each share."""
        ranks: list[tuple[int, ...]] = []
        free = 0
        for share in self.training:
            first = free if share.first_rank is None else share.first_rank
            ranks.append(tuple(range(first, first + share.engine.dims.world_size)))
            free = max(free, first + share.engine.dims.world_size)
        return ranks

    def _share_of(self, role: str) -> Share:
        for name in (role, EVERY_ROLE):
            for share in self.training:
                if name in share.roles:
                    return share
        named = ", ".join(name for share in self.training for name in share.roles)
        raise ValueError(
            f"allocation {str(self)!r} has no layout for role {role!r}; "
            f"add {role}=... or *=... (it names {named or 'no role'})"
        )

    def __str__(self) -> str:
        parts = [str(self.generation)] if self.generation else []
        if len(self.training) == 1 and self.training[0] == Share(roles=(EVERY_ROLE,), engine=self.training[0].engine):
            parts.append(str(self.training[0].engine))
        elif self.training:
            parts.append(",".join(map(str, self.training)))
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
        training=_training(text, trainings[0]) if trainings else (),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """One `[roles "="] engine ["@" first rank]` and where it stands in the text."""

    position: int
    roles: tuple[str, ...]
    engine: EngineAllocation
    first_rank: int | None


def _generation(text: str, side: list[_Part]) -> EngineAllocation:
    part = side[0]
    if part.roles:
        _fail(text, part.position, f"{part.engine.backend} generates, and cannot train role {part.roles[0]!r}")
    if part.first_rank is not None:
        _fail(text, part.position, '"@" gives training ranks; generation servers have none')
    if len(side) > 1:
        _fail(text, side[1].position, 'the generation side is one engine; training goes after "+"')
    for letter, size, what in (
        ("p", part.engine.dims.pp, "pipeline stages"),
        ("c", part.engine.dims.cp, "context-parallel ranks"),
        ("e", part.engine.dims.ep, "expert-parallel ranks"),
    ):
        if size != 1:
            reason = f"a generation server has no {what}: {letter} must be 1, got {size}; use t"
            _fail(text, part.position, reason)
    return part.engine


def _training(text: str, side: list[_Part]) -> tuple[Share, ...]:
    if len(side) == 1 and not side[0].roles:
        return (Share(roles=(EVERY_ROLE,), engine=side[0].engine, first_rank=side[0].first_rank),)
    shares: list[Share] = []
    for part in side:
        if not part.roles:
            _fail(text, part.position, '"," separates roles: role "=" must come here')
        if part.engine.backend in GENERATION_BACKENDS:
            _fail(text, part.position, f"{part.engine.backend} generates, and cannot train role {part.roles[0]!r}")
        named = [name for share in shares for name in share.roles]
        for number, role in enumerate(part.roles):
            if role in named or role in part.roles[:number]:
                _fail(text, part.position, f"role {role!r} has a layout already")
        shares.append(Share(roles=part.roles, engine=part.engine, first_rank=part.first_rank))
    return tuple(shares)


_SPACE = re.compile(r"[ \t]*")
_ROLE_NAME = r"(?:\*|[A-Za-z_][A-Za-z0-9_]*)"
_ROLES = re.compile(rf"({_ROLE_NAME}(?:[ \t]*,[ \t]*{_ROLE_NAME})*)[ \t]*=[ \t]*")
_BACKEND = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)[:.]")
_LAYOUT = re.compile(r"[A-Za-z0-9_]+")
_FIRST_RANK = re.compile(r"[ \t]*@[ \t]*([0-9]{1,6})")


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
        roles = self._match(_ROLES)
        engine_start = self._position
        backend = self._match(_BACKEND)
        name = backend[1] if backend else DEFAULT_TRAINING_BACKEND
        known = (*GENERATION_BACKENDS, *TRAINING_BACKENDS)
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
            _fail(self._text, engine_start, f"unknown backend {name!r}; {hint}")
        engine = EngineAllocation(backend=name, dims=self._dims())
        first_rank = self._match(_FIRST_RANK)
        return _Part(
            position=start,
            roles=tuple(name.strip() for name in roles[1].split(",")) if roles else (),
            engine=engine,
            first_rank=int(first_rank[1]) if first_rank else None,
        )

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
