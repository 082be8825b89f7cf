"""Where the embedded engine's CPU seconds go: a clock around the calls that a step is made of.

    with clocked_parts() as seconds: engine.generate(...)      seconds["attention"], seconds["norms"], ...

A call inside the call of another part counts as the outer one's, so that parts add up: all of the prompts is `prompts`.
What is in no part is embedding, rotation, activation and the Python between the calls. The clock itself takes half a
microsecond a call, which is charged to what is in no part.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from corral.workers.engine import batch
from corral.workers.engine.attention import TokenAttention
from corral.workers.engine.decoder import RMSNorm
from corral.workers.engine.linear import Int8Linear, Linear
from corral.workers.engine.prefill import Prefill

_CALLS_BY_PART: dict[str, tuple[tuple[Any, str], ...]] = {
    "products": tuple((linear, name) for linear in (Linear, Int8Linear) for name in ("__call__", "add_to")),
    "attention": ((TokenAttention, "__init__"), (TokenAttention, "__call__")),
    "norms": ((RMSNorm, "__call__"),),
    "sampling": ((batch, "sample_tokens"),),
    "prompts": ((Prefill, "run"),),
}
PARTS = tuple(_CALLS_BY_PART)


class _PartClock:
    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._is_inside = False

    def around(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def clocked(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside:
                return function(*args, **kwargs)
            self._is_inside = True
            start = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[part] += time.process_time() - start
                self._is_inside = False

        return clocked


@contextmanager
def clocked_parts() -> Iterator[dict[str, float]]:
    """CPU seconds of this process in each of `PARTS`, of all engines while the block runs."""
    clock = _PartClock()
    with ExitStack() as patches:
        for part, calls in _CALLS_BY_PART.items():
            for owner, name in calls:
                patches.enter_context(patch.object(owner, name, clock.around(part, getattr(owner, name))))
        yield clock.seconds
