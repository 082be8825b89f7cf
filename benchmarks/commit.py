"""What a commit costs, and how long training stands still for it: a state of 1 GB, held by a rank in its own process.

    python benchmarks/commit.py [--mb 1024] [--commits 3]

The rank writes weights (two bytes per parameter), copies its training state (twelve) and writes the copy beside its
next step, as a model worker does. The master is the real one: `Commits` with its trial directory, trial log,
ledger and disk thread; only the messages go through a pipe.

Prints how long training stands still until all is copied, beside the writing that follows, and beside what a rank
stands still that writes its state first, as all did before; and how long a step takes alone and beside the writing.
Then, per commit, seconds of wall clock, of the rank's and of the master's CPU, and the bytes that each has read of
the files. Beside them, in the same run and for the same files, what it took when the master sealed a directory by
reading it: fsync and digest of every file in four threads, of the weights once more in the commit.
"""

import argparse
import asyncio
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from corral.experiments.config.control import TrainControl  # noqa: E402
from corral.experiments.trial.directory import TrialDirectory  # noqa: E402
from corral.experiments.trial.journal import Journal  # noqa: E402
from corral.experiments.trial.log import TrialLog  # noqa: E402
from corral.experiments.worker_specs import MasterWorkerSpec  # noqa: E402
from corral.scheduling.parallel import Mesh, ParallelDims  # noqa: E402
from corral.scheduling.policy_version import PolicyVersion  # noqa: E402
from corral.workers.checkpoint.checkpoint import RecoveryPoint, last_valid_commit  # noqa: E402
from corral.workers.checkpoint.durable_file import ContentDigest, FileEntry  # noqa: E402
from corral.workers.checkpoint.ledger import Ledger, numbers_of  # noqa: E402
from corral.workers.master.commits import Commits  # noqa: E402
from corral.workers.master.disk import Disk  # noqa: E402
from corral.workers.master.epoch import Epoch  # noqa: E402
from corral.workers.master.trainer_group import WrittenFiles  # noqa: E402
from corral.workers.master.weights import PublishedVersions  # noqa: E402

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

    from corral.workers.backends.files.weights import write_weights
    from corral.workers.backends.fsdp.engine import make_shard
    from corral.workers.backends.train_state import TrainStateHeader
    from corral.workers.model.model_worker import SavesBehind
    from corral.workers.model.models import RoleSave
    from corral.workers.requests.messages import SaveCheckpoint

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
    header = TrainStateHeader(step=1, seed=0, num_ranks=1)
    is_written = threading.Event()
    with SavesBehind() as saves:
        saves.announce_to(is_written.set)
        while (request := pipe.recv()) is not None:
            kind, directory = request
            before, files = cost_so_far(), {}
            if kind == "step":
                train_step(list(parameters.values()), optimizer)
            elif kind == "weights":
                weights = ((name, parameter.detach().bfloat16()) for name, parameter in parameters.items())
                files = write_weights(directory, weights, rank=0, num_ranks=1)
            elif kind == "written first":
                files = make_shard(parameters, optimizer, header, rank=0).write(directory)
            elif kind == "copy":
                is_written.clear()
                copy = RoleSave(state=make_shard(parameters, optimizer, header, rank=0), weights=None).copied()
                request = SaveCheckpoint(role=ROLE, state=str(directory), weights="", copies=True)
                saves.begin(ROLE, partial(copy.write, request))
                del copy
            else:
                is_written.wait()
                reply = saves.written(ROLE)
                assert reply is not None and not reply.failed_because, reply
                files = reply.state
            pipe.send((files, cost_so_far() - before))


def train_step(parameters: list[Any], optimizer: Any) -> None:
    """A forward and backward pass of one row through all layers, and an update of every parameter."""
    import torch

    hidden = torch.randn(8, PARAMETER_ROWS)
    for parameter in parameters:
        hidden = torch.tanh(hidden @ parameter)
    hidden.sum().backward()
    optimizer.step()
    optimizer.zero_grad()


class Rank:
    """What the master has instead of a trainer group: one rank behind a pipe."""

    workers = ("model_worker/0",)

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self.workers, self.news = ("model_worker/0",), asyncio.Event()
        self.last_cost = Cost(0.0, 0.0, 0)

    async def save_weights(self, role: str, directory: Path, *, base: Path | None = None) -> dict[str, FileEntry]:
        return await asyncio.to_thread(self._ask, "weights", directory)

    async def begin_save(self, role: str, state: Path, weights: Path | None, *, copies: bool) -> None:
        await asyncio.to_thread(self._ask, "copy", state)

    async def written(self, role: str) -> WrittenFiles:
        return WrittenFiles(state=await asyncio.to_thread(self._ask, "written", None), weights={}, problems={})

    def still_writing(self) -> list[str]:
        return list(self.workers)

    def cost_of(self, kind: str, directory: Path | None = None) -> Cost:
        """Of something that the master has no part in."""
        self._pipe.send((kind, directory))
        _, cost = self._pipe.recv()
        return cast(Cost, cost)

    def _ask(self, kind: str, directory: Path | None) -> dict[str, FileEntry]:
        self._pipe.send((kind, directory))
        files, self.last_cost = self._pipe.recv()
        return cast(dict[str, FileEntry], files)


