"""The learning rate as a pure function of the step, so that a resumed run needs no scheduler state."""

import math

from corral.experiments.config.model import OptimizerConfig


def learning_rate(config: OptimizerConfig, *, step: int, total_steps: int) -> float:
    """Learning rate of the optimizer step number `step`, counted from 0.

    It rises linearly to `lr` over the warm-up, which ends *at* the peak, and then follows the schedule down to
    `lr * min_lr_ratio` at `total_steps`, or stays.
    """
    warmup_steps = math.ceil(config.warmup_steps_proportion * total_steps)
    if step < warmup_steps:
        return config.lr * (step + 1) / warmup_steps
    if config.lr_schedule == "constant":
        return config.lr
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    remaining = 1.0 - progress if config.lr_schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * remaining)
