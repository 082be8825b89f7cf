"""What a model's start costs each of several ranks: the engine, which reads its own rows, beside loading the whole.

    python benchmarks/load_memory.py [--ranks 4] [--layers 28] [--files 1 4]

A model, 2 GB in float32 by default, is written in bfloat16 and in float32, as one file and as several, and loaded by
all ranks at once, cut over them by FSDP2, with float32 weights in memory. `engine` is `FSDPEngine` as a trial makes it;
`whole` is transformers' `from_pretrained` in float32 on every rank, cut afterwards. The peak is what the process held
in memory more than before, as the kernel counts it, with the pages of files that are mapped into it, which it shares
with the other ranks and the kernel may take back; the share is that rank's part of the float32 weights. The target is a
peak of 1.3 shares and one file of the model.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging as transformers_logging

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.process_memory import forget_peak, kernel_count  # noqa: E402
from corral.workers.backends.fsdp.engine import FSDPEngine  # noqa: E402
from corral.workers.backends.parallel_context import (  # noqa: E402
    ParallelContext,
    connect_store,
    host_store,
    init_parallel,
)
from corral.workers.backends.sharding import device_mesh, local, shard  # noqa: E402

GB = 1e9
TIMEOUT_S = 300.0
POLL_S = 0.05
TARGET_SHARES = 1.3
MODEL: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
}


@dataclass(frozen=True, slots=True)
class Start:
    """Of one rank."""

    share_bytes: int
    """Its rows of the float32 weights."""
    peak_bytes: int
    wall_s: float


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--files", type=int, nargs="+", default=[1, 4], help="that the weights are spread over")
    parser.add_argument("--rank", nargs=4, metavar=("RANK", "WAY", "MODEL", "ADDRESS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    if options.rank is not None:
        rank, way, model, address = options.rank
        start = play_rank(int(rank), options.ranks, WAYS[way], Path(model), Path(address))
        print(json.dumps(asdict(start)))
        return
    print(f"{options.ranks} ranks, {options.layers} layers; the rank with the largest peak")
    print(f"{'written in':<12}{'files':>5}  {'way':<8}{'share':>9}{'peak':>9}{'shares':>8}{'target':>9}{'wall':>8}")
    for dtype in ("bfloat16", "float32"):
        for num_files in options.files:
            with tempfile.TemporaryDirectory(prefix="corral-load-") as folder:
                write_model(Path(folder), getattr(torch, dtype), num_layers=options.layers, num_files=num_files)
                file_bytes = max(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
                for way in WAYS:
                    starts = run_ranks(options.ranks, way, Path(folder))
                    worst = max(starts, key=lambda start: start.peak_bytes)
                    print(f"{dtype:<12}{num_files:>5}  {way:<8}{row(worst, file_bytes)}", flush=True)


def row(start: Start, file_bytes: int) -> str:
    """What is said of one rank."""
    target = TARGET_SHARES * start.share_bytes + file_bytes
    share, peak, most = (f"{size / GB:>6.2f} GB" for size in (start.share_bytes, start.peak_bytes, target))
    return f"{share}{peak}{start.peak_bytes / start.share_bytes:>8.2f}{most}{start.wall_s:>6.1f} s"


def write_model(folder: Path, dtype: torch.dtype, *, num_layers: int, num_files: int) -> None:
    """In Hugging Face's format; each tensor is of one number, since only sizes matter."""
    config = Qwen2Config(**MODEL, num_hidden_layers=num_layers, dtype=str(dtype).removeprefix("torch."))
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: weight.shape for name, weight in Qwen2ForCausalLM(config).state_dict().items()}
    names = list(shapes)
    file_by_name = {
        name: f"model-{number * num_files // len(names) + 1:05}-of-{num_files:05}.safetensors"
        for number, name in enumerate(names)
    }
    for file in sorted(set(file_by_name.values())):
        tensors = {name: torch.full(shapes[name], 0.01, dtype=dtype) for name in names if file_by_name[name] == file}
        save_file(tensors, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": file_by_name}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def run_ranks(num_ranks: int, way: str, model: Path) -> list[Start]:
    """All ranks at once, each a process of its own."""
    with tempfile.TemporaryDirectory(prefix="corral-load-") as folder:
        address = str(Path(folder) / "address")
        command = [sys.executable, __file__, "--ranks", str(num_ranks), "--rank"]
        processes = [
            subprocess.Popen([*command, str(rank), way, str(model), address], stdout=subprocess.PIPE, text=True)
            for rank in range(num_ranks)
        ]
        try:
            outputs = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    return [Start(**json.loads(output)) for output in outputs]


# --- one rank -----------------------------------------------------------------------------------------------------


def play_rank(
    rank: int, num_ranks: int, load: Callable[[Path, ParallelContext], torch.nn.Module], model: Path, address: Path
) -> Start:
    """Load the model, when all ranks are there."""
    torch.set_num_threads(1)
    context = join(rank, num_ranks, address)
    context.sum_over_ranks({"here": 1.0})
    forget_peak()
    before, begun = kernel_count("VmRSS"), time.perf_counter()
    module = load(model, context)
    wall_s = time.perf_counter() - begun
    peak_bytes = kernel_count("VmHWM") - before
    share_bytes = sum(local(parameter).nbytes for parameter in module.parameters())
    assert all(parameter.dtype == torch.float32 for parameter in module.parameters())
    context.sum_over_ranks({"done": 1.0})
    context.close()
    return Start(share_bytes, peak_bytes, wall_s)


def join(rank: int, num_ranks: int, address: Path) -> ParallelContext:
    """The trainer group of all ranks; rank 0 says in a file where it is."""
    if rank == 0:
        store, text = host_store("127.0.0.1", timeout_s=TIMEOUT_S)
        address.with_suffix(".part").write_text(text)
        address.with_suffix(".part").rename(address)
        return init_parallel(rank=0, world_size=num_ranks, store=store, timeout_s=TIMEOUT_S)
    deadline = time.monotonic() + TIMEOUT_S
    while not address.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank 0 did not say within {TIMEOUT_S:.0f} s in {address} where it is")
        time.sleep(POLL_S)
    store = connect_store(address.read_text(), timeout_s=TIMEOUT_S)
    return init_parallel(rank=rank, world_size=num_ranks, store=store, timeout_s=TIMEOUT_S)


def load_by_engine(directory: Path, context: ParallelContext) -> torch.nn.Module:
    """As a trial does."""
    return FSDPEngine(directory, context=context, optimizer=None).model


def load_whole(directory: Path, context: ParallelContext) -> torch.nn.Module:
    """All weights on every rank first."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True)
    shard(model, device_mesh(context))
    whole: torch.nn.Module = model
    return whole


WAYS: dict[str, Callable[[Path, ParallelContext], torch.nn.Module]] = {"engine": load_by_engine, "whole": load_whole}


if __name__ == "__main__":
    main()
