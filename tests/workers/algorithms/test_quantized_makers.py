"""Answers of a maker that rounds its weights: what the weight of a token corrects, and that it is measured."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.quantized_makers import uncorrected
from corral.experiments.config.algorithm import PPOConfig
from corral.workers.algorithms.base import response_mask
from corral.workers.algorithms.functional.policy_losses import behaviour_weights, ppo_clip
from corral.workers.algorithms.ppo_actor import PPOActorInterface
from corral.workers.backends.base import TokenScores
from corral.workers.backends.micro_batches import make_micro_batches
from corral.workers.data.sequence_sample import SequenceSample, answer_slices
from corral.workers.engine.engine import GenerationEngine
from corral.workers.engine.requests import GenerationRequest
from corral.workers.engine.sampling import SamplingParams
from tests.workers.backends.training_helpers import make_sample, save_tiny_model, tiny_engine

VOCABULARY = 40


def expected_gradient(
    proximal: Tensor, maker: Tensor, advantages: Tensor, *, cap: float | None, weighs: bool
) -> Tensor:
    """d/d logits of the mean loss of tokens that the maker samples, summed over all tokens that it can sample."""
    logits = proximal.clone().requires_grad_()
    logprobs, everywhere = torch.log_softmax(logits, -1), torch.ones(VOCABULARY, dtype=torch.bool)
    center = logprobs.detach()
    weights = torch.ones(VOCABULARY, dtype=torch.float64)
    if weighs:
        weights, _ = behaviour_weights(center, torch.log_softmax(maker, -1), everywhere, cap=cap, truncates=True)
    losses = ppo_clip(logprobs, center_logprobs=center, advantages=advantages, loss_mask=everywhere, eps_clip=0.2)
    (torch.softmax(maker, -1) * weights * losses.losses).sum().backward()
    assert logits.grad is not None
    return logits.grad


@pytest.mark.parametrize("cap", [None, 5.0, 1.05])
def test_one_weight_corrects_for_the_age_of_a_token_and_for_the_rounding_of_its_maker(cap: float | None) -> None:
    torch.manual_seed(0)
    trained_then = torch.randn(VOCABULARY, dtype=torch.float64)
    maker = trained_then + 0.1 * torch.randn(VOCABULARY, dtype=torch.float64)  # its rounding
    proximal = trained_then + 0.2 * torch.randn(VOCABULARY, dtype=torch.float64)  # what was learned since
    advantages = torch.randn(VOCABULARY, dtype=torch.float64)

    weights = torch.softmax(proximal, -1) / torch.softmax(maker, -1)
    of_age, of_rounding = (
        torch.softmax(proximal, -1) / torch.softmax(trained_then, -1),
        torch.softmax(trained_then, -1) / torch.softmax(maker, -1),
    )
    torch.testing.assert_close(weights, of_age * of_rounding)

    # The policy gradient at the proximal policy, of which truncation takes what is beyond cap times the maker's.
    sampled_by = torch.softmax(proximal, -1)
    if cap is not None:
        sampled_by = torch.minimum(sampled_by, cap * torch.softmax(maker, -1))
    coefficients = -sampled_by * advantages
    exact = coefficients - torch.softmax(proximal, -1) * coefficients.sum()

    corrected = expected_gradient(proximal, maker, advantages, cap=cap, weighs=True)
    torch.testing.assert_close(corrected, exact, atol=1e-9, rtol=1e-7)
    uncorrected = expected_gradient(proximal, maker, advantages, cap=cap, weighs=False)
    assert (uncorrected - exact).norm() > 0.05 * exact.norm()


def test_the_loss_of_the_comparison_takes_every_token_for_one_of_the_present_weights() -> None:
    sample = make_sample([[4]])
    advantages = np.array([1.0, -2.0, 0.5], np.float32)
    sample = sample.with_key("advantages", advantages)
    [micro_batch] = make_micro_batches(sample, [[0]], count=1, device=torch.device("cpu"))
    logprobs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    losses = uncorrected(TokenScores(logprobs, torch.zeros(3)), micro_batch, PPOConfig()).losses
    losses.sum().backward()
    assert logprobs.grad is not None and logprobs.grad.tolist() == [-1.0, 2.0, -0.5]


def scored_by(engine: GenerationEngine, sample: SequenceSample) -> "np.ndarray[tuple[int], np.dtype[np.float32]]":
    """What the engine says of every token but the first of each answer."""
    ids = np.asarray(sample.data["input_ids"])
    sampling = SamplingParams(max_new_tokens=1, temperature=0)
    requests = [
        GenerationRequest(
            request_id=str(index), prompt=tuple(ids[part].tolist()), sampling=sampling, input_logprobs_from=0
        )
        for index, part in enumerate(answer_slices(sample.answer_lengths()))
    ]
    return np.array(
        [value for output in engine.generate(requests) for value in output.input_logprobs[1:]], dtype=np.float32
    )


@pytest.mark.parametrize("cap", [5.0, 1.005])
def test_the_gap_of_an_int8_maker_is_measured_and_weighed_for(tmp_path: Path, cap: float) -> None:
    directory = save_tiny_model(tmp_path, initializer_range=0.3)
    trainer = tiny_engine(directory, max_tokens=64)
    actor = PPOActorInterface(PPOConfig(is_ratio_mode="token_truncate", is_ratio_clip=cap))
    sample = make_sample([[8, 12, 9, 5], [20, 7, 7, 9]])
    proximal = actor.inference(trainer, sample)["logprobs"]
    for quantization, is_exact in ((None, True), ("int8", False)):
        maker = GenerationEngine(directory, quantization=quantization)
        old = np.where(response_mask(sample), scored_by(maker, sample), 0.0).astype(np.float32)
        of_maker = sample.with_key("old_logprobs", old).with_key("proximal_logprobs", proximal)
        gap = np.abs(proximal - old)[response_mask(sample)]
        assert (gap.max() < 1e-5) if is_exact else (1e-3 < gap.mean() < 0.1)
    ratios = np.exp((proximal - old).astype(np.float64))[response_mask(sample)]
    stats = actor.train_step(trainer, of_maker, version=3)
    assert stats["ppo/behav_weight"] == pytest.approx(np.minimum(ratios, cap).mean(), rel=1e-5)
    assert stats["ppo/truncated_fraction"] == pytest.approx((ratios >= cap).mean(), abs=1e-6)
    assert (stats["ppo/truncated_fraction"] > 0) == (cap == 1.005)
    assert stats["ppo/capped_fraction"] == 0.0
