"""What new weights cost a generation server, for every transport, beside a plain copy of the same bytes.

    OMP_NUM_THREADS=1 python benchmarks/weight_update.py [--sglang] [--megabytes 14 52 252] [--hot] [--mode retract]

    version in a folder on disk ──transport, worker's code──► a server that answers requests meanwhile
                └──plain read, plain copy into the host directory──► what the ratios are of

A random Qwen2 in float32, two versions of it in turns; for `delta` in bfloat16, half as large, and a share of the
values goes one number up or down in each version; for `lora` with an adapter beside every linear layer. The files of a
version are dropped from the page cache before each
reading, as they are on a host that sees a version for the first time; `--hot` leaves them there, which is faster than
any network. All that is compared is done while the server answers the same requests, in turns: plain read and plain
copy come before the update in one round, and after it in the next. A ratio is the median of the rounds' ratios.

    MB         of the whole files of a version
    read       what the host read of the version's folder: by its worker, and by the server where that reads there, too
    raw        a plain copy of the files into the host directory, without looking at them; for `broadcast`, by TCP from
               the host directory of another host, which is another process here; for `disk`, the plain read
    staged     copied and verified by the worker, or only verified; the server generates on
    prepared   then read by the embedded engine into memory of its own; it generates on
    stop       as the server has it, see `GenerationBackend.swap`; beside it as a share of a plain read
    gap        the longest time without a new token of any request, from the order for the update to half a second
               after, as seen from outside: the stop, the step before it and, but for `in_place`, the prefixes read anew
    step       the same over as long without an update: what of the gap is a decode step beside all else
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen2Config
from transformers.utils.logging import disable_progress_bar

from corral.experiments.config.rollout import UpdateMode, WeightsConfig
from corral.workers.checkpoint.durable_file import PIECE_BYTES
from corral.workers.checkpoint.file_delta import DELTA_SUFFIX
from corral.workers.checkpoint.manifest import SealedDirectory
from corral.workers.generation.embedded import EmbeddedBackend

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # servers as the tests start them

from benchmarks.another_host import AnotherHost, another_host  # noqa: E402
from tests.workers.backends.trained_versions import publish, stepped  # noqa: E402
from tests.workers.generation.servers import API_KEY, DEADLINE_S, Served, serving, wait_until  # noqa: E402
from tests.workers.trusted import connection_to  # noqa: E402
from tests.workers.weight_transport.adapted_versions import (  # noqa: E402
    merged,
    publish_adapted,
    random_adapter,
)

SHAPES = {14: (256, 768, 4), 52: (512, 1536, 4), 252: (1024, 3072, 5)}  # hidden, intermediate, layers, by megabytes
VOCAB_SIZE = 1024
CHANGED_SHARES = (0.01, 0.03)  # of the values, from one version to the next
ADAPTER_RANK = 8
NUM_REQUESTS = 4
NUM_NEW_TOKENS = 4000  # more than come while all is measured
SETTLE_S = 0.5
_POLL_S = 0.002
MODES: tuple[UpdateMode, ...] = ("retract", "in_place")  # with `abort` nothing is under way afterwards
TRANSPORTS: tuple[str, ...] = get_args(WeightsConfig.model_fields["transport"].annotation)


@dataclass(frozen=True)
class Version:
    """Weights as a trainer publishes them."""

    sealed: SealedDirectory

    @property
    def directory(self) -> Path:
        return self.sealed.path

    @property
    def files(self) -> list[Path]:
        """What servers read."""
        return [
            self.directory / name for name in self.sealed.files if not name.endswith(DELTA_SUFFIX) and "/" not in name
        ]

    @property
    def size_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.files)


@dataclass(frozen=True)
class Update:
    """What one update cost, in bytes and seconds."""

    read_bytes: int
    raw_copy_s: float
    raw_read_s: float
    staged_s: float
    prepared_s: float
    stopped_s: float
    gap_s: float
    step_s: float


def make_model(directory: Path, *, megabytes: int, seed: int) -> Path:
    """Random weights in float32."""
    hidden_size, intermediate_size, num_layers = SHAPES[megabytes]
    config = Qwen2Config(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(seed)
    auto_class: Any = AutoModelForCausalLM
    auto_class.from_config(config).save_pretrained(directory)
    return directory


def make_versions(folder: Path, *, megabytes: int) -> list[Version]:
    """Two that have nothing to do with each other."""
    models = [make_model(folder / f"model{seed}", megabytes=megabytes, seed=seed) for seed in range(2)]
    return [
        Version(publish(folder / f"v{number}", load_file(model / "model.safetensors"), companions=model))
        for number, model in enumerate(models)
    ]


def make_lineage(folder: Path, *, megabytes: int, share: float) -> list[Version]:
    """Two in bfloat16 that follow each other in turns: the delta of each leads from the files of the other."""
    model = make_model(folder / "model", megabytes=megabytes, seed=0)
    first = {name: tensor.bfloat16() for name, tensor in load_file(model / "model.safetensors").items()}
    second = stepped(first, share=share, seed=1)
    sealed = publish(folder / "v0", first, companions=model)
    after = publish(folder / "v1", second, base=sealed.path, companions=model)
    before = publish(folder / "v2", first, base=after.path, companions=model)
    return [Version(before), Version(after)]


def drop_from_page_cache(directory: Path) -> None:
    for path in (path for path in directory.rglob("*") if path.is_file()):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def plain_read(files: list[Path]) -> float:
    """Seconds to read every file."""
    buffer, started = bytearray(PIECE_BYTES), time.perf_counter()
    for path in files:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - started


def plain_copy(files: list[Path], into: Path) -> float:
    """Seconds to copy every file."""
    started = time.perf_counter()
    into.mkdir()
    for path in files:
        shutil.copyfile(path, into / path.name)
    seconds = time.perf_counter() - started
    shutil.rmtree(into)
    return seconds


def make_adapted(folder: Path, *, megabytes: int) -> list[Version]:
    """Two of one base model, with adapters beside all linear layers."""
    model = make_model(folder / "model", megabytes=megabytes, seed=0)
    weights = load_file(model / "model.safetensors")
    shapes = {name: tensor.shape for name, tensor in weights.items() if name.endswith("_proj.weight")}
    versions: list[Version] = []
    for number in range(2):
        adapter = random_adapter(shapes, rank=ADAPTER_RANK, generator=torch.Generator().manual_seed(number))
        files = {"model.safetensors": merged(weights, adapter, dtype=torch.float32)}
        versions.append(Version(publish_adapted(folder / f"v{number}", files, adapter, base=model)))
    return versions


@dataclass
class Tokens:
    """Counts the tokens of the requests under way, and the longest time without a new one."""

    served: Served
    is_over: threading.Event
    longest_gap_s: float = 0.0
    num_seen: int = 0

    def longest_gap_in(self, seconds: float) -> float:
        """From the last time this was asked to as many seconds from now; and begins anew."""
        time.sleep(seconds)
        longest_gap_s, self.longest_gap_s = self.longest_gap_s, 0.0
        return longest_gap_s

    def watch_counter(self) -> None:
        """Of the embedded engine."""
        seen, since = -1, time.perf_counter()
        while not self.is_over.is_set():
            now, num_tokens = time.perf_counter(), self.served.backend.progress()["tokens_generated"]
            if num_tokens != seen:
                self._note(now - since if seen >= 0 else 0.0)
                seen, since = num_tokens, now
            time.sleep(_POLL_S)
        self._note(time.perf_counter() - since)

    def watch_stream(self) -> None:
        """Of SGLang: one request more, whose tokens are told one by one."""
        connection = connection_to(self.served.client.url, timeout_s=DEADLINE_S)
        sampling = {"max_new_tokens": NUM_NEW_TOKENS, "ignore_eos": True}
        body = {"input_ids": [1, 2, 3], "sampling_params": sampling, "stream": True}
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {API_KEY}"}
        connection.request("POST", "/generate", json.dumps(body), headers)
        since: float | None = None
        for line in connection.getresponse():
            if line.strip():
                now = time.perf_counter()
                self._note(now - since if since is not None else 0.0)
                since = now
        connection.close()

    def _note(self, gap_s: float) -> None:
        self.num_seen += 1
        self.longest_gap_s = max(self.longest_gap_s, gap_s)


@contextmanager
def watched(served: Served) -> Iterator[Tokens]:
    """Count while the block runs."""
    tokens = Tokens(served, threading.Event())
    is_embedded = isinstance(served.backend, EmbeddedBackend)
    watcher = threading.Thread(target=tokens.watch_counter if is_embedded else tokens.watch_stream)
    watcher.start()
    try:
        yield tokens
    finally:
        tokens.is_over.set()
        watcher.join(DEADLINE_S)


@dataclass(frozen=True)
class Plain:
    """What takes the same way without being looked at."""

    version: Version
    is_hot: bool
    into: Path
    """A folder that is not there yet, in the host directory."""
    other: AnotherHost | None
    is_copied: bool
    """Whether a host that stages the version has a copy of its own then."""

    def seconds(self) -> tuple[float, float]:
        """Of reading it, and of reading and copying it to where the servers of a host find it."""
        self.cool()
        read_s = plain_read(self.version.files)
        if not self.is_copied:
            return read_s, read_s
        if self.other is not None:
            names = [path.name for path in self.version.files]
            return read_s, self.other.plain_copy(names, self.version.sealed, self.into)
        self.cool()
        return read_s, plain_copy(self.version.files, self.into)

    def cool(self) -> None:
        """Have the next reading go to the disk."""
        if not self.is_hot:
            drop_from_page_cache(self.version.directory)


def update(served: Served, plain: Plain, *, tag: str, is_plain_first: bool) -> Update:
    """One update, with requests under way."""
    version, other = plain.version, plain.other
    if other is not None:
        other.stage(version.sealed)
    running = [
        served.client.start([1, 2, 3, number], max_new_tokens=NUM_NEW_TOKENS, ignore_eos=True)
        for number in range(NUM_REQUESTS)
    ]
    wait_until(lambda: served.client.metric("num_running_reqs") >= NUM_REQUESTS, "the requests to run")
    seconds = plain.seconds() if is_plain_first else None
    plain.cool()
    with watched(served) as tokens:
        wait_until(lambda: tokens.num_seen > 1, "the first tokens")
        step_s = tokens.longest_gap_in(SETTLE_S)
        served.bring_to(tag, version.directory, digest=version.sealed.digest, sources=[other.control] if other else [])
        gap_s = tokens.longest_gap_in(SETTLE_S)  # the prefixes of the requests are read again
    read_s, copy_s = seconds or plain.seconds()
    assert served.client.metric("num_running_reqs") >= NUM_REQUESTS, "the requests ended before all was measured"
    served.abort_all()
    for request in running:
        request.result(DEADLINE_S)
    last = served.updates.last
    assert last is not None and last.version == tag
    reads_there = served.client.get("/get_model_info")["model_path"] == str(version.directory)
    return Update(
        read_bytes=last.bytes_read + (version.size_bytes if reads_there else 0),
        raw_copy_s=copy_s,
        raw_read_s=read_s,
        staged_s=last.staged_s,
        prepared_s=last.prepared_s,
        stopped_s=last.stopped_s,
        gap_s=gap_s,
        step_s=step_s,
    )


def measure(kind: str, transport: str, name: str, versions: list[Version], arguments: argparse.Namespace) -> str:
    """One line of the table; the first update warms up, and brings the version that a delta leads from."""
    directory: Path = arguments.host_directory
    config = WeightsConfig.model_validate(
        {"transport": transport, "host_directory": directory, "update_mode": arguments.mode}
    )
    updates = []
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        other = None
        if transport == "broadcast":
            other = stack.enter_context(another_host(directory, versions[0].sealed))
        with serving(kind, versions[0].directory, Path(folder), transport_config=config) as served:
            for number in range(1, arguments.rounds + 2):
                plain = Plain(
                    versions[number % len(versions)],
                    is_hot=arguments.hot,
                    into=directory / f"raw-copy-{os.getpid()}",
                    other=other,
                    is_copied=transport != "disk",
                )
                updates.append(update(served, plain, tag=f"0.{number}", is_plain_first=number % 2 == 0))

    def median(value: Callable[[Update], float]) -> float:
        return statistics.median(value(one) for one in updates[1:])

    return (
        f"{versions[0].size_bytes / 1e6:6.0f} | {name:13s} | {median(lambda u: u.read_bytes / 1e6):7.2f} "
        f"{median(lambda u: u.read_bytes / versions[0].size_bytes):7.2%} | "
        f"{median(lambda u: u.raw_copy_s):7.3f} {median(lambda u: u.staged_s):7.3f} "
        f"{median(lambda u: u.staged_s / u.raw_copy_s):6.2f} {median(lambda u: u.prepared_s):8.3f} | "
        f"{median(lambda u: u.raw_read_s):7.3f} "
        f"{median(lambda u: u.stopped_s):7.4f} {median(lambda u: u.stopped_s / u.raw_read_s):6.1%} | "
        f"{median(lambda u: u.gap_s):7.3f} {median(lambda u: u.step_s):7.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="What new weights cost a generation server, for every transport")
    parser.add_argument("--sglang", action="store_true", help="a real server of SGLang instead of the embedded engine")
    parser.add_argument("--megabytes", type=int, nargs="+", choices=sorted(SHAPES), default=sorted(SHAPES))
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=TRANSPORTS)
    parser.add_argument("--mode", choices=MODES, default="retract", help="as weights.update_mode")
    parser.add_argument("--rounds", type=int, default=5, help="updates that count, for each line")
    parser.add_argument("--hot", action="store_true", help="leave the files in the page cache")
    parser.add_argument("--folder", type=Path, default=None, help="on the file system that versions are read from")
    parser.add_argument("--host-directory", type=Path, default=Path("/dev/shm"), help="as weights.host_directory")
    arguments = parser.parse_args()
    disable_progress_bar()
    kind = "sglang" if arguments.sglang else "hf"
    print(f"{kind}, {arguments.mode}, {NUM_REQUESTS} requests under way, median of {arguments.rounds} updates; seconds")
    print(
        "    MB | transport     | read MB   of MB |     raw  staged  ratio prepared "
        "|    read    stop  share |     gap    step"
    )
    for megabytes in arguments.megabytes:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            versions = make_versions(Path(folder), megabytes=megabytes)
            for transport in arguments.transports:
                if transport not in ("delta", "lora"):
                    print(measure(kind, transport, transport, versions, arguments), flush=True)
        for share in CHANGED_SHARES if "delta" in arguments.transports else ():
            with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
                lineage = make_lineage(Path(folder), megabytes=megabytes, share=share)
                print(measure(kind, "delta", f"delta, {share:.0%}", lineage, arguments), flush=True)
        if "lora" in arguments.transports:
            with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
                adapted = make_adapted(Path(folder), megabytes=megabytes)
                print(measure(kind, "lora", f"lora, rank {ADAPTER_RANK}", adapted, arguments), flush=True)


if __name__ == "__main__":
    main()
