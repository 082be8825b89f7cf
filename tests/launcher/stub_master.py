"""The words of stub_worker.py that only a master obeys."""

import json
import time
from pathlib import Path

from corral.experiments.trial.attempts import may_resume
from corral.experiments.trial.directory import TrialDirectory
from corral.experiments.trial.log import LogWriter, TrialLog


def act(trial: Path, word: str, arguments: list[str], *, attempt: int) -> int:
    directory = TrialDirectory(trial)
    log = TrialLog(directory.log_path)
    writer = log.claim("stub", resume=may_resume(directory, attempt, log))
    if word == "steps":
        return commit_steps(directory, writer, int(arguments[0]), float(arguments[1]))
    seconds = float(arguments.pop(0)) if word == "finish" else 600.0
    return be_master(directory, writer, seconds, num_steps=int(arguments[0]) if arguments else 0)


def be_master(directory: TrialDirectory, writer: LogWriter, seconds: float, *, num_steps: int) -> int:
    for step in range(1, num_steps + 1):
        line = {"step": step, "time": time.time(), "version": step, "ppo/reward/mean": 0.25 * step, "loss": 1.0 / step}
        with directory.metrics_path.open("a") as file:
            file.write(json.dumps(line) + "\n")
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if stopped(directory, writer):
            return 0
        time.sleep(0.05)
    writer.done()
    return 0


def commit_steps(directory: TrialDirectory, writer: LogWriter, num_steps: int, pause_s: float) -> int:
    last = writer.state.last_commit
    first = last.step + 1 if last else 1
    for step in range(first, num_steps + 1):
        end = time.monotonic() + pause_s
        while time.monotonic() < end:
            if stopped(directory, writer):
                return 0
            time.sleep(0.02)
        writer.commit(
            step=step,
            directory=f"checkpoints/step-{step}",
            manifest_digest="0",
            ledger_file=f"ledger/step-{step}",
            ledger_digest="0",
            trained=1,
            dropped=0,
        )
    writer.done()
    return 0


def stopped(directory: TrialDirectory, writer: LogWriter) -> bool:
    request = directory.read_stop_request()
    if request is None:
        return False
    writer.stop(by=request.by, reason="checkpointed at step 3", then=request.then)
    return True
