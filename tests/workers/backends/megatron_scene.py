"""The megatron backend's part in `layout_scene`: everything else there is the same for both."""

from pathlib import Path

from corral.scheduling.packing import MicroBatchSpec
from corral.workers.backends.megatron.engine import MegatronEngine
from corral.workers.backends.parallel_context import ParallelContext
from tests.workers.backends.layout_scene import OPTIMIZER, Variant


def make_megatron(model: Path, context: ParallelContext, variant: Variant) -> MegatronEngine:
    return MegatronEngine(
        model,
        context=context,
        head=variant.head,
        optimizer=OPTIMIZER,
        lora=variant.lora,
        recompute=variant.recompute,
        total_steps=100,
        micro_batches=MicroBatchSpec(max_tokens_per_micro_batch=48),
        compute_dtype=variant.dtype,
    )
