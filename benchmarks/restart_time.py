"""How long a worker that was killed is away: kill -9 of each kind, ten times, in a job on a throw-away SLURM.

    python benchmarks/restart_time.py [--kills 10] [--local]

Prints medians in seconds. "new process": from the kill until the process that replaces it exists, which is corral's and
SLURM's part; the target is a second. "running": until the new worker (a stub, so that only this is measured) does its
work. Beside them, as the limits in the same run: an srun of `true` in the same job, and the stub's own start-up.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from corral.launcher.slurm.client import clean_environment  # noqa: E402
from corral.launcher.trial.processes import process_start_ticks  # noqa: E402 - found through the line above
from tests.launcher.trials import StubTrial, wait_until  # noqa: E402
from tests.slurm.cluster import running_cluster  # noqa: E402
from tests.slurm.trials import SMALL, SlurmTrial  # noqa: E402

TARGET_S = 1.0
# Each kill counts as the first in a row, as for a worker that was healthy for ten minutes: the shortest pause.
POLICY = {"healthy_after_s": 0.01, "max_restarts": 1000}
KINDS: dict[str, Any] = {"model_workers": 1, "servers": 1, "rollout_workers": 1}
KILLED = ("rollout_worker/0", "generation_server/0", "gserver_manager/0", "model_worker/0", "master_worker/0")


def main() -> None:
    """Runs the kills and prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--local", action="store_true", help="plain processes on this machine, without SLURM")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="corral-restart-") as folder:
        if options.local:
            trial = StubTrial(Path(folder), {}, **KINDS, supervision=POLICY)
            _run(trial, options.kills, {})
            return
        with running_cluster() as cluster:
            os.environ.update({name: cluster.environment[name] for name in ("SLURM_CONF", "PATH")})
            _run(SlurmTrial(Path(folder), {}, **SMALL, **KINDS, supervision=POLICY), options.kills, cluster.environment)


def _run(trial: StubTrial, num_kills: int, environment: Mapping[str, str]) -> None:
    if isinstance(trial, SlurmTrial):
        trial.submit()
    else:
        trial.start()
    try:
        for worker in KILLED:
            wait_until(lambda worker=worker: trial.starts(worker), f"the first start of {worker}")
        print(f"{'killed':22}{'new process':>12}{'running':>9}   (medians of {num_kills}, s; target {TARGET_S:.0f} s)")
        for worker in KILLED:
            seconds = [_kill(trial, worker) for _ in range(num_kills)]
            created, running = (statistics.median(column) for column in zip(*seconds, strict=True))
            print(f"{worker:22}{created:12.2f}{running:9.2f}   longest {max(one for one, _ in seconds):.2f}")
        starts = {worker: len(trial.starts(worker)) for worker in KILLED}
        assert set(starts.values()) == {num_kills + 1}, f"a peer was restarted: {starts}"
        if isinstance(trial, SlurmTrial):
            command = ["srun", f"--jobid={trial.job_id}", "--overlap", "--ntasks=1", "--mem=0", "true"]
            print(f"srun of `true` in that job: {_median_s(command, clean_environment(environment)):.2f} s")
        stub = [sys.executable, str(ROOT / "tests" / "launcher" / "stub_worker.py"), "--help"]
        print(f"the stub's own start-up: {_median_s(stub, os.environ):.2f} s")
    finally:
        trial.close()


def _kill(trial: StubTrial, worker: str) -> tuple[float, float]:
    """Seconds from kill -9 until the next process exists, and until it works."""
    known = len(trial.starts(worker))
    killed_at = time.clock_gettime(time.CLOCK_BOOTTIME)
    os.kill(trial.starts(worker)[-1][0], signal.SIGKILL)
    wait_until(lambda: len(trial.starts(worker)) > known, f"{worker} to start again")
    running_at = time.clock_gettime(time.CLOCK_BOOTTIME)
    ticks = process_start_ticks(trial.starts(worker)[-1][0])
    assert ticks is not None, f"{worker} ended at once"
    return ticks / os.sysconf("SC_CLK_TCK") - killed_at, running_at - killed_at


def _median_s(command: Sequence[str], environment: Mapping[str, str]) -> float:
    seconds = []
    for _ in range(5):
        start = time.monotonic()
        subprocess.run(command, env=dict(environment), check=True, stdout=subprocess.DEVNULL)
        seconds.append(time.monotonic() - start)
    return statistics.median(seconds)


if __name__ == "__main__":
    main()
