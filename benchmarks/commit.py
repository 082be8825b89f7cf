"""What a commit costs the master: a training state of 1 GB, written by a rank in a process of its own.

    python benchmarks/commit.py [--mb 1024] [--commits 3]

The rank writes weights (two bytes per parameter) and training state (twelve), as a model worker does, and replies with
the size and the digest of each file. The master is the real one: `DurableState` with its trial directory, trial log,
ledger and disk thread; only the messages go through a pipe.

Prints, per commit, seconds of wall clock, of the rank's and of the master's CPU, and the bytes that each has read of
the files. Beside them, in the same run and for the same files, what it took when the master sealed a directory by
reading it: fsync and digest of every file in four threads, of the weights once more in the commit.
"""

import argparse
import asyncio
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from corral.experiments.config.control import TrainControl  # noqa: E402
from corral.experiments.trial.directory import TrialDirectory  # noqa: E402
from corral.experiments.trial.journal import Journal  # noqa: E402
from corral.experiments.trial.log import TrialLog  # noqa: E402
from corral.experiments.worker_specs import MasterWorkerSpec  # noqa: E402
from corral.scheduling.mesh import Mesh  # noqa: E402
from corral.scheduling.parallel import ParallelDims  # noqa: E402
from corral.scheduling.policy_version import Lineage, PolicyVersion  # noqa: E402
from corral.workers.checkpoint.checkpoint import RecoveryPoint, last_valid_commit  # noqa: E402
from corral.workers.checkpoint.content_digest import ContentDigest  # noqa: E402
from corral.workers.checkpoint.durable_file import FileEntry  # noqa: E402
from corral.workers.checkpoint.ledger import Ledger  # noqa: E402
from corral.workers.master.disk import Disk  # noqa: E402
from corral.workers.master.durable_state import DurableState  # noqa: E402
from corral.workers.master.epoch_parts import EpochParts  # noqa: E402
from corral.workers.master.sequence_buffer import SequenceBuffer  # noqa: E402

MB = 2**20
ROLE = "actor"
PARAMETER_ROWS, PARAMETER_COLUMNS = 2048, 2048
BYTES_PER_PARAMETER = 12  # parameter and both moments of AdamW, in float32
HASH_THREADS = 4
BATCH = 512


@dataclass
class Cost:
    """Of one process, or one phase."""

    wall_s: float
    cpu_s: float
    read_bytes: int

    def __sub__(self, before: "Cost") -> "Cost":
        return Cost(self.wall_s - before.wall_s, self.cpu_s - before.cpu_s, self.read_bytes - before.read_bytes)


def cost_so_far() -> Cost:
    """Of this process with all its threads; what read(2) gave it counts, from the disk or from a cache."""
    with open("/proc/self/io") as file:
        counters = dict(line.split(": ") for line in file.read().splitlines())
    return Cost(time.monotonic(), time.process_time(), int(counters["rchar"]))


# --- the rank ---------------------------------------------------------------------------------------------------------


def run_rank(pipe: Connection, num_parameters: int) -> None:
    """A model worker's side of SaveWeights and SaveCheckpoint, over parameters that nothing has trained."""
    import torch

    from corral.workers.backends.train_state import TrainStateHeader, write_header, write_shard
    from corral.workers.backends.weight_files import write_weights

    torch.set_num_threads(1)
    parameters = {
        f"model.layers.{index}.weight": torch.nn.Parameter(torch.randn(PARAMETER_ROWS, PARAMETER_COLUMNS))
        for index in range(num_parameters)
    }
    optimizer = torch.optim.AdamW(parameters.values())
    for parameter in parameters.values():
        moments = {"exp_avg": torch.randn_like(parameter), "exp_avg_sq": torch.randn_like(parameter)}
        optimizer.state[parameter] = {"step": torch.tensor(1.0), **moments}
    pipe.send("ready")
    while (request := pipe.recv()) is not None:
        kind, directory = request
        before = cost_so_far()
        if kind == "weights":
            weights = ((name, parameter.detach().bfloat16()) for name, parameter in parameters.items())
            files = write_weights(directory, weights, rank=0, num_ranks=1)
        else:
            files = write_shard(directory, parameters, optimizer, rank=0, num_ranks=1)
            files |= write_header(directory, TrainStateHeader(step=1, seed=0, num_ranks=1))
        pipe.send((files, cost_so_far() - before))


class Rank:
    """What the master has instead of a gang: one rank behind a pipe."""

    workers = ("model_worker/0",)

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self.cpu_s, self.read_bytes = 0.0, 0

    async def save_weights(self, role: str, directory: Path, *, base: Path | None = None) -> dict[str, FileEntry]:
        return await asyncio.to_thread(self._ask, "weights", directory)

    async def save_state(self, role: str, directory: Path) -> dict[str, FileEntry]:
        return await asyncio.to_thread(self._ask, "state", directory)

    def _ask(self, kind: str, directory: Path) -> dict[str, FileEntry]:
        self._pipe.send((kind, directory))
        files, cost = self._pipe.recv()
        self.cpu_s += cost.cpu_s
        self.read_bytes += cost.read_bytes
        return cast(dict[str, FileEntry], files)


# --- the master -------------------------------------------------------------------------------------------------------


