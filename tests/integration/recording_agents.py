"""An agent for the trials here, imported by their rollout workers: it keeps what the generation servers have said.

A line of the file that CORRAL_TEST_ANSWERS names is an answer: prompt_ids, output_ids, logprobs, spans.
"""

import json
import os

from corral.workers.rollout.agents import Judge, JudgedGroup, SampleGroup
from corral.workers.rollout.agents import single_turn as unrecorded_single_turn
from corral.workers.rollout.rewards import Problem


async def single_turn(problem: Problem, prompt_ids: list[int], sample_group: SampleGroup, judge: Judge) -> JudgedGroup:
    """Ask once, judge each answer, and write the answers down."""
    group = await unrecorded_single_turn(problem, prompt_ids, sample_group, judge)
    lines = [
        {
            "prompt_ids": list(prompt_ids),
            "output_ids": answer.output_ids,
            "logprobs": answer.logprobs,
            "spans": [[span.version, span.start, span.end] for span in answer.spans],
        }
        for answer in group.answers
    ]
    with open(os.environ["CORRAL_TEST_ANSWERS"], "a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))
    return group
