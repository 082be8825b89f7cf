"""What a setting costs a trial: answers per CPU second and seconds per step, with it and without it, in turns.

    OMP_NUM_THREADS=1 python benchmarks/with_and_without.py [--steps 30] [--rounds 2]
        [--without samples_per_step=0] [--setting samples_per_step=8]

The arithmetic GRPO recipe on this machine, from an untrained model, as whole trials. CPU seconds are those of all of a
trial's processes, from rl-submit to the last that its supervisor leaves; seconds per step leave the first out. Any
settings are compared, and several at once: all that shows a trial beside none of it but metrics.jsonl and the page is

    --without samples_per_step=0 tracking.to=[]
    --setting samples_per_step=null tracking.to=[tensorboard,prometheus]

and evaluations by the servers that answer for training, beside none until the last step,

    --without evaluation.every=1000 steps --setting evaluation.every=10 steps
"""

import argparse
import contextlib
import ctypes
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
RECIPE = ROOT / "experiments" / "recipes" / "arithmetic_grpo.yaml"
DEADLINE_S = 1800
WARM_UP_STEPS = 4  # caches of allocators and plans fill up
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one trial did, and took."""

    answers: float
    """That it was trained on."""
    cpu_s: float
    step_s: float
    """By the clock."""
    evaluated: float
    """Held-out problems."""
    kept: int
    """Bytes of answers kept for reading."""


def main() -> None:
    """Run the trials and print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--setting", nargs="+", default=["samples_per_step=8"], help="compared with --without")
    parser.add_argument("--without", nargs="+", default=["samples_per_step=0"], help="what that is")
    options = parser.parse_args()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # a supervisor outlives rl-submit: it comes here
    arms = {"without": options.without, "with": options.setting}
    runs: dict[str, list[Run]] = {name: [] for name in arms}
    with tempfile.TemporaryDirectory(prefix="corral-settings-") as folder:
        root = Path(folder)
        subprocess.run([sys.executable, "-m", "corral.workers.data.arithmetic", "--out", root / "data"], check=True)
        for number in range(options.rounds):
            for name in list(arms)[:: -1 if number % 2 else 1]:  # neither is always first
                run = _run(root, f"{name}-{number}", arms[name], steps=options.steps)
                runs[name].append(run)
                print(
                    f"{name:8} {run.answers:,.0f} answers, {run.cpu_s:.1f} CPU s, {run.step_s:.3f} s per step, "
                    f"{run.evaluated:,.0f} held-out problems, {run.kept / 1e3:.1f} kB kept",
                    flush=True,
                )
    rates = {name: statistics.fmean(run.answers / run.cpu_s for run in found) for name, found in runs.items()}
    steps = {name: statistics.fmean(run.step_s for run in found) for name, found in runs.items()}
    print(f"answers per CPU second: {_compared(rates)}\nseconds per step: {_compared(steps)}")


def _compared(values: Mapping[str, float]) -> str:
    without, with_it = values["without"], values["with"]
    return f"{without:.3f} without, {with_it:.3f} with, {with_it / without:.3f} times"


def _run(root: Path, name: str, compared: Sequence[str], *, steps: int) -> Run:
    """A whole trial."""
    data, before = root / "data", _children_s()
    settings = [
        f"actor.path={data / 'model'}",
        f"dataset.path={data / 'train_grpo.jsonl'}",
        f"evaluation.dataset.path={data / 'heldout.jsonl'}",
        "evaluation.every=1000 steps",
        f"control.max_steps={steps}",
        *compared,
    ]
    overrides = [option for setting in settings for option in ("-s", setting)]
    command = [BIN / "rl-submit", RECIPE, "--local", "--wait", "--trial", name, "--fileroot", root, *overrides]
    subprocess.run(
        list(map(str, command)),
        check=True,
        stdout=subprocess.DEVNULL,
        timeout=DEADLINE_S,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    cpu_s, trial = _children_s() - before, root / "arithmetic-grpo" / name
    lines = [json.loads(line) for line in (trial / "metrics.jsonl").read_text().splitlines()]
    ended = [line["time"] for line in lines if "ppo/num_answers" in line][WARM_UP_STEPS:]
    return Run(
        answers=sum(line.get("ppo/num_answers", 0.0) for line in lines),
        cpu_s=cpu_s,
        step_s=(ended[-1] - ended[0]) / (len(ended) - 1),
        evaluated=sum(line.get("eval/problems", 0.0) for line in lines),
        kept=sum(path.stat().st_size for path in trial.glob("samples/*")),
    )


def _children_s() -> float:
    """CPU seconds of all that descended from this process, once the last of them has ended."""
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
