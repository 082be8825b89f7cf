"""What workers keep of when they did what."""

from pydantic import Field

from corral.experiments.config.base import FrozenConfig
from corral.scheduling.scheduling import MemoryMb


class TimelineConfig(FrozenConfig):
    """When each worker did what, and for whom it waited, kept for `rl-trace`."""

    max_size: MemoryMb = Field(default=16, ge=0)
    """Space for each worker in the trial's folder, in MB or with a suffix M, G or T; beyond it the older half goes. 0 keeps nothing."""  # noqa: E501
