"""What it costs to keep answers for people to read: answers trained on per CPU second, with and without, in turns.

    OMP_NUM_THREADS=1 python benchmarks/kept_samples.py [--steps 30] [--rounds 2] [--setting samples.prompts_per_step=8]
        [--without samples.prompts_per_step=0]

The arithmetic GRPO recipe on this machine, from an untrained model, as whole trials. CPU seconds are those of all of a
trial's processes, from rl-submit to the last that its supervisor leaves. Other settings are compared in the same way,
and several at once: all that shows a trial beside none of it but metrics.jsonl and the page of its end is

    --without samples.prompts_per_step=0 timeline.max_size=0 tracking.to=[]
    --setting samples.prompts_per_step=null timeline.max_size=16 tracking.to=[tensorboard,prometheus]
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
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
RECIPE = ROOT / "experiments" / "recipes" / "arithmetic_grpo.yaml"
DEADLINE_S = 1800
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def main() -> None:
    """Run the trials and print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--setting", nargs="+", default=["samples.prompts_per_step=8"], help="compared with --without")
    parser.add_argument("--without", nargs="+", default=["samples.prompts_per_step=0"], help="what that is")
    options = parser.parse_args()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # a supervisor outlives rl-submit: it comes here
    rates: dict[str, list[float]] = {"without": [], "with": []}
    settings = {"without": options.without, "with": options.setting}
    with tempfile.TemporaryDirectory(prefix="corral-kept-") as folder:
        root = Path(folder)
        subprocess.run([sys.executable, "-m", "corral.workers.data.arithmetic", "--out", root / "data"], check=True)
        for number in range(options.rounds):
            for name, found in rates.items():
                trial = _run(root, f"{name}-{number}", settings[name], steps=options.steps)
                found.append(trial[0] / trial[1])
                print(
                    f"{name:8} {trial[0]:,.0f} answers, {trial[1]:.1f} CPU s, {trial[2] / 1e3:.1f} kB kept", flush=True
                )
    without, with_it = (statistics.fmean(found) for found in rates.values())
    print(f"answers per CPU second: {without:.1f} without, {with_it:.1f} with, {with_it / without:.3f} times")


def _run(root: Path, name: str, compared: Sequence[str], *, steps: int) -> tuple[float, float, int]:
    """Answers trained on, CPU seconds, and bytes that were kept."""
    data, before = root / "data", _children_s()
    settings = [
        f"actor.path={data / 'model'}",
        f"dataset.path={data / 'train_grpo.jsonl'}",
        "evaluation=null",
        f"control.max_steps={steps}",
        *compared,
    ]
    overrides = [option for setting in settings for option in ("-s", setting)]
    command = [BIN / "rl-submit", RECIPE, "--local", "--wait", "--trial", name, "--fileroot", root, *overrides]
    subprocess.run(
        list(map(str, command)),
        check=True,
        capture_output=True,
        timeout=DEADLINE_S,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    cpu_s, trial = _children_s() - before, root / "arithmetic-grpo" / name
    lines = [json.loads(line) for line in (trial / "metrics.jsonl").read_text().splitlines()]
    kept = sum(path.stat().st_size for path in trial.glob("samples/*"))
    return sum(line.get("ppo/num_answers", 0.0) for line in lines), cpu_s, kept


def _children_s() -> float:
    """CPU seconds of all that descended from this process, once the last of them has ended."""
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
