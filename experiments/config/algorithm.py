"""How a model learns: the settings of the losses and advantages in `corral.workers.algorithms`."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeAlias

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


_Floor: TypeAlias = Annotated[float, Field(gt=0.0, lt=1.0)]
_Cap: TypeAlias = Annotated[float, Field(gt=1.0)]
RatioLevel = Literal["token", "sequence", "geometric"]
"""Whose importance sampling ratio a token has: its own, or the product or geometric mean of its answer's."""
_LEVEL_AND_TRUNCATES: Mapping[str, tuple[RatioLevel, bool]] = {
    "token_mask": ("token", False),
    "token_truncate": ("token", True),
    "sequence_mask": ("sequence", False),
    "sequence_truncate": ("sequence", True),
    "geometric_mask": ("geometric", False),
    "geometric_truncate": ("geometric", True),
}
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
    """The KL penalty, which keeps the policy near a reference model."""

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
        """Whether rewards are less by it, so that the estimate of advantages has to know it."""
        return self.coef > 0.0 and self.place == "reward"

    @property
    def estimator_in_place(self) -> Literal["k1", "k2", "k3"]:
        """The estimator that is used."""
        return self.estimator or ("k3" if self.place == "loss" else "k1")


class DistillationConfig(FrozenConfig):
    """On-policy distillation: the policy learns from a teacher on its own answers."""

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
    is_ratio_clip: _Cap | tuple[_Floor, _Cap] | None = 5.0
    """Bounds of a token's importance sampling ratio, proximal to behaviour policy: an upper bound, or [lower, upper] (IcePop). None bounds nothing."""  # noqa: E501
    is_ratio_mode: Literal[
        "token_mask", "token_truncate", "sequence_mask", "sequence_truncate", "geometric_mask", "geometric_truncate"
    ] = "token_mask"
    """Whether tokens whose ratio is beyond a bound leave the loss (mask), or stay with the bound as their ratio (truncate); and whose ratio is meant: each token's own, or for all tokens of an answer the product of their ratios (sequence) or its geometric mean."""  # noqa: E501
    entropy_coef: float = Field(default=0.0, ge=0.0)
    """Weight of an entropy bonus, whose gradient is estimated from the sampled tokens."""
    gap_alarm: float | None = Field(default=None, gt=0.0)
    """A token whose log-probability differs by more than this many nats between generator and trainer, with the same
    weights, is an alarm in rl-status; None is 0.001, or 0.5 where one of them computes in bfloat16, or the generator
    rounds its weights or keeps older keys and values (`weights.update_mode: in_place`), or answers of several versions
    are trained on with the experts of each (a mixture above `rollout.max_head_offpolicyness: 0`)."""
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
    """A teacher's term in the advantages."""
    early_stop_imp_ratio: float | None = Field(default=5.0, gt=1.0)
    """A mean importance ratio above this ends the train step before the update; None never does."""
    mask_no_eos_with_zero: bool = False
    """Whether an answer that was cut off by the token limit gets reward 0."""
    overlong_buffer: int | None = Field(default=None, ge=1)
    """Tokens before `overlong_limit` in which an answer's reward falls, evenly, by 1 (DAPO); None leaves long answers alone."""  # noqa: E501
    overlong_limit: int | None = Field(default=None, ge=1)
    """Tokens from which on an answer has the whole penalty; None is rollout.sampling.max_new_tokens."""

    @model_validator(mode="before")
    @classmethod
    def _begins_with_its_algorithm(cls, data: Any) -> Any:
        return with_preset(data) if isinstance(data, Mapping) else data

    @model_validator(mode="after")
    def _settings_have_an_effect(self) -> Self:
        """A written setting that another one makes pointless is an error."""
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
            (self.use_decoupled_loss, "use_decoupled_loss", "is_ratio_mode"),
        ):
            for name in [] if is_used else changed(self, names):
                is_of_algorithm = PRESETS.get(self.algorithm or "", {}).get(name) == getattr(self, name)
                way = f"algorithm: {self.algorithm} sets it: choose another" if is_of_algorithm else "remove it"
                raise RuleError(f"{name} has no effect without {reason}", way, key=name)
        if self.advantage == "none" and self.distillation.coef == 0.0:
            raise RuleError(
                "advantage none reads no rewards, and distillation.coef 0 no teacher: nothing would be learned",
                "set ppo.distillation.coef: 1, or ppo.advantage: group_relative",
                key="advantage",
            )
        if self.advantage in ("group_relative", "rloo", "opo") and self.group_size < 2:
            raise RuleError(
                f"{self.advantage} advantages compare the answers to one prompt: with group_size 1 they are all 0",
                "ppo.group_size: 8 is usual, 2 the least",
                key="group_size",
            )
        if self.loss_reduction == "fixed_divisor" and self.loss_divisor is None:
            raise RuleError("loss_reduction fixed_divisor needs loss_divisor", "the most tokens of an answer is usual")
        if self.overlong_buffer is not None and self.overlong_buffer > (self.overlong_limit or self.overlong_buffer):
            raise RuleError(
                f"overlong_buffer {self.overlong_buffer} is more than overlong_limit {self.overlong_limit}: every "
                "answer would be too long",
                "a fifth of it is usual",
            )
        if self.truncates_ratios and self.is_ratio_clip is None:
            raise RuleError(f"is_ratio_mode {self.is_ratio_mode} needs is_ratio_clip", "5.0 is usual")
        return self

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps in one train step, if none is left out."""
        return self.n_minibatches * self.sample_reuse

    @property
    def is_ratio_bounds(self) -> tuple[float | None, float | None]:
        """Lower and upper bound of `is_ratio_clip`."""
        return self.is_ratio_clip if isinstance(self.is_ratio_clip, tuple) else (None, self.is_ratio_clip)

    @property
    def truncates_ratios(self) -> bool:
        """Whether a token beyond a bound stays, with the bound as its ratio."""
        return _LEVEL_AND_TRUNCATES[self.is_ratio_mode][1]

    @property
    def is_ratio_level(self) -> RatioLevel:
        """Whose ratio a token has."""
        return _LEVEL_AND_TRUNCATES[self.is_ratio_mode][0]

    @property
    def drops_tokens(self) -> bool:
        """Whether the ratio of a token may take it out of the loss."""
        return self.use_decoupled_loss and self.is_ratio_clip is not None and not self.truncates_ratios

    @property
    def needs_critic(self) -> bool:
        """Whether the advantages read a critic's values."""
        return self.advantage == "gae"


