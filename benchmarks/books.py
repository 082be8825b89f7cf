"""What the books of a trial cost at its beginning and after many samples and commits: ledger and trial log.

    python benchmarks/books.py [--samples 1000000] [--rows 300000] [--commits 100000]

A young trial has one commit. The old one has consumed `samples` samples in shuffled passes over `rows` rows, one in a
hundred dropped, and has `commits` entries in its log, which are made without forcing them to disk. Both commit 512
samples more, several times, as the master does: the ledger is taken while training stands still; what is written then,
beside training, is its file, the delta and the entry of the log. Beside them in the same run: a plain write of the same
bytes into three new files, forced to disk as well.

A start is what a process does before it knows what is settled and may commit or deal: it reads the names of the rows,
the log and the ledger. Whoever follows takes in each further commit.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TypeVar

import msgspec

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from corral.experiments.config.data import DatasetConfig  # noqa: E402
from corral.experiments.datasets.dataset import Dataset, dataset_spec  # noqa: E402
from corral.experiments.trial.directory import TrialDirectory  # noqa: E402
from corral.experiments.trial.log import TrialLog  # noqa: E402
from corral.experiments.trial.log_state import Claim, Commit  # noqa: E402
from corral.experiments.worker_specs import DatasetSpec  # noqa: E402
from corral.workers.checkpoint.checkpoint import CheckpointWriter, CommittedLedger  # noqa: E402
from corral.workers.checkpoint.ledger import (  # noqa: E402
    LEDGER_NAME,
    Ledger,
    LedgerDelta,
    numbers_of,
    write_delta,
)
from corral.workers.data.prompts import uids_of_passes  # noqa: E402

T = TypeVar("T")

BATCH = 512
MEASURED_COMMITS = 11


@dataclass
class Costs:
    """Seconds, and bytes per commit."""

    still_s: list[float] = field(default_factory=list)
    written_s: list[float] = field(default_factory=list)
    plain_s: list[float] = field(default_factory=list)
    followed_s: list[float] = field(default_factory=list)
    bytes_per_commit: int = 0
    names_s: float = 0.0
    log_s: float = 0.0
    log_without_snapshot_s: float = 0.0
    claim_s: float = 0.0
    start_s: float = 0.0
    """Of what reads all three."""
    start_cpu_s: float = 0.0


def timed(work: Callable[[], T], into: list[float] | None = None) -> tuple[T, float]:
    started = time.perf_counter()
    result = work()
    seconds = time.perf_counter() - started
    if into is not None:
        into.append(seconds)
    return result, seconds


def make_dataset(path: Path, rows: int) -> DatasetSpec:
    with path.open("w") as file:
        for row in range(rows):
            file.write(json.dumps({"id": f"problem-{row}", "prompt": "What is " + "1+" * 100 + "1?", "answer": "101"}))
            file.write("\n")
    return dataset_spec(DatasetConfig(path=path), kind="answers")


def consumed(uids: list[str]) -> LedgerDelta:
    """A hundredth of the samples dropped, the others trained."""
    dropped = set(random.Random(1).sample(uids, len(uids) // 100))
    trained = {1: [uid for uid in uids if uid not in dropped]}
    return LedgerDelta(epoch=1, step=1, trained=trained, dropped=dict.fromkeys(dropped, "reward_error"))


class Trial:
    """One whose master has claimed it and committed something."""

    def __init__(self, folder: Path, dataset: DatasetSpec, *, samples: int, commits: int) -> None:
        self.directory = TrialDirectory(folder)
        self.directory.create()
        self.dataset, self.step, self.samples = dataset, commits, samples
        self.row_ids = list(Dataset.planned(dataset))
        self.ledger = Ledger(numbers_of(self.row_ids))
        self.uids = uids_of_passes(self.row_ids, seed=1, num_epochs=1000, shuffle=True)
        self.ledger.add(consumed(list(islice(self.uids, samples))))
        self._write_log(commits)
        self.writer = TrialLog(self.directory.log_path).claim("benchmark")
        self.commit(Costs())

    def _write_log(self, commits: int) -> None:
        log = TrialLog(self.directory.log_path)
        for slot in range(1, commits + 1):
            entry: Claim | Commit = Claim(epoch=1, owner="benchmark")
            if slot > 1:
                entry = Commit(
                    epoch=1,
                    step=slot,
                    parent=log.state.head,
                    directory=f"checkpoints/step-{slot:08d}-e1-00000000",
                    manifest_digest="0" * 64,
                    ledger_file=f"ledger/1-{slot}-00000000.json",
                    ledger_digest="0" * 64,
                    trained=BATCH,
                    dropped=0,
                )
            (self.directory.log_path / f"{slot:08d}").write_bytes(msgspec.json.encode(entry))
            log._state = log.state.after(entry)
            if slot > 1 and slot % 100 == 0:
                log.write_snapshot()

    def commit(self, costs: Costs) -> None:
        """As `workers/master/commits.py` does it, without the tensors."""
        uids = list(islice(self.uids, BATCH))
        self.samples, self.step = self.samples + BATCH, self.step + 1
        self.ledger.train(self.step, uids)
        epoch = self.writer.epoch
        checkpoint = CheckpointWriter(self.directory, epoch=epoch, step=self.step)
        (states, delta), _ = timed(
            lambda: (self.ledger.states(), self.ledger.delta_for(epoch=epoch, step=self.step)), costs.still_s
        )

        def write() -> tuple[int, int, int]:
            checkpoint.add_ledger(states)
            digest = checkpoint.write_manifest({})
            file, ledger_digest = write_delta(self.directory, delta)
            logged = self.writer.commit(
                step=self.step,
                directory=checkpoint.relative_path,
                manifest_digest=digest,
                ledger_file=file,
                ledger_digest=ledger_digest,
                trained=BATCH,
                dropped=0,
            )
            whole = (checkpoint.path / LEDGER_NAME).stat().st_size
            return whole, (self.directory.path / file).stat().st_size, len(msgspec.json.encode(logged.commit))

        sizes, _ = timed(write, costs.written_s)
        self.ledger.mark_committed(delta)
        costs.bytes_per_commit = sum(sizes)
        timed(lambda: self._write_plainly(sizes), costs.plain_s)

    def _write_plainly(self, sizes: Iterable[int]) -> None:
        for size in sizes:
            with tempfile.NamedTemporaryFile(dir=self.directory.path) as file:
                file.write(b"x" * size)
                file.flush()
                os.fsync(file.fileno())

    def measure(self) -> Costs:
        costs = Costs()
        cpu_s = time.process_time()
        row_ids, costs.names_s = timed(lambda: list(Dataset.planned(self.dataset)))
        follower, made_s = timed(lambda: CommittedLedger(self.directory, row_ids))
        news, first_look_s = timed(lambda: asyncio.run(follower.look()))
        costs.start_cpu_s = time.process_time() - cpu_s
        _, costs.log_s = timed(lambda: TrialLog(self.directory.log_path).read())
        assert len(news.covered) == self.samples, (len(news.covered), self.samples)
        costs.start_s = costs.names_s + made_s + first_look_s
        for _ in range(MEASURED_COMMITS):
            self.commit(costs)
            timed(lambda: asyncio.run(follower.look()), costs.followed_s)
        snapshot = self.directory.log_path / "snapshot"
        if snapshot.exists():
            snapshot.rename(snapshot.with_name("aside"))
        _, costs.log_without_snapshot_s = timed(lambda: TrialLog(self.directory.log_path).read())
        if snapshot.with_name("aside").exists():
            snapshot.with_name("aside").rename(snapshot)
        _, costs.claim_s = timed(lambda: TrialLog(self.directory.log_path).claim("another"))
        return costs


def report(young: Costs, old: Costs) -> None:
    def ms(seconds: list[float]) -> str:
        return f"{1e3 * statistics.median(seconds):.2f} ms"

    rows: list[tuple[str, Callable[[Costs], str]]] = [
        ("a commit: training stands still for its books", lambda costs: ms(costs.still_s)),
        ("a commit: its books are written beside training", lambda costs: ms(costs.written_s)),
        ("  a plain write of the same bytes, three files", lambda costs: ms(costs.plain_s)),
        ("a commit: MB", lambda costs: f"{costs.bytes_per_commit / 1e6:.3f} MB"),
        ("a commit: taken in by whoever follows", lambda costs: ms(costs.followed_s)),
        ("a start: names of the rows, log, ledger", lambda costs: f"{costs.start_s:.3f} s"),
        ("  CPU seconds", lambda costs: f"{costs.start_cpu_s:.3f} s"),
        ("  of which names of the rows", lambda costs: f"{costs.names_s:.3f} s"),
        ("  of which the log", lambda costs: f"{costs.log_s:.4f} s"),
        ("  the log if its snapshot is gone", lambda costs: f"{costs.log_without_snapshot_s:.3f} s"),
        ("a claim, which lists the log's folder", lambda costs: f"{costs.claim_s:.3f} s"),
    ]
    print(f"{'':<50}{'YOUNG':>12}{'OLD':>12}")
    for name, value in rows:
        print(f"{name:<50}{value(young):>12}{value(old):>12}")


def main() -> None:
    """Makes both trials, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--rows", type=int, default=300_000, help="of the data set")
    parser.add_argument("--commits", type=int, default=100_000, help="entries of the trial log")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="corral-books-") as folder:
        dataset = make_dataset(Path(folder) / "rows.jsonl", options.rows)
        young = Trial(Path(folder) / "young", dataset, samples=0, commits=1).measure()
        old = Trial(Path(folder) / "old", dataset, samples=options.samples, commits=options.commits).measure()
    print(f"{options.samples:,} samples of {options.rows:,} rows, {options.commits:,} entries in the log\n")
    report(young, old)


if __name__ == "__main__":
    main()
