"""What a data set of a million rows costs the submission and each kind of worker: CPU seconds, and memory of their own.

    python benchmarks/many_rows.py [--rows 1000000] [--characters 400]

Parquet with prompts of so many characters, a condition that takes nine rows in ten, and an order. Each part runs
in a process of its own. "held" is what the kernel counts as the process's own at the end, "at most" the most with the
file's mapped pages, which the kernel takes away where it needs room; both without what the imports had taken.
"""

import argparse
import base64
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pyarrow
import pyarrow.parquet

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.process_memory import forget_peak, kernel_count  # noqa: E402
from corral.experiments.config.data import DatasetConfig  # noqa: E402
from corral.experiments.datasets.dataset import Dataset, Look, dataset_spec  # noqa: E402
from corral.experiments.worker_specs import DatasetSpec  # noqa: E402
from corral.workers.checkpoint.ledger import Ledger, numbers_of  # noqa: E402
from corral.workers.data.prompts import PlannedPrompts  # noqa: E402
from corral.workers.master.drawn_prompts import DrawnPrompts  # noqa: E402

STEP = 512


def submit(folder: Path) -> object:
    """The names, a look at 20,000 whole rows, and the facts of the plan; of Parquet first the copy as Arrow."""
    config = DatasetConfig(path=folder / "rows.parquet", where="difficulty < 9", order="difficulty")
    Look(Dataset.open(config, kind="prompts")).check()
    spec = dataset_spec(config, kind="prompts")
    (folder / "spec.json").write_text(spec.model_dump_json())
    return spec


def planned(folder: Path) -> DatasetSpec:
    return DatasetSpec.model_validate_json((folder / "spec.json").read_bytes())


def read(folder: Path) -> object:
    """A rollout worker or a model worker, and the rows of a step."""
    rows = Dataset.planned(planned(folder))
    return rows, [rows[name] for name in islice(rows, 0, None, len(rows) // STEP)]


def deal(folder: Path) -> object:
    """The manager, or the master with a window: names, ledger, and the order as far as the first step."""
    prompts = PlannedPrompts.load(planned(folder))
    uids = prompts.uids(seed=1, num_epochs=1)
    return prompts, Ledger(numbers_of(prompts.row_ids)), uids, list(islice(uids, STEP))


def draw(folder: Path) -> object:
    """The master with a sampler, and the draws of the first step."""
    prompts = PlannedPrompts.load(planned(folder))
    ledger = Ledger(numbers_of(prompts.row_ids))
    return DrawnPrompts(prompts.row_ids, ledger, seed=1, batch_size=STEP, eta=1, total=10**6), prompts


PARTS: dict[str, Callable[[Path], object]] = {
    "submission, first": submit,
    "submission, again": submit,
    "rollout worker, model worker": read,
    "manager": deal,
    "master with a sampler": draw,
}


def measure(part: str, folder: Path) -> None:
    before, started = kernel_count("RssAnon"), time.process_time()
    resident = kernel_count("VmRSS")
    forget_peak()
    kept = PARTS[part](folder)
    spent_s = time.process_time() - started
    held, most = kernel_count("RssAnon") - before, kernel_count("VmHWM") - resident
    assert kept is not None
    print(f"| {part} | {spent_s:.1f} s | {held / 1e6:.0f} MB | {most / 1e6:.0f} MB |", flush=True)


def write_rows(path: Path, num_rows: int, num_characters: int) -> None:
    """A thousand rows at a time; their texts are alike too seldom to be made much smaller."""
    text = base64.b64encode(random.Random(1).randbytes(2**20 + num_characters)).decode()
    writer = None
    for first in range(0, num_rows, 1000):
        numbers = range(first, min(first + 1000, num_rows))
        places = [(number, number * 7919 % 2**20) for number in numbers]
        table = pyarrow.table(
            {
                "id": [f"problem-{number}" for number in numbers],
                "prompt": [f"What is {number}? {text[at : at + num_characters]}" for number, at in places],
                "answer": [str(number + 200) for number in numbers],
                "difficulty": [number * 7 % 10 for number in numbers],
            }
        )
        writer = writer or pyarrow.parquet.ParquetWriter(path, table.schema)
        writer.write_table(table)
    if writer is not None:
        writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--characters", type=int, default=400)
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part is not None:
        measure(arguments.part, arguments.folder)
        return
    with tempfile.TemporaryDirectory(prefix="corral-rows-") as folder:
        write_rows(Path(folder) / "rows.parquet", arguments.rows, arguments.characters)
        print(f"{arguments.rows} rows, {(Path(folder) / 'rows.parquet').stat().st_size / 1e6:.0f} MB of Parquet\n")
        print("| | CPU | held | at most |\n|---|---|---|---|", flush=True)
        for part in PARTS:
            command = [sys.executable, __file__, "--part", part, "--folder", folder]
            subprocess.run(command, check=True, env=os.environ | {"HF_DATASETS_CACHE": f"{folder}/cache"})


if __name__ == "__main__":
    main()
