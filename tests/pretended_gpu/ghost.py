"""Real engines at the sizes of real models, on a device that counts memory without having it, beside the memory plan.

    config ──► a model of holes on disk ──► FSDPEngine, MegatronEngine, GenerationEngine ──► peak bytes
                     │                      of one rank among as many as the layout has          │
                     └──► RoleModel, server_on_gpu ──► planned bytes ────────────────────────────┴──► a row of the table

`python -m tests.pretended_gpu.ghost` prints the table of docs/layouts.md, and `--write docs/layouts.md` puts it there.
Kernels have shapes and no numbers here, and collectives move nothing: what is allocated is all that is true.
"""

import argparse
import gc
import json
import struct
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from math import prod
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final, Literal

from tests.pretended_gpu import installed  # before torch is imported

# isort: split
import numpy as np
import torch
import torch.distributed as dist
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch.testing._internal.distributed import fake_pg as fake_pg  # registers the group that exchanges nothing
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from corral.experiments.config.model import OptimizerConfig
from corral.experiments.inputs.decoder_config import decoder_sizes
from corral.scheduling.memory.decoder_sizes import DecoderSizes, num_parameters, tensor_shapes
from corral.scheduling.memory.gpu import ANSWER, server_on_gpu
from corral.scheduling.memory.layers import Backend, Recompute
from corral.scheduling.memory.model import CallSizes, RoleModel
from corral.scheduling.packing import MicroBatchSpec
from corral.scheduling.parallel import Mesh, ParallelDims
from corral.workers.backends.base import LossOutput
from corral.workers.backends.fsdp.engine import FSDPEngine
from corral.workers.backends.megatron import engine as megatron
from corral.workers.backends.megatron.engine import MegatronEngine
from corral.workers.backends.micro_batches import MicroBatch
from corral.workers.backends.parallel_context import ParallelContext, init_parallel, mesh_contexts
from corral.workers.data.sequence_sample import SequenceSample
from corral.workers.engine import engine
from corral.workers.engine.engine import GenerationEngine
from corral.workers.engine.requests import GenerationRequest
from corral.workers.engine.sampling import SamplingParams

