"""What a shell offers after TAB: names of trials, and of their workers. Reads folder names, imports nothing heavy.

rl-status --install-completion      once; then  rl-logs gsm8k<TAB> gen<TAB>
"""

import os
from pathlib import Path

import typer

from corral.experiments.exit_codes import UserError

_EXTRA_LOGS = ("redis", "supervisor")


def complete_trial(ctx: typer.Context, incomplete: str) -> list[str]:
    """Trial names that are unique, and experiment/trial for all, that begin like this."""
    paths = [plan.parent for plan in _fileroot(ctx).glob("*/*/plan.json")]
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
    from corral.launcher.trial.find import default_fileroot

    given = ctx.params.get("fileroot")
    return Path(os.path.expanduser(str(given))) if given else default_fileroot()


def _workers(ctx: typer.Context) -> tuple[str, ...]:
    from corral.launcher.trial.find import find_trial

    try:
        return find_trial(str(ctx.params.get("trial") or ""), _fileroot(ctx)).workers
    except UserError:
        return ()
