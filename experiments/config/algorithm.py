"""How a model learns: the settings of the losses and advantages in `corral.workers.algorithms`."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from corral.experiments.config.base import FrozenConfig, changed
from corral.experiments.config.presets import PRESETS, with_preset
from corral.experiments.config.rollout import check_import_path_syntax
from corral.scheduling.errors import RuleError

INTERFACE_NAMES = ("ppo_actor", "ppo_critic", "teacher", "reward", "paired_reward", "dpo", "sft")
"""The interfaces that `corral.workers.algorithms.interfaces` has under these names."""
LOSS_NAMES = ("ppo", "gspo", "cispo")
"""The policy losses that `corral.workers.algorithms.policy_loss` has under these names."""
PAIR_LOSS_NAMES = ("dpo", "ipo", "simpo", "kto")
"""The losses of pairs that `corral.workers.algorithms.pair_losses` has under these names."""
ADVANTAGE_NAMES = ("group_relative", "rloo", "opo", "rewards_to_go", "gae", "none")
"""The advantages that `corral.workers.algorithms.advantage` has under these names."""


_OF_DECOUPLED_LOSS = (
    "behav_imp_weight_mode", "behav_imp_weight_floor", "behav_imp_weight_level", "off_policy_mask",
)  # fmt: skip


LEAST_PROMPTS, LEAST_TOKENS = 8, 100
"""Prompts of a step, and tokens of older weights, that can be compared with the trainer's numbers."""


def _known_algorithm(name: str) -> str:
    if name not in PRESETS:
        raise RuleError(f"must be one of {', '.join(PRESETS)}", f"got {name!r}")
    return name


def named_or_imported(text: str, names: tuple[str, ...]) -> str:
    """The text; ValueError if it is neither of the names nor `package.module:name`."""
    if ":" in text:
        return check_import_path_syntax(text)
    if text not in names:
        raise RuleError(f"must be {', '.join(names)} or an import path, package.module:name", f"got {text!r}")
    return text


class KLConfig(FrozenConfig):
    """What keeps the policy near a reference model."""

    coef: float = Field(default=0.0, ge=0.0)
    """Weight of the KL divergence to the reference model; above 0 it needs `ref`. With `target`, the first one."""
    place: Literal["loss", "reward"] = "loss"
    """Whether the divergence is a term of the loss (GRPO) or is subtracted from the reward of each token (PPO)."""
    estimator: Literal["k1", "k2", "k3"] | None = None
    """How it is estimated from the sampled tokens; None is k3 in the loss, and k1, the only one there, in rewards."""
    target: float | None = Field(default=None, gt=0.0)
    """Nats per answer that an adaptive coefficient aims at, which changes by at most a fifth in 10,000 answers; None
    keeps the coefficient as it is."""

    @model_validator(mode="after")
    def _settings_have_an_effect(self) -> Self:
        if self.place == "reward" and self.estimator not in (None, "k1"):
            raise RuleError(f"estimator {self.estimator} has no effect with place: reward", "remove it")
        if self.target is not None and self.coef == 0.0:
            raise RuleError("target can never be reached from coef 0", "start from a coef above 0, such as 0.1")
        return self

    @property
    def is_charged(self) -> bool:
        """Whether rewards are less by it, so that whoever estimates advantages has to know it."""
        return self.coef > 0.0 and self.place == "reward"

    @property
    def estimator_in_place(self) -> Literal["k1", "k2", "k3"]:
        """The estimator that is used."""
        return self.estimator or ("k3" if self.place == "loss" else "k1")


class DistillationConfig(FrozenConfig):
    """What the policy learns from a teacher on its own answers (on-policy distillation)."""

    coef: float = Field(default=0.0, ge=0.0)
    """Weight of the divergence to the teacher; above 0 it needs `teacher`."""
    top_k: int | None = Field(default=None, ge=1)
    """How many of the teacher's likeliest tokens are compared in each place, in a term of the loss. None compares the token that was sampled alone, in its advantage."""  # noqa: E501
    divergence: Literal["reverse_kl", "forward_kl"] = "reverse_kl"
    """Whether what the policy would say has to be likely to the teacher, or what the teacher would say to the policy; the latter with `top_k`."""  # noqa: E501

    @model_validator(mode="after")
    def _settings_have_an_effect(self) -> Self:
        if self.divergence == "forward_kl" and self.top_k is None:
            raise ValueError("divergence forward_kl needs top_k: the policy's own tokens say the reverse one alone")
        return self


