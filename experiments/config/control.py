"""Length of a trial, and the schedule of its commits, exports and evaluations."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from corral.experiments.config.base import FrozenConfig
from corral.scheduling.cadence import Frequency, parse_frequency
from corral.scheduling.errors import RuleError


def _frequency(value: Any) -> Any:
    if isinstance(value, str):
        parse_frequency(value)
    elif type(value) in (int, float):
        raise RuleError(f"must have a unit, got {value}", f"write {value} steps, {value} epochs or {value} minutes")
    return value


KEPT_COMMITS = 2
"""Commits kept on disk; if the newest is damaged, training goes on from the one before."""

Every = Annotated[str, BeforeValidator(_frequency)]
"""How often: 20 steps, 1 epoch, 10 minutes, or several of these with `or` between."""


class TrainControl(FrozenConfig):
    """Length of the run and frequencies of its durable writes."""

    total_train_epochs: int = Field(default=1, ge=1)
    """Passes over the dataset; in each, every prompt is trained on exactly once."""
    max_steps: int | None = Field(default=None, ge=1)
    """Train steps after which the run ends even if data is left; None trains on all of it."""
    commit_every: Every = "1 step"
    """From one commit (weights, optimizer, RNG, ledger) to the next, and so what a failure may cost: 50 steps, 1 epoch,
    10 minutes, or `50 steps or 10 minutes`, whichever is due first. A number of minutes, hours or seconds counts from
    the last commit or from a restart, and the commit follows the step in which they have passed."""
    commit_beside_training: bool = True
    """Whether a commit is copied to host memory and written while the next steps run. It takes as much memory as each
    rank's shard of weights and optimizer; false takes none, and the next step waits until all is on disk."""
    save_every: Every | None = None
    """From one permanent copy of the weights (exports/) to the next, as in `commit_every`; None keeps those at the end
    only."""

    @property
    def commit_frequency(self) -> Frequency:
        """When the state of training is made to last."""
        return parse_frequency(self.commit_every)

    @property
    def save_frequency(self) -> Frequency:
        """When a copy of the weights is made that stays."""
        return Frequency() if self.save_every is None else parse_frequency(self.save_every)

    def total_steps(self, *, num_rows: int, batch_size: int) -> int:
        """Train steps of the whole run; the last one may hold fewer prompts than the others."""
        steps = -(-num_rows * self.total_train_epochs // batch_size)
        return steps if self.max_steps is None else min(steps, self.max_steps)
