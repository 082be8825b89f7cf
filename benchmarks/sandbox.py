"""What it costs to run a program in a sandbox: how many in a second, and how long one takes.

    python benchmarks/sandbox.py [--runs 1000] [--at-a-time N]

Rows of so many runs each: a program that does nothing (true) and Python that prints a number, once as bare
processes of this machine, then in one sandbox that stays, and in a new sandbox each, with as many at a time as there
are CPUs. Prints runs per second, and the median and the 99th percentile of one run in milliseconds, with its waiting
for a CPU, which counts what else the machine does; and the CPU time of a run, in a sandbox without the program's own.
For new sandboxes making and closing them is in it.
"""

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from corral.workers.sandbox.bubblewrap import Bubblewrap  # noqa: E402

PROGRAMS = {"true": ["true"], "Python": [sys.executable, "-I", "-c", "print(6 * 7)"]}
TIMEOUT_S = 60.0
Once = Callable[[Sequence[str]], Awaitable[None]]


async def bare(command: Sequence[str]) -> None:
    """As a process of this machine."""
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.DEVNULL)
    assert await process.wait() == 0


async def in_new_sandbox(command: Sequence[str]) -> None:
    """In one that is made for it and closed."""
    async with await Bubblewrap.create() as sandbox:
        assert (await sandbox.exec(command, timeout_s=TIMEOUT_S)).is_success


async def measure(once: Once, command: Sequence[str], *, runs: int, at_a_time: int) -> str:
    """Cells of the table: runs per second, median and 99th percentile in milliseconds, milliseconds of CPU time."""
    left, taken_s = iter(range(runs)), list[float]()

    async def work() -> None:
        for _ in left:
            started = time.perf_counter()
            await once(command)
            taken_s.append(time.perf_counter() - started)

    started, cpu_before_s = time.perf_counter(), cpu_s()
    await asyncio.gather(*(work() for _ in range(at_a_time)))
    rate = runs / (time.perf_counter() - started)
    percentiles = statistics.quantiles(taken_s, n=100)
    cpu_ms = 1e3 * (cpu_s() - cpu_before_s) / runs
    return f"{rate:.0f} | {1e3 * percentiles[49]:.1f} | {1e3 * percentiles[98]:.1f} | {cpu_ms:.1f}"


def cpu_s() -> float:
    """What this process has used, and those that have ended."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--at-a-time", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    print(f"{arguments.runs} runs, {arguments.at_a_time} at a time, user {os.geteuid()}\n")
    print(
        "| program | where | runs per second | median, ms | 99th percentile, ms | CPU, ms |\n|---|---|---|---|---|---|"
    )
    async with await Bubblewrap.create() as sandbox:

        async def in_one_sandbox(command: Sequence[str]) -> None:
            assert (await sandbox.exec(command, timeout_s=TIMEOUT_S)).is_success

        ways: dict[str, Once] = {"bare": bare, "one sandbox": in_one_sandbox, "a new sandbox each": in_new_sandbox}
        for program, command in PROGRAMS.items():
            for where, once in ways.items():
                cells = await measure(once, command, runs=arguments.runs, at_a_time=arguments.at_a_time)
                print(f"| {program} | {where} | {cells} |", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
