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
from dataclasses import dataclass, replace
from typing import NoReturn

from corral.scheduling.errors import RuleError
from corral.scheduling.parallel import Mesh, ParallelDims

GENERATION_BACKENDS = ("sglang", "hf")
TRAINING_BACKENDS = ("fsdp", "megatron")
DEFAULT_TRAINING_BACKEND = "fsdp"
EVERY_ROLE = "*"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAllocation:
    """One engine: its backend and its parallel layout."""

    backend: str
    dims: ParallelDims

    def __str__(self) -> str:
        return f"{self.backend}:{self.dims}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleGroup:
    """Roles that hold their models on the same ranks."""

    roles: tuple[str, ...]
    """ "*" for the roles that no group names."""
    engine: EngineAllocation
    first_rank: int | None = None
    """Where its ranks begin; None: after those of the groups before it."""

    def __str__(self) -> str:
        place = "" if self.first_rank is None else f"@{self.first_rank}"
        return f"{','.join(self.roles)}={self.engine}{place}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """A parsed allocation string.

    Example:
        allocation = parse_allocation("sglang:d4t2+actor,ref=fsdp:d2,critic=fsdp:d4")
        allocation.num_generation_servers               # 4
        allocation.meshes(("actor", "critic"))          # {"actor": ranks 0-1 as d2, "critic": ranks 2-5 as d4}
    """

    generation: EngineAllocation | None
    training: tuple[RoleGroup, ...]

    @property
    def num_generation_servers(self) -> int:
        return self.generation.dims.dp if self.generation else 0

    @property
    def gpus_per_server(self) -> int:
        """GPUs of one generation server, which share each layer of its model (tensor parallel)."""
        return self.generation.dims.tp if self.generation else 1

    def training_of(self, role: str) -> EngineAllocation:
        """The backend and layout that hold `role`."""
        return self._group_of(role).engine

    def meshes(self, roles: Iterable[str]) -> dict[str, Mesh]:
        """The ranks of each role.

        Raises:
            ValueError: if a role has no layout, or a rank in between has no role.
        """
        ranks_by_group: dict[RoleGroup, range] = {}
        free = 0
        for group in self.training:
            first = free if group.first_rank is None else group.first_rank
            ranks_by_group[group] = range(first, first + group.engine.dims.world_size)
            free = max(free, ranks_by_group[group].stop)
        groups = {role: self._group_of(role) for role in roles}
        meshes = {
            role: Mesh(ranks=tuple(ranks_by_group[group]), dims=group.engine.dims) for role, group in groups.items()
        }
        used = {rank for mesh in meshes.values() for rank in mesh.ranks}
        if idle := sorted(set(range(max(used, default=-1) + 1)) - used):
            raise RuleError(
                f"allocation {str(self)!r} leaves model_worker/{idle[0]} without a role",
                f"start a role at rank {idle[0]} with @{idle[0]}, or remove the @ after it",
            )
        return meshes

    def _group_of(self, role: str) -> RoleGroup:
        for name in (role, EVERY_ROLE):
            for group in self.training:
                if name in group.roles:
                    return group
        named = ", ".join(name for group in self.training for name in group.roles)
        raise RuleError(
            f"allocation {str(self)!r} has no layout for role {role!r}",
            f"add {role}=... or *=... (it names {named or 'no role'})",
        )

    def __str__(self) -> str:
        parts = [str(self.generation)] if self.generation else []
        if len(self.training) == 1 and self.training[0] == RoleGroup(
            roles=(EVERY_ROLE,), engine=self.training[0].engine
        ):
            parts.append(str(self.training[0].engine))
        elif self.training:
            parts.append(",".join(map(str, self.training)))
        return "+".join(parts)


def parse_allocation(text: str) -> Allocation:
    """Read an allocation string; see the module for examples.

    Raises:
        ValueError: showing the position of the first thing that does not fit, and the grammar.
    """
    side_by_kind: dict[bool, _Side] = {}
    for side in _sides(text):
        position, first = side[0]
        if (generates := first.engine.backend in GENERATION_BACKENDS) in side_by_kind:
            does, other = ("generate", "training") if generates else ("train", "generation")
            _fail(text, position, f'both sides of "+" {does}; one must be a {other} backend')
        side_by_kind[generates] = side
    return Allocation(
        generation=_generation(text, side_by_kind[True]) if True in side_by_kind else None,
        training=_training(text, side_by_kind[False]) if False in side_by_kind else (),
    )


_Side = list[tuple[int, RoleGroup]]
"""Of each `[roles "="] engine ["@" first rank]`, where it stands in the text, and what it says."""


def _generation(text: str, side: _Side) -> EngineAllocation:
    position, group = side[0]
    if group.roles:
        _fail(text, position, f"{group.engine.backend} generates, and cannot train role {group.roles[0]!r}")
    if group.first_rank is not None:
        _fail(text, position, '"@" gives training ranks; generation servers have none')
    if len(side) > 1:
        _fail(text, side[1][0], 'the generation side is one engine; training goes after "+"')
    dims = group.engine.dims
    for letter, size, what in (
        ("p", dims.pp, "pipeline stages"),
        ("c", dims.cp, "context-parallel ranks"),
        ("e", dims.ep, "expert-parallel ranks"),
    ):
        if size != 1:
            _fail(text, position, f"a generation server has no {what}: {letter} must be 1, got {size}; use t")
    return group.engine


def _training(text: str, side: _Side) -> tuple[RoleGroup, ...]:
    if len(side) == 1 and not side[0][1].roles:
        return (replace(side[0][1], roles=(EVERY_ROLE,)),)
    named: set[str] = set()
    for position, group in side:
        if not group.roles:
            _fail(text, position, '"," separates roles: role "=" must come here')
        if group.engine.backend in GENERATION_BACKENDS:
            _fail(text, position, f"{group.engine.backend} generates, and cannot train role {group.roles[0]!r}")
        for role in group.roles:
            if role in named:
                _fail(text, position, f"role {role!r} has a layout already")
            named.add(role)
    return tuple(group for _, group in side)


_ROLE_NAME = r"(?:\*|[A-Za-z_][A-Za-z0-9_]*)"
_PART = re.compile(
    rf"[ \t]*(?P<part>(?:(?P<roles>{_ROLE_NAME}(?:[ \t]*,[ \t]*{_ROLE_NAME})*)[ \t]*=[ \t]*)?"
    r"(?P<engine>(?:(?P<backend>[A-Za-z_][A-Za-z0-9_]*)[:.])?(?P<layout>[A-Za-z0-9_]*))"
    r"(?:[ \t]*@[ \t]*(?P<first_rank>[0-9]{1,6}))?)[ \t]*"
)


def _sides(text: str) -> list[_Side]:
    """The text's one or two sides, from left to right."""
    sides: list[_Side] = [[]]
    position = 0
    while match := _PART.match(text, position):
        sides[-1].append((match.start("part"), _role_group(text, match)))
        position = match.end()
        separator = text[position : position + 1]
        if separator == "+" and len(sides) == 1:
            sides.append([])
        elif separator != ",":
            break
        position += 1
    if position < len(text):
        _fail(text, position, "nothing may follow here")
    return sides


def _role_group(text: str, match: re.Match[str]) -> RoleGroup:
    backend = match["backend"] or DEFAULT_TRAINING_BACKEND
    known = (*GENERATION_BACKENDS, *TRAINING_BACKENDS)
    if backend not in known:
        close = difflib.get_close_matches(backend, known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
        _fail(text, match.start("engine"), f"unknown backend {backend!r}; {hint}")
    if not match["layout"]:
        _fail(text, match.start("layout"), "a layout such as d4t2p1 must come here")
    try:
        dims = ParallelDims.parse(match["layout"])
    except ValueError as error:
        _fail(text, match.start("layout"), str(error))
    return RoleGroup(
        roles=tuple(name.strip() for name in match["roles"].split(",")) if match["roles"] else (),
        engine=EngineAllocation(backend=backend, dims=dims),
        first_rank=int(match["first_rank"]) if match["first_rank"] else None,
    )


def _fail(text: str, position: int, reason: str) -> NoReturn:
    shown = "".join(character if character.isprintable() else "?" for character in text)
    raise ValueError(f"allocation {text!r}, position {position}: {reason}\n  {shown}\n  {' ' * position}^")
