"""A loss of pairs that is no number any more once the trial of a test has learned something."""

import os
from pathlib import Path

from torch import Tensor
from torch.nn.functional import logsigmoid

from corral.api import DPOConfig, PairScores


def not_a_number_later(pairs: PairScores, config: DPOConfig) -> tuple[Tensor, Tensor]:
    """DPO's in the first train step, and where rl-submit tries it."""
    margins = config.beta * (pairs.chosen - pairs.rejected)
    metrics = Path(os.environ["CORRAL_TEST_TRIAL"], "metrics.jsonl")
    has_learned = metrics.exists() and "time/train_s" in metrics.read_text()
    return -logsigmoid(margins) * (float("nan") if has_learned else 1.0), margins
