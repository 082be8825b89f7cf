"""How a model learns: the settings of the losses and advantages in `corral.workers.algorithms`."""

from typing import Literal

from pydantic import Field

from corral.experiments.config.base import FrozenConfig


class PPOConfig(FrozenConfig):
    """PPO (https://arxiv.org/abs/1707.06347) with GRPO's advantages (https://arxiv.org/abs/2402.03300) and AReaL's decoupled loss (https://arxiv.org/abs/2505.24298)."""  # noqa: E501

    group_size: int = Field(default=8, ge=1)
    """Answers sampled for one prompt."""
    n_minibatches: int = Field(default=1, ge=1)
    """Optimizer steps that one train step is cut into; the policy version rises once per train step."""
    eps_clip: float = Field(default=0.2, gt=0.0)
    """The importance ratio to the proximal policy is clipped to [1 - eps_clip, 1 + eps_clip]."""
    c_clip: float | None = Field(default=None, gt=1.0)
    """Dual clip: bound of the loss where the advantage is negative; None leaves it out."""
    use_decoupled_loss: bool = True
    """Clip around the policy at the start of the step and weight by its ratio to the policy that generated."""
    behav_imp_weight_cap: float | None = Field(default=5.0, gt=1.0)
    """Tokens whose behaviour importance weight exceeds this leave the loss; None keeps all."""
    advantage: Literal["group_relative"] = "group_relative"
    """How rewards become advantages; `group_relative` compares the answers to one prompt and needs no critic."""
    group_std_normalization: bool = True
    """Divide group-relative advantages by the group's standard deviation (off: Dr. GRPO, arXiv 2503.20783)."""
    kl_coef: float = Field(default=0.0, ge=0.0)
    """Weight of the KL divergence to the reference model in the loss; above 0 it needs `ref`."""
    reward_scale: float = 1.0
    """Rewards are multiplied by this after `reward_bias` was subtracted."""
    reward_bias: float = 0.0
    """Subtracted from each reward."""
    max_reward_clip: float = Field(default=20.0, gt=0.0)
    """Scaled rewards are clipped to plus or minus this."""
    mask_no_eos_with_zero: bool = False
    """Whether an answer that was cut off by the token limit gets reward 0."""
