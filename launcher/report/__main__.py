"""Draws the pictures of a trial into its report folder: `python -m corral.launcher.report --trial DIR`.

    plan.json ─────► dataflow.svg, dataflow.png    the calls of a train step, on which model workers, and their keys
    metrics.jsonl ─► curves.png                    how training went
               └───► step_times.png                where the time of the steps went

The supervisor runs this as a process of its own at the end of a trial; a failure to draw is noted and harms nothing.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from corral.experiments.plan import RunPlan
from corral.experiments.trial.directory import TrialDirectory
from corral.launcher.report.curves import draw_curves
from corral.launcher.report.graph import draw_graph, graph_of
from corral.launcher.report.step_times import draw_step_times
from corral.launcher.report.style import call_colours, save
from corral.launcher.trial.metrics import read_metrics


def draw_report(directory: TrialDirectory) -> Iterator[Path]:
    """Writes the pictures that there is something for; what they are."""
    plan = RunPlan.from_json(directory.plan_path.read_bytes())
    title, report = f"{plan.trial.experiment}/{plan.trial.trial}", directory.report_path
    master, lines = plan.master, read_metrics(directory.metrics_path)
    colours = call_colours(master.step_plan.graph.step_calls)
    yield from draw_curves(lines, title=title, path=report / "curves.png")
    yield from draw_step_times(lines, title=title, colours=colours, path=report / "step_times.png")
    graph = graph_of(master.step_plan, samples=master.samples_from, published_to=master.weights_go_to)
    title = f"{title}: a train step of {master.train_batch_size} {master.sample_unit}"
    yield from save(draw_graph(graph, title=title), report / "dataflow.svg", formats=("svg", "png"))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="corral.launcher.report", description="Draw the pictures of a trial.")
    parser.add_argument("--trial", type=Path, required=True, help="the trial directory")
    for path in draw_report(TrialDirectory(parser.parse_args(arguments).trial.resolve())):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
