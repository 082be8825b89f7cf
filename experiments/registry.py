"""profiles + experiment.yaml + overrides -> Experiment, or everything that is wrong with them.

    bytes ─read_yaml─► raw values ─merge, override─► raw values ─validate─► Experiment ─find_problems─► Experiment
             │                         │                        │                       │
             └─────────────────────────┴───── ConfigError ──────┴───────────────────────┘

Each stage reports all of its mistakes at once; the next stage runs only on what the one before found clean.
"""

import copy
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from corral.experiments.async_ppo import AsyncPPOExperiment
from corral.experiments.config.presets import fill_in
from corral.experiments.errors import (
    ConfigError,
    ConfigProblem,
    ConfigSource,
    KeyPath,
    did_you_mean,
    dotted,
    leaves,
    located,
    show_value,
)
from corral.experiments.experiment import Experiment
from corral.experiments.inputs.users_class import import_class, naming_users_line
from corral.experiments.loading.overrides import (
    Override,
    apply_overrides,
    as_text_where_asked,
    parse_override,
    value_at,
)
from corral.experiments.loading.profile import Layer, merge, read_layer, read_profile, without
from corral.experiments.loading.schema import accepts, field_at, json_schema
from corral.experiments.loading.validation import EXPERIMENT_BY_WORD, validate
from corral.experiments.ppo import PPOExperiment
from corral.experiments.problems import find_problems
from corral.experiments.row_experiment import DPOExperiment, RewardModelExperiment, SFTExperiment
from corral.scheduling.allocation import parse_allocation
from corral.scheduling.scheduling import Scheduling, default_scheduling
from corral.scheduling.worker_information import WorkerKind

EXPERIMENTS: Mapping[str, type[Experiment]] = {
    "async_ppo": AsyncPPOExperiment,
    "dpo": DPOExperiment,
    "ppo": PPOExperiment,
    "reward_model": RewardModelExperiment,
    "sft": SFTExperiment,
}
"""Experiment class by the file's `experiment` key, where that is no import path."""

GENERATION_KINDS: tuple[WorkerKind, ...] = ("generation_server", "gserver_manager", "rollout_worker")
"""Groups of experiments that generate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedExperiment:
    """A checked experiment, and where its values came from."""

    experiment: Experiment
    source: ConfigSource
    written: Mapping[str, Any]
    """What files and overrides say, as one file could; nothing that follows from it is filled in."""


def schema_text() -> str:
    """The JSON Schema of experiment files."""
    return json.dumps(json_schema(EXPERIMENTS, filled_in=Scheduling), indent=1, ensure_ascii=False)


def load_experiment(path: Path | str, overrides: Sequence[str] = (), *, profiles: Sequence[Path] = ()) -> Experiment:
    """The experiment of `load_with_source`."""
    return load_with_source(path, overrides, profiles=profiles).experiment


def load_with_source(
    path: Path | str,
    overrides: Sequence[str] = (),
    *,
    profiles: Sequence[Path] = (),
    sbatch_arguments: Sequence[str] = (),
    is_to_run: bool = True,
) -> LoadedExperiment:
    """Read an experiment file and check everything that can be checked without starting anything.

    Args:
        path: the YAML file; relative paths in it are relative to its folder.
        overrides: `key.path=value`, applied in order; relative paths in them are relative to the current directory.
        profiles: files with values for what the experiment file leaves open, the weakest first.
        sbatch_arguments: what is added to `launch.extra_sbatch_arguments`.
        is_to_run: whether what only running needs must be there: weights of models, SGLang.

    Raises:
        ConfigError: listing all mistakes of the first stage that found any.
    """
    own, layers = read_layer(Path(path)), [read_profile(profile) for profile in profiles]
    changes = _parse_overrides(overrides)
    source = ConfigSource(
        file=Path(path),
        location_by_path=own.location_by_path,
        override_by_path={change.path: change.option for change in changes},
        profiles=tuple(profiles),
    )
    with located(source):
        experiment_class = _experiment_class(apply_overrides(own.data, changes))
    merged = merge([*(without(layer, _keys_of_others(layer, experiment_class)) for layer in layers), own])
    source = replace(source, location_by_path=merged.location_by_path)
    changes = [as_text_where_asked(change, experiment_class) for change in changes]
    written, source = _with_sbatch_arguments(apply_overrides(merged.data, changes), sbatch_arguments, source)
    written, source = _by_own_names(written, experiment_class, source)
    _make_paths_absolute(written, experiment_class, source)
    filled = _with_what_follows(_with_group_defaults(written, experiment_class), experiment_class)
    experiment = validate(experiment_class, filled, source)
    with located(source), naming_users_line(type(experiment), path=("experiment",), shown=experiment.experiment):
        found = [problem for problem in find_problems(experiment) if is_to_run or not problem.is_of_running]
        if found:
            raise ConfigError(problem.showing(experiment) for problem in found)
    return LoadedExperiment(experiment=experiment, source=source, written=written)


def _keys_of_others(layer: Layer, experiment_class: type[Experiment]) -> list[KeyPath]:
    """What a profile says about parts that only other experiments have."""
    elsewhere = {name for other in EXPERIMENTS.values() for name in other.model_fields}
    unwanted: list[KeyPath] = [
        (key,) for key in layer.data if key in elsewhere and key not in experiment_class.model_fields
    ]
    if not experiment_class.generates:
        unwanted += [("groups", kind) for kind in GENERATION_KINDS]
    return unwanted


def _parse_overrides(overrides: Sequence[str]) -> list[Override]:
    changes: list[Override] = []
    problems: list[ConfigProblem] = []
    for typed in overrides:
        try:
            changes.append(parse_override(typed))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return changes


def _experiment_class(data: Mapping[str, Any]) -> type[Experiment]:
    kind = data.get("experiment")
    if isinstance(kind, str) and ":" in kind:
        return import_class(kind, Experiment, path=("experiment",))
    if isinstance(kind, str) and kind in EXPERIMENTS:
        return EXPERIMENTS[kind]
    known = f"{', '.join(sorted(EXPERIMENTS))}, or package.module:Class of your own"
    if kind is None:
        raise ConfigError.of("experiment is missing: the kind of experiment", hint=f"add one of {known}")
    word = kind if isinstance(kind, str) else ""
    meant = EXPERIMENT_BY_WORD.get(word.lower())
    raise ConfigError.of(
        f"there is no experiment {show_value(kind)}",
        hint=f"it is {meant}" if meant else did_you_mean(word, list(EXPERIMENTS), f"known: {known}"),
        path=("experiment",),
        shown=show_value(kind),
    )


def _with_group_defaults(data: dict[str, Any], experiment_class: type[Experiment]) -> dict[str, Any]:
    """Resources that a group's `scheduling` leaves out are those of its kind, not an error."""
    filled = copy.deepcopy(data)
    allocation = data.get("allocation", experiment_class.model_fields["allocation"].get_default())
    for kind, scheduling in default_scheduling(gpus_per_server=_gpus_per_server(allocation)).items():
        default = scheduling.model_dump(mode="json", exclude_defaults=True)
        for above in (("groups", kind), ("groups", kind, "elastic")):
            if isinstance(given := value_at(data, (*above, "scheduling")), dict):
                value_at(filled, above)["scheduling"] = default = default | given
    return filled


