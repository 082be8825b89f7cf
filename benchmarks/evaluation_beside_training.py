"""What evaluations by generation servers cost the training beside them: one trial, with and without in turns.

    OMP_NUM_THREADS=1 python benchmarks/evaluation_beside_training.py [--steps 60] [--every 10] [--problems 128]

The arithmetic GRPO recipe on this machine, one server and one trainer, from an untrained model. Each interval between
two train steps counts as with an evaluation where one was under way for half of it or more, else as without; so both
are of the same minutes, whatever else the machine does. Printed are the train samples per second of both, and by how
much longer all steps took than if each had been one without.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
RECIPE = ROOT / "experiments" / "recipes" / "arithmetic_grpo.yaml"
BATCH = 32
DEADLINE_S = 1800
WARM_UP_STEPS = 3  # caches of allocators and plans fill up


def main() -> None:
    """Run the trial and print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=10, help="steps from one evaluation to the next")
    parser.add_argument("--problems", type=int, default=128, help="held-out problems")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="corral-evaluation-") as folder:
        lines = _run(Path(folder), **vars(options))
    _print(lines)


def _run(root: Path, *, steps: int, every: int, problems: int) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl of a whole trial."""
    data = root / "data"
    subprocess.run([sys.executable, "-m", "corral.workers.data.arithmetic", "--out", data], check=True)
    held_out = root / "held_out.jsonl"
    held_out.write_text("".join((data / "heldout.jsonl").read_text().splitlines(keepends=True)[:problems]))
    settings = {
        "actor.path": data / "model",
        "dataset.path": data / "train_grpo.jsonl",
        "evaluation.dataset.path": held_out,
        "evaluation.every_steps": every,
        "evaluation.batch_size": 16,
        "train_batch_size": BATCH,
        "control.max_steps": steps,
        "control.commit_every_steps": 20,
    }
    overrides = [option for key, value in settings.items() for option in ("-s", f"{key}={value}")]
    command = [BIN / "rl-submit", RECIPE, "--local", "--wait", "--trial", "t", "--fileroot", root, *overrides]
    subprocess.run(
        [str(part) for part in command],
        check=True,
        capture_output=True,
        timeout=DEADLINE_S,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return [json.loads(line) for line in (root / "arithmetic-grpo" / "t" / "metrics.jsonl").read_text().splitlines()]


def _print(lines: list[dict[str, Any]]) -> None:
    ended = {line["step"]: line["time"] for line in lines if "time/train_s" in line}
    evaluations = [
        (ended[line["step"]], line["time"], line)
        for line in lines
        if "eval/accuracy" in line and WARM_UP_STEPS < line["step"] < max(ended)
    ]
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for (before, start), (_, end) in pairwise(sorted(ended.items())):
        if before >= WARM_UP_STEPS:
            shared = sum(max(0.0, min(end, last) - max(start, first)) for first, last, _ in evaluations)
            seconds[shared >= (end - start) / 2].append(end - start)
    both = {is_with: statistics.fmean(spans) for is_with, spans in seconds.items()}
    for is_with, name in ((False, "without"), (True, "with an evaluation")):
        print(f"{name:<20} {len(seconds[is_with]):>4} steps {BATCH / both[is_with]:>8.1f} samples/s")
    for first, last, line in evaluations:
        print(
            f"  evaluation of step {line['step']:>3}: {line['eval/problems']:.0f} problems in {last - first:.1f} s, by "
            f"versions {line['eval/version_min']:.0f} to {line['eval/version_max']:.0f}"
        )
    total = sum(map(sum, seconds.values()))
    cost = total / (both[False] * sum(map(len, seconds.values()))) - 1.0
    waits = [line.get("time/wait_s/rollout_worker", 0.0) for line in lines if line["step"] > WARM_UP_STEPS]
    print(f"with / without       {both[False] / both[True]:.2f} of the speed")
    print(f"cost to training     {100 * cost:.1f} % (limit 5 %)")
    print(f"the trainer waited   {100 * sum(waits) / total:.0f} % of the time for samples")


if __name__ == "__main__":
    main()
