"""Words that other trainers have for our keys and experiments: a key that we do not have -> the key that is meant.

Names are those of TRL, verl, OpenRLHF, AReaL and transformers' Trainer.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from corral.experiments.config.presets import PRESETS
from corral.experiments.errors import KeyPath, dotted

_WORDS_BY_KEY: Mapping[str, tuple[str, ...]] = {
    "optimizer.lr": ("learning_rate",),
    "optimizer.warmup_steps_proportion": ("warmup_ratio",),
    "optimizer.lr_schedule": ("lr_scheduler_type",),
    "optimizer.gradient_clipping": ("max_grad_norm", "clip_grad"),
    "optimizer.beta1": ("adam_beta1",),
    "optimizer.beta2": ("adam_beta2",),
    "group_size": ("num_generations", "n_samples", "n_samples_per_prompt", "rollout_n"),
    "kl.coef": ("kl_coef", "kl_beta", "kl_ctl", "kl_loss_coef", "init_kl_coef"),
    "eps_clip": ("epsilon", "cliprange", "clip_ratio"),
    "eps_clip_high": ("epsilon_high", "clip_ratio_high"),
    "c_clip": ("clip_ratio_c", "delta"),
    "loss_reduction": ("loss_agg_mode", "loss_type"),
    "group_std_normalization": ("norm_adv_by_std_in_grpo", "scale_rewards"),
    "behav_imp_weight_cap": ("behave_imp_weight_cap", "rollout_is_threshold", "vllm_importance_sampling_clip_max"),
    "behav_imp_weight_level": ("rollout_is", "vllm_importance_sampling_mode"),
    "off_policy_mask": ("off_policy_mask_threshold",),
    "entropy_coef": ("entropy_coeff",),
    "overlong_buffer": ("overlong_tokens",),
    "drop_uniform_groups": ("filter_groups", "dynamic_sampling"),
    "sample_reuse": ("num_iterations", "ppo_epochs"),
    "n_minibatches": ("ppo_n_minibatches",),
    "advantage": ("adv_estimator",),
    "discount": ("gamma",),
    "gae_lambda": ("lam",),
    "max_new_tokens": ("max_completion_length", "max_response_length", "max_tokens"),
    "max_prompt_tokens": ("max_prompt_length",),
    "chat_template_kwargs": ("apply_chat_template_kwargs", "enable_thinking"),
    "max_head_offpolicyness": ("max_staleness",),
    "rollout.reward": ("reward_fn",),
    "actor.path": ("model_path", "model_name_or_path"),
    "dtype": ("torch_dtype",),
    "recompute": ("gradient_checkpointing",),
    "total_train_epochs": ("num_train_epochs", "total_epochs"),
    "save_every_steps": ("save_steps", "save_freq"),
    "evaluation.every_steps": ("eval_steps", "test_freq"),
    "train_batch_size": ("batch_size",),
}
_KEY_BY_WORD = {word: key for key, words in _WORDS_BY_KEY.items() for word in words}

EXPERIMENT_BY_WORD: Mapping[str, str] = MappingProxyType(
    {
        "reinforce": "async_ppo with ppo.advantage: rewards_to_go",
        "reinforce++": "async_ppo with ppo.algorithm: reinforce_plus_plus",
        **{name: "dpo with dpo.loss: " + name for name in ("ipo", "simpo", "kto")},
        **{name: f"async_ppo with ppo.algorithm: {name}" for name in PRESETS},
        "rm": "reward_model",
        "rlhf": "ppo",
    }
)


def meant_by(word: str, place: KeyPath, known: Sequence[KeyPath]) -> list[str]:
    """Keys, dotted, of the name `word` or of what it stands for; those below `place` alone, if there are any.

    Example:
        meant_by("lr", ("actor",), paths) == ["actor.optimizer.lr"]
    """
    ends = tuple(_KEY_BY_WORD.get(word, word).split("."))
    found = [path for path in known if path[-len(ends) :] == ends and path != (*place, word)]
    below = [path for path in found if path[: len(place)] == place]
    return [dotted(path) for path in below or found]
