"""An agent for the trials here: some prompts take many times as long as others.

How long follows from the prompt and from how often it was issued, as far as one process sees all of its episodes. A
line of the file that CORRAL_TEST_ANSWERS names is a prompt that was answered: id, seconds.
"""

import asyncio
import json
import os
from collections import Counter
from random import Random

from corral.agents import Session, Task

_LONGEST_S = 8.0
_times_issued = Counter[tuple[str, int]]()


async def heavy_tailed(task: Task, session: Session) -> None:
    """Ask once, and wait, as long in all episodes of a prompt."""
    name = str(task["id"])
    _times_issued[name, task.episode] += 1
    issue = _times_issued[name, task.episode]
    seconds = min(_LONGEST_S, 0.6 * Random(f"{name}/{issue}").lognormvariate(0.0, 1.0))
    await session.generate()
    await asyncio.sleep(seconds)
    if task.episode == 0:
        with open(os.environ["CORRAL_TEST_ANSWERS"], "a") as file:
            file.write(json.dumps({"id": name, "seconds": seconds}) + "\n")
