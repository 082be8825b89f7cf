"""Agents with mistakes in them, imported by the rollout workers of trials here."""

from collections.abc import Mapping
from typing import Any


async def reads_a_field_that_no_row_has(problem: Mapping[str, Any], prompt_ids: list[int], *others: Any) -> Any:
    """As a user would write it before the first try."""
    return problem["solution"]
