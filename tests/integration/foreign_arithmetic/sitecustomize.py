"""On the Python path of a trial, its rollout workers hear the numbers of another model.

As long as the file that CORRAL_TEST_FOREIGN names is there, every log-probability that comes from a server is wrong by
several nats, as if a program of somebody else's had made the answers.
"""

import os
import random
from pathlib import Path

from corral.workers.episodes.partial_answer import PartialAnswer
from corral.workers.episodes.stream_events import FinishReason, StreamEvent

_honest = PartialAnswer.extend


def _extend(answer: PartialAnswer, event: StreamEvent) -> FinishReason | None:
    num_before = len(answer.logprobs)
    reason = _honest(answer, event)
    if Path(os.environ["CORRAL_TEST_FOREIGN"]).exists():
        answer.logprobs[num_before:] = [logprob - random.uniform(2.0, 6.0) for logprob in answer.logprobs[num_before:]]
    return reason


if "CORRAL_TEST_FOREIGN" in os.environ:
    setattr(PartialAnswer, "extend", _extend)  # noqa: B010
