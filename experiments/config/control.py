"""How long a trial trains, and what it writes when."""

from pydantic import Field

from corral.experiments.config.base import FrozenConfig


class TrainControl(FrozenConfig):
    """Length of the run and frequencies of its durable writes."""

    total_train_epochs: int = Field(default=1, ge=1)
    """Passes over the dataset; in each, every prompt is trained on exactly once."""
    max_steps: int | None = Field(default=None, ge=1)
    """Train steps after which the run ends even if data is left; None trains on all of it."""
    commit_every_steps: int = Field(default=1, ge=1)
    """Train steps from one commit (weights, optimizer, RNG, ledger) to the next; what a failure may cost."""
    save_every_steps: int | None = Field(default=None, ge=1)
    """Train steps from one permanent copy of the weights (exports/) to the next; None keeps only the last one."""
    max_nonfinite_steps: int = Field(default=3, ge=1)
    """Train steps in a row whose loss or gradient is not finite, after which training goes back to the last commit.
    Where as many follow again without a commit in between, the trial fails."""
    keep_commits: int = Field(default=2, ge=2)
    """Commits kept on disk."""

    def total_steps(self, *, num_rows: int, batch_size: int) -> int:
        """Train steps of the whole run; the last one may hold fewer prompts than the others."""
        steps = -(-num_rows * self.total_train_epochs // batch_size)
        return steps if self.max_steps is None else min(steps, self.max_steps)
