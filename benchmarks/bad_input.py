"""How long rl-submit takes to refuse a broken experiment: every case of the tests, each as a process of its own.

    python benchmarks/bad_input.py            mistakes of the file alone, with --local
    python benchmarks/bad_input.py --slurm    also what a cluster can never run, against a throw-away SLURM

Prints seconds per case, their median and maximum, beside the time of a bare Python process in the same run. Every case
must end with its exit code and leave nothing behind, or this stops with an error.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.experiments.broken_yaml import BROKEN_CASES, BrokenCase  # noqa: E402 - found through the line above
from tests.slurm.cluster import running_cluster  # noqa: E402
from tests.slurm.wrong_configurations import REFUSED_CASES, RefusedCase  # noqa: E402


def main() -> None:
    """Run every case once."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--slurm", action="store_true", help="also the cases that need a cluster")
    options = parser.parse_args()
    _report("of the file", {case.name: _refuse(case, os.environ, "--local") for case in BROKEN_CASES})
    if options.slurm:
        with running_cluster() as cluster:
            _report("of the cluster", {case.name: _refuse(case, cluster.environment) for case in REFUSED_CASES})
    bare_s = statistics.median(_timed([sys.executable, "-c", ""], os.environ)[0] for _ in range(5))
    print(f"a bare Python process: {bare_s:.2f} s")


def _report(what: str, seconds: Mapping[str, float]) -> None:
    for name, took_s in sorted(seconds.items(), key=lambda item: item[1]):
        print(f"{took_s:6.2f}  {name}")
    median_s, maximum_s = statistics.median(seconds.values()), max(seconds.values())
    print(f"{len(seconds)} mistakes {what}, all refused: median {median_s:.2f} s, maximum {maximum_s:.2f} s\n")


def _refuse(case: BrokenCase, environment: Mapping[str, str], *arguments: str) -> float:
    code = case.exit_code if isinstance(case, RefusedCase) else 2
    with tempfile.TemporaryDirectory() as folder:
        trials = Path(folder) / "trials"
        file = case.write(Path(folder) / "input")
        overrides = [part for override in case.overrides for part in ("-s", override)]
        command = [str(Path(sys.executable).parent / "rl-submit"), str(file), "--fileroot", str(trials), *arguments]
        took_s, run = _timed([*command, *overrides], environment)
        if run.returncode != code or trials.exists():
            raise RuntimeError(f"{case.name}: exit code {run.returncode} instead of {code}, {run.stderr}")
    return took_s


def _timed(command: list[str], environment: Mapping[str, str]) -> tuple[float, "subprocess.CompletedProcess[str]"]:
    started = time.monotonic()
    run = subprocess.run(command, capture_output=True, text=True, env=dict(environment))
    return time.monotonic() - started, run


if __name__ == "__main__":
    main()
