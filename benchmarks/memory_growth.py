"""How the memory of each process of a trial grows with its train steps: a local trial of many tiny ones.

    python benchmarks/memory_growth.py [--steps 1500] [--batch 4] [--commit-every 1]

Prints, per process, the resident memory after the first tenth of the steps and at the end, and the slope: in MB
per 1,000 steps, and per hour at the speed of this run. A slope is what a straight line through the second half of the
samples gives: caches fill up in the first. Beside them, the number of files in the trial directory at both moments.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
RECIPE = ROOT / "experiments" / "recipes" / "arithmetic_grpo.yaml"
MAKE_INPUTS = """
import json, sys
from pathlib import Path
from corral.workers.data.arithmetic import make_problems, write_model
folder = Path(sys.argv[1])
write_model(folder / "model", seed=1, hidden_size=16, num_layers=1)
rows = make_problems(seed=1)
(folder / "heldout.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows[-8:]))
(folder / "train.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows[:int(sys.argv[2])]))
"""
ROWS = 2000
SAMPLE_S = 1.0
STALL_S = 180.0  # without a step, the trial is stuck or has failed
MB = 2**20


@dataclass
class Series:
    """What one process held at which step."""

    steps: list[int] = field(default_factory=list)
    bytes_held: list[int] = field(default_factory=list)

    def at(self, step: int) -> float:
        """MB at the first sample from this step on."""
        return next(held for held, at in zip(self.bytes_held, self.steps, strict=True) if at >= step) / MB

    def slope(self) -> float:
        """MB per step, over the second half."""
        half = len(self.steps) // 2
        return statistics.linear_regression(self.steps[half:], [held / MB for held in self.bytes_held[half:]]).slope


def main() -> None:
    """Run the trial and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch", type=int, default=4, help="prompts per step")
    parser.add_argument("--commit-every", type=int, default=1, help="steps from one commit to the next")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="corral-memory-") as folder:
        root = Path(folder)
        subprocess.run([sys.executable, "-c", MAKE_INPUTS, folder, str(ROWS)], check=True)
        trial = _submit(root, options.steps, options.batch, options.commit_every)
        try:
            series, files, seconds = _watch(trial, options.steps)
        finally:
            subprocess.run([BIN / "rl-stop", trial, "--now"], check=False, capture_output=True)
    _print(series, files, steps=options.steps, seconds=seconds)


def _submit(root: Path, steps: int, batch: int, commit_every: int) -> Path:
    settings = {
        "actor.path": root / "model",
        "dataset.path": root / "train.jsonl",
        "evaluation.dataset.path": root / "heldout.jsonl",
        "evaluation.every": f"{10**9} steps",
        "train_batch_size": batch,
        "ppo.group_size": 2,
        "rollout.sampling.max_new_tokens": 2,
        "control.total_train_epochs": -(-steps * batch // ROWS),
        "control.max_steps": steps,
        "control.commit_every": f"{commit_every} steps",
    }
    options = [option for key, value in settings.items() for option in ("-s", f"{key}={value}")]
    command = [BIN / "rl-submit", RECIPE, "--local", "--trial", "memory", "--fileroot", root / "trials", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([str(part) for part in command], check=True, capture_output=True, env=environment)
    return root / "trials" / "arithmetic-grpo" / "memory"


def _watch(trial: Path, steps: int) -> tuple[dict[str, Series], dict[int, int], float]:
    """Samples until the last step; returns them, the number of files by step, and seconds per step."""
    series: defaultdict[str, Series] = defaultdict(Series)
    files: dict[int, int] = {}
    started = moved = time.monotonic()
    step = first_step = 0
    while step < steps:
        time.sleep(SAMPLE_S)
        if (now := _last_step(trial)) > step:
            step, moved = now, time.monotonic()
            if not first_step:
                first_step, started = step, moved
        if time.monotonic() - moved > STALL_S:
            raise TimeoutError(f"no step after {step} within {STALL_S:.0f} s; look at {trial}/logs")
        if step:
            for name, held in _resident_bytes(trial).items():
                series[name].steps.append(step)
                series[name].bytes_held.append(held)
            if not files or step >= steps * 0.9:
                files[step] = sum(len(names) for _, _, names in os.walk(trial))
    return dict(series), files, (moved - started) / max(1, step - first_step)


def _resident_bytes(trial: Path) -> dict[str, int]:
    held: dict[str, int] = {}
    for name, pid in _processes(trial).items():
        try:
            held[name] = psutil.Process(pid).memory_info().rss
        except psutil.Error:  # it has ended
            continue
    return held


def _processes(trial: Path) -> dict[str, int]:
    """The newest process of each worker, of Redis, and of the supervisor."""
    pids: dict[str, int] = {}
    for line in (trial / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "worker_started":
            with suppress(psutil.Error, IndexError):  # it has ended
                pids[event["worker"]] = psutil.Process(event["pid"]).children()[0].pid  # the guard's only child
        elif event["event"] in ("redis_started", "supervisor_started"):
            pids[event["event"].removesuffix("_started")] = event["pid"]
    return pids


def _last_step(trial: Path) -> int:
    try:
        with (trial / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 8192))
            lines = file.read().split(b"\n")[:-1]
    except FileNotFoundError:
        return 0
    return int(json.loads(lines[-1])["step"]) if lines else 0


def _print(series: dict[str, Series], files: dict[int, int], *, steps: int, seconds: float) -> None:
    first = steps // 10
    print(f"{steps} steps at {1 / seconds:.1f} a second\n")
    print(f"{'PROCESS':<22}{f'STEP {first}':>12}{f'STEP {steps}':>12}{'MB/1000 STEPS':>15}{'MB/H':>8}")
    for name in sorted(series):
        one = series[name]
        row: Sequence[float] = (
            one.at(first),
            one.bytes_held[-1] / MB,
            one.slope() * 1000,
            one.slope() * 3600 / seconds,
        )
        print(f"{name:<22}{row[0]:>9.1f} MB{row[1]:>9.1f} MB{row[2]:>15.2f}{row[3]:>8.1f}")
    (first_step, few), (last_step, many) = min(files.items()), max(files.items())
    print(f"\nfiles in the trial directory: {few} at step {first_step}, {many} at step {last_step}")


if __name__ == "__main__":
    main()
