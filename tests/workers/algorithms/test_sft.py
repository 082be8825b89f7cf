"""Supervised fine-tuning beside transformers' own loss."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from corral.scheduling.packing import MicroBatchSpec
from corral.workers.algorithms.sft import SFTInterface
from corral.workers.backends.fsdp.engine import FSDPEngine
from corral.workers.backends.parallel_context import ParallelContext
from corral.workers.data.sequence_sample import SequenceSample
from tests.workers.backends.training_helpers import load_reference, make_sample, optimizer_config, save_tiny_model


def test_sft_learns_and_evaluates_the_loss_that_transformers_computes(tmp_path: Path) -> None:
    model_directory = save_tiny_model(tmp_path)
    engine = FSDPEngine(
        model_directory,
        context=ParallelContext(),
        optimizer=optimizer_config(),
        total_steps=100,
        micro_batches=MicroBatchSpec(max_tokens_per_micro_batch=64),
    )
    sft = SFTInterface()
    sample = make_sample([[9], [14], [6]], prompt_length=3)
    evaluation = sft.evaluate(engine, sample)
    assert evaluation["loss"] == pytest.approx(transformers_loss(model_directory, sample), abs=1e-5)
    assert evaluation["perplexity"] == pytest.approx(math.exp(evaluation["loss"]))
    assert evaluation["count"] == 6 + 11 + 3
    first = sft.train_step(engine, sample, version=0)["sft/loss"]
    assert first == pytest.approx(evaluation["loss"], abs=1e-5)
    for version in range(1, 6):
        last = sft.train_step(engine, sample, version=version)["sft/loss"]
    assert last < first - 0.1


def transformers_loss(directory: Path, sample: SequenceSample) -> float:
    """Mean cross entropy of the response tokens by transformers' own labels, one sequence at a time."""
    model, total, count = load_reference(directory), 0.0, 0
    for single in sample.unpack():
        ids = torch.as_tensor(np.asarray(single.data["input_ids"])).long()
        labels = ids.masked_fill(torch.as_tensor(np.asarray(single.data["prompt_mask"])), -100)
        with torch.no_grad():
            mean = float(model(input_ids=ids[None], labels=labels[None]).loss)
        num_tokens = int((labels[1:] != -100).sum())
        total, count = total + mean * num_tokens, count + num_tokens
    return total / count
