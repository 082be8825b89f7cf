"""Start-up of a local trial: seconds from rl-submit to the first trained step, and what each worker costs by then.

    python benchmarks/startup.py

Starts one small GRPO trial and stops it after its first step. CPU seconds and memory are those of each worker at that
moment, with the processes that it has started and without its guard (PSS: memory that processes share is divided among
them). Beside them, as the limit in the same run: the CPU
seconds of a bare Python process, and of one that imports torch and a transformers model class.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

BIN = Path(sys.executable).parent
RECIPE = Path(__file__).parents[1] / "experiments" / "recipes" / "arithmetic_grpo.yaml"
DEADLINE_S = 180.0
HEAVY_IMPORT = "import torch; from transformers import Qwen2ForCausalLM"


def main() -> None:
    """Run the trial and print the table."""
    with tempfile.TemporaryDirectory(prefix="corral-startup-") as folder:
        root = Path(folder)
        subprocess.run(
            [sys.executable, "-m", "corral.workers.data.arithmetic", "--out", folder], check=True, capture_output=True
        )
        started = time.monotonic()
        _submit(root)
        submitted_s = time.monotonic() - started
        trial = root / "trials" / "arithmetic-grpo" / "startup"
        _wait_for_first_step(trial / "metrics.jsonl")
        first_step_s = time.monotonic() - started
        rows = [_cost(worker) for worker in _workers(trial)]
        subprocess.run([BIN / "rl-stop", trial, "--now"], check=True, capture_output=True)
    print(
        f"rl-submit --local returned after {submitted_s:.1f} s; the first step was trained after {first_step_s:.1f} s\n"
    )
    print(f"{'WORKER':<22}{'CPU S':>8}{'MEMORY MB':>11}  TORCH")
    for name, cpu_s, memory_mb, has_torch in rows:
        print(f"{name:<22}{cpu_s:>8.2f}{memory_mb:>11.0f}  {'yes' if has_torch else 'no'}")
    print(
        f"\nfor comparison, CPU seconds: python {_cpu_of(''):.2f}, python + torch + Qwen2 {_cpu_of(HEAVY_IMPORT):.2f}"
    )


def _submit(root: Path) -> None:
    command = [
        *(BIN / "rl-submit", RECIPE, "--local", "--trial", "startup", "--fileroot", root / "trials"),
        *("-s", f"actor.path={root / 'model'}", "-s", f"dataset.path={root / 'train_grpo.jsonl'}"),
        *("-s", f"evaluation.dataset.path={root / 'heldout.jsonl'}"),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([str(part) for part in command], check=True, capture_output=True, env=environment)


def _wait_for_first_step(metrics: Path) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        if metrics.exists() and any(json.loads(line)["step"] >= 1 for line in metrics.read_text().splitlines()):
            return
        time.sleep(0.05)
    raise TimeoutError(f"the trial trained no step within {DEADLINE_S:.0f} s; look at {metrics.parent}/logs")


def _workers(trial: Path) -> list[tuple[str, int]]:
    """Names, and process ids of their guards."""
    events = [json.loads(line) for line in (trial / "events.jsonl").read_text().splitlines()]
    pid_by_worker = {event["worker"]: event["pid"] for event in events if event["event"] == "worker_started"}
    return sorted(pid_by_worker.items())


def _cost(worker: tuple[str, int]) -> tuple[str, float, float, bool]:
    name, guard = worker
    processes = psutil.Process(guard).children(recursive=True)
    if not processes:
        raise RuntimeError(f"{name} has ended: its guard {guard} has no process; look at the trial's logs")
    times = [process.cpu_times() for process in processes]
    memory = sum(process.memory_full_info().pss for process in processes)
    has_torch = any("libtorch" in Path(f"/proc/{process.pid}/maps").read_text() for process in processes)
    return name, sum(time.user + time.system for time in times), memory / 2**20, has_torch


def _cpu_of(code: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
