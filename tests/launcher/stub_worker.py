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


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--kind", required=True)
    parser.add_argument("--index", required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--incarnation", required=True)
    options = parser.parse_args()
    trial = options.plan.parent
    worker = f"{options.kind}/{options.index}"
    starts = trial / "starts" / f"{options.kind}-{options.index}"
    starts.parent.mkdir(exist_ok=True)
    with starts.open("a") as file:
        file.write(f"{os.getpid()} {options.incarnation}\n")
    words = json.loads((trial / "stub.json").read_text()).get(worker, ["wait"])
    word, *arguments = words[min(len(starts.read_text().splitlines()), len(words)) - 1].split()
    obey(options.plan, options.kind, word, linger_s=float(arguments[0]) if word == "linger" else 0.0)
    print(f"{worker} attempt {options.attempt}: {word} {' '.join(arguments)}", flush=True)
    return act(trial, word, arguments, attempt=options.attempt)


def obey(plan: Path, kind: str, word: str, *, linger_s: float) -> None:
    """As a real worker obeys signals; what is printed afterwards says that it does."""

    def end(*_: object) -> None:
        time.sleep(linger_s)
        sys.exit(0)

    leave = signal.SIG_IGN if word == "stubborn" else end
    signal.signal(signal.SIGINT, leave)
    signal.signal(signal.SIGTERM, leave)
    planned = json.loads(plan.read_bytes()) if "SLURM_JOB_ID" in os.environ else {"mode": "local"}
    if planned["mode"] == "slurm" and kind != "master_worker":
        signal.signal(signal.SIGTERM, lambda *_: None)  # notice that does not concern it: test_notice.py
    elif planned["mode"] == "slurm":
        from corral.experiments.trial.directory import TrialDirectory  # the others start faster without
        from corral.workers.lifecycle.worker import notice_of

        grace_s = planned["supervision"]["stop_grace_s"]
        signal.signal(signal.SIGTERM, notice_of("slurm", TrialDirectory(plan.parent), kind, stop_grace_s=grace_s))


def act(trial: Path, word: str, arguments: list[str], *, attempt: int) -> int:
    if word == "exit":
        print(f"ValueError: told to exit with {arguments[0]}", file=sys.stderr)
        return int(arguments[0])
    if word == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if word == "die":
        other = trial / "starts" / arguments[1].replace("/", "-")
        while not other.exists():
            time.sleep(0.02)
        return int(arguments[0])
    if word == "child":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    if word == "eat":
        bytearray(int(arguments[0]) << 20)
    if word == "served":
        subprocess.run([sys.executable, "-c", f"bytearray({arguments[0]} << 20)"], check=True)
    if word in ("steps", "finish", "master"):
        import stub_master

        return stub_master.act(trial, word, arguments, attempt=attempt)
    while True:
        time.sleep(600.0)


if __name__ == "__main__":
    sys.exit(main())
