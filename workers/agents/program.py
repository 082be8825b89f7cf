"""The agent `program`: a program of somebody else's plays the episode, which knows OpenAI's API and nothing of a trial.

the row, as JSON ──stdin──► program ⇄ OPENAI_BASE_URL, OPENAI_API_KEY
                               └── last line of its output: a number, or {"reward": ..., more numbers}
                                   └── neither: `rollout.reward` judges the model's last answer
"""

import asyncio
import json
import math
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from corral.workers.agents.contract import Outcome, Task
from corral.workers.agents.session import Session
from corral.workers.data.side_numbers import side_number

_LAST_WORDS = 2000  # bytes of what it said, where it fails


class ProgramError(RuntimeError):
    """A program failed, or did not end in time."""


async def program(task: Task, session: Session, *, command: Sequence[str], timeout_s: float = 250.0) -> Outcome | None:
    """Run a program for each episode.

    Args:
        command: its words; it starts where the agents' processes do, and `python` is the one that they have.
        timeout_s: after which it is killed, and the episode has failed. Less than `rollout.agent_timeout_s`.

    Raises:
        ProgramError: if it fails, or takes longer.
    """
    endpoint = session.endpoint
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={
            **os.environ,
            "PATH": path,
            "OPENAI_BASE_URL": endpoint.base_url,
            "OPENAI_API_KEY": endpoint.api_key,
        },
    )
    try:
        async with asyncio.timeout(timeout_s):
            output, errors = await process.communicate(json.dumps(dict(task.fields)).encode())
    except TimeoutError as error:
        raise ProgramError(f"{command[0]} did not end within {timeout_s:g} s") from error
    finally:
        with suppress(ProcessLookupError):
            process.kill()
    if process.returncode != 0:
        said = errors[-_LAST_WORDS:].decode(errors="replace").strip()
        raise ProgramError(f"{command[0]} ended with {process.returncode}: {said or 'it said nothing'}")
    return outcome_of(output.decode(errors="replace"))


def outcome_of(output: str) -> Outcome | None:
    """What a program's last line says; None if that is neither a number nor an object with a reward.

    Example:
        outcome_of('thinking...\\n{"reward": 1, "calls": 2}') == Outcome(1.0, metrics={"calls": 2.0})
    """
    *_, last = output.splitlines() or [""]
    try:
        said = json.loads(last)
    except ValueError:
        return None
    numbers = said if isinstance(said, dict) else {"reward": said}
    values = {name: side_number(value) for name, value in numbers.items() if isinstance(value, int | float)}
    if not math.isfinite(values.get("reward", math.nan)):
        return None
    return Outcome(values.pop("reward"), metrics=values)
