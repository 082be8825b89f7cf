"""Jobs as squeue shows them, in words of our own."""

import json
from typing import Any

from corral.launcher.slurm.verdict import Job, jobs_of_squeue


def job_of(
    job_id: str = "7",
    state: str = "PENDING",
    *,
    tag: dict[str, Any] | None = None,
    reason: str = "None",
    start: str = "N/A",
    nodes: str = "",
    name: str = "exp.t",
    comment: str = "",
    display_id: str = "",
) -> Job:
    """A line of squeue, read; `tag` goes into the comment."""
    comment = comment if tag is None else json.dumps(tag)
    (job,) = jobs_of_squeue(f"{job_id}|{display_id}|{state}|{reason}|{start}||1|{nodes}|{name}|{comment}")
    return job
