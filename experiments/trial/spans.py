"""timeline/: when each worker did what, in lines of JSON that its process appends and rl-trace reads.

    timeline/rollout_worker-0.jsonl      {"type":"clock","worker":"rollout_worker/0","attempt":0,"incarnation":"5f2c",
    timeline/rollout_worker-0.1.jsonl     "offset_s":1700000000.25,"error_s":0.0002}
    (the older half)                     {"type":"span","lane":"rewards","name":"reward","start_s":8.5,"end_s":8.75}

A worker writes times of its own monotonic clock. The clock line before them says whose they are, and what leads from
there to the one clock of the trial, that of its name service, and how wrong that may be.
"""

from pathlib import Path

import msgspec

PHASES = "phases"
"""The lane in which each worker always does exactly one thing."""
STEPS = "steps"
"""The master's lane of train steps: each begins where the one before ended."""


class Clock(msgspec.Struct, frozen=True, kw_only=True, tag="clock"):
    """Whose the following spans are, and how their times are those of the trial."""

    worker: str
    attempt: int
    incarnation: str
    offset_s: float
    """To be added to the times that follow."""
    error_s: float
    """How far the result may be from the trial's clock: half of what it took to ask for it."""


class Span(msgspec.Struct, frozen=True, kw_only=True, tag="span", omit_defaults=True):
    """Something that a worker did, or waited for."""

    lane: str
    """What is of one lane is of one kind; it may overlap, but for `PHASES`."""
    name: str
    start_s: float
    end_s: float
    waits_for: tuple[str, ...] = ()
    """The workers (kind/index) without which it could not go on."""
    about: str = ""
    """A prompt, a version, what is waited for in words."""
    tokens: int = 0
    """That were made in it."""
    among_ranks_s: float = 0.0
    """Of a training rank: how much of it was spent in calls that need the other ranks."""
    step: int | None = None
    """The train step in which it began; of `STEPS`, the step itself."""
    worker: str = ""
    """With the next two filled in by who reads."""
    attempt: int = 0
    incarnation: str = ""

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


def spans_path(folder: Path, worker: str, *, is_old: bool = False) -> Path:
    """Where a worker (kind/index) keeps its spans; the older half of them, where they became too many."""
    return folder / f"{worker.replace('/', '-')}{'.1' if is_old else ''}.jsonl"
