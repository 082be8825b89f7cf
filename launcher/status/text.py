"""Status as text: a table of trials, one trial by groups, or by workers; `-o json` gives all of it as data."""

import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from corral.experiments.config.algorithm import LEAST_PROMPTS, LEAST_TOKENS
from corral.experiments.trial.mode import has_jobs
from corral.launcher.status.evidence import GroupRow, WorkerRow
from corral.launcher.status.judge import TrialStatus
from corral.launcher.status.waits import describe_wait, render_chain
from corral.launcher.terminal import first_few, fold, format_duration, printable
from corral.launcher.trial.metrics import GAP, is_number
from corral.launcher.trial.view import Finding, PastAttempt
from corral.launcher.trial.words import FINAL_STATES, TrialState, WorkerState

_COLOUR_BY_STATE: dict[str, str] = {
    **dict.fromkeys((TrialState.RUNNING, TrialState.COMPLETE, WorkerState.UP), "green"),
    **dict.fromkeys(
        (TrialState.STARTING, TrialState.QUEUED, TrialState.REQUEUED, TrialState.STOPPING, WorkerState.AWAY), "cyan"
    ),
    **dict.fromkeys((TrialState.DEGRADED, TrialState.SUSPENDED, TrialState.HELD), "yellow"),
    **dict.fromkeys((WorkerState.RESTARTING, WorkerState.SILENT, WorkerState.KEPT_DOWN), "yellow"),
    **dict.fromkeys((TrialState.FAILED, TrialState.OOM, TrialState.LOST, TrialState.UNRESPONSIVE), "red"),
    **dict.fromkeys((TrialState.BLOCKED, WorkerState.MISSING), "red"),
}
_ANSI = {"green": "\x1b[32m", "cyan": "\x1b[36m", "yellow": "\x1b[33m", "red": "\x1b[31m"}
_RESET = "\x1b[0m"
_RESUME = "rl-submit --resume {trial}"
_ADVICE = {
    **dict.fromkeys(FINAL_STATES - {TrialState.COMPLETE}, _RESUME),
    TrialState.UNRESPONSIVE: "rl-logs {trial} master_worker",
    TrialState.DEGRADED: "rl-logs {trial} --errors",
    TrialState.FAILED: f"rl-logs {{trial}} --errors\n           {_RESUME}    when it is mended",
    TrialState.OOM: "rl-logs {trial} --errors\n           rl-submit ... a new trial, with more mem for that group",
}
"""What one does about a state; where that is to wait, nothing is said."""
_SHOW_NUMBERS = (TrialState.RUNNING, TrialState.COMPLETE)
_MAX_NODES = 4
_MAX_WAITS = 6
_SHORT_WAIT_S = 1.0
_MIN_LAST_COLUMN = 20
_INDENT_APART = 4


def render_trials(
    statuses: Sequence[TrialStatus],
    *,
    colour: bool = False,
    width: int | None = None,
    num_hidden: int = 0,
    folder: Path | str = "here",
) -> str:
    """One row per trial of a folder; `width` is that of the terminal, if there is one."""
    hidden = f"{num_hidden} trials that ended more than a day ago are not shown; rl-status -a shows them"
    if not statuses:
        return hidden if num_hidden else f"no trials in {folder}; start one with rl-submit EXPERIMENT.yaml"
    header = ("TRIAL", "STATE", "STEP", "AGE", "NODES", "JOB", "ATTEMPT", "NOTE")
    rows = [
        (
            f"{status.experiment}/{status.trial}",
            status.state,
            _steps(status),
            format_duration(status.age_s),
            _or_dash(status.nodes),
            status.job_id or ("" if has_jobs(status.mode) else status.mode) or "-",
            _or_dash(status.attempt),
            status.note or (status.numbers if status.state in _SHOW_NUMBERS else ""),
        )
        for status in statuses
    ]
    table = render_table(header, rows, colour=colour, width=width)
    return f"{table}\n{hidden}" if num_hidden else table