class Phases:
    """Stands for the presence record, which nobody looks at here."""

    def during(self, *_: object, **__: object) -> "Phases":
        return self

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def make_parts(trial: TrialDirectory, rank: Rank) -> EpochParts:
    writer = TrialLog(trial.log_path).claim("benchmark")
    ledger = Ledger()
    spec = MasterWorkerSpec(
        calls=[],
        train_batch_size=BATCH,
        num_prompts=10**6,
        source="dataset",
        max_head_offpolicyness=0,
        control=TrainControl(),
        meshes={f"{ROLE}/0": Mesh(ranks=(0,), dims=ParallelDims())},
        sample_ranks=[0],
        initial_weights={ROLE: trial.path},
        published_role=ROLE,
    )
    return EpochParts(
        spec=spec,
        graph=cast(Any, None),  # nothing runs on it here
        trial=trial,
        presence=cast(Any, Phases()),
        journal=Journal(trial.journal_path),
        gang=cast(Any, rank),
        writer=writer,
        recovery=RecoveryPoint(honoured=(), rejected=()),
        ledger=ledger,
        lineage=Lineage([], epoch=writer.epoch),
        buffer=SequenceBuffer(is_consumed=ledger.consumed),
        source=cast(Any, None),
        held_out_rows=(),
        publish=lambda version, weights: None,
        weights_in_use=frozenset,
        step_timeout_s=600.0,
    )


async def run_master(trial: TrialDirectory, rank: Rank, num_commits: int) -> list[tuple[Cost, Cost]]:
    """Cost of writing and sealing weights, and of the commit, per step."""
    parts = make_parts(trial, rank)
    costs: list[tuple[Cost, Cost]] = []
    async with Disk() as disk:
        durable = DurableState(parts, disk)
        await durable.open_lines()
        for step in range(1, num_commits + 1):
            parts.ledger.train(step, [f"0:{step}-{number}" for number in range(BATCH)])
            version = PolicyVersion(parts.writer.epoch, step)
            start = cost_so_far()
            await durable.write_weights(version)
            sealed = cost_so_far()
            await durable.commit(step, version)
            costs.append((sealed - start, cost_so_far() - sealed))
    return costs


def seal_by_reading(directory: Path) -> Cost:
    """What the master did before: fsync and hash every file of a directory."""

    def seal(path: Path) -> str:
        digest = ContentDigest()
        piece = memoryview(bytearray(4 * MB))
        with open(path, "rb", buffering=0) as file:
            os.fsync(file.fileno())
            while size := file.readinto(piece):
                digest.update(piece[:size])
        return digest.hexdigest()

    before = cost_so_far()
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        list(pool.map(seal, [path for path in directory.rglob("*") if path.is_file()]))
    return cost_so_far() - before


def main() -> None:
    """Makes the state, commits it, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=1024, help="size of the training state")
    parser.add_argument("--commits", type=int, default=3)
    options = parser.parse_args()
    num_parameters = max(1, round(options.mb * MB / (BYTES_PER_PARAMETER * PARAMETER_ROWS * PARAMETER_COLUMNS)))
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=run_rank, args=(theirs, num_parameters), daemon=True)
    process.start()
    ours.recv()
    rank = Rank(ours)
    with tempfile.TemporaryDirectory(prefix="corral-commit-") as folder:
        trial = TrialDirectory(Path(folder) / "trial")
        trial.create()
        costs = asyncio.run(run_master(trial, rank, options.commits))
        point = last_valid_commit(TrialLog(trial.log_path).read(), trial)
        assert point.commit is not None and point.commit.step == options.commits
        checkpoint = trial.inside(point.commit.directory)
        size = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
        old_weights, old_commit = seal_by_reading(checkpoint / "weights"), seal_by_reading(checkpoint)
    ours.send(None)
    process.join()
    report(costs, rank, options.commits, size, old_weights, old_commit)


def report(
    costs: list[tuple[Cost, Cost]], rank: Rank, num_commits: int, size: int, old_weights: Cost, old_commit: Cost
) -> None:
    def median(value: Callable[[Cost], float]) -> float:
        return statistics.median(value(weights) + value(commit) for weights, commit in costs)

    old_cpu_s, old_read = old_weights.cpu_s + old_commit.cpu_s, old_weights.read_bytes + old_commit.read_bytes
    cpu_s, read = median(lambda cost: cost.cpu_s), median(lambda cost: cost.read_bytes)
    print(f"a checkpoint of {size / MB:.0f} MB, median of {num_commits} commits, weights published before\n")
    rows: list[tuple[str, float | None, float | None, float | None]] = [
        ("master, all of it", median(lambda cost: cost.wall_s), cpu_s, read),
        ("  until the weights are published", statistics.median(weights.wall_s for weights, _ in costs), None, None),
        ("rank: write, hash, fsync", None, rank.cpu_s / num_commits, rank.read_bytes / num_commits),
        ("master, had it read to seal", old_weights.wall_s + old_commit.wall_s, old_cpu_s, old_read),
    ]
    print(f"{'':<34}{'WALL S':>8}{'CPU S':>8}{'MB READ':>9}")
    for name, wall_s, seconds, num_bytes in rows:
        print(f"{name:<34}{_cell(wall_s, 8, 2)}{_cell(seconds, 8, 3)}{_cell(num_bytes, 9, 2, unit=MB)}")
    print(
        f"\nthe master's CPU is {cpu_s / old_cpu_s:.4f} of what it was, the bytes that it reads {read / old_read:.6f}"
    )


def _cell(value: float | None, width: int, digits: int, *, unit: int = 1) -> str:
    return " " * width if value is None else f"{value / unit:>{width}.{digits}f}"


if __name__ == "__main__":
    main()