class CriticConfig(FrozenConfig):
    """How the values of a critic are trained."""

    value_eps_clip: float | None = Field(default=0.2, gt=0.0)
    """A value moves at most this far from the value that the advantages were computed from; None does not clip."""
    value_norm: Literal["none", "exponential", "plain"] = "exponential"
    """Whether the critic learns returns of mean 0 and deviation 1, by running means that forget (a fraction of 0.00005
    in one train step), or that do not."""


class DPOConfig(FrozenConfig):
    """Direct preference optimisation (https://arxiv.org/abs/2305.18290) and its kin. docs/algorithms.md has the formulas."""  # noqa: E501

    loss: Annotated[str, AfterValidator(lambda text: named_or_imported(text, PAIR_LOSS_NAMES))] = "dpo"
    """dpo, ipo (a margin to reach, and not to pass), simpo (without a reference), kto (each answer by itself), or the import path of one of your own."""  # noqa: E501
    loss_settings: dict[str, Any] = {}
    """Fields of a loss of your own that is a class."""
    beta: float = Field(default=0.1, gt=0.0)
    """How much the policy is held to the reference: the implicit reward is beta times the log-ratio. Of ipo it is tau, of simpo the scale of log-probabilities per token (2.0 is usual)."""  # noqa: E501
    label_smoothing: float = Field(default=0.0, ge=0.0, lt=0.5)
    """Fraction of the preferences that are taken to be the wrong way round, with dpo and simpo."""
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
