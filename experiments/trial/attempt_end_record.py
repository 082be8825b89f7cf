"""How attempts ended, and what was learnt under them, as files in control/: later starts of the trial decide on these.

control/end-0.json          how attempt 0 ended, and what follows; whoever ends it writes it, the last word stays
control/failed-nodes/n3     an empty file for each node that failed under the trial

The journal tells the same to people; it may lack a line after a crash or on a full disk, and nothing follows from it.
"""

import contextlib
from enum import StrEnum
from typing import Literal

import msgspec

from corral.experiments.trial.directory import TrialDirectory, atomic_write, list_names, mark, read_record


class EndState(StrEnum):
    """How an attempt ends, as rl-status says it."""

    COMPLETE = "COMPLETE"
    STOPPED = "STOPPED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    TIMED_OUT = "TIMED_OUT"
    PREEMPTED = "PREEMPTED"
    NODE_FAILED = "NODE_FAILED"
    REQUEUED = "REQUEUED"
    UNKNOWN = "UNKNOWN"

    @property
    def may_go_on(self) -> bool:
        """Whether a next attempt may follow without a human; if nothing is known, SLURM's requeue says so."""
        return self in _GO_ON


_GO_ON = (EndState.TIMED_OUT, EndState.PREEMPTED, EndState.NODE_FAILED, EndState.REQUEUED, EndState.UNKNOWN)


Follows = Literal["", "requeue", "successor"]
"""What goes on after an attempt: SLURM starts its job again, another job does, or, with "", nothing without a human."""


class AttemptEndRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The end of one attempt."""

    attempt: int
    state: str
    """Word of rl-status."""
    cause: str
    """For people."""
    then: Follows
    failed: str = ""
    """What failed, if the state is FAILED: a worker as kind/index, redis, or supervisor."""

    @property
    def is_final(self) -> bool:
        """Whether it is the end of the trial, too."""
        return not self.then


def write_end(directory: TrialDirectory, end: AttemptEndRecord) -> None:
    """Records how an attempt ended; a later word replaces an earlier one."""
    atomic_write(directory.control_path / f"end-{end.attempt}.json", msgspec.json.encode(end))


def read_end(directory: TrialDirectory, attempt: int) -> AttemptEndRecord | None:
    """How an attempt ended; None if it goes on, or nobody could say so, or what was said cannot be read."""
    with contextlib.suppress(ValueError):
        return read_record(directory.control_path / f"end-{attempt}.json", AttemptEndRecord, way_out="")
    return None


def add_failed_node(directory: TrialDirectory, node: str) -> None:
    """Notes a node that has failed under the trial."""
    mark(directory.failed_nodes_path, node)


def failed_nodes(directory: TrialDirectory) -> list[str]:
    """Nodes that have failed under a trial so far."""
    return list_names(directory.failed_nodes_path)
