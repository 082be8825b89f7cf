"""The worker graph's vocabulary: the kinds of workers, what one of them is called, and how a trial stands."""

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Literal, get_args

from pydantic import Field, model_validator

from corral.scheduling.frozen import FrozenModel

WorkerKind = Literal["master_worker", "model_worker", "generation_server", "gserver_manager", "rollout_worker"]
WORKER_KINDS: tuple[WorkerKind, ...] = get_args(WorkerKind)

_WORKER_ID = re.compile(r"(?P<kind>[a-z_]+)/(?P<index>0|[1-9][0-9]*)")
_KIND_BY_NAME: Mapping[str, WorkerKind] = {kind: kind for kind in WORKER_KINDS}


def worker_id(kind: WorkerKind, index: int) -> str:
    """The name by which logs, requests and errors call a worker: `rollout_worker/3`."""
    return f"{kind}/{index}"


def parse_worker_id(text: str) -> tuple[WorkerKind, int]:
    """The kind and index of `rollout_worker/3`."""
    match = _WORKER_ID.fullmatch(text)
    kind = _KIND_BY_NAME.get(match["kind"]) if match else None
    if match is None or kind is None:
        raise ValueError(f"worker id {text!r} must be KIND/INDEX with KIND one of {', '.join(WORKER_KINDS)}")
    return kind, int(match["index"])


class WorkerInformation(FrozenModel):
    """Who a worker is, and which names of the name service tie its life to that of others."""

    experiment: str
    trial: str
    kind: WorkerKind
    index: int = Field(ge=0)
    """0 .. count - 1 within the kind."""
    count: int = Field(ge=1)
    """How many workers of this kind the trial has."""
    host_key: str | None = None
    """Name that this worker keeps alive as long as it lives, so that others can watch it; None if nobody does."""
    watch_keys: tuple[str, ...] = ()
    """Names whose disappearance, of all of them, ends this worker: those who need it are gone."""

    @model_validator(mode="after")
    def _index_is_below_count(self) -> "WorkerInformation":
        if self.index >= self.count:
            raise ValueError(f"worker index {self.index} of kind {self.kind} must be below its count {self.count}")
        return self

    @property
    def worker_id(self) -> str:
        return worker_id(self.kind, self.index)


class ExpStatus(StrEnum):
    """How a trial stands, as its master publishes it.

    UNKNOWN ──► RUNNING ──► COMPLETE    all prompts trained
                   ├──────► ABORTED     an error that no restart may mend
                   └──────► STOPPED     on request; may be resumed
    """

    UNKNOWN = "UNKNOWN"
    RUNNING = "RUNNING"
    COMPLETE = "COMPLETE"
    ABORTED = "ABORTED"
    STOPPED = "STOPPED"

    @property
    def is_final(self) -> bool:
        """Whether workers may exit because of it."""
        return self in (ExpStatus.COMPLETE, ExpStatus.ABORTED, ExpStatus.STOPPED)
