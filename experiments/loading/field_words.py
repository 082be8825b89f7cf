"""Words that other trainers have for our keys and experiments: a key that we do not have -> the key that is meant.

Names are those of TRL, verl, OpenRLHF, AReaL and transformers' Trainer.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from corral.experiments.errors import KeyPath, dotted

_KEY_BY_WORD: Mapping[str, str] = MappingProxyType(
    {
        "learning_rate": "optimizer.lr",
        "warmup_ratio": "optimizer.warmup_steps_proportion",
        "lr_scheduler_type": "optimizer.lr_schedule",
        "max_grad_norm": "optimizer.gradient_clipping",
        "clip_grad": "optimizer.gradient_clipping",
        "adam_beta1": "optimizer.beta1",
        "adam_beta2": "optimizer.beta2",
        "num_generations": "group_size",
        "n_samples": "group_size",
        "n_samples_per_prompt": "group_size",
        "rollout_n": "group_size",
        "kl_coef": "kl.coef",
        "kl_beta": "kl.coef",
        "kl_ctl": "kl.coef",
        "kl_loss_coef": "kl.coef",
        "init_kl_coef": "kl.coef",
        "epsilon": "eps_clip",
        "cliprange": "eps_clip",
        "clip_ratio": "eps_clip",
        "epsilon_high": "eps_clip_high",
        "clip_ratio_high": "eps_clip_high",
        "num_iterations": "sample_reuse",
        "ppo_epochs": "sample_reuse",
        "ppo_n_minibatches": "n_minibatches",
        "adv_estimator": "advantage",
        "gamma": "discount",
        "lam": "gae_lambda",
        "max_completion_length": "max_new_tokens",
        "max_response_length": "max_new_tokens",
        "max_tokens": "max_new_tokens",
        "max_prompt_length": "max_prompt_tokens",
        "max_staleness": "max_head_offpolicyness",
        "reward_fn": "rollout.reward",
        "model_path": "actor.path",
        "model_name_or_path": "actor.path",
        "torch_dtype": "dtype",
        "gradient_checkpointing": "recompute",
        "num_train_epochs": "total_train_epochs",
        "total_epochs": "total_train_epochs",
        "save_steps": "save_every_steps",
        "save_freq": "save_every_steps",
        "eval_steps": "evaluation.every_steps",
        "test_freq": "evaluation.every_steps",
        "batch_size": "train_batch_size",
    }
)

EXPERIMENT_BY_WORD: Mapping[str, str] = MappingProxyType(
    {
        "grpo": "async_ppo, whose defaults are GRPO, or ppo, which generates between its train steps",
        "dr_grpo": "async_ppo with ppo.group_std_normalization: false",
        "dapo": "async_ppo with ppo.eps_clip_high and ppo.loss_reduction",
        "rloo": "async_ppo with ppo.advantage: rloo",
        "gspo": "async_ppo with ppo.loss: gspo",
        "cispo": "async_ppo with ppo.loss: cispo",
        "reinforce": "async_ppo with ppo.advantage: rewards_to_go",
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
