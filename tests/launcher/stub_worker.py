"""A worker without work: does what {trial}/stub.json tells it, start by start; the last word holds for later starts.

    {"rollout_worker/0": ["exit 3", "wait"], "master_worker/0": ["finish 0.5"]}

wait       ends with 0 when asked to            stubborn   does not obey
exit N     ends with N                          kill       SIGKILLs itself
finish S N a master that is done after S s      master N   a master that runs until a stop request
steps N D  a master that commits a step every D s, in all attempts together N of them
die N W    `exit N`, once W has started         child      starts a process of its own, then waits
linger S   ends with 0 S s after it was asked to     eat M      uses M MiB of memory, then waits
served M   starts a process that uses M MiB, and fails if it ends

A master that tells of N steps, of none if N is left out, has metrics, and so its trial ends with a page: a process.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from corral.experiments.trial.attempts import may_resume
from corral.experiments.trial.directory import TrialDirectory
from corral.experiments.trial.log import LogWriter, TrialLog


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--kind", required=True)
    parser.add_argument("--index", required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--incarnation", required=True)
    options = parser.parse_args()
    directory = TrialDirectory(options.plan.parent)
    worker = f"{options.kind}/{options.index}"
    starts = directory.path / "starts" / f"{options.kind}-{options.index}"
    starts.parent.mkdir(exist_ok=True)
    with starts.open("a") as file:
        file.write(f"{os.getpid()} {options.incarnation}\n")
    words = json.loads((directory.path / "stub.json").read_text()).get(worker, ["wait"])
    word, *arguments = words[min(len(starts.read_text().splitlines()), len(words)) - 1].split()
    obey(directory, options.kind, word, linger_s=float(arguments[0]) if word == "linger" else 0.0)
    print(f"{worker} attempt {options.attempt}: {word} {' '.join(arguments)}", flush=True)
    return act(directory, word, arguments, attempt=options.attempt)


def obey(directory: TrialDirectory, kind: str, word: str, *, linger_s: float) -> None:
    """As a real worker obeys signals; what is printed afterwards says that it does."""

    def end(*_: object) -> None:
        time.sleep(linger_s)
        sys.exit(0)

    leave = signal.SIG_IGN if word == "stubborn" else end
    signal.signal(signal.SIGINT, leave)
    signal.signal(signal.SIGTERM, leave)
    if "SLURM_JOB_ID" in os.environ:  # not at the top: the many stubs of a local trial start faster without
        from corral.experiments.plan import RunPlan
        from corral.workers.lifecycle.notice import notice_of

        plan = RunPlan.from_json(directory.plan_path.read_bytes())
        signal.signal(signal.SIGTERM, notice_of(plan, directory, kind) or leave)


def act(directory: TrialDirectory, word: str, arguments: list[str], *, attempt: int) -> int:
    if word == "exit":
        print(f"ValueError: told to exit with {arguments[0]}", file=sys.stderr)
        return int(arguments[0])
    if word == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if word == "die":
        other = directory.path / "starts" / arguments[1].replace("/", "-")
        while not other.exists():
            time.sleep(0.02)
        return int(arguments[0])
    if word == "child":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    if word == "eat":
        bytearray(int(arguments[0]) << 20)
    if word == "served":
        subprocess.run([sys.executable, "-c", f"bytearray({arguments[0]} << 20)"], check=True)
    if word == "steps":
        return commit_steps(directory, int(arguments[0]), float(arguments[1]), attempt=attempt)
    if word in ("finish", "master"):
        seconds = float(arguments.pop(0)) if word == "finish" else 600.0
        return be_master(directory, seconds, num_steps=int(arguments[0]) if arguments else 0, attempt=attempt)
    while True:
        time.sleep(600.0)


def be_master(directory: TrialDirectory, seconds: float, *, num_steps: int, attempt: int) -> int:
    log = TrialLog(directory.log_path)
    writer = log.claim("stub", resume=may_resume(directory, attempt, log))
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


def commit_steps(directory: TrialDirectory, num_steps: int, pause_s: float, *, attempt: int) -> int:
    log = TrialLog(directory.log_path)
    writer = log.claim("stub", resume=may_resume(directory, attempt, log))
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


if __name__ == "__main__":
    sys.exit(main())