class PPOConfig(FrozenConfig):
    """PPO (https://arxiv.org/abs/1707.06347) and what has grown from it: GRPO, RLOO, REINFORCE++, DAPO, GSPO, CISPO, decoupled PPO. docs/algorithms.md has the formulas."""  # noqa: E501

    algorithm: Annotated[str, AfterValidator(_known_algorithm)] | None = None
    """One of those in docs/algorithms.md, by its name, such as dapo: what it sets of these keys, where the file does not. None: GRPO's advantages with the decoupled loss, and every token weighs the same."""  # noqa: E501
    group_size: int = Field(default=8, ge=1, le=65536)
    """Answers sampled for one prompt."""
    n_minibatches: int = Field(default=1, ge=1)
    """Optimizer steps that one pass over the batch is cut into; the policy version rises once per train step."""
    sample_reuse: int = Field(default=1, ge=1)
    """Passes over the batch in one train step."""
    loss: Annotated[str, AfterValidator(lambda text: named_or_imported(text, LOSS_NAMES))] = "ppo"
    """ppo (clip per token), gspo (clip per answer), cispo (clipped weight), or the import path of one of your own."""
    loss_settings: dict[str, Any] = {}
    """Fields of a loss of your own that is a class, such as {worse: 0.3}."""
    eps_clip: float = Field(default=0.2, gt=0.0)
    """The importance ratio to the proximal policy is clipped to [1 - eps_clip, 1 + eps_clip]."""
    eps_clip_high: float | None = Field(default=None, gt=0.0)
    """Another distance for the upper bound of that clip (clip-higher); None is `eps_clip`."""
    c_clip: float | None = Field(default=None, gt=1.0)
    """Dual clip of the loss ppo: bound of the loss where the advantage is negative; None leaves it out."""
    loss_reduction: Literal["token_mean", "answer_mean", "fixed_divisor"] = "token_mean"
    """Whether every token, every answer (GRPO), or every token at a fixed rate (Dr. GRPO) weighs the same."""
    loss_divisor: int | None = Field(default=None, ge=1)
    """Tokens that `fixed_divisor` divides an answer's sum by; None is rollout.sampling.max_new_tokens."""
    use_decoupled_loss: bool = True
    """Clip around the policy at the start of the step and weight by its ratio to the policy that generated."""
    behav_imp_weight_cap: float | None = Field(default=5.0, gt=1.0)
    """Bound of a token's behaviour importance weight; None keeps all weights as they are."""
    behav_imp_weight_mode: Literal["drop", "truncate"] = "drop"
    """Whether tokens beyond a bound leave the loss, or stay with the bound as their weight."""
    behav_imp_weight_floor: float | None = Field(default=None, gt=0.0, lt=1.0)
    """A lower bound of that weight, for which the same holds (IcePop); None has none."""
    behav_imp_weight_level: Literal["token", "answer", "answer_mean"] = "token"
    """Whether each token has a weight of its own, or all of an answer the product of its tokens' weights, or their geometric mean."""  # noqa: E501
    off_policy_mask: float | None = Field(default=None, gt=0.0)
    """Answers with a negative advantage leave the loss if the policy has moved away from them by more than this many nats per token since they were made (DeepSeek-V3.2); None keeps all."""  # noqa: E501
    entropy_coef: float = Field(default=0.0, ge=0.0)
    """Weight of an entropy bonus, whose gradient is estimated from the sampled tokens."""
    gap_alarm: float | None = Field(default=None, gt=0.0)
    """A token whose log-probability differs by more than this many nats between generator and trainer, with the same
    weights, is an alarm in rl-status; None is 0.001, or 0.5 where one of them computes in bfloat16, or the generator
    rounds its weights or keeps older keys and values (`weights.update_mode: in_place`), or answers of several versions
    are trained on with the experts of each (`router_replay` above `rollout.max_head_offpolicyness: 0`)."""
    router_replay: bool = True
    """With a mixture of experts, whether the trainer computes each token by the experts that made it (R3, https://arxiv.org/abs/2510.11370), and does not choose anew, by other roundings than the generator's; samples carry 2 bytes per token, mixture layer and expert. Other models have nothing to replay."""  # noqa: E501
    advantage: Annotated[str, AfterValidator(lambda text: named_or_imported(text, ADVANTAGE_NAMES))] = "group_relative"
    """group_relative, rloo and opo compare the answers to one prompt, rewards_to_go compares nothing, gae asks a
    critic, none reads no rewards (with `distillation`); or the import path of an estimator of your own."""
    advantage_settings: dict[str, Any] = {}
    """Fields of an estimator of your own that is a class."""
    group_std_normalization: bool = True
    """Divide group-relative advantages by the group's standard deviation (off: Dr. GRPO, arXiv 2503.20783)."""
    advantage_normalization: Literal["none", "batch", "group"] = "none"
    """Bring advantages to mean 0 and deviation 1 over the tokens of the batch, or of each prompt's answers."""
    discount: float = Field(default=1.0, gt=0.0, le=1.0)
    """Gamma: what a reward is worth one token earlier, in gae and rewards_to_go."""
    gae_lambda: float = Field(default=1.0, ge=0.0, le=1.0)
    """Lambda of gae: 1 trusts the rewards, 0 the critic."""
    kl: KLConfig = KLConfig()
    """The divergence to a reference model."""
    distillation: DistillationConfig = DistillationConfig()
    """What a teacher adds to the advantages."""
    early_stop_imp_ratio: float | None = Field(default=5.0, gt=1.0)
    """A mean importance ratio above this ends the train step before the update; None never does."""
    early_stop_kl: float | None = Field(default=None, gt=0.0)
    """So does a mean of log(center / current) above this, in nats per token."""
    reward_scale: float = 1.0
    """Rewards are multiplied by this after `reward_bias` was subtracted."""
    reward_bias: float = 0.0
    """Subtracted from each reward."""
    max_reward_clip: float = Field(default=20.0, gt=0.0)
    """Scaled rewards are clipped to plus or minus this."""
    mask_no_eos_with_zero: bool = False
    """Whether an answer that was cut off by the token limit gets reward 0."""
    overlong_buffer: int | None = Field(default=None, ge=1)
    """Tokens before `overlong_limit` in which an answer's reward falls, evenly, by 1 before `reward_bias` and `reward_scale` (DAPO); None leaves long answers alone."""  # noqa: E501
    overlong_limit: int | None = Field(default=None, ge=1)
    """Tokens from which on an answer has the whole penalty; None is rollout.sampling.max_new_tokens."""

    @model_validator(mode="before")
    @classmethod
    def _begins_with_its_algorithm(cls, data: Any) -> Any:
        return with_preset(data) if isinstance(data, Mapping) else data

    @model_validator(mode="after")
    def _settings_have_an_effect(self) -> Self:
        """What a setting makes pointless is an error, as far as it was written down."""
        own_loss, own_advantage = ":" in self.loss, ":" in self.advantage
        for is_used, reason, *names in (
            (own_loss or self.loss == "ppo", "loss: ppo", "c_clip"),
            (own_loss, "a loss of your own", "loss_settings"),
            (own_advantage, "an advantage of your own", "advantage_settings"),
            (own_advantage or self.advantage == "gae", "advantage: gae", "gae_lambda"),
            (
                own_advantage or self.advantage == "group_relative",
                "advantage: group_relative",
                "group_std_normalization",
            ),
            (self.loss_reduction == "fixed_divisor", "loss_reduction: fixed_divisor", "loss_divisor"),
            (self.overlong_buffer is not None, "overlong_buffer", "overlong_limit"),
            (self.use_decoupled_loss, "use_decoupled_loss", *_OF_DECOUPLED_LOSS),
        ):
            for name in [] if is_used else changed(self, names):
                is_of_algorithm = PRESETS.get(self.algorithm or "", {}).get(name) == getattr(self, name)
                way = f"algorithm: {self.algorithm} sets it: choose another" if is_of_algorithm else "remove it"
                raise RuleError(f"{name} has no effect without {reason}", way)
        if self.loss_reduction == "fixed_divisor" and self.loss_divisor is None:
            raise RuleError("loss_reduction fixed_divisor needs loss_divisor", "the most tokens of an answer is usual")
        if self.overlong_buffer is not None and self.overlong_buffer > (self.overlong_limit or self.overlong_buffer):
            raise RuleError(
                f"overlong_buffer {self.overlong_buffer} is more than overlong_limit {self.overlong_limit}: every "
                "answer would be too long",
                "a fifth of it is usual",
            )
        if self.behav_imp_weight_mode == "truncate" and self.behav_imp_weight_cap is None:
            raise RuleError("behav_imp_weight_mode truncate needs behav_imp_weight_cap", "5.0 is usual")
        return self

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps in one train step, if none is left out."""
        return self.n_minibatches * self.sample_reuse

    @property
    def drops_tokens(self) -> bool:
        """Whether the weight of a token may take it out of the loss."""
        bounds = (self.behav_imp_weight_cap, self.behav_imp_weight_floor)
        beyond_bounds = self.behav_imp_weight_mode == "drop" and bounds != (None, None)
        return self.use_decoupled_loss and (beyond_bounds or self.off_policy_mask is not None)

    @property
    def needs_critic(self) -> bool:
        """Whether the advantages read a critic's values."""
        return self.advantage == "gae"


