"""Losses of critics, reward models, preferences and language models, per token or per pair of answers.

Nothing is added up here: see `TokenLosses`.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


@dataclass(frozen=True, slots=True)
class TokenLosses:
    """The loss of each token, whatever stands where the loss mask is False; every loss over tokens returns this.

    TokenLosses(losses [T], stats) ──mask, weights──► sums of a micro-batch ──► means over the global batch

    A loss says what one token costs. Which tokens count, how much each, and by what the sum is divided is decided in
    one place for all of them, so that the mean is exact however the batch is cut into micro-batches and ranks.
    """

    losses: Tensor
    """[T] float, with gradient."""
    stats: dict[str, Tensor] = field(default_factory=dict)
    """[T] each, without gradient; reported as means over the tokens of the loss mask."""


def value_loss(values: Tensor, *, old_values: Tensor, returns: Tensor, value_eps_clip: float | None) -> TokenLosses:
    """Half the squared error of each value, the larger of clipped and unclipped.

    The clip keeps a value within `value_eps_clip` of the one that the advantages were computed from (PPO's reference
    implementation; see https://arxiv.org/abs/2006.05990, choice C13).

    Args:
        values: [T] with gradient, like `old_values` and `returns` in the units that the critic's head works in.
        value_eps_clip: None for no clip.
    """
    unclipped = 0.5 * (values - returns).square()
    if value_eps_clip is None:
        return TokenLosses(unclipped)
    near_old = old_values + (values - old_values).clamp(-value_eps_clip, value_eps_clip)
    clipped = 0.5 * (near_old - returns).square()
    return TokenLosses(torch.maximum(unclipped, clipped), {"critic/clip_fraction": clipped > unclipped})


def sft_loss(logprobs: Tensor) -> TokenLosses:
    """The cross entropy of each token."""
    return TokenLosses(-logprobs)


def bradley_terry_loss(chosen_scores: Tensor, rejected_scores: Tensor) -> Tensor:
    """[pairs] minus the log-probability that the chosen answer wins: -log sigmoid(chosen - rejected).

    Bradley & Terry 1952, https://doi.org/10.2307/2334029; as a loss of reward models, Ouyang et al. 2022,
    https://arxiv.org/abs/2203.02155, eq. 1 (there a mean over all pairs of a prompt, here over all pairs).
    """
    return -logsigmoid(chosen_scores - rejected_scores)


def dpo_loss(margins: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
    """[pairs] loss of direct preference optimisation: the margin is what the chosen answer's implicit reward is ahead.

    Rafailov et al. 2023, https://arxiv.org/abs/2305.18290, eq. 7. With `label_smoothing` that fraction of the labels is
    taken to be wrong: conservative DPO, E. Mitchell 2023, https://ericmitchell.ai/cdpo.pdf.

    A margin that is not finite gives a loss that is not, either (0 times infinity, if nothing else): an infinite one is
    no pair that is perfectly learned, but one that cannot be judged.
    """
    return -(1.0 - label_smoothing) * logsigmoid(margins) - label_smoothing * logsigmoid(-margins)


def ipo_loss(gains: Tensor, *, tau: float) -> Tensor:
    """[pairs] squared distance of the gain from 1 / (2 tau), which it is to reach and not to pass.

    Identity preference optimisation: Azar et al. 2023, https://arxiv.org/abs/2310.12036, eq. 17. As its authors run it
    and TRL computes it, log-ratios are means over an answer's tokens, so that long answers are not pushed apart less.

    Args:
        gains: [pairs] mean log-ratio of the chosen answer less that of the rejected one.
    """
    return (gains - 1.0 / (2.0 * tau)).square()


def kto_loss(chosen: Tensor, rejected: Tensor, *, reference_point: Tensor) -> Tensor:
    """[pairs] how far both answers are from being valued as they should: the sum of the two answers' losses.

    Kahneman-Tversky optimisation: Ethayarajh et al. 2024, https://arxiv.org/abs/2402.01306, eq. 8, without the
    constant lambda of each answer. The reference point has no gradient.

    Args:
        chosen, rejected: [pairs] implicit rewards: beta times the sum of log-ratios.
        reference_point: beta times a KL divergence, at least 0.
    """
    return torch.sigmoid(reference_point - chosen) + torch.sigmoid(rejected - reference_point)
