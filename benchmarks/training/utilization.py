"""How much of what a GPU can do a training step does: model FLOPs utilization, MFU.

    lengths, shape of the model ──► floating-point operations of a step ──► / seconds / peak of the device ──► MFU

As Chowdhery et al. 2022 (https://arxiv.org/abs/2204.02311, appendix B) define it: operations that the model needs,
forward once and backward twice, whatever is recomputed on the way; of attention the half that a causal mask leaves.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from corral.scheduling.packing import TransformerShape, forward_flops

TERA: Final = 1e12

# Dense bfloat16 products with float32 sums, in TFLOP/s, as the makers' data sheets have them (those give the number
# with sparsity, twice as large, for some). A longer name counts before one that it begins with.
BF16_PEAK_TFLOPS: Final[Mapping[str, float]] = {
    "A10": 125.0,
    "A10G": 70.0,
    "A30": 165.0,
    "A40": 149.7,
    "A100": 312.0,
    "A800": 312.0,
    "B200": 2250.0,
    "GH200": 989.4,
    "H100": 989.4,
    "H100 NVL": 835.5,
    "H100 PCIe": 756.0,
    "H200": 989.4,
    "H200 NVL": 835.5,
    "H800": 989.4,
    "L4": 121.0,
    "L40": 181.05,
    "L40S": 362.05,
    "RTX 3090": 71.0,
    "RTX 4090": 165.2,
    "RTX A6000": 154.8,
    "RTX 6000 Ada": 364.2,
}


def peak_flops(device_name: str) -> float | None:
    """Operations per second, by the name that the driver gives a GPU; None for one that the table lacks.

    Example:
        peak_flops("NVIDIA H100 80GB HBM3")    # 989.4e12
    """
    for name in sorted(BF16_PEAK_TFLOPS, key=len, reverse=True):
        if re.search(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", device_name):
            return BF16_PEAK_TFLOPS[name] * TERA
    return None


def step_flops(lengths: Sequence[int], shape: TransformerShape) -> float:
    """Operations that one optimizer step needs for sequences of these lengths."""
    return 3.0 * forward_flops([lengths], [shape])[0]


def utilization(flops: float, *, seconds: float, peak: float) -> float:
    """Between 0 and 1."""
    return flops / seconds / peak
