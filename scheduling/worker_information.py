"""The kinds of workers, and what one of them is called."""

import re
from collections.abc import Mapping
from typing import Literal, get_args

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
