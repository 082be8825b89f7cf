"""rl-samples: what the model said that was trained on."""

import json
import sys
from typing import Annotated, Literal

import typer

from corral.launcher.commands.common import TRIAL_HELP, Fileroot, find_in_time, run, terminal_width, user_errors
from corral.launcher.commands.completion import complete_trial

_STEP_HELP = "A train step, a span such as 40:50, latest, or all."
_WHERE_HELP = "Only answers of which this is so: reward < 1 and length > 20, 'sorry' in said, row == 'problem-7'."
_SORT_HELP = "By this, from low to high; -FIELD from high to low: reward, advantage, length, staleness, gap."
_SHOW_HELP = "One answer whole, by its name in the list, token by token."


def samples(
    trial: Annotated[str, typer.Argument(metavar="TRIAL", help=TRIAL_HELP, autocompletion=complete_trial)],
    step: Annotated[str, typer.Option("--step", metavar="STEPS", help=_STEP_HELP)] = "latest",
    where: Annotated[str | None, typer.Option("--where", metavar="CONDITION", help=_WHERE_HELP)] = None,
    sort: Annotated[str, typer.Option("--sort", metavar="FIELD", help=_SORT_HELP)] = "",
    most: Annotated[int, typer.Option("-n", min=1, metavar="N", help="So many at most.")] = 40,
    show: Annotated[str | None, typer.Option("--show", metavar="ANSWER", help=_SHOW_HELP)] = None,
    colour: Annotated[
        Literal["logprob", "gap", "advantage"], typer.Option("--colour", help="What tokens are coloured by.")
    ] = "logprob",
    output: Annotated[
        Literal["table", "jsonl"], typer.Option("-o", "--output", help="For people, or for programs.")
    ] = "table",
    fileroot: Fileroot = None,
) -> None:
    """Show answers that a trial was trained on."""
    with user_errors():
        from rich.console import Console

        from corral.experiments.errors import ConfigError
        from corral.experiments.prompts.tokens import load_tokenizer
        from corral.experiments.worker_specs import ModelWorkerSpec
        from corral.launcher.evaluation.plan import read_plan
        from corral.launcher.files.patient_files import PatientFiles
        from corral.launcher.samples.find import KeptAnswers
        from corral.launcher.samples.show import as_table, as_whole
        from corral.launcher.trial.find import default_fileroot

        files = PatientFiles()
        directory = find_in_time(files, trial, fileroot or default_fileroot()).directory
        kept = files.run(lambda: KeptAnswers(directory.samples_path), directory.samples_path)
        steps = kept.steps(step if show is None or step != "latest" else "all")
        is_whole = show is not None or output == "jsonl"
        rows = kept.read(steps, where=where, sort=sort, most=most, named=show, is_whole=is_whole)
        if show is not None and not rows:
            raise ConfigError.of(f"no answer {show!r} is kept", hint="rl-samples TRIAL lists them; --step all, all")
        if output == "jsonl":
            print("\n".join(json.dumps(row) for row in rows))
            return
        console = Console(width=terminal_width() or 200)
        if show is None:
            console.print(as_table(rows))
            of = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
            print(f"{len(rows)} answers of {of}; rl-samples {trial} --show ANSWER shows one whole", file=sys.stderr)
            return
        tokenizer = load_tokenizer(read_plan(directory).all_of(ModelWorkerSpec)[0].tokenizer)
        for row in rows:
            console.print(as_whole(row, tokenizer, colour))


def main() -> None:
    """rl-samples"""
    run(samples)
