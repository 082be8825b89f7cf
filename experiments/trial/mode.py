"""Where a trial runs, asked in one place: everything else asks whether it has jobs."""

from typing import Literal

Mode = Literal["local", "slurm"]


def has_jobs(mode: str) -> bool:
    """Whether a trial's processes run in jobs of a cluster; else they are this machine's, or nobody knows ("")."""
    return mode not in ("", "local")
