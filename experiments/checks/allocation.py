"""Text of an allocation -> what it says, and what of it this version cannot do."""

from collections.abc import Iterable
from dataclasses import replace

from corral.experiments.checks.generation import check_generation_side
from corral.experiments.checks.training import check_training_side
from corral.experiments.errors import ConfigProblem, split_remedy
from corral.scheduling.allocation import Allocation, parse_allocation

_ALLOCATION = ("allocation",)


def check_allocation(
    text: str, *, roles: Iterable[str], generates: bool
) -> tuple[Allocation | None, list[ConfigProblem]]:
    """The allocation, and what this version cannot do of it; None if it is no allocation string at all."""
    try:
        allocation = parse_allocation(text)
    except ValueError as error:
        message, hint = split_remedy(str(error))
        hint = hint or ("for example hf:d1+fsdp:d1" if generates else "for example fsdp:d1")
        return None, [ConfigProblem(message, hint, path=_ALLOCATION)]
    problems = [
        *check_generation_side(allocation, generates=generates),
        *check_training_side(allocation, roles=tuple(roles)),
    ]
    return allocation, [replace(problem, path=_ALLOCATION) for problem in problems]
