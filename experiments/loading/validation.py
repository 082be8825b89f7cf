"""Raw values + class -> a checked configuration, or all mistakes: pydantic's errors in the user's words.

The values of a file are checked strictly (a quoted "8" is no number, `yes` is no boolean), which pydantic offers for
JSON without refusing paths and tuples; hence the detour over JSON text.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from corral.experiments.config.presets import PRESETS
from corral.experiments.errors import (
    ConfigError,
    ConfigProblem,
    ConfigSource,
    KeyPath,
    closest,
    did_you_mean,
    dotted,
    leaves,
    shorten,
    show_value,
)
from corral.experiments.loading.schema import field_at, key_paths, model_at, names_of_entries, purpose
from corral.scheduling.errors import RuleError, message_and_hint

Model = TypeVar("Model", bound=BaseModel)
_LARGEST = 1_000_000_000


# Words that other trainers have for our keys and experiments: a key that we do not have -> the key that is meant.
#
# Names are those of TRL, verl, OpenRLHF, AReaL and transformers' Trainer.

_WORDS_BY_KEY: Mapping[str, tuple[str, ...]] = {
    "optimizer.lr": ("learning_rate",),
    "optimizer.warmup_steps_proportion": ("warmup_ratio",),
    "optimizer.lr_schedule": ("lr_scheduler_type",),
    "optimizer.gradient_clipping": ("max_grad_norm", "clip_grad"),
    "optimizer.betas": ("adam_beta1", "adam_beta2"),
    "group_size": ("num_generations", "n_samples", "n_samples_per_prompt", "rollout_n"),
    "kl.coef": ("kl_coef", "kl_beta", "kl_ctl", "kl_loss_coef", "init_kl_coef"),
    "eps_clip": ("epsilon", "cliprange", "clip_ratio"),
    "eps_clip_high": ("epsilon_high", "clip_ratio_high"),
    "c_clip": ("clip_ratio_c", "delta"),
    "loss_reduction": ("loss_agg_mode", "loss_type"),
    "group_std_normalization": ("norm_adv_by_std_in_grpo", "scale_rewards"),
    "is_ratio_clip": ("behave_imp_weight_cap", "rollout_is_threshold", "vllm_importance_sampling_clip_max"),
    "is_ratio_mode": ("rollout_is", "vllm_importance_sampling_mode"),
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
    "rollout.reward": ("reward_fn",),
    "actor.path": ("model_path", "model_name_or_path"),
    "dtype": ("torch_dtype",),
    "recompute": ("gradient_checkpointing",),
    "total_train_epochs": ("num_train_epochs", "total_epochs"),
    "save_every": ("save_steps", "save_freq"),
    "evaluation.every": ("eval_steps", "test_freq"),
    "train_batch_size": ("batch_size",),
}
_KEY_BY_WORD = {word: key for key, words in _WORDS_BY_KEY.items() for word in words}

OLD_KEYS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "trial": ("", "rl-submit -n names a trial"),
        "control.commit_every_steps": ("commit_every: {} steps", ""),
        "control.commit_every_epochs": ("commit_every: {} epochs", ""),
        "control.commit_every_seconds": ("commit_every: {} seconds", ""),
        "control.save_every_steps": ("save_every: {} steps", ""),
        "control.save_every_epochs": ("save_every: {} epochs", ""),
        "control.save_every_seconds": ("save_every: {} seconds", ""),
        "control.max_nonfinite_steps": ("", "it is 3"),
        "evaluation.every_steps": ("every: {} steps", ""),
        "evaluation.every_epochs": ("every: {} epochs", ""),
        "evaluation.every_seconds": ("every: {} seconds", ""),
        "evaluation.best.metric": ("best: {}", ""),
        "evaluation.best.is_highest": ("", "the lowest value is the best of a number whose name ends in loss"),
        "samples.prompts_per_step": ("samples_per_step: {}", ""),
        "samples.max_size": ("", "the newest 512 MB are kept"),
        "timeline.max_size": ("", "16 MB are kept of each worker"),
        "optimizer.muon": ("", "the momentum is Nesterov's, of 0.95, with 5 Newton-Schulz steps, at the rate `lr`"),
        "optimizer.decays_biases_and_norms": ("", "biases and norms do not decay"),
        "optimizer.beta1": ("betas: [{}, 0.95]", ""),
        "optimizer.beta2": ("betas: [0.9, {}]", ""),
        "n_seqs": ("", "a call takes the whole batch"),
        "critic.value": ("value_eps_clip and value_norm, as keys of critic", "value_norm_decay is 0.99995"),
        "dpo.desirable_weight": ("", "it is 1"),
        "dpo.undesirable_weight": ("", "it is 1"),
        "ppo.behav_imp_weight_cap": ("is_ratio_clip: {}", ""),
        "ppo.behav_imp_weight_floor": ("is_ratio_clip: [{}, 5.0]", ""),
        "ppo.behav_imp_weight_mode": ("is_ratio_mode: token_mask or token_truncate", "its values have other names"),
        "ppo.behav_imp_weight_level": ("is_ratio_mode: sequence_mask or geometric_mask", "its values have other names"),
        "ppo.off_policy_mask": ("", "a loss of your own masks other tokens"),
        "kl.horizon": ("", "it is 10,000 answers"),
        "ppo.overlong_penalty": ("", "it is 1"),
        "ppo.reward_scale": ("", "the weight of a part of rollout.reward scales it"),
        "ppo.reward_bias": ("", "a reward function may subtract it"),
        "ppo.max_reward_clip": ("", "a reward function may clip it"),
        "ppo.early_stop_kl": ("early_stop_imp_ratio, a bound of the mean ratio", ""),
        "sglang.max_restarts": ("", "it is 3"),
        "rollout.token_timeout_s": ("", "it is 300 s, or weights.update_timeout_s where that is longer"),
        "rollout.reward_processes": ("concurrency: {} in a part of rollout.reward", ""),
        "ppo.router_replay": ("", "the trainer replays the generator's experts where it can"),
        "rollout.spool": ("", "it is on disk"),
        "rollout.length_schedule": ("", "an agent may ask for shorter answers"),
        "rollout.reward.*.timeout_s": ("rollout.reward_timeout_s: {}", "all parts have the same deadline"),
        "teacher.key_file": ("key: {}", ""),
        "teacher.key_variable": ("key: ${}", ""),
        "rollout.schedule_policy": ("", "a request goes to the server with the fewest requests"),
        "rollout.max_updating_share": ("", "all servers take over new weights as soon as they can"),
        "rollout.first_token_timeout_s": ("", "it is 300 s, or weights.update_timeout_s where that is longer"),
        "environment.load_timeout_s": ("", "it is 300 s"),
        "sglang.probe_timeout_s": ("", "it is 60 s"),
        "control.keep_commits": ("", "it is 2"),
        "supervision.restart_pause_s": ("", "it is 0.2 s, and doubles up to 30 s"),
        "launch.begin": ("extra_sbatch_arguments: [--begin={}]", ""),
        "launch.deadline": ("extra_sbatch_arguments: [--deadline={}]", ""),
        "scheduling.begin": ("extra_sbatch_arguments: [--begin={}]", ""),
        "scheduling.deadline": ("extra_sbatch_arguments: [--deadline={}]", ""),
        "launch.no_kill": ("", "SLURM requeues a job that has lost a node, which goes on from the last commit"),
        "launch.exclude_failed_nodes": ("", "later attempts avoid the nodes that failed"),
        "cluster.threads_per_core": ("", "sinfo says it"),
        "supervision.lease_ttl_s": ("", "it is 10 s"),
    }
)
"""Keys that there were, by the ends of their paths (*: any name) -> what is written in their place ({}: the old value),
what holds instead."""


def old_key(path: KeyPath, value: Any) -> tuple[str, str, str] | None:
    """(key, what is written in its place, what holds instead) of a key that there was, at a path or just below it."""
    written = {path: value}
    if isinstance(value, Mapping):
        written |= {(*path, str(key)): below for key, below in value.items()}
    for end, (new, reason) in OLD_KEYS.items():
        for there, was in written.items():
            if fnmatchcase(f".{dotted(there)}", f"*.{end}"):
                return dotted(there), "" if was is None else new.format(shorten(str(was))), reason
    return None


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


def validate(model: type[Model], data: Mapping[str, Any], source: ConfigSource) -> Model:
    """The configuration that `data` stands for.

    Raises:
        ConfigError: with one problem per mistake, each naming its line.
    """
    huge = list(_huge_numbers(data, model, source))
    try:
        checked = model.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        problems = explain(error, model, source)
        known = {problem.path for problem in problems}
        raise ConfigError([*problems, *(one for one in huge if one.path not in known)]) from error
    if huge:
        raise ConfigError(huge)
    return checked


def _huge_numbers(data: Mapping[str, Any], model: type[BaseModel], source: ConfigSource) -> Iterator[ConfigProblem]:
    """Numbers of ours that are larger than any trial could use, and that timers and counters could not hold."""
    for path, value in leaves(data):
        if isinstance(value, int | float) and abs(value) > _LARGEST and field_at(model, path) is not None:
            yield ConfigProblem(
                f"{dotted(path)} must be at most {_LARGEST:,}",
                f"{path[-1]}: {purpose(model, path)}",
                path=path,
                shown=show_value(value),
                place=source.place(path),
            )


def explain(error: ValidationError, model: type[BaseModel], source: ConfigSource) -> list[ConfigProblem]:
    """The problems behind a ValidationError, one per key, in the order of the file."""
    problem_by_path: dict[KeyPath, ConfigProblem] = {}
    for details in error.errors(include_url=False):
        if details["loc"][-1] == "[key]":  # pydantic's word for a key of a mapping, which is then the input
            details["type"], details["loc"] = "extra_forbidden", details["loc"][:-1]
            details["input"] = source.written(details["loc"])
        path, broken = _known_path(details["loc"], model), details.get("ctx", {}).get("error")
        if isinstance(broken, RuleError) and broken.key:  # of a class: one of its keys
            path, given = (*path, broken.key), details["input"]
            details["input"] = given.get(broken.key) if isinstance(given, Mapping) else given
        if path not in problem_by_path:
            problem_by_path[path] = _problem(details, path, model, source)
    return list(problem_by_path.values())


def _known_path(location: tuple[int | str, ...], model: type[BaseModel]) -> KeyPath:
    """The location without the words that pydantic adds for the members of a union, such as "str" or "int"."""
    for length in range(len(location), 0, -1):
        path = location[:length]
        parent = field_at(model, path[:-1])
        holds_items = parent is not None and (isinstance(path[-1], int) or "dict[" in str(parent.annotation))
        if holds_items or model_at(model, path[:-1]) is not None:
            return path
    return location


def _problem(details: ErrorDetails, path: KeyPath, model: type[BaseModel], source: ConfigSource) -> ConfigProblem:
    kind = details["type"]
    if kind in ("extra_forbidden", "string_type") and (was := old_key(path, details["input"])) is not None:
        key, new, reason = was
        rule = f"{key} is no key any more{f': {reason}' if reason else ''}"
        hint = f"write {new}" if new else f"remove {key.rpartition('.')[2]}"
        return ConfigProblem(rule, hint, path=path, shown=show_value(details["input"]), place=source.place(path))
    if kind == "extra_forbidden":
        return _unknown_key(path, details["input"], model, source)
    if kind == "missing":
        meaning = purpose(model, path)
        hint = f"add {path[-1]}" + (f": {meaning}" if meaning else "")
        return ConfigProblem(f"{dotted(path)} is missing", hint, path=path, place=source.place(path))
    value = details["input"]
    written = shorten(source.written(path)) if isinstance(value, bool | int | float) else ""
    rule, remedy = _rule(details, written)
    if not remedy and (meaning := purpose(model, path)):
        remedy = f"{path[-1]}: {meaning}"
    # The rules here are predicates; those of the classes' own validators may be whole sentences.
    separator = " " if rule.startswith(("must ", "is ")) else ": "
    message = f"{dotted(path)}{separator}{rule}" if path else rule
    return ConfigProblem(message, remedy, path=path, shown=written or show_value(value), place=source.place(path))


def _unknown_key(path: KeyPath, value: Any, model: type[BaseModel], source: ConfigSource) -> ConfigProblem:
    key = str(path[-1])
    above = model_at(model, path[:-1])
    field = field_at(model, path[:-1])
    known = list(above.model_fields) if above is not None else [*names_of_entries(field.annotation)] if field else []
    where = f" in {dotted(path[:-1])}" if len(path) > 1 else ""
    if elsewhere := meant_by(key, path[:-1], [other for other, _ in key_paths(model)]):
        hint = f"did you mean {' or '.join(elsewhere[:3])}?"
    elif near := closest(key, known):
        hint = f"did you mean {near!r}?"
    else:
        hint = f"known keys{where}: {', '.join(known)}"
    shown = show_value(value) if value != "" else ""  # a mapping below a mapping's key is not known here
    return ConfigProblem(f"unknown key {key!r}{where}", hint, path=path, shown=shown, place=source.place(path))


def _rule(details: ErrorDetails, written: str) -> tuple[str, str]:
    """The rule that was broken, to be read after the key, and the way out where it is not the field's purpose.

    Args:
        written: a number or a boolean as a file has it; "" if nobody knows.
    """
    kind, context = details["type"], details.get("ctx", {})
    if kind == "value_error":
        return message_and_hint(context["error"])
    if kind == "literal_error":
        expected = str(context["expected"])
        options = [option.strip("'") for part in expected.split(", ") for option in part.split(" or ")]
        hint = did_you_mean(str(details["input"]), options, "")
        return f"must be {expected}, got {written or show_value(details['input'])}", hint
    if kind == "string_type":
        is_scalar = isinstance(details["input"], bool | int | float)
        quoted = "write it in quotes" + (f': "{written}"' if written else "") if is_scalar else ""
        return f"must be text, got {written or _kind_of(details['input'])}", quoted
    if kind == "string_pattern_mismatch":
        return "is not in the form that it must have", ""  # the field's purpose says which, and no pattern does
    if kind in _FORMS:
        text = details["input"]
        is_quoted = kind.startswith(("int_", "float_", "bool_")) and isinstance(text, str)
        quoted = f", got the text {shorten(json.dumps(text))}" if is_quoted else ""
        return f"must be {_FORMS[kind]}{quoted}", ""
    # "Input should be greater than 0", "String should match pattern '^...'"
    return f"must {details['msg'].partition(' should ')[2] or details['msg']}", ""


def _kind_of(value: Any) -> str:
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "a list"
    return show_value(value)


_FORMS: Mapping[str, str] = {
    **dict.fromkeys(("int_type", "int_from_float"), "a whole number"),
    "float_type": "a number",
    "bool_type": "true or false",
    **dict.fromkeys(("list_type", "tuple_type"), "a list, [a, b]"),
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "a mapping of keys to values"),
    "path_type": "the path of a file",
}
"""What a value has to be, by pydantic's name for the mistake; of the others, pydantic's own words are used."""
