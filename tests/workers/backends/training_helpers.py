"""Tiny models and samples for the training tests."""

import gc
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging as transformers_logging

from corral.experiments.config.model import OptimizerConfig
from corral.scheduling.packing import MicroBatchSpec
from corral.workers.backends.base import LossOutput
from corral.workers.backends.fsdp.engine import FSDPEngine
from corral.workers.backends.micro_batches import MicroBatch
from corral.workers.backends.parallel_context import ParallelContext
from corral.workers.backends.sharding import local
from corral.workers.data.sequence_sample import SequenceSample

VOCAB_SIZE = 64


def save_tiny_model(directory: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """A random Qwen2 with grouped-query attention."""
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 256,
    }
    config = Qwen2Config(**(settings | overrides))
    Qwen2ForCausalLM(config).save_pretrained(directory)
    return directory


def load_reference(directory: Path) -> Any:
    """The same weights in plain transformers with its slowest, simplest attention."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
    return model.eval()


def tiny_engine(
    directory: Path, context: ParallelContext | None = None, *, max_tokens: int | None = None, **settings: Any
) -> FSDPEngine:
    """One that AdamW trains, unless the settings say otherwise."""
    usual: dict[str, Any] = {
        "context": context or ParallelContext(),
        "optimizer": optimizer_config(),
        "total_steps": 100,
        "micro_batches": MicroBatchSpec(max_tokens_per_micro_batch=max_tokens),
    }
    return FSDPEngine(directory, **usual | settings)


def make_sample(
    lengths: Sequence[Sequence[int]], *, prompt_length: int = 2, seed: int = 0, version: int = 3
) -> SequenceSample:
    """Groups of random answers with every key that the PPO actor can use; log-probabilities near those of chance."""
    rng = np.random.default_rng(seed)
    groups = []
    for index, group in enumerate(lengths):
        is_prompt = [np.arange(n) < prompt_length for n in group]
        noise = [rng.normal(size=n - 1) * 0.2 for n in group]
        on_prompt = [mask[1:] for mask in is_prompt]
        groups.append(
            SequenceSample.from_group(
                f"0:{index}",
                {
                    "input_ids": [rng.integers(0, VOCAB_SIZE, n) for n in group],
                    "prompt_mask": is_prompt,
                    "old_logprobs": [
                        np.where(p, 0.0, -np.log(VOCAB_SIZE) + x) for p, x in zip(on_prompt, noise, strict=True)
                    ],
                    "proximal_logprobs": [np.where(p, 0.0, -np.log(VOCAB_SIZE)) for p in on_prompt],
                    "ref_logprobs": [np.where(p, 0.0, -np.log(VOCAB_SIZE) - 0.1) for p in on_prompt],
                    "versions": [np.where(p, -1, version - rng.integers(0, 2, p.shape[0])) for p in on_prompt],
                    "rewards": [float(rng.integers(0, 2)) for _ in group],
                    "seq_no_eos_mask": [bool(rng.integers(0, 2)) for _ in group],
                },
            )
        )
    return SequenceSample.gather(groups)


def value_loss(values: torch.Tensor, micro_batch: MicroBatch) -> LossOutput:
    """Squared distance of the prompts' values from 1; counts the prompt mask."""
    on_prompt = micro_batch.tensors["prompt_mask"]
    return LossOutput(((values - 1.0).square() * on_prompt).sum(), {"value": (values.detach() * on_prompt).sum()})


def score_loss(scores: torch.Tensor, micro_batch: MicroBatch) -> LossOutput:
    """Squared distance from the reward of the scores of answers that were cut off; counts their mask."""
    distance = (scores - micro_batch.tensors["rewards"]) * micro_batch.tensors["seq_no_eos_mask"]
    return LossOutput(distance.square().sum())


def optimizer_config(**overrides: Any) -> OptimizerConfig:
    """AdamW with a rate that moves a tiny model visibly in a few steps."""
    return OptimizerConfig(**({"lr": 1e-3, "gradient_clipping": 1e6} | overrides))


def read_weights(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a directory's safetensors files."""
    from safetensors.torch import load_file

    return {
        name: tensor for path in sorted(directory.glob("*.safetensors")) for name, tensor in load_file(path).items()
    }


def memory_changes(run: Callable[[], object]) -> list[int]:
    """Bytes taken, and given back as negative ones, in their order; what `run` returns is given back after them."""
    gc.collect()  # or what came while an earlier profile was taken, and is garbage now, would go in this one
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        returned = run()
    del returned
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


def kept_bytes(parameters: Iterable[torch.Tensor], forward: Callable[[], object]) -> int:
    """Of the tensors that gradients will need; one storage counts once, and what is a parameter's does not."""
    own = {local(parameter).untyped_storage().data_ptr() for parameter in parameters}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = tensor  # alive, or another would get its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    # Afterwards: what was gathered of a layer that is cut is let go, and gathered again.
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


class LargestTensor(TorchDispatchMode):
    """The number of elements of the largest tensor that comes into being; of one that is cut, this rank's."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        """Count those of one type only, or all."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._dtype = dtype
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta and self._dtype in (None, tensor.dtype):
                self.numel = max(self.numel, local(tensor).numel())
        return result


class NumbersRead(TorchDispatchMode):
    """How often a number of a tensor is read, for which the host waits until the device has made it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))
