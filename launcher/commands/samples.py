"""rl-samples: the answers that were trained on."""

import json
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from corral.launcher.commands.common import TRIAL_HELP, Fileroot, complete_trial, find_in_time, run, terminal_width

if TYPE_CHECKING:
    from rich.console import Console

    from corral.experiments.trial.directory import TrialDirectory

_STEP_HELP = (
    "A train step, a span such as 40:50, latest, or all; default latest, where one prompt or answer is meant all."
)
_WHERE_HELP = "Only answers of which this is so: reward < 1 and length > 20, 'sorry' in said, row == 'problem-7'."
_SORT_HELP = "By this, from low to high; -FIELD from high to low: reward, advantage, length, staleness, gap."
_BY_HELP = "prompt: a line for each prompt with its mean reward, the lowest first."
_DIFF_HELP = "Answers to this row of the data over all steps, each beside the one before it."
_SHOW_HELP = "One answer whole, by its name in the list, token by token."


def samples(
    trial: Annotated[str, typer.Argument(metavar="TRIAL", help=TRIAL_HELP, autocompletion=complete_trial)],
    step: Annotated[str | None, typer.Option(metavar="STEPS", help=_STEP_HELP)] = None,
    where: Annotated[str | None, typer.Option(metavar="CONDITION", help=_WHERE_HELP)] = None,
    sort: Annotated[str, typer.Option(metavar="FIELD", help=_SORT_HELP)] = "",
    most: Annotated[int, typer.Option("-n", min=1, metavar="N", help="So many at most.")] = 40,
    show: Annotated[str | None, typer.Option(metavar="ANSWER", help=_SHOW_HELP)] = None,
    by: Annotated[Literal["answer", "prompt"], typer.Option(help=_BY_HELP)] = "answer",
    diff: Annotated[str | None, typer.Option(metavar="ROW", help=_DIFF_HELP)] = None,
    dropped: Annotated[bool, typer.Option("--dropped", help="Prompts that were dropped, and why.")] = False,
    colour: Annotated[
        Literal["logprob", "gap", "advantage"], typer.Option(help="What tokens are coloured by.")
    ] = "logprob",
    output: Annotated[
        Literal["table", "jsonl"], typer.Option("-o", "--output", help="For people, or for programs.")
    ] = "table",
    fileroot: Fileroot = None,
) -> None:
    """Show answers that a trial was trained on."""
    from rich.console import Console

    from corral.experiments.errors import ConfigError
    from corral.launcher.files.file_thread import PatientFiles
    from corral.launcher.samples import KeptAnswers, as_diff, as_table, by_prompt, dropped_table, prompts_table
    from corral.launcher.trial.view import default_fileroot, dropped_prompts

    files, console = PatientFiles(), Console(width=terminal_width() or 200)
    directory = find_in_time(files, trial, fileroot or default_fileroot()).directory
    if dropped:
        reasons, _ = files.run(lambda: dropped_prompts(directory), directory.ledger_path)
        newest = dict(list(reasons.items())[-most:])
        lines = [{"uid": uid, "reason": reason} for uid, reason in newest.items()]
        _print_lines(lines) if output == "jsonl" else console.print(dropped_table(newest))
        return
    kept = files.run(lambda: KeptAnswers(directory.samples_path), directory.samples_path)
    is_of_all = show is not None or diff is not None or by == "prompt"
    steps = kept.steps(step or ("all" if is_of_all else "latest"))
    if by == "prompt":
        prompts = by_prompt(kept.read(steps, where=where, is_whole=False))[:most]
        _print_lines(prompts) if output == "jsonl" else console.print(prompts_table(prompts))
        return
    is_whole = show is not None or output == "jsonl"
    rows = kept.read(steps, where=where, sort=sort, most=most, named=show, row=diff, is_whole=is_whole)
    if is_of_all and not rows:
        hint = f"rl-samples {trial} lists the answers of the last step; add --step all for those of all steps"
        raise ConfigError.of(f"no answer {show or diff!r} is kept", hint=hint)
    if output == "jsonl":
        _print_lines(rows)
    elif diff is not None:
        console.print(as_diff(rows))
    elif show is not None:
        _print_whole(console, directory, rows, colour)
    else:
        console.print(as_table(rows))
        of = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
        print(f"{len(rows)} answers of {of}; rl-samples {trial} --show ANSWER shows one whole", file=sys.stderr)


def _print_lines(lines: Sequence[Mapping[str, Any]]) -> None:
    print("\n".join(json.dumps(line) for line in lines))


def _print_whole(
    console: "Console",
    directory: "TrialDirectory",
    rows: Sequence[Mapping[str, Any]],
    colour: Literal["logprob", "gap", "advantage"],
) -> None:
    from corral.experiments.prompts.tokens import load_tokenizer
    from corral.experiments.worker_specs import ModelWorkerSpec
    from corral.launcher.samples import as_whole
    from corral.launcher.trial.view import read_plan

    tokenizer = load_tokenizer(read_plan(directory).all_of(ModelWorkerSpec)[0].tokenizer)
    for row in rows:
        console.print(as_whole(row, tokenizer, colour))


main = partial(run, samples)
"""rl-samples"""
