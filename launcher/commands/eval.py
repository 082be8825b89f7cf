"""rl-eval: versions of a trial's weights answer held-out problems, as jobs of their own."""

import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from corral.experiments.exit_codes import CommandExit
from corral.experiments.trial.mode import has_jobs
from corral.launcher.commands.common import (
    TRIAL_HELP,
    Fileroot,
    Output,
    complete_trial,
    leaving,
    run,
    terminal_width,
    wants_colour,
)

if TYPE_CHECKING:
    from corral.launcher.evaluation.jobs import EvaluationReader, EvaluationStatus

_LOCAL_HELP = "On this machine, one after the other; the default for a trial that was submitted with --local."
_PARTITION_HELP = "A partition of the cluster; default: where the trial trains."
_WAIT_TIMEOUT_S = 7 * 24 * 3600.0


def evaluate(
    trial: Annotated[str, typer.Argument(metavar="TRIAL", help=TRIAL_HELP, autocompletion=complete_trial)],
    step: Annotated[
        str, typer.Option(metavar="STEPS", help="Train step (several with commas), latest, best, or all.")
    ] = "latest",
    dataset: Annotated[Path | None, typer.Option(metavar="FILE", help="Other problems than the trial's own.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, metavar="N", help="Longest answer.")] = None,
    local: Annotated[bool, typer.Option("--local", help=_LOCAL_HELP)] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Until all have ended.")] = False,
    show: Annotated[bool, typer.Option("--show", help="Only show what was asked for before.")] = False,
    again: Annotated[bool, typer.Option("--again", help="Also steps that have a result already.")] = False,
    partition: Annotated[str | None, typer.Option(metavar="NAME", help=_PARTITION_HELP)] = None,
    minutes: Annotated[int, typer.Option(min=1, metavar="N", help="Time limit of one start of a job.")] = 60,
    output: Annotated[Output, typer.Option("-o", "--output", help="For people, or for programs.")] = "table",
    fileroot: Fileroot = None,
) -> None:
    """Evaluate versions of a trial's weights, on the cluster or on this machine."""
    from corral.launcher.evaluation.jobs import (
        EvaluationReader,
        EvaluationResources,
        is_wanted,
        run_here,
        submit_to_slurm,
    )
    from corral.launcher.evaluation.plan import (
        choose,
        evaluation_folder,
        find_weights,
        make_evaluation_config,
        make_requests,
    )
    from corral.launcher.trial.view import default_fileroot, find_trial, read_plan

    facts = find_trial(trial, fileroot or default_fileroot())
    folder = evaluation_folder(facts.directory, dataset)
    if show:
        reader = EvaluationReader(folder)
        known = reader.known_steps()
        if not known and output == "table":
            print(f"no evaluations of {facts.name} yet; rl-eval {facts.name} makes one of its last version")
            return
        _print(reader.read(known), output)
        return
    plan = read_plan(facts.directory)
    evaluation = make_evaluation_config(plan, dataset, max_new_tokens=max_new_tokens)
    chosen = choose(find_weights(facts.directory), step)
    requests = make_requests(facts.directory, plan, chosen, evaluation, folder)
    resources = EvaluationResources(plan, minutes=minutes, partition=partition)
    before = {status.step: status for status in EvaluationReader(folder).read([one.step for one in requests])}
    wanted = [request for request in requests if is_wanted(request, before[request.step], again=again)]
    if local or (not has_jobs(facts.mode) and partition is None):
        here = {request.step: run_here(facts.directory, request, resources) for request in wanted}
        statuses = list((before | here).values())
    else:
        if wanted:
            submit_to_slurm(facts.directory, wanted, resources)
        statuses = _read(EvaluationReader(folder), [one.step for one in requests], wait=wait, name=facts.name)
    _print(statuses, output)
    if any(status.is_final and status.state != "DONE" for status in statuses):
        raise typer.Exit(CommandExit.FAILED)
    if not all(status.is_final for status in statuses):
        print(f"next       rl-eval {facts.name} --show    results will be in {folder}", file=sys.stderr)


def _read(reader: "EvaluationReader", steps: Sequence[int], *, wait: bool, name: str) -> "list[EvaluationStatus]":
    from corral.launcher.evaluation.jobs import wait_for

    if not wait:
        return reader.read(steps)
    with leaving(f"the evaluations keep running; rl-eval {name} --show shows them", out=sys.stderr):
        return wait_for(reader, steps, timeout_s=_WAIT_TIMEOUT_S, on_change=_print_change)


def _print_change(status: "EvaluationStatus") -> None:
    print(f"step {status.step}  {status.state}  {status.note}".rstrip(), file=sys.stderr, flush=True)


def _print(statuses: "Sequence[EvaluationStatus]", output: Output) -> None:
    from corral.launcher.status.text import render_table
    from corral.launcher.terminal import format_duration

    if output == "json":
        print(json.dumps([_as_json(status) for status in statuses], indent=1))
        return
    header = ("STEP", "STATE", "ACCURACY", "REWARD", "TOKENS", "PROMPTS", "TIME", "JOB", "NOTE")
    rows = []
    for status in statuses:
        numbers: tuple[str, ...] = ("-",) * 5
        if (result := status.result) is not None:
            means = (result.accuracy, result.mean_reward, result.mean_response_tokens)
            numbers = (*(f"{mean:.4g}" for mean in means), str(result.num_prompts), format_duration(result.seconds))
        rows.append((str(status.step), status.state, *numbers, status.job_id or "-", status.note))
    print(render_table(header, rows, colour=wants_colour(), width=terminal_width()))


def _as_json(status: "EvaluationStatus") -> dict[str, object]:
    shown = {"step": status.step, "state": status.state, "job_id": status.job_id, "note": status.note}
    result = status.result.model_dump(mode="json") if status.result is not None else None
    return {**shown, "result": result}


main = partial(run, evaluate)
"""rl-eval"""
