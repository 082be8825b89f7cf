"""An agent for the trials here, imported by their rollout workers: some prompts take many times as long as others.

How long follows from the prompt and from how often it was issued. A line of the file that CORRAL_TEST_ANSWERS names is
a prompt that was answered: id, seconds.
"""

import asyncio
import json
import os
from collections import Counter
from random import Random

from corral.workers.rollout.agents import Judge, JudgedGroup, SampleGroup
from corral.workers.rollout.agents import single_turn as undelayed_single_turn
from corral.workers.rollout.rewards import Problem

_LONGEST_S = 8.0
_times_issued = Counter[str]()


async def heavy_tailed(problem: Problem, prompt_ids: list[int], sample_group: SampleGroup, judge: Judge) -> JudgedGroup:
    """Ask once, judge each answer, and wait."""
    name = str(problem["id"])
    _times_issued[name] += 1
    seconds = min(_LONGEST_S, 0.6 * Random(f"{name}/{_times_issued[name]}").lognormvariate(0.0, 1.0))
    group = await undelayed_single_turn(problem, prompt_ids, sample_group, judge)
    await asyncio.sleep(seconds)
    with open(os.environ["CORRAL_TEST_ANSWERS"], "a") as file:
        file.write(json.dumps({"id": name, "seconds": seconds}) + "\n")
    return group
