"""What a shell offers after TAB: names of trials, and of their workers. Reads folder names, imports nothing heavy.

rl-status --install-completion      once; then  rl-logs gsm8k<TAB> gen<TAB>
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import typer

from corral.scheduling.worker_information import planned_workers

_EXTRA_LOGS = ("redis", "supervisor")


def complete_trial(ctx: typer.Context, incomplete: str) -> list[str]:
    """Trial names that are unique, and experiment/trial for all, that begin like this."""
    paths = list(_trial_paths(_fileroot(ctx)))
    names = [path.name for path in paths]
    candidates = [name for name in names if names.count(name) == 1]
    candidates += [f"{path.parent.name}/{path.name}" for path in paths]
    return sorted(name for name in candidates if name.startswith(incomplete))


def complete_worker(ctx: typer.Context, incomplete: str) -> list[str]:
    """Kinds and workers of the trial that was named before."""
    workers = _workers(ctx)
    kinds = dict.fromkeys(worker.partition("/")[0] for worker in workers)
    return [name for name in (*kinds, *workers, *_EXTRA_LOGS) if name.startswith(incomplete)]


def complete_group(ctx: typer.Context, incomplete: str) -> list[str]:
    """Kinds of worker that rl-stop may keep down."""
    return [kind for kind in ("generation_server", "rollout_worker") if kind.startswith(incomplete)]


def _fileroot(ctx: typer.Context) -> Path:
    given = ctx.params.get("fileroot")
    configured = str(given) if given else os.environ.get("CORRAL_FILEROOT")
    return Path(configured).expanduser() if configured else Path.home() / "corral"


def _trial_paths(fileroot: Path) -> Iterator[Path]:
    return (plan.parent for plan in fileroot.glob("*/*/plan.json"))


def _workers(ctx: typer.Context) -> list[str]:
    wanted = str(ctx.params.get("trial") or "")
    for path in (Path(wanted), *_trial_paths(_fileroot(ctx))):
        if wanted in (path.name, f"{path.parent.name}/{path.name}", str(path)):
            try:
                plan = json.loads((path / "plan.json").read_bytes())
                return planned_workers(plan["workers"])
            except (OSError, ValueError, KeyError, TypeError):
                continue
    return []
