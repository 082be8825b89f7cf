"""What a rank of a large model sends and allocates in a train step and an export: counted, and not computed.

    python benchmarks/step_traffic.py [--models 7B 32B] [--tokens 4096]

A model of the sizes of Qwen2.5 is cut over ranks as the fsdp backend cuts it, on fake tensors, which have shapes and no
numbers, in a process group that sends nothing. Counted are the bytes that come out of collectives in one micro-batch
and in one export, and the largest tensor that either makes. In rows of `float32` all is gathered so and rounded
afterwards; `bfloat16` is what the backend does. `plan` is what the memory plan has for what is whole at a time.
"""

import argparse
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Qwen2Config

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from corral.experiments.inputs.decoder_config import decoder_sizes  # noqa: E402
from corral.scheduling.memory.model import CallSizes, RoleModel  # noqa: E402
from corral.scheduling.parallel import (
    Mesh,  # noqa: E402
    ParallelDims,  # noqa: E402
)
from corral.workers.backends.chunked_head import install_chunked_head  # noqa: E402
from corral.workers.backends.heads import HEADS  # noqa: E402
from corral.workers.backends.lora import merged_weights  # noqa: E402
from corral.workers.backends.low_precision import cast_per_use  # noqa: E402
from corral.workers.backends.micro_batches import MicroBatch  # noqa: E402
from corral.workers.backends.packed_attention import PACKED_ATTENTION, register_packed_attention  # noqa: E402
from corral.workers.backends.parallel_context import ParallelContext  # noqa: E402
from corral.workers.backends.recompute import recompute_layers  # noqa: E402
from corral.workers.backends.sharding import device_mesh, layers_of, local, reshard, shard  # noqa: E402

GB: Final = 1e9
MODELS: Final[dict[str, tuple[int, dict[str, int]]]] = {
    "7B": (8, {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28}),
    "32B": (32, {"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40}),
}
KEYS: Final = {"7B": 4, "32B": 8}


class Counting(TorchDispatchMode):
    """Bytes out of collectives by kind, and of the largest tensor that came into being."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sent: Counter[str] = Counter()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.name()
        for kind in ("allgather", "all_gather", "reduce_scatter"):
            if kind in name and "wait" not in name:
                out = result if isinstance(result, torch.Tensor) else args[0]
                out = out[0] if isinstance(out, (list, tuple)) else out
                self.sent["gathered" if "gather" in kind else "reduced"] += out.nbytes
        for tensor in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                self.largest = max(self.largest, local(tensor).nbytes)
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--tokens", type=int, default=4096, help="of the micro-batch")
    options = parser.parse_args()
    print("model ranks gathers   step: gathered  reduced  largest  plan   export: gathered  largest   (GB a rank)")
    for name in options.models:
        for dtype in (torch.float32, torch.bfloat16):
            print(row_of(name, dtype, options.tokens))


def row_of(name: str, dtype: torch.dtype, tokens: int) -> str:
    """One model, gathered in one type."""
    ranks, sizes = MODELS[name]
    config = Qwen2Config(**sizes, num_key_value_heads=KEYS[name], vocab_size=152064, tie_word_embeddings=False)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    group = dist.group.WORLD
    dims = ParallelDims(dp=ranks)
    try:
        mesh = device_mesh(
            ParallelContext(mesh=Mesh(ranks=tuple(range(ranks)), dims=dims), group=group, shard_group=group)
        )
        with FakeTensorMode(allow_non_fake_inputs=True):
            step, export = counted(config, mesh, dtype, tokens)
    finally:
        dist.destroy_process_group()
    plan = planned_bytes(config, ranks, dtype, tokens)
    figures = [step.sent["gathered"], step.sent["reduced"], step.largest, plan, export.sent["gathered"], export.largest]
    shown = "".join(f"{figure / GB:10.2f}" for figure in figures)
    return f"{name:5} d{ranks:<4} {str(dtype).removeprefix('torch.'):9}{shown}"


def counted(config: Any, mesh: DeviceMesh, dtype: torch.dtype, tokens: int) -> tuple[Counting, Counting]:
    """A train step of one micro-batch with products in bfloat16, and an export in bfloat16."""
    register_packed_attention()
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation=PACKED_ATTENTION, dtype=torch.float32)
    head = HEADS["lm"]
    cast_per_use(model)
    install_chunked_head(model)
    shard(model, mesh, compute_dtype=dtype)
    recompute_layers(layers_of(model), "full")
    model.train()
    with Counting() as step, torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        head.columns(model, row(tokens))[:, 0].sum().backward()
    with Counting() as export:
        reshard(model)
        for _, tensor in merged_weights(model, dtype=dtype):
            tensor.to(torch.bfloat16)
    return step, export


def row(tokens: int) -> MicroBatch:
    """One answer."""
    places = torch.arange(tokens)
    return MicroBatch(
        answers=(0,),
        segment_lengths=(tokens,),
        cu_seqlens=torch.tensor([0, tokens], dtype=torch.int32),
        input_ids=torch.zeros(tokens, dtype=torch.int64),
        position_ids=places,
        predicting=places[:-1],
        labels=torch.zeros(tokens - 1, dtype=torch.int64),
        last_tokens=places[-1:],
        tensors={},
    )


def planned_bytes(config: Any, ranks: int, dtype: torch.dtype, tokens: int) -> int:
    """What the memory plan has for layers and ends that are whole, their gradients included."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(
            json.dumps(config.to_dict() | {"architectures": ["Qwen2ForCausalLM"]})
        )
        sizes = decoder_sizes(Path(folder))
    assert sizes is not None
    role = RoleModel(sizes=sizes, optimizer="adamw", compute_bytes=dtype.itemsize, recompute="full")
    call = CallSizes(name="train", kind="train", tokens=tokens)
    return role.on_gpu("actor", ParallelDims(dp=ranks), [call]).working["train"]["buffers"]


if __name__ == "__main__":
    main()
