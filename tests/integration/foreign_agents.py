"""An agent for the trials here, imported by their rollout workers: its numbers can be those of another model.

As long as the file that CORRAL_TEST_FOREIGN names is there, every log-probability that it hands back is wrong by
several nats, as if a program of somebody else's had made the answers.
"""

import os
import random
from pathlib import Path

from corral.workers.rollout.agents import Judge, JudgedGroup, SampleGroup
from corral.workers.rollout.agents import single_turn as honest_single_turn
from corral.workers.rollout.rewards import Problem


async def single_turn(problem: Problem, prompt_ids: list[int], sample_group: SampleGroup, judge: Judge) -> JudgedGroup:
    """Ask once, judge each answer, and lie about how likely it was while the test says so."""
    group = await honest_single_turn(problem, prompt_ids, sample_group, judge)
    if Path(os.environ["CORRAL_TEST_FOREIGN"]).exists():
        for answer in group.answers:
            answer.logprobs = [logprob - random.uniform(2.0, 6.0) for logprob in answer.logprobs]
    return group
