"""How long a trial trains, what it writes when, and what it keeps for people to read."""

from typing import Self

from pydantic import Field, model_validator

from corral.experiments.config.base import FrozenConfig
from corral.scheduling.cadence import Frequency
from corral.scheduling.scheduling import MemoryMb


class TrainControl(FrozenConfig):
    """Length of the run and frequencies of its durable writes. Of several frequencies of one thing, whichever is due
    first counts. Seconds count from the last time, or from a restart: nothing keeps them beyond it."""

    total_train_epochs: int = Field(default=1, ge=1)
    """Passes over the dataset; in each, every prompt is trained on exactly once."""
    max_steps: int | None = Field(default=None, ge=1)
    """Train steps after which the run ends even if data is left; None trains on all of it."""
    commit_every_steps: int | None = Field(default=1, ge=1)
    """Train steps from one commit (weights, optimizer, RNG, ledger) to the next; what a failure may cost."""
    commit_every_epochs: int | None = Field(default=None, ge=1)
    """Passes over the dataset from one commit to the next; set commit_every_steps: null with it."""
    commit_every_seconds: float | None = Field(default=None, gt=0.0)
    """Seconds from one commit to the next, which follows the step in which they have passed."""
    commit_beside_training: bool = True
    """Whether a commit is copied to host memory and written while the next steps run. It takes as much memory as each
    rank's share of weights and optimizer; false takes none, and the next step waits until all is on disk."""
    save_every_steps: int | None = Field(default=None, ge=1)
    """Train steps from one permanent copy of the weights (exports/) to the next; None keeps only the last one."""
    save_every_epochs: int | None = Field(default=None, ge=1)
    """Passes over the dataset from one permanent copy to the next."""
    save_every_seconds: float | None = Field(default=None, gt=0.0)
    """Seconds from one permanent copy to the next."""
    max_nonfinite_steps: int = Field(default=3, ge=1)
    """Train steps in a row whose loss or gradient is not finite, after which training goes back to the last commit.
    Where as many follow again without a commit in between, the trial fails."""
    keep_commits: int = Field(default=2, ge=2, le=64)
    """Commits kept on disk; whoever reads the trial log remembers no more than the newest 64."""

    @model_validator(mode="after")
    def _a_failure_costs_not_everything(self) -> Self:
        if self.commit_frequency.is_never:
            raise ValueError(
                "commit_every_steps is null, and so a failure would cost the whole run; give it, "
                "commit_every_epochs or commit_every_seconds"
            )
        return self

    @property
    def commit_frequency(self) -> Frequency:
        """When the state of training is made to last."""
        return Frequency(
            steps=self.commit_every_steps, passes=self.commit_every_epochs, seconds=self.commit_every_seconds
        )

    @property
    def save_frequency(self) -> Frequency:
        """When a copy of the weights is made that stays."""
        return Frequency(steps=self.save_every_steps, passes=self.save_every_epochs, seconds=self.save_every_seconds)

    def total_steps(self, *, num_rows: int, batch_size: int) -> int:
        """Train steps of the whole run; the last one may hold fewer prompts than the others."""
        steps = -(-num_rows * self.total_train_epochs // batch_size)
        return steps if self.max_steps is None else min(steps, self.max_steps)


class SamplesConfig(FrozenConfig):
    """Answers that were trained on, kept for reading with `rl-samples`."""

    prompts_per_step: int | None = Field(default=8, ge=0)
    """Prompts of each train step that are kept with all their answers, at least one for each data-parallel rank; 0
    keeps none, None all."""
    max_size: MemoryMb = Field(default=512, ge=1)
    """Space for them in the trial's folder, in MB or with a suffix M, G or T; beyond it the oldest steps go."""


class TimelineConfig(FrozenConfig):
    """When each worker did what, and for whom it waited, kept for `rl-trace`."""

    max_size: MemoryMb = Field(default=16, ge=0)
    """Space for each worker in the trial's folder, in MB or with a suffix M, G or T; beyond it the older half goes. 0 keeps nothing."""  # noqa: E501