GB: Final = 1e9
LENGTH: Final = 4096  # tokens of each answer
TOLERANCE: Final = 1.10
"""A plan may be above the peak by so much, and never below it."""
PEAK_FLOPS: Final = 989e12  # a second, of an H100 in bfloat16
PRODUCT_FLOPS: Final = 700e12  # what large products reach of them
EXCHANGED_BYTES: Final = 350e9  # a second, by NVLink within a node
BEGIN, END = "<!-- python -m tests.pretended_gpu.ghost --write docs/layouts.md -->", "<!-- until here -->"
_FILE_NUMBERS: Final = 2 * 10**9  # a file of more than the host's memory is not mapped
_OPS: Any = torch.ops.pretended
_GHOSTLY: Final = torch.library.Library("aten", "IMPL")
"""Kernels of a GPU that have no shapes elsewhere."""
_QWEN2 = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": False}
MODELS: Final[dict[str, dict[str, Any]]] = {
    "0.5B": _QWEN2
    | {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14}
    | {"num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
    "7B": _QWEN2
    | {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28}
    | {"num_key_value_heads": 4, "vocab_size": 152064},
    "32B": _QWEN2
    | {"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40}
    | {"num_key_value_heads": 8, "vocab_size": 152064},
    "30B-A3B": {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "tie_word_embeddings": False}
    | {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32}
    | {"num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "moe_intermediate_size": 768}
    | {"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True},
}
"""Qwen2.5 and Qwen3, as their configs have them."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call of one engine."""

    model: str
    call: Literal["train", "infer", "generate"] = "train"
    backend: Backend = "fsdp"
    layout: str = "d1"
    recompute: Recompute = "full"
    tokens: int = 16384
    """Of a micro-batch; where it generates, positions of the cache."""


CASES: Final = (
    Case(model="0.5B", recompute="none", tokens=8192),
    Case(model="0.5B", backend="megatron", recompute="none", tokens=8192),
    Case(model="0.5B", call="infer"),
    Case(model="0.5B", call="generate"),
    Case(model="7B", layout="d8"),
    Case(model="7B", layout="d4t2", recompute="selective"),
    Case(model="7B", layout="d8", call="infer"),
    Case(model="7B", layout="d4t2", backend="megatron"),
    Case(model="7B", layout="d4t2", backend="megatron", call="infer"),
    Case(model="7B", call="generate"),
    Case(model="32B", layout="d32"),
    Case(model="32B", layout="d16", call="infer"),
    Case(model="32B", layout="d8t4", backend="megatron"),
    Case(model="32B", layout="d2t4", backend="megatron", call="infer"),
    Case(model="32B", call="generate"),
    Case(model="30B-A3B", layout="d32"),
    Case(model="30B-A3B", layout="d16", call="infer"),
    Case(model="30B-A3B", layout="d32e8", backend="megatron"),
    Case(model="30B-A3B", layout="d8e8", backend="megatron", call="infer"),
    Case(model="30B-A3B", call="generate"),
)


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What the ghost of a case did."""

    peak: int
    plan: int
    flops: float = 0.0
    """Of one micro-batch, as torch counts them; recomputation included."""
    sent: int = 0
    """Bytes of the tensors that collectives were given in one micro-batch, the larger one of each."""


class Work(TorchDispatchMode):
    """Adds up what is multiplied, and what collectives are given."""

    def __init__(self) -> None:
        super().__init__()
        self.flops, self.sent = 0.0, 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = operation.overloadpacket.__name__
        if operation.namespace == "c10d":
            self.sent += max((tensor.nbytes for tensor in _tensors_in(args) if tensor.is_cuda), default=0)
        elif name in ("mm", "bmm", "_grouped_mm", "addmm", "addmm_", "baddbmm"):
            left, right = list(_tensors_in(args))[name.count("add") :][:2]
            self.flops += 2.0 * left.numel() * right.shape[-1]
        elif name.startswith("_varlen_attn"):  # two products forward, five backward, of half of all pairs
            self.flops += args[0].numel() * LENGTH * (5.0 if name.endswith("backward") else 2.0)
        return operation(*args, **(kwargs or {}))


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for element in value:
            yield from _tensors_in(element)


class Alone(dist.HashStore):
    """The store of a rank whose others are always there."""

    def wait(self, *_: Any) -> None: ...


def become_ghost() -> None:
    """From now on the device of this process counts and computes nothing; there is no way back."""
    installed.kernels_of_cpu._destroy()
    _OPS.become_ghost()
    for name, kernel in (("_fused_rms_norm", _norm), ("_fused_rms_norm_backward", _norm_backward)):
        _GHOSTLY.impl(name, kernel, "CUDA")
    join = dist.init_process_group
    dist.init_process_group = lambda _, **options: join("fake", **options)
    megatron._needed = _read_from_nowhere
    engine.load_model = _load_from_nowhere
    engine.stage_weights = _stage_from_nowhere


def _norm(values: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(values), values.new_empty((*values.shape[:-1], 1), dtype=torch.float32)


def _norm_backward(
    gradient: torch.Tensor, values: torch.Tensor, shape: Any, scales: torch.Tensor, weight: torch.Tensor, _: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(values), torch.empty_like(weight)


def _read_from_nowhere(
    directory: Path, slices: Any, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """As Megatron's engine reads a directory, which would put matrices side by side in the host's memory."""
    return ((name, torch.empty(shape, dtype=torch.bfloat16, device="cuda")) for name, shape in shapes.items())


def _load_from_nowhere(directory: Path, *, dtype: torch.dtype, device: str) -> tuple[Any, frozenset[int]]:
    """As the embedded engine loads a model, whose files are more than the host's memory."""
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=dtype)
    return model.eval().requires_grad_(False), frozenset()


def _stage_from_nowhere(directory: Path, parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.empty_like(tensor, device="cuda") for name, tensor in parameters.items()}


def choose_evenly(sizes: DecoderSizes) -> torch.library.Library | None:
    """Let tokens go to all experts alike, as long as the result is held: a ghost's routers choose nothing."""
    if not sizes.num_experts:
        return None

    def nonzero(mask: torch.Tensor) -> torch.Tensor:  # the tokens of one expert
        return mask.new_empty((mask.numel() // sizes.num_experts, mask.ndim), dtype=torch.int64)

    def masked_select(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:  # all experts, token by token
        return values.new_empty(mask.numel() * sizes.experts_per_token // sizes.num_experts)

    def unique(chosen: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
        return chosen.new_empty(sizes.num_experts), chosen.new_empty(0), chosen.new_empty(0)

    library = torch.library.Library("aten", "IMPL")
    for name, kernel in (("nonzero", nonzero), ("masked_select", masked_select), ("_unique2", unique)):
        library.impl(name, kernel, "CUDA")
    own = MoEAlltoAllTokenDispatcher.preprocess

    def preprocess(self: Any, routing_map: torch.Tensor) -> torch.Tensor:
        own(self, routing_map)
        each = routing_map.shape[0] * sizes.experts_per_token // sizes.num_experts
        local, ranks, cuts = self.num_local_experts, self.ep_size, self.tp_size
        if ranks * cuts > 1:
            self.input_splits = self.output_splits = [each * local] * ranks
            self.output_splits_tp = torch.full((cuts,), each * local * ranks)
        self.num_global_tokens_per_local_expert = torch.full((cuts * ranks, local), each)
        return torch.full((local,), each * cuts * ranks)

    MoEAlltoAllTokenDispatcher.preprocess = preprocess
    return library


def save_hollow(name: str, directory: Path) -> Path:
    """A model directory whose weights are holes in files: zeros that take no room."""
    config = AutoConfig.for_model(**MODELS[name], max_position_embeddings=32768, eos_token_id=None)
    config.architectures = MODELS[name]["architectures"]
    config.save_pretrained(directory)
    files: list[dict[str, tuple[int, ...]]] = [{}]
    for tensor, shape in _stored_shapes(sizes_of(directory)):
        if sum(map(prod, files[-1].values())) > _FILE_NUMBERS:
            files.append({})
        files[-1][tensor] = shape
    names = [f"model-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)]
    for file_name, shapes in zip(names, files, strict=True):
        _write_hollow(directory / file_name, shapes)
    place_by_tensor = {tensor: name for name, shapes in zip(names, files, strict=True) for tensor in shapes}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": place_by_tensor}))
    return directory


def _write_hollow(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    at, header = 0, {}
    for tensor, shape in shapes.items():
        end = at + 2 * prod(shape)
        header[tensor] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps({"__metadata__": {"format": "pt"}} | header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)


def _stored_shapes(sizes: DecoderSizes) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, shape in tensor_shapes(sizes).items():
        experts, _, kind = name.rpartition(".")
        for expert in range(shape[0]) if len(shape) == 3 else ():
            if kind == "gate_up_proj":
                yield f"{experts}.{expert}.gate_proj.weight", (shape[1] // 2, shape[2])
                yield f"{experts}.{expert}.up_proj.weight", (shape[1] // 2, shape[2])
            else:
                yield f"{experts}.{expert}.down_proj.weight", shape[1:]
        if len(shape) < 3:
            yield name, shape


def sizes_of(directory: Path) -> DecoderSizes:
    sizes = decoder_sizes(directory)
    assert sizes is not None
    return sizes


def run(case: Case, directory: Path) -> Seen:
    """Run the case twice, and look at the second time."""
    _ = choose_evenly(sizes_of(directory))
    return _generate(case, directory) if case.call == "generate" else _compute(case, directory)


def _compute(case: Case, directory: Path) -> Seen:
    dims = ParallelDims.parse(case.layout)
    context = _join(dims)
    make: Any = FSDPEngine if case.backend == "fsdp" else MegatronEngine
    trainer = make(
        directory,
        context=context,
        optimizer=OptimizerConfig(lr=1e-5) if case.call == "train" else None,
        recompute=case.recompute,
        total_steps=100,
        micro_batches=MicroBatchSpec(max_tokens_per_micro_batch=case.tokens),
        compute_dtype=torch.bfloat16,
        is_held_low=case.call == "infer" and case.backend == "fsdp",
    )
    num_micro_batches = 2 * dims.pp
    sample = _answers(case.tokens * num_micro_batches // LENGTH)
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        with Work() as work:
            if case.call == "train":
                trainer.train_batch(sample, loss_fn=_loss, counted="prompt_mask")
            else:
                trainer.forward(sample)
    peak = torch.cuda.max_memory_allocated()
    del trainer
    if dist.is_initialized():
        dist.destroy_process_group()
    role = RoleModel(
        sizes=sizes_of(directory),
        backend=case.backend,
        optimizer="adamw" if case.call == "train" else None,
        compute_bytes=2,
        recompute=case.recompute,
        is_held_low=case.call == "infer",
    )
    call = CallSizes(name="it", kind=case.call, tokens=case.tokens)
    plan = sum(role.on_gpu("actor", dims, [call]).during("it").values())
    each = num_micro_batches
    return Seen(peak=peak, plan=plan, flops=work.flops / each, sent=work.sent // each)


def _join(dims: ParallelDims) -> ParallelContext:
    world = init_parallel(rank=0, world_size=dims.world_size, store=Alone(), device="cuda:0")
    context = mesh_contexts(world, {"actor": Mesh(ranks=tuple(range(dims.world_size)), dims=dims)})["actor"]
    assert context is not None
    return context


def _answers(count: int) -> SequenceSample:
    return SequenceSample.gather(
        [
            SequenceSample.from_group(
                f"0:{number}",
                {
                    "input_ids": [np.ones(LENGTH, dtype=np.int64)],
                    "prompt_mask": [np.arange(LENGTH) < 8],
                    "old_logprobs": [np.zeros(LENGTH - 1, dtype=np.float32)],
                },
            )
            for number in range(count)
        ]
    )


def _loss(scores: Any, micro_batch: MicroBatch) -> LossOutput:
    return LossOutput((scores.logprobs * micro_batch.tensors["old_logprobs"]).sum())


def _generate(case: Case, directory: Path) -> Seen:
    requests = 4
    answering = GenerationEngine(
        directory, device="cuda", dtype="bfloat16", max_running_requests=requests, max_total_tokens=case.tokens
    )
    torch.cuda.reset_peak_memory_stats()
    staged = answering.stage_weights(directory)  # which a server does while it answers
    sampling = SamplingParams(temperature=1.0, max_new_tokens=8, ignore_eos=True)
    prompts = [(n,) * (case.tokens // requests - 8) for n in range(requests)]  # none of which is computed for two
    answering.generate(
        [GenerationRequest(request_id=str(prompt[0]), prompt=prompt, sampling=sampling) for prompt in prompts]
    )
    answering.apply_weights(staged, version="new")
    peak = torch.cuda.max_memory_allocated()
    server = server_on_gpu(
        "server",
        sizes_of(directory),
        number_bytes=2,
        max_total_tokens=case.tokens,
        max_running_requests=requests,
        is_embedded=True,
    )
    return Seen(peak=peak, plan=sum(server.during(ANSWER).values()))


def rows(cases: Sequence[Case], *, directory: Path) -> Iterator[tuple[Case, Seen]]:
    for case in cases:
        model = directory / case.model
        if not model.exists():
            save_hollow(case.model, model)
        yield case, run(case, model)
        gc.collect()


def predicted_mfu(case: Case, seen: Seen, directory: Path) -> float:
    """Share of a GPU's peak that the model's own products are, if exchanges and products follow each other."""
    sizes, dims = sizes_of(directory), ParallelDims.parse(case.layout)
    idle = 0 if sizes.is_tied else sizes.vocab_size * sizes.hidden_size  # the embedding is only looked up
    idle += (
        len(sizes.sparse_layers)
        * (sizes.num_experts - sizes.experts_per_token)
        * 3
        * sizes.expert_size
        * sizes.hidden_size
    )
    of_attention = 6 * sizes.num_layers * sizes.query_size * LENGTH  # all it does but for what is computed again
    useful = case.tokens * (6 * (num_parameters(sizes) - idle) + of_attention) / dims.tp
    return useful / PEAK_FLOPS / (seen.flops / PRODUCT_FLOPS + seen.sent / EXCHANGED_BYTES)


def row(case: Case, directory: Path) -> str:
    """A line of the table."""
    [(_, seen)] = rows([case], directory=directory)
    sizes = f"{seen.plan / GB:.1f} | {seen.peak / GB:.1f} | {seen.plan / seen.peak:.3f}"
    mfu = f"{predicted_mfu(case, seen, directory / case.model):.0%}" if case.call == "train" else ""
    layout = f"{case.backend}:{case.layout}" if case.call != "generate" else "hf:d1"
    again = case.recompute if case.call == "train" else ""
    sent = f"{seen.sent / GB:.1f}" if seen.sent else ""
    return f"| {case.model} | {case.call} | {layout} | {again} | {case.tokens} | {sizes} | {sent} | {mfu} |"


def table(cases: Sequence[Case], *, directory: Path) -> Iterator[str]:
    """Lines of a page. Each case has a process of its own: Megatron keeps buffers for as long as its process lives."""
    yield "| model | call | layout | recompute | tokens | plan, GB | ghost, GB | plan / ghost | exchanged, GB | MFU |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    context = get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=become_ghost, max_tasks_per_child=1) as pool:
        yield from pool.map(partial(row, directory=directory), cases)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[*MODELS], help="cases of these models")
    parser.add_argument("--write", type=Path, help="the page whose table is replaced")
    options = parser.parse_args()
    lines = []
    with tempfile.TemporaryDirectory() as directory:
        chosen = [case for case in CASES if case.model in options.only]
        for line in table(chosen, directory=Path(directory)):
            print(line, flush=True)
            lines.append(line)
    if options.write is not None:
        before, _, rest = options.write.read_text().partition(BEGIN)
        options.write.write_text(before + "\n".join([BEGIN, "", *lines, "", ""]) + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
