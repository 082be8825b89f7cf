"""Everything that needs a GPU, in steps of eight minutes at most, each with a report. Run by `make gpu`.

    python -m benchmarks.gpu [--only tests training-0.5B] [--sizes 0.5B 1.5B] [--reports gpu-reports]

    steps ── one process each, its output shown as it comes ──► gpu-reports/tests.md, gpu-reports/training-0.5B.md, …

Exit codes: 0 if all steps passed, 1 if one did not, 2 if there is no GPU, and then nothing was run. `--device cpu` runs
the same steps on small models, to see whether the steps themselves are right.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu.report import Result, command_line, render  # noqa: E402 - found through the line above
from benchmarks.gpu.steps import Step, steps  # noqa: E402 - as above
from benchmarks.training.sizes import SIZES  # noqa: E402 - as above
from tests.launcher.trials import end_trials  # noqa: E402 - as above

NO_GPU = 2


def main() -> int:
    """Run the steps; returns the exit code."""
    options = _options()
    if options.device != "cpu" and not torch.cuda.is_available():
        print("no GPU: torch finds none on this machine, and nothing was run", file=sys.stderr)
        return NO_GPU
    machine = describe_machine(options.device)
    sizes = options.sizes or (["tiny"] if options.device == "cpu" else ["0.5B", "1.5B"])
    options.reports.mkdir(parents=True, exist_ok=True)
    has_failed = False
    with tempfile.TemporaryDirectory(prefix="corral-gpu-") as fileroot:
        try:
            for step in steps(device=options.device, sizes=sizes, visible=visible_gpus(), fileroot=fileroot):
                if not options.only or step.name in options.only:
                    result = run(step)
                    has_failed |= result.exit_code != 0
                    (options.reports / f"{step.name}.md").write_text(render(result, machine=machine))
                    print(f"== {step.name}: {result.verdict}, {options.reports / step.name}.md", flush=True)
        finally:
            end_trials(Path(fileroot))  # a trial whose step was late goes on by itself
    return int(has_failed)


def run(step: Step) -> Result:
    """Run one step to its end, or end its process group at its deadline."""
    print(f"\n== {step.name}: {command_line(step)}", flush=True)
    started = time.monotonic()
    process = subprocess.Popen(
        step.command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        cwd=ROOT,
        env={**os.environ, **step.environment, "PYTHONPATH": _search_path()},
        start_new_session=True,
    )
    assert process.stdout is not None
    is_late = threading.Event()

    def end() -> None:
        is_late.set()
        os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(step.timeout_s, end)
    timer.start()
    output: list[str] = []
    try:
        for line in process.stdout:
            print(line, end="", flush=True)
            output.append(line.rstrip("\n"))
        code = process.wait()
    finally:
        timer.cancel()
        process.stdout.close()
    return Result(
        step=step, exit_code=None if is_late.is_set() else code, seconds=time.monotonic() - started, output=output
    )


def visible_gpus() -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them for a process of its own."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [name.strip() for name in given.split(",") if name.strip()]
    return [str(number) for number in range(torch.cuda.device_count())]


def describe_machine(device: str) -> dict[str, str]:
    """What figures cannot be read without."""
    described = {"date": time.strftime("%Y-%m-%d"), "commit": _commit()}
    if device == "cpu":
        described["device"] = f"no GPU: {platform.machine()}, to try the steps out"
    else:
        names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
        memory = torch.cuda.get_device_properties(0).total_memory / 2**30
        described["GPU"] = f"{len(names)} x {names[0]}, {memory:.0f} GiB"
        described["CUDA"] = str(torch.version.cuda)
        described["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return described | {"Python": platform.python_version(), "torch": torch.__version__}


def _commit() -> str:
    """Of the source tree; it may have been carried here without its history."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _search_path() -> str:
    return os.pathsep.join(path for path in (str(ROOT), os.environ.get("PYTHONPATH", "")) if path)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [step.name for step in steps(device="cpu", sizes=list(SIZES), visible=[], fileroot="")]
    parser.add_argument("--only", nargs="+", choices=names, metavar="STEP", help=", ".join(names))
    parser.add_argument("--sizes", nargs="+", choices=SIZES, metavar="SIZE", help=", ".join(SIZES))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--reports", type=Path, default=Path("gpu-reports"), help="folder for a page of each step")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
