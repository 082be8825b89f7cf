"""The kinds of workers and layouts, what a worker is called, and numbers of them as text: plain data, for commands that
have to answer at once.

[{"kind": "model_worker", "numbers": "0-2,5", ...}, ...]  ──►  model_worker/0, model_worker/1, ...
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

WorkerKind = Literal["master_worker", "model_worker", "generation_server", "gserver_manager", "rollout_worker"]
WORKER_KINDS: tuple[WorkerKind, ...] = get_args(WorkerKind)
LayoutKind = Literal["packed", "hetjob", "jobs"]
"""Which jobs a trial asks for, and what they are to each other.

packed   [head]                            one job
hetjob   [head] [component] ...            one heterogeneous job
jobs     [head] [group] [group] ...        a job each
any      ... + [elastic] [elastic] ...     and a job for each elastic worker
"""

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


NUMBERS = "numbers"
"""Of a specification in plan.json: the workers that have it, as in 0-2,5."""


def fold_numbers(numbers: Iterable[int]) -> str:
    """Numbers of workers, in the order given: (0, 1, 2, 5) is "0-2,5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def unfold_numbers(text: str) -> list[int]:
    """What `fold_numbers` wrote, read again: "0-2,5" is [0, 1, 2, 5]."""
    runs = [[int(number) for number in run.split("-")] for run in text.split(",") if run]
    return [number for run in runs for number in range(run[0], run[-1] + 1)]


def planned_workers(specifications: Iterable[Mapping[str, Any]]) -> list[str]:
    """Ids of all workers of a plan, kind by kind; of one from before specifications were shared, too."""
    numbers_by_kind: dict[str, list[int]] = {}
    for one in specifications:
        numbers = unfold_numbers(one[NUMBERS]) if NUMBERS in one else [int(one["index"])]
        numbers_by_kind.setdefault(str(one["kind"]), []).extend(numbers)
    return [f"{kind}/{number}" for kind, numbers in numbers_by_kind.items() for number in sorted(numbers)]
