"""A model on disk in Hugging Face format: directory -> the facts that submission checks, or what is missing."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corral.experiments.errors import ConfigProblem, display_path
from corral.experiments.tokens import eos_token_ids

_LFS_BEGINNING = b"version https://git-lfs"
_HEADER_LENGTH_BYTES = 8  # a safetensors file starts with the length of its JSON header


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What config.json says, as far as submission asks; None where it does not say."""

    max_position_embeddings: int | None
    vocab_size: int | None


def inspect_model(directory: Path) -> tuple[ModelFacts | None, list[ConfigProblem]]:
    """The facts of a model and what is wrong with its directory; the facts are None if config.json cannot be read."""
    if not directory.is_dir():
        kind = "is not a directory" if directory.exists() else "does not exist"
        hint = "give a directory in Hugging Face format (config.json, *.safetensors, tokenizer.json) on this machine"
        return None, [_problem(f"model {display_path(directory)} {kind}", hint)]
    config, problems = _read_config(directory)
    problems += _weight_problems(directory)
    if not (directory / "tokenizer.json").is_file():
        problems.append(_problem(f"model {display_path(directory)} has no tokenizer.json", _tokenizer_hint(directory)))
    if config is not None and not _names_end_of_answer(directory):
        hint = 'add "eos_token_id" to config.json: the id of the token that ends an answer'
        problems.append(_problem(f"model {display_path(directory)} names no eos_token_id", hint))
    facts = None if config is None else _facts(config)
    return facts, problems


def _facts(config: dict[str, Any]) -> ModelFacts:
    def positive(key: str) -> int | None:
        value = config.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None

    return ModelFacts(max_position_embeddings=positive("max_position_embeddings"), vocab_size=positive("vocab_size"))


def _read_config(directory: Path) -> tuple[dict[str, Any] | None, list[ConfigProblem]]:
    name = display_path(directory)
    try:
        config = json.loads((directory / "config.json").read_bytes())
    except FileNotFoundError:
        return None, [_problem(f"model {name} has no config.json", "download the whole model, not only its weights")]
    except (OSError, ValueError, RecursionError) as error:
        return None, [_problem(f"cannot read config.json of model {name}: {error}", "download it again")]
    if not isinstance(config, dict):
        return None, [_problem(f"config.json of model {name} is no JSON object", "download it again")]
    return config, []


def _names_end_of_answer(directory: Path) -> bool:
    try:
        return bool(eos_token_ids(directory))
    except (OSError, ValueError, RecursionError):
        return False


def _weight_problems(directory: Path) -> list[ConfigProblem]:
    name = display_path(directory)
    shards = sorted(directory.glob("*.safetensors"))
    if not shards:
        if any(directory.glob("*.bin")) or any(directory.glob("*.pt")):
            hint = "its weights are pickled; convert them with save_pretrained(..., safe_serialization=True)"
        else:
            hint = "download the weights as safetensors"
        return [_problem(f"model {name} has no *.safetensors", hint)]
    problems = [problem for shard in shards if (problem := _shard_problem(shard)) is not None]
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        problems += _index_problems(index, {shard.name for shard in shards})
    return problems


def _shard_problem(shard: Path) -> ConfigProblem | None:
    name = display_path(shard)
    try:
        size_bytes = shard.stat().st_size
        with shard.open("rb") as stream:
            beginning = stream.read(len(_LFS_BEGINNING))
    except OSError as error:
        return _problem(f"cannot read weights {name}: {error.strerror or error}", "check its permissions")
    if beginning == _LFS_BEGINNING:
        return _problem(f"weights {name} are a git-lfs pointer, not tensors", "run git lfs pull in the model's folder")
    header_bytes = int.from_bytes(beginning[:_HEADER_LENGTH_BYTES], "little")
    if len(beginning) < _HEADER_LENGTH_BYTES or header_bytes + _HEADER_LENGTH_BYTES > size_bytes:
        return _problem(
            f"weights {name} are cut off or no safetensors file ({size_bytes} bytes)", "download them again"
        )
    return None


def _index_problems(index: Path, present: set[str]) -> list[ConfigProblem]:
    try:
        named = set(json.loads(index.read_bytes())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return [_problem(f"cannot read {display_path(index)}: {error!r}", "download it again")]
    missing = sorted(str(name) for name in named - present)
    if not missing:
        return []
    listed = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
    return [
        _problem(f"model {display_path(index.parent)} lacks weights that its index names: {listed}", "download them")
    ]


def _tokenizer_hint(directory: Path) -> str:
    if (directory / "tokenizer.model").exists() or (directory / "vocab.json").exists():
        return "save its tokenizer once with transformers: AutoTokenizer.from_pretrained(...).save_pretrained(...)"
    return "copy the tokenizer.json that the model was trained with"


def _problem(message: str, hint: str) -> ConfigProblem:
    return ConfigProblem(message=message, hint=hint)