# --- the master -------------------------------------------------------------------------------------------------------


class Phases:
    """Stands for the presence record, which nobody looks at here."""

    def during(self, *_: object, **__: object) -> "Phases":
        return self

    def beat(self) -> None: ...

    def record(self, *_: object) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def make_epoch(trial: TrialDirectory, disk: Disk) -> Epoch:
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
    plan = SimpleNamespace(supervision=SimpleNamespace(step_timeout_s=600.0))
    return Epoch(
        context=cast(Any, SimpleNamespace(trial=trial, plan=plan, presence=Phases(), attempt=0)),
        spec=spec,
        writer=TrialLog(trial.log_path).claim("benchmark"),
        recovery=RecoveryPoint(),
        disk=disk,
        journal=Journal(trial.journal_path),
    )


@dataclass
class CommitCosts:
    """One step's, of the master's process."""

    weights: Cost
    """Until the published weights are sealed."""
    still: Cost
    """Until all is copied and the next step may begin."""
    behind: Cost
    """From then until the entry of the trial log, without the step that runs meanwhile."""
    step_s: float
    """A step alone."""
    step_beside_s: float
    """A step while its state of before is written."""
    written_first: Cost
    """Of a rank that writes its state before it goes on, and stands still meanwhile."""
    weights_written: Cost
    """Of the rank."""

    @property
    def commit(self) -> Cost:
        return Cost(*(a + b for a, b in zip(astuple(self.still), astuple(self.behind), strict=True)))


async def run_master(trial: TrialDirectory, rank: Rank, num_commits: int) -> list[CommitCosts]:
    costs: list[CommitCosts] = []
    rank.cost_of("step")  # it makes what later steps reuse
    async with Disk() as disk:
        epoch = make_epoch(trial, disk)
        weights = PublishedVersions(epoch, cast(Any, rank), publish=lambda published: None)
        ledger = Ledger(numbers_of(map(str, range(BATCH * num_commits))))
        commits = Commits(epoch, cast(Any, rank), weights, ledger)
        for step in range(1, num_commits + 1):
            commits.ledger.train(step, [f"0:{number}" for number in range(BATCH * (step - 1), BATCH * step)])
            version = PolicyVersion(epoch.writer.epoch, step)
            scratch = trial.path / f"written-first-{step}"
            written_first = rank.cost_of("written first", scratch)
            shutil.rmtree(scratch)
            step_s = rank.cost_of("step").wall_s
            start = cost_so_far()
            await weights.publish(version)
            sealed, weights_written = cost_so_far(), rank.last_cost
            await commits.begin(step, version)
            copied = cost_so_far()
            step_beside_s = rank.cost_of("step").wall_s
            trained = cost_so_far()
            await commits.settle()
            assert commits.covers(step)
            behind = cost_so_far() - trained
            behind.wall_s += step_beside_s
            costs.append(
                CommitCosts(
                    weights=sealed - start,
                    still=copied - sealed,
                    behind=behind,
                    step_s=step_s,
                    step_beside_s=step_beside_s,
                    written_first=written_first,
                    weights_written=weights_written,
                )
            )
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
    report(costs, options.commits, size, old_weights, old_commit)


def report(costs: list[CommitCosts], num_commits: int, size: int, old_weights: Cost, old_commit: Cost) -> None:
    def median(value: Callable[[CommitCosts], float]) -> float:
        return statistics.median(map(value, costs))

    still_s, first_s = median(lambda cost: cost.still.wall_s), median(lambda cost: cost.written_first.wall_s)
    print(f"a checkpoint of {size / MB:.0f} MB, median of {num_commits} commits, weights published before\n")
    print(f"training stands still, until all is copied    {still_s:>8.2f} s  {still_s / first_s:.3f} of the next line")
    print(f"training stands still, where it is written    {first_s:>8.2f} s  by the rank alone, as before")
    print(f"writing beside training, until the entry      {median(lambda cost: cost.behind.wall_s):>8.2f} s")
    print(f"a step alone                                  {median(lambda cost: cost.step_s):>8.2f} s")
    print(f"a step beside the writing                     {median(lambda cost: cost.step_beside_s):>8.2f} s\n")
    old_cpu_s, old_read = old_weights.cpu_s + old_commit.cpu_s, old_weights.read_bytes + old_commit.read_bytes
    cpu_s = median(lambda cost: cost.weights.cpu_s + cost.commit.cpu_s)
    rank_cpu_s = median(lambda cost: cost.weights_written.cpu_s + cost.written_first.cpu_s)
    rank_read = median(lambda cost: cost.weights_written.read_bytes + cost.written_first.read_bytes)
    read = median(lambda cost: cost.weights.read_bytes + cost.commit.read_bytes)
    rows: list[tuple[str, float | None, float | None, float | None]] = [
        ("master, all of it", median(lambda cost: cost.weights.wall_s + cost.commit.wall_s), cpu_s, read),
        ("  until the weights are published", median(lambda cost: cost.weights.wall_s), None, None),
        ("rank: write, hash, fsync", None, rank_cpu_s, rank_read),
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
