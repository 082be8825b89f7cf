"""How long rl-submit takes to refuse a broken experiment: every case of the tests, each as a process of its own.

    python benchmarks/bad_input.py

Prints seconds per case and their maximum, beside the time of a bare Python process in the same run. Every case must end
with exit code 2 and leave nothing behind, or this stops with an error.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.experiments.broken_yaml import BROKEN_CASES, BrokenCase  # noqa: E402 - found through the line above


def main() -> None:
    """Run every case once."""
    seconds = {case.name: _refuse(case) for case in BROKEN_CASES}
    for name, took_s in sorted(seconds.items(), key=lambda item: item[1]):
        print(f"{took_s:6.2f}  {name}")
    bare_s = statistics.median(_timed([sys.executable, "-c", ""])[0] for _ in range(5))
    print(
        f"\n{len(seconds)} cases, all refused with exit code 2: median {statistics.median(seconds.values()):.2f} s, "
        f"maximum {max(seconds.values()):.2f} s (a bare Python process: {bare_s:.2f} s)"
    )


def _refuse(case: BrokenCase) -> float:
    with tempfile.TemporaryDirectory() as folder:
        trials = Path(folder) / "trials"
        file = case.write(Path(folder) / "input")
        overrides = [part for override in case.overrides for part in ("-s", override)]
        command = [str(Path(sys.executable).parent / "rl-submit"), str(file), "--local", "--fileroot", str(trials)]
        took_s, run = _timed([*command, *overrides])
        if run.returncode != 2 or trials.exists():
            raise RuntimeError(f"{case.name}: exit code {run.returncode}, {run.stderr}")
    return took_s


def _timed(command: list[str]) -> tuple[float, "subprocess.CompletedProcess[str]"]:
    started = time.monotonic()
    run = subprocess.run(command, capture_output=True, text=True)
    return time.monotonic() - started, run


if __name__ == "__main__":
    main()
