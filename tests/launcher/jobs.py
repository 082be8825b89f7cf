"""Jobs as squeue shows them, in words of our own."""

import json
from typing import Any

from corral.launcher.cluster.jobs import Job
from corral.launcher.slurm.parse import QueuedJob
from corral.launcher.slurm.verdict import in_our_words


def queued(job_id: str = "7", state: str = "PENDING", *, tag: dict[str, Any] | None = None, **fields: str) -> QueuedJob:
    """A line of squeue; `tag` goes into the comment."""
    plain = {"reason": "None", "start": "N/A", "num_nodes": "1", "nodes": "", "name": "exp.t", "comment": ""}
    comment = {"comment": json.dumps(tag)} if tag is not None else {}
    return QueuedJob(job_id=job_id, state=state, **(plain | fields | comment))


def job_of(job_id: str = "7", state: str = "PENDING", *, tag: dict[str, Any] | None = None, **fields: str) -> Job:
    """The same in words of our own."""
    return in_our_words(queued(job_id, state, tag=tag, **fields))