class CriticConfig(FrozenConfig):
    """How the values of a critic are trained."""

    value_eps_clip: float | None = Field(default=0.2, gt=0.0)
    """A value moves at most this far from the value that the advantages were computed from; None does not clip."""
    value_norm: Literal["none", "exponential", "plain"] = "exponential"
    """Whether the critic learns returns of mean 0 and deviation 1, by running means that forget (a share of 0.00005 in
    one train step), or that do not."""


class DPOConfig(FrozenConfig):
    """Direct preference optimisation (https://arxiv.org/abs/2305.18290) and its kin. docs/algorithms.md has the formulas."""  # noqa: E501

    loss: Annotated[str, AfterValidator(lambda text: named_or_imported(text, PAIR_LOSS_NAMES))] = "dpo"
    """dpo, ipo (a margin to reach, and not to pass), simpo (without a reference), kto (each answer by itself), or the import path of one of your own."""  # noqa: E501
    loss_settings: dict[str, Any] = {}
    """Fields of a loss of your own that is a class."""
    beta: float = Field(default=0.1, gt=0.0)
    """How much the policy is held to the reference: the implicit reward is beta times the log-ratio. Of ipo it is tau, of simpo the scale of log-probabilities per token (2.0 is usual)."""  # noqa: E501
    label_smoothing: float = Field(default=0.0, ge=0.0, lt=0.5)
    """Share of the preferences that are taken to be the wrong way round, with dpo and simpo."""
    target_margin: float = Field(default=0.0, ge=0.0)
    """How far the chosen answer is to be ahead with simpo, there called gamma; half of beta is usual."""

    @model_validator(mode="after")
    def _settings_have_an_effect(self) -> Self:
        for written, losses in (
            ("label_smoothing", ("dpo", "simpo")),
            ("target_margin", ("simpo",)),
        ):
            if self.loss not in losses and changed(self, [written]):
                raise RuleError(f"{written} has no effect with loss: {self.loss}", "remove it")
        if self.loss_settings and ":" not in self.loss:
            raise RuleError("loss_settings has no effect without a loss of your own", "remove it")
        return self

    @property
    def reads_reference(self) -> bool:
        """Whether the loss compares with a reference model."""
        return self.loss != "simpo"
