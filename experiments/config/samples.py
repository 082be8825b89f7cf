"""What is kept for people to read of that which is trained on."""

from pydantic import Field

from corral.experiments.config.base import FrozenConfig
from corral.scheduling.scheduling import MemoryMb


class SamplesConfig(FrozenConfig):
    """Answers that were trained on, kept for reading with `rl-samples`."""

    prompts_per_step: int | None = Field(default=8, ge=0)
    """Prompts of each train step that are kept with all their answers, at least one for each data-parallel rank; 0
    keeps none, None all."""
    max_size: MemoryMb = Field(default=512, ge=1)
    """Space for them in the trial's folder, in MB or with a suffix M, G or T; beyond it the oldest steps go."""
