"""Chains of waiting workers, with times: the reports of workers lead to the worker that all others wait for.

    master_worker/0 in `wait for a batch` 40s, 3 more of 8 trajectories
      -> rollout_worker/1 in `generate` 38s
        -> generation_server/0, silent 37s                                                    the root

The root is silent, is not there, works, or waits for nobody. Pure; who waits for whom is a list of workers in each
record (experiments/trial/worker_record.py), which workers/lifecycle/presence.py publishes, and its words are only
shown, by text.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from corral.launcher.status.evidence import WorkerRow
from corral.launcher.terminal import format_duration
from corral.launcher.trial.words import ABSENT, SPEAKING, WorkerState

# The first that fits is the one that holds the others up.
_CULPRIT_ORDER = (WorkerState.SILENT, WorkerState.MISSING, *ABSENT, WorkerState.RESTARTING, WorkerState.STARTING)


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitStep:
    """One worker of a chain, and what it does."""

    worker: str
    state: WorkerState
    phase: str
    since_s: float | None
    waiting_for: str
    """What it waits for besides workers, in its own words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitChain:
    """From a worker that waits to the root."""

    steps: tuple[WaitStep, ...]
    others: tuple[str, ...] = ()
    """Workers that wait in the same way as the first one."""
    is_circle: bool = False
    """Whether the last one waits for one before it: nobody goes on."""


def find_waits(rows: Sequence[WorkerRow]) -> list[WaitChain]:
    """The chain of every worker that waits; those that hang on the same next worker in the same phase share one."""
    chains: dict[tuple[str, ...], WaitChain] = {}
    circles: set[frozenset[str]] = set()
    row_by_worker = {row.worker: row for row in rows}
    for row in rows:
        if row.state not in SPEAKING or not row.waits_for:
            continue
        steps, is_circle = _follow(row, row_by_worker)
        workers = frozenset(step.worker for step in steps)
        if is_circle and workers in circles:
            continue  # the same circle, entered elsewhere
        circles |= {workers} if is_circle else set()
        key = (row.kind, row.phase, *(step.worker for step in steps[1:]))
        if key in chains:
            before = chains[key]
            chains[key] = WaitChain(steps=before.steps, others=(*before.others, row.worker), is_circle=before.is_circle)
        else:
            chains[key] = WaitChain(steps=tuple(steps), is_circle=is_circle)
    return _without_parts(list(chains.values()))


def render_chain(chain: WaitChain) -> str:
    """`master_worker/0: train step 12s -> model_worker/1: silent 11s`."""
    first, *rest = (_render_step(step) for step in chain.steps)
    if chain.others:
        first = first.replace(":", f" and {len(chain.others)} more:", 1)
    end = "  (they wait for each other)" if chain.is_circle else ""
    return " -> ".join([first, *rest]) + end


def describe_wait(row: WorkerRow) -> str:
    """What a worker waits for, in a few words: `3 more of 8 trajectories (rollout_worker x2)`; "" if it works."""
    indices_by_kind: dict[str, list[str]] = {}
    for worker in row.waits_for:
        kind, _, index = worker.partition("/")
        indices_by_kind.setdefault(kind, []).append(index)
    workers = ", ".join(
        f"{kind}/{indices[0]}" if len(indices) == 1 else f"{kind} x{len(indices)}"
        for kind, indices in indices_by_kind.items()
    )
    return f"{row.waiting_for} ({workers})" if row.waiting_for and workers else row.waiting_for or workers


def _follow(start: WorkerRow, row_by_worker: Mapping[str, WorkerRow]) -> tuple[list[WaitStep], bool]:
    chain = [start]
    while True:
        targets = [row for row in _next_rows(chain[-1], row_by_worker) if row.worker != chain[-1].worker]
        if not targets:
            return [_step(row) for row in chain], False
        fresh = [row for row in targets if row not in chain]
        if not fresh:
            return [_step(row) for row in chain], True
        chain.append(min(fresh, key=_order))


def _next_rows(row: WorkerRow, row_by_worker: Mapping[str, WorkerRow]) -> list[WorkerRow]:
    if row.state not in SPEAKING:
        return []
    if row.waits_for:
        return _without_away([row_by_worker[name] for name in row.waits_for if name in row_by_worker])
    helpers = _without_away([row_by_worker[name] for name in row.works_with if name in row_by_worker])
    return [other for other in helpers if other.state in _CULPRIT_ORDER]


def _without_away(rows: Sequence[WorkerRow]) -> list[WorkerRow]:
    """Nobody waits for those that are away while there are others."""
    return [row for row in rows if row.state not in ABSENT] or list(rows)


def _order(row: WorkerRow) -> tuple[int, int, float]:
    """The one that holds others up comes first: who is not there, then who works, then who waits, then the idle."""
    if row.state in _CULPRIT_ORDER:
        return 0, _CULPRIT_ORDER.index(row.state), -(row.last_seen_s or 0.0)
    rank = 2 if row.waits_for else 3 if row.waiting_for else 1
    return rank, 0, -(row.phase_s or 0.0)


def _step(row: WorkerRow) -> WaitStep:
    is_silent = row.state not in SPEAKING
    return WaitStep(
        worker=row.worker,
        state=row.state,
        phase=row.phase,
        since_s=row.last_seen_s if is_silent else row.phase_s,
        waiting_for=row.waiting_for,
    )


def _render_step(step: WaitStep) -> str:
    since = f" {format_duration(step.since_s)}" if step.since_s is not None else ""
    if step.state not in SPEAKING:
        return f"{step.worker}: {step.state.lower()}{since}"
    text = f"{step.worker}: {step.phase or step.state.lower()}{since}"
    return f"{text} ({step.waiting_for})" if step.waiting_for else text


def _without_parts(chains: list[WaitChain]) -> list[WaitChain]:
    """Without the chains that are the end of another one."""
    ends = [[step.worker for step in chain.steps] for chain in chains]
    return [
        chain
        for chain, workers in zip(chains, ends, strict=True)
        if chain.others or not any(len(other) > len(workers) and other[-len(workers) :] == workers for other in ends)
    ]
