"""Algorithms by name: each is a set of defaults for `ppo`, which the experiment file overrides.

    ppo: {algorithm: dapo, eps_clip: 0.1}  ──with_preset──►  the settings of DAPO, but for eps_clip
    rollout.sampling.max_new_tokens        ──fill_in──────►  lengths that it reads; sampling that belongs to it

What a setting does is said at its field, and in docs/algorithms.md; here stands which of them make which algorithm.
Pure.
"""

from collections.abc import Mapping
from typing import Any

from corral.experiments.config.base import merged

_DAPO = "dapo"
_OVERLONG_DIVISOR = 5  # DAPO's buffer: 4,096 of 20,480 tokens
SHOWING = ("luffy", "sft_mix")
"""Those that learn from answers of rows, which `rollout.demonstrations` names."""

PRESETS: Mapping[str, Mapping[str, Any]] = {
    # Schulman et al. 2017, https://arxiv.org/abs/1707.06347: the clip is around the policy that generated.
    "ppo": {"advantage": "gae", "use_decoupled_loss": False},
    # Hilton et al. 2022, https://arxiv.org/abs/2110.00641; Fu et al. 2025, https://arxiv.org/abs/2505.24298.
    "decoupled_ppo": {"advantage": "gae"},
    # Shao et al. 2024, https://arxiv.org/abs/2402.03300.
    "grpo": {"loss_reduction": "answer_mean"},
    # Liu et al. 2025, https://arxiv.org/abs/2503.20783.
    "dr_grpo": {"group_std_normalization": False, "loss_reduction": "fixed_divisor"},
    # Ahmadian et al. 2024, https://arxiv.org/abs/2402.14740: whole answers are the actions.
    "rloo": {"advantage": "rloo", "loss_reduction": "fixed_divisor", "kl": {"place": "reward"}},
    # Hu 2025, https://arxiv.org/abs/2501.03262.
    "reinforce_plus_plus": {
        "advantage": "rewards_to_go",
        "advantage_normalization": "batch",
        "kl": {"place": "reward"},
    },
    # The same paper, with the mean of the group as a baseline.
    "reinforce_plus_plus_baseline": {
        "group_std_normalization": False,
        "advantage_normalization": "batch",
        "kl": {"estimator": "k2"},
    },
    # Yu et al. 2025, https://arxiv.org/abs/2503.14476; overlong shaping and dynamic sampling are in `fill_in`.
    _DAPO: {"eps_clip": 0.2, "eps_clip_high": 0.28, "loss_reduction": "token_mean"},
    # Zheng et al. 2025, https://arxiv.org/abs/2507.18071.
    "gspo": {"loss": "gspo", "loss_reduction": "answer_mean", "eps_clip": 3e-4, "eps_clip_high": 4e-4},
    # MiniMax 2025, https://arxiv.org/abs/2506.13585: its weight corrects for age, so no second one does.
    "cispo": {"loss": "cispo", "eps_clip": 1.0, "eps_clip_high": 4.0, "use_decoupled_loss": False},
    # Hao et al. 2025, https://arxiv.org/abs/2505.23585.
    "opo": {"advantage": "opo"},
    # Yao et al. 2025, https://fengyao.notion.site/off-policy-rl.
    "tis": {"is_ratio_mode": "token_truncate", "is_ratio_clip": 2.0},
    # Liu et al. 2025, https://richardli.xyz/rl-collapse: whole answers leave the loss.
    "mis": {"is_ratio_mode": "sequence_mask", "is_ratio_clip": 2.0},
    # Ling team 2025, https://arxiv.org/abs/2510.18855: tokens on either side do.
    "icepop": {"is_ratio_clip": (0.5, 5.0)},
    # Oh et al. 2018, https://arxiv.org/abs/1806.05635, on the answers of the step.
    "self_imitation": {
        "loss": "corral.workers.algorithms.policy_loss:SelfImitation",
        "use_decoupled_loss": False,
    },
    # Yan et al. 2025, https://arxiv.org/abs/2504.14945; `rollout.demonstrations` says where the answers are.
    "luffy": {"loss": "corral.workers.algorithms.policy_loss:Luffy", "use_decoupled_loss": False},
    "sft_mix": {"loss": "corral.workers.algorithms.policy_loss:SFTMix", "use_decoupled_loss": False},
    # Agarwal et al. 2023, https://arxiv.org/abs/2306.13649, on the student's own answers alone; the reverse KL by token
    # as its advantage: Lu 2025, https://thinkingmachines.ai/blog/on-policy-distillation.
    "distillation": {"advantage": "none", "distillation": {"coef": 1.0}},
}
"""By the value of `ppo.algorithm`."""


def with_preset(ppo: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with those of their algorithm beneath; the same if it has none, or one that is not known."""
    name = ppo.get("algorithm")
    return merged(PRESETS.get(name, {}) if isinstance(name, str) else {}, ppo)


def fill_in(ppo: Mapping[str, Any], *, max_new_tokens: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """(what `ppo` leaves open, what `rollout` does), as the algorithm and the longest answer say.

    Args:
        ppo: what the file says of it.
        max_new_tokens: the most tokens of an answer.
    """
    asked = with_preset(ppo)
    is_dapo = asked.get("algorithm") == _DAPO
    if is_dapo and max_new_tokens >= _OVERLONG_DIVISOR:
        asked = {"overlong_buffer": max_new_tokens // _OVERLONG_DIVISOR, **asked}
    if asked.get("loss_reduction") == "fixed_divisor":
        asked = {"loss_divisor": max_new_tokens, **asked}
    if asked.get("overlong_buffer") is not None:
        asked = {"overlong_limit": max_new_tokens, **asked}
    open_ones = ("loss_divisor", "overlong_buffer", "overlong_limit")
    of_ppo = {name: asked[name] for name in open_ones if name in asked and name not in ppo}
    return of_ppo, {"drop_uniform_groups": True} if is_dapo else {}