def _with_what_follows(data: dict[str, Any], experiment_class: type[Experiment]) -> dict[str, Any]:
    """The data with what an algorithm says beyond `ppo`, and lengths that follow from the longest answer."""
    longest = field_at(experiment_class, ("rollout", "sampling", "max_new_tokens"))
    ppo, rollout = data.get("ppo"), data.get("rollout", {})
    if longest is None or not isinstance(ppo, dict) or not isinstance(rollout, dict):
        return data
    max_new_tokens = value_at(data, ("rollout", "sampling", "max_new_tokens"), longest.default)
    if type(max_new_tokens) is not int:
        return data
    of_ppo, of_rollout = fill_in(ppo, max_new_tokens=max_new_tokens)
    there = {name: value for name, value in of_rollout.items() if field_at(experiment_class, ("rollout", name))}
    return {**data, "ppo": {**ppo, **of_ppo}, "rollout": {**there, **rollout}}


def _gpus_per_server(allocation: Any) -> int:
    """As the allocation says; an allocation that is wrong is reported later, beside all other errors."""
    try:
        return parse_allocation(allocation).gpus_per_server if isinstance(allocation, str) else 1
    except ValueError:
        return 1


def _with_sbatch_arguments(
    data: dict[str, Any], added: Sequence[str], source: ConfigSource
) -> tuple[dict[str, Any], ConfigSource]:
    path: KeyPath = ("launch", "extra_sbatch_arguments")
    given = value_at(data, path) or []
    if not added or not isinstance(given, list):
        return data, source
    typed = {(*path, number): f"--sbatch-arg={argument}" for number, argument in enumerate(added, start=len(given))}
    changed = apply_overrides(data, [Override(path=path, value=[*given, *added], typed=dotted(path))])
    return changed, replace(source, override_by_path={**source.override_by_path, **typed})


def _by_own_names(
    data: dict[str, Any], experiment_class: type[Experiment], source: ConfigSource
) -> tuple[dict[str, Any], ConfigSource]:
    """The data without the second names of keys.

    Raises:
        ConfigError: if a key is there by both of its names.
    """
    for (above, other), own in _OTHER_NAMES.items():
        keys, path = data.get(above), (above, own)
        if not isinstance(keys, dict) or other not in keys or field_at(experiment_class, path) is None:
            continue
        if own in keys:
            error = ConfigError.of(f"{other} and {own} are one key", hint="remove one of them", path=(above, other))
            raise error.located(source)
        data = {**data, above: {own if key == other else key: value for key, value in keys.items()}}
        source = replace(
            source,
            location_by_path={path if at == (above, other) else at: it for at, it in source.location_by_path.items()},
            override_by_path={path if at == (above, other) else at: it for at, it in source.override_by_path.items()},
        )
    return data, source


_OTHER_NAMES: Mapping[tuple[str, str], str] = {("rollout", "max_staleness"): "max_head_offpolicyness"}


def _make_paths_absolute(data: dict[str, Any], experiment_class: type[Experiment], source: ConfigSource) -> None:
    for place, text in list(leaves(data)):
        field, above = (field_at(experiment_class, path) for path in (place, place[:-1]))
        if isinstance(text, str) and (accepts(field, Path) or accepts(above, dict[str, Path])):
            absolute = os.path.abspath(source.folder(place) / os.path.expanduser(text))
            value_at(data, place[:-1])[place[-1]] = absolute
