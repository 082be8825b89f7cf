"""An agent for the trials here: it keeps what the generation servers have said.

A line of the file that CORRAL_TEST_ANSWERS names is an answer: prompt_ids, output_ids, logprobs, spans.
"""

import json
import os

from corral.agents import Session, Task


async def single_turn(task: Task, session: Session) -> None:
    """Ask once, and write the answer down."""
    turn = await session.generate()
    line = {
        "prompt_ids": list(task.prompt_ids),
        "output_ids": list(turn.ids),
        "logprobs": list(turn.logprobs),
        "spans": list(turn.versions),
    }
    with open(os.environ["CORRAL_TEST_ANSWERS"], "a") as file:
        file.write(json.dumps(line) + "\n")
