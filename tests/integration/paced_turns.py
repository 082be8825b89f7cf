"""Turns for the trials here, of agents and environments alike: they take time, and each answer is written down.

Between two turns an episode waits as long as the file says that CORRAL_TEST_PACE names. The file that
CORRAL_TEST_ANSWERS names gets a line for each answer that an agent or an environment was given.
"""

import asyncio
import json
import os
from pathlib import Path

NUM_TURNS = 4


async def after_answer() -> None:
    """What an episode does between two of its turns."""
    with open(os.environ["CORRAL_TEST_ANSWERS"], "a") as file:
        file.write("1\n")
    pace = Path(os.environ["CORRAL_TEST_PACE"])
    await asyncio.sleep(json.loads(pace.read_bytes())["pause_s"] if pace.exists() else 0.0)
