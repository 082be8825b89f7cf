"""Configuration classes -> docs/configuration.md, the reference of every key.

python -m tests.configuration_reference --write docs/configuration.md

The keys that shipped files use come first.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo

from corral.experiments.errors import KeyPath, dotted, show_value
from corral.experiments.experiment import Experiment
from corral.experiments.loading.schema import (
    alternatives,
    entries,
    key_paths,
    model_at,
    names_of_entries,
    purpose,
    submodel,
)
from corral.experiments.loading.validation import OLD_KEYS
from corral.experiments.registry import EXPERIMENTS
from corral.scheduling.scheduling import Scheduling, default_scheduling

_INTRODUCTION = f"""\
# Configuration reference

<!-- Generated: python -m tests.configuration_reference --write docs/configuration.md -->

An experiment is one YAML file. Its `experiment` key chooses the kind: {", ".join(f"`{name}`" for name in EXPERIMENTS)},
or a class of [your own](customize.md#an-experiment-of-your-own) by its import path.
Everything is checked before anything is submitted; an error names file, line, value, rule and a way out.

- **Overrides**: `rl-submit experiment.yaml -s actor.optimizer.lr=1e-4 -s ref=null`. The value follows the rules of the
  file; `[a, b]` is a list. Where text is expected, a number needs no quotes.
- **Paths** in the file are relative to the file's folder; in an override, to the current directory. `~` is your home.
- **YAML is read strictly**: `true` and `false` are the only booleans (`yes`, `no`, `on` and `off` are text), `1e-5` is
  a number, `24:00:00` is text. Duplicate keys, anchors and aliases, tags, control characters and line breaks in values
  are errors; a file has at most 1 MB.
- **Editors** complete and check keys by a JSON Schema: `rl-submit --schema > experiment.schema.json`, and
  `# yaml-language-server: $schema=experiment.schema.json` as the first line of the file.
- **Import paths** look like `package.module:name`. The module is searched where Python searches, and in the current
  directory.

An allocation says who generates and who trains. Backends are `hf` and `sglang` (generation,
see [rollout](rollout.md)), `fsdp` and `megatron` (training; see [layouts](layouts.md)): `fsdp:d4`,
`hf:d2+fsdp:d2c2`, or `sglang:d2+megatron:d4`. The whole grammar:

```
allocation := [generation "+"] training | generation
generation := "sglang" | "hf" ":" layout
training   := engine | share {{"," share}}
share      := role {{"," role}} "=" engine ["@" first rank]        role "*": every role that is not named
engine     := ["fsdp" | "megatron" ":"] layout       "." may stand for ":"
layout     := "d", "t" (or "m"), "p", "c" and "e", each with a size, each at most once; one that is missing counts 1
```
"""


ROOT = Path(__file__).parents[1]
SHIPPED = sorted([*(ROOT / "experiments" / "recipes").glob("*.yaml"), *(ROOT / "examples").glob("*.yaml")])
"""Files whose keys come first."""


def configuration_reference() -> str:
    """The text of docs/configuration.md."""
    usual = usual_keys()
    lines = [_INTRODUCTION, "# Usual keys", "", "Those that the files which ship use.", ""]
    lines += _sections(usual, are_usual=True)
    lines += ["# Further keys", "", "Their defaults suit most trials.", ""]
    lines += _sections(usual, are_usual=False)
    return "\n".join([*lines, *_old_keys()]).rstrip() + "\n"


def usual_keys() -> set[tuple[type[BaseModel], str]]:
    """(class that declares it, key) of each key that a shipped file has."""
    found = set()
    for file in SHIPPED:
        data = yaml.safe_load(file.read_text(encoding="utf-8"))
        model = EXPERIMENTS[data["experiment"]]
        for path in _paths(data):
            above, name = model_at(model, path[:-1]), str(path[-1])
            if above is not None and name in above.model_fields:
                found.add((_declaring(above, name), name))
    return found


def _declaring(model: type[BaseModel], name: str) -> type[BaseModel]:
    bases = [base for base in model.__mro__ if issubclass(base, BaseModel) and name in base.model_fields]
    return bases[-1]


def _paths(data: Any, path: KeyPath = ()) -> Iterator[KeyPath]:
    for key, value in data.items() if isinstance(data, dict) else ():
        yield (*path, key)
        yield from _paths(value, (*path, key))


def _sections(usual: set[tuple[type[BaseModel], str]], *, are_usual: bool) -> Iterator[str]:
    """A section for each class that has such keys, by its title; keys beyond the usual ones have one of their own."""

    def section(title: str, purpose: str, model: type[BaseModel], names: list[str]) -> Iterator[str]:
        wanted = [name for name in names if ((_declaring(model, name), name) in usual) == are_usual]
        if wanted:
            title = f"More of {title}" if not are_usual and len(wanted) < len(names) else title
            yield from (f"## {title}", "", *([purpose, ""] if purpose else []), *_table(model, wanted), "")
            if model is Scheduling and are_usual:
                yield from (*_default_scheduling(), "")

    common = set(Experiment.model_fields)
    for name, model in EXPERIMENTS.items():
        own = [field for field in model.model_fields if field not in common or field == "allocation"]
        yield from section(f"experiment: {name}", (model.__doc__ or "").splitlines()[0], model, own)
    shared = [field for field in Experiment.model_fields if field not in ("experiment", "allocation")]
    yield from section("Every experiment", "", Experiment, shared)
    for model, places in _models_below().items():
        where = ", ".join(f"`{place}`" for place in places)
        purpose = f"At {where}. {' '.join((model.__doc__ or '').split())}"
        yield from section(_title(model), purpose, model, list(model.model_fields))


def _old_keys() -> Iterator[str]:
    yield from ("# Old keys", "", "A file that has one is refused with what this table says.", "")
    yield from ("| key that was | write | what holds instead |", "|---|---|---|")
    for key, (new, reason) in OLD_KEYS.items():
        written = new.format("N")
        yield f"| `{key}` | {f'`{written}`' if ':' in new else new} | {reason} |"


def _models_below() -> dict[type[BaseModel], list[str]]:
    """Every configuration class that is a value of some key, with those keys, in the order in which they appear."""
    places: dict[type[BaseModel], list[str]] = {}
    for experiment_class in EXPERIMENTS.values():
        for path, field in key_paths(experiment_class):
            model = submodel(field.annotation) or entries(field.annotation)
            if model is not None and dotted(path) not in places.setdefault(model, []):
                places[model].append(dotted(path))
    return places


def _default_scheduling() -> Iterator[str]:
    yield "Keys that are left out keep the default of the kind of worker:"
    yield ""
    yield "| worker | cpu | gpu | mem |"
    yield "|---|---|---|---|"
    for kind, scheduling in default_scheduling().items():
        yield f"| {kind} | {scheduling.cpu} | {scheduling.gpu} | {scheduling.mem // 1024}G |"
    yield ""
    yield "A generation server of N GPUs (`sglang:d1tN`) has N in place of 1, and a CPU more for each further one."
    yield "Where what it keeps of its host's memory needs more (docs/rollout.md), it asks for that and 8G."
    yield "So does a model worker for what it copies of each commit (docs/operations.md)."


def _table(model: type[BaseModel], names: list[str]) -> Iterator[str]:
    yield "| key | value | default | meaning |"
    yield "|---|---|---|---|"
    for name in names:
        field = model.model_fields[name]
        is_memory = any(isinstance(rule, BeforeValidator) for rule in field.metadata) and int in alternatives(
            field.annotation
        )
        value = "whole number or text such as 20G" if is_memory else _type(field)
        default = "by kind" if model is Scheduling and field.is_required() else _default(field)
        cells = [f"`{name}`", value, default, purpose(model, (name,)) + "."]
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _type(field: FieldInfo) -> str:
    names = [_type_name(member) for member in alternatives(field.annotation)]
    if isinstance(field.default, str) and entries(field.annotation) is not None:
        names.insert(0, "text")
    text = " or ".join(dict.fromkeys(names))
    bounds = [
        f"{sign} {getattr(rule, attribute)}"
        for rule in field.metadata
        for attribute, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))
        if getattr(rule, attribute, None) is not None
    ]
    if bounds:
        text += f", {', '.join(bounds)}"
    return text + (" or null" if type(None) in get_args(field.annotation) else "")


def _type_name(member: Any) -> str:
    if get_origin(member) is Literal:
        return " or ".join(f"`{value}`" for value in get_args(member))
    if isinstance(member, type) and issubclass(member, BaseModel):
        return f"[{_title(member)}](#{_title(member).lower().replace(' ', '-')})"
    plain = {int: "whole number", float: "number", bool: "true or false", str: "text", Path: "path"}
    if member in plain:
        return plain[member]
    if (model := entries(member)) is not None:
        names = ", ".join(f"`{name}`" for name in names_of_entries(member)) or "names"
        return f"mapping of {names} to [{_title(model)}](#{_title(model).lower()})"
    if names := names_of_entries(member):
        return f"mapping of {', '.join(f'`{name}`' for name in names)} to text"
    if get_origin(member) is tuple and alternatives(get_args(member)[0]) == (float,):
        return f"list of {len(get_args(member))} numbers"
    return {list: "list of text", tuple: "list of text", dict: "mapping of text to text"}[get_origin(member)]


def _title(model: type[BaseModel]) -> str:
    return model.__name__.removesuffix("Config")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, BaseModel):
        return "its defaults"
    return f"`{show_value(value)}`"


def main() -> None:
    """Print the reference, or write it."""
    parser = argparse.ArgumentParser(description="Generate the configuration reference.")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write to FILE instead of printing")
    arguments = parser.parse_args()
    text = configuration_reference()
    if arguments.write is None:
        print(text, end="")
    else:
        arguments.write.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
