"""How long rl-status and rl-logs take beside many trials: 200 that have ended, 5 that run (stub workers).

    python benchmarks/status_latency.py [--finished 200] [--running 5] [--slurm]

--slurm lets the running ones be jobs of a throw-away cluster.

Prints seconds of wall clock for each command: the first look, then the median of five more. Beside them, as the limit
in the same run: a bare Python process, and the same command in an empty folder. The target is half a second.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from corral.experiments.trial.attempts import AttemptEnd, EndState, record_attempt, write_end  # noqa: E402
from corral.experiments.trial.directory import TrialDirectory  # noqa: E402
from corral.experiments.trial.journal import Journal  # noqa: E402
from corral.experiments.trial.log import TrialLog  # noqa: E402
from corral.launcher.trial.ends import TASK_ENDED  # noqa: E402
from tests.launcher.trials import StubTrial, make_plan  # noqa: E402
from tests.slurm.cluster import running_cluster  # noqa: E402
from tests.slurm.trials import SMALL, SlurmTrial  # noqa: E402

BIN = Path(sys.executable).parent
NUM_COMMITS = 20
NUM_STEPS = 500
TARGET_S = 0.5


def main() -> None:
    """Makes the trials, asks, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--finished", type=int, default=200)
    parser.add_argument("--running", type=int, default=5)
    parser.add_argument("--slurm", action="store_true", help="the running trials are jobs of a throw-away SLURM")
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="corral-status-"))
        if options.slurm:
            cluster = stack.enter_context(running_cluster(num_nodes=options.running))  # one fills a node
            os.environ.update({name: cluster.environment[name] for name in ("SLURM_CONF", "PATH")})
        root, empty = Path(folder) / "trials", Path(folder) / "empty"
        empty.mkdir()
        os.environ["XDG_CACHE_HOME"] = str(Path(folder) / "cache")
        for number in range(options.finished):
            _make_finished(root, f"done-{number}")
        running = [_start(root, f"run-{number}", on_slurm=options.slurm) for number in range(options.running)]
        time.sleep(2.0)  # until the machine is as busy as five trials that wait make it
        try:
            _report(root, empty, options.finished, options.running)
        finally:
            for trial in running:
                trial.close()


def _make_finished(root: Path, name: str) -> None:
    directory = TrialDirectory(root / "exp" / name)
    plan = make_plan(directory.path, trial=name, model_workers=8, servers=8)
    directory.create()
    directory.plan_path.write_bytes(plan.to_json())
    directory.start_attempt_logs(0)
    record_attempt(directory, attempt=0, resume=False, mode="local")
    _write_log(directory)
    journal = Journal(directory.journal_path)
    for worker in plan.workers:
        directory.worker_log(0, worker.kind, worker.index).write_text("a line of a log\n" * 200)
        journal.append("worker_started", attempt=0, worker=f"{worker.kind}/{worker.index}", pid=1, node="n1")
    directory.metrics_path.write_text(
        "".join(json.dumps({"step": step, "ppo/reward/mean": 0.5, "loss": 0.1}) + "\n" for step in range(NUM_STEPS))
    )
    for worker in plan.workers:
        journal.append(TASK_ENDED, attempt=0, who=f"{worker.kind}/{worker.index}", pid=1, code=0, why="exit 0")
    write_end(directory, AttemptEnd(attempt=0, state=EndState.COMPLETE, cause="", then=""))


def _write_log(directory: TrialDirectory) -> None:
    writer = TrialLog(directory.log_path).claim("benchmark")
    for step in range(1, NUM_COMMITS + 1):
        writer.commit(
            step=step,
            directory=f"checkpoints/step-{step}",
            manifest_digest="0" * 64,
            ledger_file="ledger/x",
            ledger_digest="0" * 64,
            trained=8,
            dropped=0,
        )
    writer.done()


def _start(root: Path, name: str, *, on_slurm: bool) -> StubTrial:
    size: dict[str, Any] = {"model_workers": 1, "servers": 1}
    if on_slurm:
        job = SlurmTrial(root, {"master_worker/0": ["master"]}, trial=name, **size, **SMALL)
        job.submit()
        job.wait_for_workers()
        return job
    trial = StubTrial(root, {"master_worker/0": ["master"]}, trial=name, **size)
    trial.start()
    trial.wait_for_workers()
    return trial


def _report(root: Path, empty: Path, num_finished: int, num_running: int) -> None:
    name = f"exp/done-{num_finished // 2}"
    commands = [
        ["rl-status", "--fileroot", str(root)],
        ["rl-status", "--fileroot", str(root), "-a", "-o", "json"],
        ["rl-status", name, "--fileroot", str(root)],
        ["rl-status", "run-0", "--fileroot", str(root)],
        ["rl-logs", name, "--fileroot", str(root)],
        ["rl-logs", "run-0", "-n", "5", "--fileroot", str(root)],
        ["rl-status", "--fileroot", str(empty)],
    ]
    print(f"{num_finished} trials ended, {num_running} run; target {TARGET_S} s\n")
    print(f"{'FIRST':>7}{'MEDIAN':>8}  COMMAND")
    for command in commands:
        first, *more = (_seconds([str(BIN / command[0]), *command[1:]]) for _ in range(6))
        shown = " ".join(command).replace(str(root), "TRIALS").replace(str(empty), "EMPTY")
        print(f"{first:>7.2f}{statistics.median(more):>8.2f}  {shown}")
    bare = statistics.median(_seconds([sys.executable, "-c", "pass"]) for _ in range(5))
    print(f"{'':>7}{bare:>8.2f}  python -c pass")


def _seconds(command: Sequence[str]) -> float:
    started = time.monotonic()
    subprocess.run(command, check=True, capture_output=True, stdin=subprocess.DEVNULL)
    return time.monotonic() - started


if __name__ == "__main__":
    main()
