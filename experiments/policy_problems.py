"""What is wrong with an experiment that trains a policy: PolicyExperiment -> ConfigProblems, each with its key.

algorithm ──► reference, critic, teachers that it needs; mini-batches of what each rank has
teachers ───► the actor's tokens, and the sources of rows
the user's own interfaces, losses, advantages ──► keys that somebody makes
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from corral.experiments.checks.data import check_columns, check_length
from corral.experiments.errors import ConfigProblem, dotted
from corral.experiments.inputs.model_directory import model_sizes, read_vocabulary
from corral.experiments.policy import PolicyExperiment
from corral.scheduling.model_function_call import CallType


def policy_problems(experiment: PolicyExperiment) -> Iterator[ConfigProblem]:
    """What contradicts each other in the algorithm, its models, and its rows."""
    yield from _of_ppo(experiment)
    served = {
        f"rollout.teachers.{name}" if name else "rollout.teacher": one.path
        for name, one in experiment.rollout.served_teachers.items()
    }
    yield from _of_teachers(experiment, served)
    if served:
        yield from _of_served_teachers(experiment, ", ".join(served))
    if experiment.dataset.has_teacher_prompts and experiment.rollout.makes_episodes:
        yield ConfigProblem(
            "columns.teacher_prompt takes the place of the prompt, and what agents and environments make may begin "
            "with something else",
            "remove it, or answer in a single turn: without rollout.agent and rollout.environment",
            path=("dataset",),
        )
    yield from check_columns(experiment.dataset, experiment.checked_dataset)
    if experiment.rollout.asks_judge != (getattr(experiment.rollout, "judge", None) is not None):
        yield ConfigProblem(
            "a reward with the settings {url: trial} asks rollout.judge of async_ppo; only one of both is there",
            "name the judge's model in rollout.judge.path, or an endpoint in the reward's settings",
            path=("rollout", "reward"),
        )
    yield from _of_keys(experiment)
    path = ("rollout", "sampling", "max_new_tokens")
    yield from check_length(experiment.dataset, experiment.rollout.sampling, experiment.length_bounds(), path)


def _of_ppo(experiment: PolicyExperiment) -> Iterator[ConfigProblem]:
    """Settings of the algorithm that contradict each other, the rest of the experiment, or the ranks that train."""
    ppo = experiment.ppo
    ranks = [mesh.dims.dp for role, mesh in experiment.known_meshes.items() if role in ("actor", "critic")]
    dp = max(ranks, default=1)  # each cuts its own answers into mini-batches
    if ppo.kl.coef > 0.0 and experiment.ref is None:
        yield ConfigProblem(
            f"ppo.kl.coef {ppo.kl.coef} needs a reference model, and there is none",
            "give ref.path (the model that the actor starts from), or set ppo.kl.coef: 0",
            path=("ppo", "kl", "coef"),
        )
    if ppo.distillation.coef > 0.0 and not experiment.has_teacher:
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
    if ppo.needs_critic and experiment.critic is None:
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
    answers = experiment.train_batch_size * ppo.group_size // dp
    if ppo.n_minibatches > answers >= 1:
        prompts = -(-ppo.n_minibatches * dp // ppo.group_size)
        yield ConfigProblem(
            f"ppo.n_minibatches {ppo.n_minibatches} is more than the answers of a data-parallel rank: "
            f"{experiment.train_batch_size} prompts x {ppo.group_size} answers / {dp} ranks = {answers}",
            f"at most {answers}, or raise train_batch_size to at least {prompts}",
            path=("ppo", "n_minibatches"),
        )


def _of_teachers(experiment: PolicyExperiment, served: Mapping[str, Path | None]) -> Iterator[ConfigProblem]:
    """Teachers that do not read what the actor writes, or are not there for every row.

    Args:
        served: the directories of those outside of the trial, as far as they are known, by the key of each.
    """
    own = {experiment.key_of(role): experiment.models[role].path for role in experiment.teacher_roles}
    teachers, top_k = {**own, **served}, experiment.ppo.distillation.top_k
    names, sources = experiment.taught_sources, experiment.dataset.sources
    for key, path in teachers.items():
        if path is not None:
            yield from _of_one_teacher(path, experiment.actor.path, key=key, top_k=top_k)
    if teachers and top_k is not None and experiment.actor.shared_prompts != "off":
        yield ConfigProblem(
            "ppo.distillation.top_k asks each answer for tokens of its own, and with actor.shared_prompts answers "
            "that begin alike are asked once",
            "set actor.shared_prompts: off",
            path=("actor", "shared_prompts"),
        )
    if len(teachers) > max(1, len(set(names))):
        yield ConfigProblem(
            f"{' and '.join(teachers)} say who is learned from on the same rows",
            "keep one of all rows, or one of each source in `teachers` or `rollout.teachers`",
            path=("teacher",),
        )
    if names and set(names) != sources.keys():
        yield ConfigProblem(
            f"teachers are named {', '.join(names)}, and dataset.sources {', '.join(sources) or 'nothing'}: each "
            "source has one",
            "name teachers as the sources, or give one `teacher` of all rows",
            path=("teachers",),
        )


def _of_one_teacher(teacher: Path, actor: Path, *, key: str, top_k: int | None) -> Iterator[ConfigProblem]:
    """A teacher that does not read what the actor writes; it may know more tokens, and have more rows to fill up.

    Args:
        top_k: how many of its own tokens it tells the actor, which then has to know all of them.
    """
    own, actors = (read_vocabulary(one) for one in (teacher, actor))
    if own is not None and actors is not None and (others := sorted(dict(actors.items() - own.items()))):
        yield ConfigProblem(
            f"{key} has another tokenizer than the actor: {len(others)} of the actor's {len(actors)} tokens are others "
            f"to it, such as {others[0]!r}",
            "take a teacher of the actor's family, with the same tokenizer: it scores the actor's tokens one by one",
            path=(key, "path"),
        )
    rows, needed = (model_sizes(one).get("vocab_size") for one in (teacher, actor))
    if rows is not None and needed is not None and rows < needed:
        yield ConfigProblem(
            f"{key} has a vocabulary of {rows}, the actor one of {needed}: it cannot read all that the actor may write",
            "take a teacher with at least as many rows of embeddings",
            path=(key, "path"),
        )
    elif rows != needed and top_k is not None and rows is not None and needed is not None:
        yield ConfigProblem(
            f"{key} has a vocabulary of {rows}, the actor one of {needed}: it may tell of tokens that the actor lacks",
            "take a teacher with as many rows of embeddings, or leave out ppo.distillation.top_k",
            path=(key, "path"),
        )
    elif needed is not None and top_k is not None and top_k > needed:
        yield ConfigProblem(
            f"ppo.distillation.top_k {top_k} is more than the vocabulary of {needed}",
            f"at most {needed}; 20 to 100 are usual",
            path=("ppo", "distillation", "top_k"),
        )


def _of_served_teachers(experiment: PolicyExperiment, keys: str) -> Iterator[ConfigProblem]:
    """What teachers outside of the trial cannot say."""
    temperature = experiment.rollout.sampling.temperature
    if temperature != 1.0:
        yield ConfigProblem(
            f"{keys} says log-probabilities at temperature 1, as servers give those of prompts, and answers "
            f"are sampled at {temperature:g}",
            "sample at 1, or take a `teacher` of the trial",
            path=("rollout", "sampling", "temperature"),
        )
    if experiment.dataset.names_temperatures:
        yield ConfigProblem(
            f"{keys} says log-probabilities at temperature 1, and rows say at which answers are sampled",
            "leave out columns.temperature of dataset, or take a `teacher` of the trial",
            path=("dataset",),
        )
    if experiment.ppo.distillation.top_k is not None:
        yield ConfigProblem(
            f"{keys} says how likely given tokens are, and cannot name others by their ids",
            "leave out ppo.distillation.top_k, or take a `teacher` of the trial",
            path=("ppo", "distillation", "top_k"),
        )


def _of_keys(experiment: PolicyExperiment) -> Iterator[ConfigProblem]:
    """Interfaces, losses and advantages of the user's own that read what nobody makes."""
    made = {*experiment.trajectory_keys, *(key for call in experiment.training_calls() for key in call.output_keys)}
    made |= {"rewards", *experiment.declared_names(experiment.ppo.advantage, "outputs")}
    for path, import_path, call_type in (
        (("actor", "interface"), experiment.actor.implementation, CallType.TRAIN_STEP),
        (("ppo", "advantage"), experiment.ppo.advantage, None),
        (("ppo", "loss"), experiment.ppo.loss, None),
    ):
        if missing := [key for key in experiment.declared_names(import_path, "inputs", call_type) if key not in made]:
            yield ConfigProblem(
                f"{dotted(path)} {import_path} reads {', '.join(missing)}, and no call makes that",
                "let a reward_model.interface or a call of your own make it: see docs/customize.md",
                path=path,
            )