def render_trial(status: TrialStatus, *, wide: bool = False, colour: bool = False, width: int | None = None) -> str:
    """One trial: a headline, a row per group or per worker, who waits for whom, the attempts before, what to do.

    Args:
        width: columns of the terminal, if lines are to be broken there.
    """
    lines = _headline(status, colour=colour, width=width)
    if status.cause:
        lines.append(fold(f"  {printable(status.cause)}", width))
    lines += [fold(f"trouble    {printable(trouble)}", width) for trouble in status.troubles]
    if wide:
        lines.append(render_workers(status.workers, colour=colour, width=width))
    else:
        lines.append(render_groups(status.groups, width=width))
    # A healthy trial is full of waits that end at once.
    waits = [chain for chain in status.waits if (chain.steps[0].since_s or 0.0) >= _SHORT_WAIT_S]
    lines += [fold(f"waits      {printable(render_chain(chain))}", width) for chain in waits[:_MAX_WAITS]]
    if len(waits) > _MAX_WAITS:
        lines.append(f"           and {len(waits) - _MAX_WAITS} more; -o json shows all")
    for finding in status.findings:
        lines += [fold(printable(line), width) for line in _describe(finding)]
    lines += [fold(line, width) for line in _compared(status.metrics)]
    lines += [fold(f"watch      {found.text}: {found.details}", width) for found in status.watch]
    lines += [printable(_describe_end(end)) for end in status.history if end.attempt != status.attempt]
    if advice := _ADVICE.get(status.state):
        name = f"{status.experiment}/{status.trial}"
        lines.append(f"next       {advice.format(trial=name)}")  # whole: it is there to be copied
    return "\n".join([*lines, f"directory  {status.directory}"])


def render_groups(rows: Sequence[GroupRow], *, width: int | None = None) -> str:
    """One row per kind of worker."""
    header = ("GROUP", "READY", "RESTARTS", "NODES", "LAST SEEN", "NOTE")
    texts = [
        (
            row.group,
            f"{row.ready}/{row.total}" if row.ready is not None else "-",
            str(row.restarts),
            first_few(row.nodes, most=_MAX_NODES) or "-",
            format_duration(row.last_seen_s),
            row.note,
        )
        for row in rows
    ]
    return render_table(header, texts, colour=False, width=width)


def render_workers(rows: Sequence[WorkerRow], *, colour: bool = False, width: int | None = None) -> str:
    """One row per worker."""
    header = ("WORKER", "STATE", "PID", "NODE", "PHASE", "VERSION", "RESTARTS", "LAST SEEN", "WAITING FOR")
    texts = [
        (
            row.worker,
            f"{row.state} ({row.exit})" if row.state is WorkerState.ENDED else row.state,
            _or_dash(row.pid),
            row.node or "-",
            f"{row.phase} {format_duration(row.phase_s)}" if row.phase else "-",
            row.version or "-",
            str(row.restarts),
            format_duration(row.last_seen_s),
            describe_wait(row) or "-",
        )
        for row in rows
    ]
    return render_table(header, texts, colour=colour, width=width)


def render_json(statuses: Sequence[TrialStatus]) -> str:
    """Everything, for programs; a number that is not finite is null."""
    return msgspec.json.format(msgspec.json.encode(list(statuses)), indent=2).decode()


