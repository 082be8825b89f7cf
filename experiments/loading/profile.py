"""Cluster profiles: settings of a site and of a user for all experiments, which the experiment file overrides.

    /etc/corral/profile.yaml  <  ~/.config/corral/profile.yaml  <  --profile NAME  <  experiment.yaml  <  -s key=value
    ($CORRAL_SITE_PROFILE)       ($XDG_CONFIG_HOME)                (profiles/NAME.yaml)

Mappings merge key by key, all else is replaced by what is stronger. Every value keeps its file and line, so that an
error names the profile where the profile is to blame. What a profile says about a part that an experiment does not have
(generation servers, for SFT) does not concern that experiment.
"""

import copy
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from corral.experiments.config.base import merged
from corral.experiments.errors import (
    ConfigError,
    ConfigProblem,
    ConfigSource,
    KeyPath,
    Location,
    did_you_mean,
    shorten,
    show_value,
)
from corral.experiments.loading.overrides import value_at
from corral.experiments.loading.yaml_loader import EXPERIMENT_FILE, read_yaml

SITE_FOLDER = Path("/etc/corral")
SITE_PROFILE_VARIABLE = "CORRAL_SITE_PROFILE"
KEYS_OF_ONE_EXPERIMENT = ("experiment", "name", "trial")
_NOWHERE = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Values of a file, or of several on top of each other, and where each of their keys stands."""

    data: dict[str, Any]
    location_by_path: dict[KeyPath, Location]


def find_profiles(wanted: str | None = None) -> list[Path]:
    """The profiles that apply, the weakest first.

    Args:
        wanted: what was given as --profile: a name, or the path of a file.

    Raises:
        ConfigError: if `wanted`, or the file that the environment names, does not exist.
    """
    found = [*_site_profile(), *_existing(_user_folder() / "profile.yaml")]
    if wanted is not None:
        found.append(_named_profile(wanted))
    return found


def read_layer(file: Path, *, what: str = EXPERIMENT_FILE) -> Layer:
    """A file by the rules of `read_yaml`."""
    data, location_by_path = read_yaml(file, what=what)
    return Layer(data=data, location_by_path=location_by_path)


def read_profile(file: Path) -> Layer:
    """A profile, read by the rules of experiment files.

    Raises:
        ConfigError: naming the file, and the line where there is one.
    """
    layer = read_layer(file, what="profile")
    source = ConfigSource(file=file, location_by_path=layer.location_by_path)
    wrong = [key for key in KEYS_OF_ONE_EXPERIMENT if key in layer.data]
    if wrong:
        raise ConfigError(
            ConfigProblem(
                f"a profile may not set {key!r}: it is for all experiments",
                "move it to the experiment file",
                path=(key,),
                shown=show_value(layer.data[key]),
            )
            for key in wrong
        ).located(source)
    return layer


def without(layer: Layer, unwanted: Sequence[KeyPath]) -> Layer:
    """The layer without the values at some keys."""
    data = copy.deepcopy(layer.data)
    for path in unwanted:
        if isinstance(above := value_at(data, path[:-1]), dict):
            above.pop(path[-1], None)
    return replace(layer, data=data)


def merge(layers: Sequence[Layer]) -> Layer:
    """All layers as one, later ones on top."""
    data: dict[str, Any] = {}
    location_by_path: dict[KeyPath, Location] = {}
    for layer in layers:
        data = merged(data, layer.data)
        location_by_path |= layer.location_by_path
    # Items of a list and keys of a mapping that was replaced as a whole, or left out, came from nowhere.
    found = {path: at for path, at in location_by_path.items() if value_at(data, path, _NOWHERE) is not _NOWHERE}
    return Layer(data=data, location_by_path=found)


def _site_profile() -> list[Path]:
    named = os.environ.get(SITE_PROFILE_VARIABLE)
    if not named:
        return _existing(SITE_FOLDER / "profile.yaml")
    if not Path(named).is_file():
        raise ConfigError.of(
            f"the site profile {shorten(named)} does not exist",
            hint=f"unset {SITE_PROFILE_VARIABLE}, or let it name a file",
            place=f"${SITE_PROFILE_VARIABLE}",
        )
    return [Path(named)]


def _named_profile(wanted: str) -> Path:
    place = f"--profile {shorten(wanted)}"
    if "/" in wanted or wanted.endswith((".yaml", ".yml")):
        if not Path(os.path.expanduser(wanted)).is_file():
            raise ConfigError.of(f"there is no profile {shorten(wanted)}", hint="give an existing file", place=place)
        return Path(os.path.expanduser(wanted))
    folders = [_user_folder() / "profiles", SITE_FOLDER / "profiles"]
    for folder in folders:
        if (folder / f"{wanted}.yaml").is_file():
            return folder / f"{wanted}.yaml"
    known = sorted({file.stem for folder in folders if folder.is_dir() for file in folder.glob("*.yaml")})
    there_are = f"there are {', '.join(known)}" if known else f"write {folders[0] / 'NAME.yaml'}, or give a path"
    raise ConfigError.of(
        f"there is no profile named {shorten(wanted)!r}",
        hint=did_you_mean(wanted, known, there_are),
        place=place,
    )


def _user_folder() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path(os.path.expanduser("~")) / ".config") / "corral"


def _existing(file: Path) -> list[Path]:
    return [file] if file.is_file() else []
