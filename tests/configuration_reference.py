"""Configuration classes -> docs/configuration.md, the reference of every key.

python -m tests.configuration_reference --write docs/configuration.md
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo

from corral.experiments.errors import dotted, show_value
from corral.experiments.experiment import Experiment
from corral.experiments.loading.schema import alternatives, entries, key_paths, purpose, submodel
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
- **Import paths** look like `package.module:name`. The module is searched where Python searches, and in the current
  directory.

An allocation says who generates and who trains. This version builds the backends `hf` and `sglang` (generation,
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


def configuration_reference() -> str:
    """The text of docs/configuration.md."""
    lines = [_INTRODUCTION]
    common = set(Experiment.model_fields)
    for name, experiment_class in EXPERIMENTS.items():
        own = [field for field in experiment_class.model_fields if field not in common or field == "allocation"]
        purpose = (experiment_class.__doc__ or "").splitlines()[0]
        lines += [f"## experiment: {name}", "", purpose, "", *_table(experiment_class, own), ""]
    shared = [field for field in Experiment.model_fields if field not in ("experiment", "allocation")]
    lines += ["## Every experiment", "", *_table(Experiment, shared), ""]
    for model, places in _models_below().items():
        where = ", ".join(f"`{place}`" for place in places)
        purpose = " ".join((model.__doc__ or "").split())
        lines += [f"## {_title(model)}", "", f"At {where}. {purpose}", "", *_table(model, list(model.model_fields)), ""]
        if model is Scheduling:
            lines += [*_default_scheduling(), ""]
    return "\n".join(lines).rstrip() + "\n"


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
        return f"mapping of names to [{_title(model)}](#{_title(model).lower()})"
    if get_origin(member) is dict and get_args(member)[0] is not str:
        return "mapping of numbers to numbers"
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