def render_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, colour: bool, width: int | None = None
) -> str:
    """Columns as wide as their widest cell; the second one is a state, and carries its colour.

    Args:
        width: of the terminal. The last column goes on below itself where the terminal ends; if there is no room for
            words beside the others, it stands on lines of its own.
    """
    cells = [tuple(printable(cell) for cell in row) for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    indent = sum(widths[:-1]) + 2 * (len(widths) - 1)
    is_apart = width is not None and width - indent < min(_MIN_LAST_COLUMN, widths[-1])
    if is_apart:
        indent = _INDENT_APART
    room = max(1, widths[-1]) if width is None else max(_MIN_LAST_COLUMN, width - indent)
    lines = []
    for row in cells:
        padded = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        padded[1] = _coloured(padded[1], colour=colour)
        last = textwrap.wrap(row[-1], room, break_long_words=False, break_on_hyphens=False)
        beside, below = ([], last if row[-1] != "-" else []) if is_apart else (last[:1], last[1:])
        lines.append("  ".join([*padded[:-1], *beside]).rstrip())
        lines += [" " * indent + part for part in below]
    return "\n".join(lines)


def _headline(status: TrialStatus, *, colour: bool, width: int | None) -> list[str]:
    parts = [f"{status.experiment}/{status.trial}", status.state, f"step {_steps(status)}"]
    if status.is_final and not status.step:
        parts.append("nothing trained")
    parts += [f"ALARM: {finding.topic}" for finding in status.findings if finding.is_alarm]
    if status.numbers:
        parts.append(status.numbers)
    if status.speed:
        parts.append(status.speed)
    if status.attempt is not None:
        parts.append(f"attempt {status.attempt}")
    if status.job_id:
        parts.append(f"job {status.job_id}" + (f" on {status.node_list}" if status.node_list else ""))
    if status.age_s is not None:
        parts.append(f"age {format_duration(status.age_s)}")
    if status.time_left and status.time_left != "UNLIMITED":
        parts.append(f"time left {status.time_left}")
    lines = _wrapped(parts, width)
    return [lines[0].replace(f"  {status.state}", f"  {_coloured(status.state, colour=colour)}", 1), *lines[1:]]


def _wrapped(parts: Sequence[str], width: int | None) -> list[str]:
    """The parts in lines of at most this width; none is broken, and what follows the first line is indented."""
    lines = [parts[0]]
    for part in parts[1:]:
        if width is not None and len(lines[-1]) + 2 + len(part) > width:
            lines.append(f"  {part}")
        else:
            lines[-1] += f"  {part}"
    return lines


def _describe_end(end: PastAttempt) -> str:
    """`attempt 0  ended NODE_FAILED n15 after 5h02m at 08:11 (cause)`."""
    if end.ended_at is None:
        return f"attempt {end.attempt}  ended without a word"
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(end.ended_at))
    after = format_duration(max(0.0, end.ended_at - end.started_at))
    what = " ".join(["ended", end.state, ",".join(end.nodes)]).rstrip()
    return f"attempt {end.attempt}  {what} after {after} at {when}" + (f" ({end.cause})" if end.cause else "")


def _describe(finding: Finding) -> Iterator[str]:
    """A line; of an alarm, also what it rests on, and a line per cause, likeliest first."""
    if not finding.is_alarm:
        yield f"found      {finding.text}"
        return
    yield f"ALARM      {finding.text}, since step {finding.step}: {finding.details}"
    for cause in finding.causes:
        yield f"           - {cause}"


def _compared(metrics: Mapping[str, Any]) -> Iterator[str]:
    """The fraction of the newest step's tokens on which generator and trainer were compared, and the evidence found."""
    coverage, found, prompts = (metrics.get(name) for name in ("gap/coverage", GAP[0], "drift/prompts"))
    if not coverage and is_number(prompts):
        few = "prompts" if prompts < LEAST_PROMPTS else "tokens"
        needed = f"{prompts:.0f} prompts; at least {LEAST_PROMPTS}, and {LEAST_TOKENS} tokens, are needed"
        yield f"compared   logprob check: too few {few} for a verdict ({needed})"
    elif is_number(coverage):
        evidence = f", {found:.2g} of the evidence for an alarm" if coverage and is_number(found) else ""
        yield f"compared   logprob check: {coverage:.0%} of the last step's tokens{evidence}"


def _steps(status: TrialStatus) -> str:
    if status.step is None:
        return "-"
    return f"{status.step}/{status.total_steps}" if status.total_steps else str(status.step)


def _or_dash(value: object) -> str:
    return "-" if value is None else str(value)


def _coloured(text: str, *, colour: bool) -> str:
    name = _COLOUR_BY_STATE.get(text.strip())
    return f"{_ANSI[name]}{text}{_RESET}" if colour and name else text
