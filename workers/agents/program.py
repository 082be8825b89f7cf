"""The agent `program`: a program of somebody else's plays the episode, which knows OpenAI's API and nothing of a trial.

the row, as JSON ──stdin──► program ⇄ OPENAI_BASE_URL, OPENAI_API_KEY
                               └── last line of its output: a number, or {"reward": ..., more numbers}
                                   └── neither: `rollout.reward` judges the model's last answer

Its key opens this episode, and programs of other episodes run as the same user. So each has a user namespace of its
own, by bubblewrap: the kernel shows it no environment and no memory of another program, or of the agents' process.
"""

import asyncio
import json
import logging
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from corral.workers.agents.contract import Outcome, Task
from corral.workers.agents.session import Session
from corral.workers.data.side_numbers import side_number

logger = logging.getLogger(__name__)

_BWRAP_TIMEOUT_S = 30.0
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
    environment = {**os.environ, "PATH": path, "OPENAI_BASE_URL": endpoint.base_url}
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb"), os.fdopen(writing, "wb") as options:
        if apart := await asyncio.to_thread(_own_namespace):
            # Not in the environment of bwrap: before it has made the namespace, that is open to the other programs.
            options.write(f"--setenv\0OPENAI_API_KEY\0{endpoint.api_key}\0".encode())
            command = [*apart, "--args", str(reading), "--", *command]
        else:
            environment["OPENAI_API_KEY"] = endpoint.api_key
        options.close()
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment,
            pass_fds=[reading] if apart else [],
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


@cache
def _own_namespace() -> tuple[str, ...]:
    """The words before a program that give it a user namespace of its own; none where this machine cannot."""
    words = (shutil.which("bwrap") or "bwrap", "--unshare-user", "--dev-bind", "/", "/", "--die-with-parent")
    try:
        subprocess.run([*words, "true"], check=True, capture_output=True, timeout=_BWRAP_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("a program can read the keys of other episodes here, since bubblewrap cannot run: %s", error)
        return ()
    return words


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
