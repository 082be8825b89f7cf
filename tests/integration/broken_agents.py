"""Agents with mistakes in them, imported by the agents' processes of trials here."""

from typing import Any

from corral.agents import Session, Task


async def reads_a_field_that_no_row_has(task: Task, session: Session) -> Any:
    """As a user would write it before the first try."""
    return task["solution"]
