"""What it costs a host to stage weights, beside a plain copy of the same bytes, while it does nothing else.

    OMP_NUM_THREADS=1 python benchmarks/staging.py [--megabytes 14 52 252] [--rounds 9] [--cold]

    files in the page cache ──shared_memory──► host directory          another process ──broadcast, over TCP──► the same
          │      └──disk──► only compared with their digests                  │
          ├──delta, lora──► the same                                          └──plain copy, over TCP──► the same
      └──plain copy──► host directory

`weight_update.py` measures the same beside a server that answers requests, and then both compete for cores. Copies and
stagings take turns; seconds are medians of the rounds, of the wall clock and of this process's CPU, and a ratio is the
median of the ratios of the rounds. What is staged is also all that belongs to it: locks, the manifest, and that the
version before the last one is removed. `delta` and `lora` make a whole version, of little that they read, so they stand
beside a copy of the whole version, too. With `--cold` files are read from their disk each time.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median

from transformers.utils.logging import disable_progress_bar

from corral.experiments.config.rollout import WeightsConfig

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.another_host import AnotherHost, another_host  # noqa: E402
from benchmarks.weight_update import (  # noqa: E402
    CHANGED_SHARES,
    SHAPES,
    Version,
    drop_from_page_cache,
    make_adapted,
    make_lineage,
    make_versions,
    plain_copy,
)
from corral.workers.weight_transport.staging import WeightStaging, make_staging  # noqa: E402
from tests.workers.generation.servers import ADMIN_KEY, DEADLINE_S  # noqa: E402
from tests.workers.trusted import trust  # noqa: E402

TRANSPORTS = ("disk", "shared_memory", "broadcast", "delta", "lora")
Seconds = tuple[float, float]
"""Of the wall clock, and of this process's CPU."""


def main() -> None:
    """Print a line for each transport and size."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--megabytes", type=int, nargs="+", choices=sorted(SHAPES), default=sorted(SHAPES))
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=TRANSPORTS)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--cold", action="store_true", help="drop the files from the page cache before each reading")
    parser.add_argument("--host-directory", type=Path, default=Path("/dev/shm"), help="as weights.host_directory")
    options = parser.parse_args()
    disable_progress_bar()
    print("    MB | transport     |     raw  staged  ratio | CPU raw  staged  ratio")
    for megabytes in options.megabytes:
        for name in options.transports:
            with tempfile.TemporaryDirectory() as folder:
                versions = versions_for(name, Path(folder), megabytes=megabytes)
                rounds = measure(name, versions, options.host_directory, rounds=options.rounds, is_cold=options.cold)
                print(line(name, versions[0].size_bytes, rounds), flush=True)


def measure(
    name: str, versions: Sequence[Version], host_directory: Path, *, rounds: int, is_cold: bool
) -> list[tuple[Seconds, Seconds]]:
    """What a plain copy and a staging cost in each round, after one that warms up."""
    costs: list[tuple[Seconds, Seconds]] = []
    with ExitStack() as stack:
        other = None
        if name == "broadcast":
            other = stack.enter_context(another_host(host_directory, versions[0].sealed))
        transport = stack.enter_context(closing(make(name, host_directory)))
        for number in range(rounds + 1):
            version = versions[number % len(versions)]
            into = host_directory / f"raw-copy-{uuid.uuid4().hex}"
            if other is not None:
                other.stage(version.sealed)
            if is_cold:
                drop_from_page_cache(version.directory)
            raw = copied(version, into, other)
            if is_cold:
                drop_from_page_cache(version.directory)
            costs.append((raw, staged(transport, version, tag=f"0.{number}", other=other)))
    return costs[1:]


def versions_for(name: str, folder: Path, *, megabytes: int) -> list[Version]:
    """Two in turns, of which each leads to the other as the transport wants it."""
    if name == "delta":
        return make_lineage(folder, megabytes=megabytes, share=CHANGED_SHARES[0])
    if name == "lora":
        return make_adapted(folder, megabytes=megabytes)
    return make_versions(folder, megabytes=megabytes)


def make(name: str, host_directory: Path) -> WeightStaging:
    """A worker's end, of a trial of its own."""
    config = WeightsConfig.model_validate({"transport": name, "host_directory": host_directory})
    return make_staging(
        config, trial_uuid=uuid.uuid4().hex, worker="benchmark", admin_key=ADMIN_KEY, tls=trust().client()
    )


def copied(version: Version, into: Path, other: AnotherHost | None) -> Seconds:
    """A plain copy of the same files, from their folder or from the other host."""
    cpu_s = time.process_time()
    if other is None:
        wall_s = plain_copy(version.files, into)
    else:
        wall_s = other.plain_copy([path.name for path in version.files], version.sealed, into)
    return wall_s, time.process_time() - cpu_s


def staged(transport: WeightStaging, version: Version, *, tag: str, other: AnotherHost | None) -> Seconds:
    """As the worker of a server has it done."""
    sources = [] if other is None else [other.control]
    cpu_s = time.process_time()
    result = transport.stage(tag, version.directory, version.sealed.digest, timeout_s=DEADLINE_S, sources=sources)
    assert (result.bytes_received > 0) == (other is not None), result
    return result.seconds, time.process_time() - cpu_s


def line(name: str, size_bytes: int, rounds: Sequence[tuple[Seconds, Seconds]]) -> str:
    """Of the table."""
    wall, cpu = (columns([(raw[clock], staging[clock]) for raw, staging in rounds]) for clock in range(2))
    return f"{size_bytes / 1e6:6.0f} | {name:13s} | {wall} | {cpu}"


def columns(rounds: Sequence[tuple[float, float]]) -> str:
    """Medians of a plain copy's seconds, of a staging's, and of their ratios."""
    raw_s, staged_s = (median(each) for each in zip(*rounds, strict=True))
    return f"{raw_s:7.3f} {staged_s:7.3f} {median(staging / raw for raw, staging in rounds):6.2f}"


if __name__ == "__main__":
    main()
