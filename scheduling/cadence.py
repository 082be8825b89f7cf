"""When something that is repeated is due: a commit, an export, a look at held-out rows.

    Frequency: every 20 steps, every pass, every 600 s ──┐
                                                         ├──► Cadence.is_due(progress)    whichever comes first
    TrainingProgress: step 40, pass 2, 13:05:10 ─────────┘          note(progress)        it was done then

Steps and passes are counted from the beginning of the run, so that a restart changes nothing in them. Seconds are
counted from the last time, or from the start of the process: no file keeps when something was last done.
"""

import re
from dataclasses import dataclass

from pydantic import Field

from corral.scheduling.errors import RuleError
from corral.scheduling.frozen import FrozenModel


class Frequency(FrozenModel):
    """How often something is repeated; None does not count, and without any of them it never is.

    Example:
        Frequency(steps=20, seconds=600.0)      # after steps 20, 40, ... and whenever ten minutes have passed
    """

    steps: int | None = Field(default=None, ge=1)
    """Train steps."""
    passes: int | None = Field(default=None, ge=1)
    """Passes over the dataset."""
    seconds: float | None = Field(default=None, gt=0.0)

    @property
    def is_never(self) -> bool:
        return self.steps is None and self.passes is None and self.seconds is None

    def __str__(self) -> str:
        """ "every 20 steps or 600 s" """
        if self.steps == 1:
            return "after every step"
        counted = [(self.steps, "step"), (self.passes, "epoch")]
        parts = [unit if count == 1 else f"{count} {unit}s" for count, unit in counted if count is not None]
        parts += [] if self.seconds is None else [f"{self.seconds:g} s"]
        return f"every {' or '.join(parts)}" if parts else "never"


_UNITS = {"step": 0, "epoch": 0, "second": 1, "minute": 60, "hour": 3600}
"""Seconds of each unit; those without are counted."""


def parse_frequency(text: str) -> Frequency:
    """A frequency as files say it: `20 steps`, `1 epoch`, `10 minutes`, or several of these with `or` between.

    Raises:
        ValueError: if it is not of this form, or counts a kind of unit twice.
    """
    found: dict[str, float] = {}
    for part in text.split(" or "):
        match = re.fullmatch(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*([a-z]+?)s?\s*", part, re.ASCII)
        number, unit = (float(match[1]), match[2]) if match else (0.0, "")
        if unit not in _UNITS or number <= 0.0 or (not _UNITS[unit] and number != int(number)):
            raise RuleError(
                "must be a number of steps, epochs, seconds, minutes or hours, such as 20 steps or 10 minutes, got "
                f"{text!r}",
                "write the unit behind a number above 0, and a whole number of steps or epochs",
            )
        kind = {"step": "steps", "epoch": "passes"}.get(unit, "seconds")
        if kind in found:
            raise RuleError(f"{text!r} says twice after how many {unit}s", "keep one of them")
        found[kind] = number * _UNITS[unit] if _UNITS[unit] else int(number)
    return Frequency.model_validate(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingProgress:
    """How far training is."""

    step: int
    passes: int
    """Whole passes over the dataset that are behind it."""
    time_s: float
    """Of a monotonic clock."""


BEFORE_THE_RUN = -1
"""The step and pass of a moment before which nothing was done: at step 0 everything is due that counts them."""


class Cadence:
    """Repeats one thing.

    Example:
        cadence = Cadence(Frequency(steps=2), last=TrainingProgress(step=0, passes=0, time_s=0.0))
        cadence.is_due(TrainingProgress(step=1, passes=0, time_s=9.0))       # False
        cadence.is_due(TrainingProgress(step=2, passes=0, time_s=18.0))      # True, until `note` says that it was done
    """

    def __init__(self, every: Frequency, *, last: TrainingProgress) -> None:
        self._every = every
        self.last = last
        """When it was last done."""

    def is_due(self, now: TrainingProgress) -> bool:
        """Whether it is time again; at most once for each step."""
        last, every = self.last, self._every
        if now.step == last.step:
            return False
        return (
            _has_passed(every.steps, last.step, now.step)
            or _has_passed(every.passes, last.passes, now.passes)
            or (every.seconds is not None and now.time_s - last.time_s >= every.seconds)
        )

    def note(self, now: TrainingProgress) -> None:
        """It was done at this moment."""
        self.last = now


def _has_passed(every: int | None, last: int, now: int) -> bool:
    """Whether a multiple of `every` lies after `last` and not after `now`."""
    return every is not None and now // every > last // every
