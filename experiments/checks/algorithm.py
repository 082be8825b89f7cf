"""Checks of the algorithm: settings that contradict each other."""

from collections.abc import Iterator

from corral.experiments.config.algorithm import PPOConfig
from corral.experiments.config.rollout import RolloutConfig
from corral.experiments.errors import ConfigProblem


def check_ppo(
    ppo: PPOConfig,
    *,
    has_ref: bool,
    train_batch_size: int,
    dp: int,
    has_critic: bool = False,
    has_teacher: bool = False,
) -> Iterator[ConfigProblem]:
    """Settings of the algorithm that contradict each other, the rest of the experiment, or the ranks that train.

    Args:
        dp: data-parallel ranks of the actor, each of which cuts its own answers into mini-batches.
    """
    if ppo.kl.coef > 0.0 and not has_ref:
        yield ConfigProblem(
            f"ppo.kl.coef {ppo.kl.coef} needs a reference model, and there is none",
            "give ref.path (the model that the actor starts from), or set ppo.kl.coef: 0",
            path=("ppo", "kl", "coef"),
        )
    if ppo.distillation.coef > 0.0 and not has_teacher:
        yield ConfigProblem(
            f"ppo.distillation.coef {ppo.distillation.coef} needs a teacher, and there is none",
            "give teacher.path (a better model with the actor's tokenizer), or set ppo.distillation.coef: 0",
            path=("ppo", "distillation", "coef"),
        )
    if ppo.advantage == "none" and ppo.distillation.coef == 0.0:
        yield ConfigProblem(
            "ppo.advantage none reads no rewards, and ppo.distillation.coef 0 no teacher: nothing would be learned",
            "set ppo.distillation.coef: 1, or ppo.advantage: group_relative",
            path=("ppo", "advantage"),
        )
    if ppo.needs_critic and not has_critic:
        yield ConfigProblem(
            f"ppo.advantage {ppo.advantage} needs a critic, and there is none",
            "give a critic, or set ppo.advantage: group_relative",
            path=("ppo", "advantage"),
        )
    if ppo.advantage in ("group_relative", "rloo", "opo") and ppo.group_size < 2:
        yield ConfigProblem(
            f"{ppo.advantage} advantages compare the answers to one prompt: with group_size 1 they are all 0",
            "ppo.group_size: 8 is usual, 2 the least",
            path=("ppo", "group_size"),
        )
    answers = train_batch_size * ppo.group_size // dp
    if ppo.n_minibatches > answers >= 1:
        prompts = -(-ppo.n_minibatches * dp // ppo.group_size)
        yield ConfigProblem(
            f"ppo.n_minibatches {ppo.n_minibatches} is more than the answers of a data-parallel rank: "
            f"{train_batch_size} prompts x {ppo.group_size} answers / {dp} ranks = {answers}",
            f"at most {answers}, or raise train_batch_size to at least {prompts}",
            path=("ppo", "n_minibatches"),
        )


def check_admission(rollout: RolloutConfig, *, train_batch_size: int) -> Iterator[ConfigProblem]:
    """More prompts in flight than the staleness bound ever admits, or fewer than a batch."""
    eta, overtaking = rollout.max_head_offpolicyness, rollout.overtaking
    if overtaking > eta * train_batch_size:
        yield ConfigProblem(
            f"rollout.reorder_window {rollout.reorder_window} leaves no batch within the staleness bound: what may be "
            f"overtaken by {overtaking} prompts has to be admitted so much earlier, and max_head_offpolicyness {eta} x "
            f"train_batch_size {train_batch_size} = {eta * train_batch_size} are there for it",
            f"at most {eta * train_batch_size + 1}, or raise max_head_offpolicyness",
            path=("rollout", "reorder_window"),
        )
        return
    most = (eta + 1) * train_batch_size - overtaking
    if rollout.max_concurrent_rollouts is not None and rollout.max_concurrent_rollouts > most:
        yield ConfigProblem(
            f"rollout.max_concurrent_rollouts {rollout.max_concurrent_rollouts} can never be reached: "
            f"the staleness bound admits (max_head_offpolicyness {eta} + 1) x train_batch_size {train_batch_size}"
            + (f" - (reorder_window {rollout.reorder_window} - 1)" if overtaking else "")
            + f" = {most}",
            f"at most {most}, or leave it out; raise max_head_offpolicyness for more",
            path=("rollout", "max_concurrent_rollouts"),
        )
