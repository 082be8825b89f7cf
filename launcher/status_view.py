"""Status as text: one table of trials, or one trial with a row per worker; `-o json` gives the same as data."""

import dataclasses
import json
from collections.abc import Sequence

from corral.launcher.status import TrialStatus, WorkerRow

_COLOUR_BY_STATE = {
    "RUNNING": "green",
    "UP": "green",
    "COMPLETE": "green",
    "STARTING": "cyan",
    "QUEUED": "cyan",
    "STOPPING": "cyan",
    "DEGRADED": "yellow",
    "RESTARTING": "yellow",
    "SILENT": "yellow",
    "FAILED": "red",
    "LOST": "red",
    "UNRESPONSIVE": "red",
    "BLOCKED": "red",
    "MISSING": "red",
}
_ANSI = {"green": "\x1b[32m", "cyan": "\x1b[36m", "yellow": "\x1b[33m", "red": "\x1b[31m"}
_RESET = "\x1b[0m"


def render_trials(statuses: Sequence[TrialStatus], *, colour: bool = False) -> str:
    """One row per trial."""
    if not statuses:
        return "no trials here; start one with rl-submit EXPERIMENT.yaml"
    names = [status.trial for status in statuses]
    header = ("TRIAL", "STATE", "STEP", "AGE", "NODES", "JOB", "ATTEMPT", "NOTE")
    rows = [
        (
            status.trial if names.count(status.trial) == 1 else f"{status.experiment}/{status.trial}",
            status.state,
            _steps(status),
            format_duration(status.age_s),
            _or_dash(status.nodes),
            status.job_id or ("local" if status.mode == "local" else "-"),
            _or_dash(status.attempt),
            status.note,
        )
        for status in statuses
    ]
    return render_table(header, rows, colour=colour)


def render_trial(status: TrialStatus, *, colour: bool = False) -> str:
    """One trial: a headline, then a row per worker."""
    state = _coloured(status.state, colour=colour)
    parts = [f"{status.experiment}/{status.trial}", state, f"step {_steps(status)}"]
    if status.attempt is not None:
        parts.append(f"attempt {status.attempt}")
    if status.job_id:
        parts.append(f"job {status.job_id}")
    if status.age_s is not None:
        parts.append(f"age {format_duration(status.age_s)}")
    lines = ["  ".join(parts)]
    if status.note:
        lines.append(f"  {status.note}")
    lines += ["", render_workers(status.workers, colour=colour), "", f"directory  {status.directory}"]
    return "\n".join(lines)


def render_workers(rows: Sequence[WorkerRow], *, colour: bool = False) -> str:
    """One row per worker."""
    header = ("WORKER", "STATE", "PID", "NODE", "PHASE", "VERSION", "RESTARTS", "LAST SEEN", "WAITING FOR")
    texts = [
        (
            row.worker,
            row.state,
            _or_dash(row.pid),
            row.node or "-",
            f"{row.phase} {format_duration(row.phase_s)}" if row.phase else "-",
            row.version or "-",
            str(row.restarts),
            format_duration(row.last_seen_s),
            row.waiting_for or "-",
        )
        for row in rows
    ]
    return render_table(header, texts, colour=colour)


def render_json(statuses: Sequence[TrialStatus]) -> str:
    """Everything, for programs."""
    return json.dumps([dataclasses.asdict(status) for status in statuses], indent=2)


def render_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, colour: bool) -> str:
    """Columns as wide as their widest cell; the second one is a state, and carries its colour."""
    cells = [tuple(_printable(cell) for cell in row) for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = []
    for row in cells:
        padded = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        padded[1] = _coloured(padded[1], colour=colour)
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def format_duration(seconds: float | None) -> str:
    """12s, 5m10s, 3h12m, 2d4h."""
    if seconds is None:
        return "-"
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600}h"


def _steps(status: TrialStatus) -> str:
    if status.step is None:
        return "-"
    return f"{status.step}/{status.total_steps}" if status.total_steps else str(status.step)


def _or_dash(value: object) -> str:
    return "-" if value is None else str(value)


def _coloured(text: str, *, colour: bool) -> str:
    name = _COLOUR_BY_STATE.get(text.strip())
    return f"{_ANSI[name]}{text}{_RESET}" if colour and name else text


def _printable(text: str) -> str:
    # Causes quote what programs printed; a terminal must not obey it.
    return "".join(character if character.isprintable() else " " for character in text)
