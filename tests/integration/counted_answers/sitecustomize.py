"""On the Python path of a trial, its rollout workers write down each answer that a server has brought to its end.

The file that CORRAL_TEST_SERVED names gets a line for each: how many tokens it has.
"""

import os
from contextlib import suppress

with suppress(ModuleNotFoundError):  # another Python, in which environments are
    from corral.workers.episodes.partial_answer import PartialAnswer
    from corral.workers.episodes.stream_events import FinishReason, StreamEvent

    _extend = PartialAnswer.extend

    def _count(answer: PartialAnswer, event: StreamEvent) -> FinishReason | None:
        reason = _extend(answer, event)
        if reason is not None and reason.type != "abort":
            with open(os.environ["CORRAL_TEST_SERVED"], "a") as file:
                file.write(f"{len(answer.output_ids)}\n")
        return reason

    if "CORRAL_TEST_SERVED" in os.environ:
        setattr(PartialAnswer, "extend", _count)  # noqa: B010
