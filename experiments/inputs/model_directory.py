"""A model on disk in Hugging Face format: directory -> the facts that submission checks, or what is missing.

config.json, tokenizer.json, and the headers of the weights are read, and compared with each other; no tensor is.
The shape of the model goes into the plan: by it the master gives all ranks equal work.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from corral.experiments.errors import ConfigProblem, display_path, show_value
from corral.experiments.prompts.tokens import eos_token_ids
from corral.experiments.regular_file import open_regular, read_regular
from corral.scheduling.packing import TransformerShape

_LFS_BEGINNING = b"version https://git-lfs"
_HEADER_LENGTH_BYTES = 8  # a safetensors file starts with the length of its JSON header
_MAX_HEADER_BYTES = 100_000_000  # that of the safetensors library
_COUNTS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "max_position_embeddings",
)  # fmt: skip
_SHAPE_KEYS = {"num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size", "num_attention_heads"}
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_EMBEDDINGS = "embed_tokens.weight"

Shapes = Mapping[str, tuple[int, ...]]
"""By the name of a tensor."""


def inspect_model(directory: Path) -> Iterator[ConfigProblem]:
    """An error in the directory of a model."""
    name = display_path(directory)
    if not directory.is_dir():
        kind = "is not a directory" if directory.exists() else "does not exist"
        hint = "give a directory in Hugging Face format (config.json, *.safetensors, tokenizer.json) on this machine"
        yield ConfigProblem(f"model {name} {kind}", hint)
        return
    config, problems = _read_config(directory)
    shapes, weight_problems = _inspect_weights(directory)
    yield from (*problems, *weight_problems, *_tokenizer_problems(directory))
    if config is not None:
        yield from _config_problems(name, config, shapes)
        if not _names_end_of_answer(directory):
            hint = 'add "eos_token_id" to config.json: the id of the token that ends an answer'
            yield ConfigProblem(f"model {name} names no eos_token_id", hint)


def weight_shapes(directory: Path) -> Shapes:
    """The shapes of a model's tensors, as the headers of its files say; those that cannot be read are missing."""
    return _inspect_weights(directory)[0]


def has_tied_output(directory: Path) -> bool:
    """Whether the output's weight is the embedding's, so that a stored one counts for nothing."""
    return (read_config(directory) or {}).get("tie_word_embeddings") is True


def model_sizes(directory: Path) -> dict[str, int]:
    """The sizes that config.json says, by their names in it; none is missing but those that it does not say."""
    config = read_config(directory) or {}
    return {key: config[key] for key in _COUNTS if _is_count(config.get(key))}


def context_length(directory: Path) -> int | None:
    """The longest sequence that a model has positions for; None if config.json does not say."""
    return model_sizes(directory).get("max_position_embeddings")


def model_type(directory: Path) -> str | None:
    """What transformers calls models of this kind; None if config.json does not say."""
    kind = (read_config(directory) or {}).get("model_type")
    return kind if isinstance(kind, str) else None


def attention_heads(directory: Path) -> tuple[int, int] | None:
    """Heads of queries, and of keys and values; None if config.json does not say."""
    sizes = model_sizes(directory)
    heads = sizes.get("num_attention_heads")
    return None if heads is None else (heads, sizes.get("num_key_value_heads", heads))


def transformer_shape(directory: Path) -> TransformerShape | None:
    """The sizes that decide how much work a sequence is; None if config.json does not say all of them."""
    sizes = model_sizes(directory)
    if not sizes.keys() >= _SHAPE_KEYS:
        return None
    heads = sizes["num_attention_heads"]
    return TransformerShape(
        num_layers=sizes["num_hidden_layers"],
        hidden_size=sizes["hidden_size"],
        intermediate_size=sizes["intermediate_size"],
        vocab_size=sizes["vocab_size"],
        num_heads=heads,
        num_key_value_heads=sizes.get("num_key_value_heads", heads),
        head_dim=sizes.get("head_dim", sizes["hidden_size"] // heads),
    )


def read_config(directory: Path) -> dict[str, Any] | None:
    """config.json as it is; None if it cannot be read."""
    return _read_config(directory)[0]


def _read_config(directory: Path) -> tuple[dict[str, Any] | None, list[ConfigProblem]]:
    missing = "download the whole model, not only its weights"
    if not (directory / "config.json").exists():
        below = [*directory.glob("*/config.json"), *directory.glob("*/*/config.json")]
        names = sorted(str(path.parent.relative_to(directory)) for path in below)
        missing = f"name a folder with a model in it, such as {names[0]} below this one" if names else missing
    return read_object(directory / "config.json", missing=missing)


def read_object(
    path: Path,
    *,
    missing: str,
    what: str = "model",
    remedy: str = "download it again",
    decode: Callable[[bytes], Any] = json.loads,
) -> tuple[dict[str, Any] | None, list[ConfigProblem]]:
    """The JSON object in a file of a model's directory, or what is wrong with it.

    Args:
        missing: the way out where there is no such file.
        what: whose directory it is.
        remedy: the way out where it cannot be read.
        decode: reads JSON; msgspec does so in a third of the time, but knows no Infinity.
    """
    owner = f"{what} {display_path(path.parent)}"
    try:
        content = decode(read_regular(path))
    except FileNotFoundError:
        return None, [ConfigProblem(f"{owner} has no {path.name}", missing)]
    except (OSError, ValueError, RecursionError) as error:
        return None, [ConfigProblem(f"cannot read {path.name} of {owner}: {error}", remedy)]
    if not isinstance(content, dict):
        return None, [ConfigProblem(f"{path.name} of {owner} is no JSON object", remedy)]
    return content, []


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _names_end_of_answer(directory: Path) -> bool:
    try:
        return bool(eos_token_ids(directory))
    except (OSError, ValueError, RecursionError):
        return False


def _config_problems(name: str, config: Mapping[str, Any], shapes: Shapes) -> Iterator[ConfigProblem]:
    """Sizes that no model has, or that its weights do not have."""
    says = f"config.json of model {name} says"
    for key in _COUNTS:
        if config.get(key) is not None and not _is_count(config[key]):
            message = f"{says} {key}: {show_value(config[key])}"
            yield ConfigProblem(message, "it must be a whole number, at least 1; download the file again")
    layers = config.get("num_hidden_layers")
    of_weights = [int(match[1]) for match in map(_LAYER.search, shapes) if match]
    if isinstance(layers, int) and of_weights and layers > max(of_weights) + 1:
        hint = "config.json and the weights are of different models, or one is incomplete"
        message = f"{says} num_hidden_layers: {layers}, and its weights have {max(of_weights) + 1}"
        yield ConfigProblem(message, hint)
    hidden, vocabulary = config.get("hidden_size"), config.get("vocab_size")
    for tensor, shape in shapes.items():
        if not tensor.endswith(_EMBEDDINGS):
            continue
        for key, value, is_wrong in (
            ("vocab_size", vocabulary, isinstance(vocabulary, int) and vocabulary > math.prod(shape[:1])),
            ("hidden_size", hidden, isinstance(hidden, int) and shape[-1:] != (hidden,)),
        ):
            if is_wrong:
                message = f"{says} {key}: {value}, and its {tensor} has shape {list(shape)}"
                yield ConfigProblem(message, "config.json and the weights are of different models")


def _tokenizer_problems(directory: Path) -> Iterator[ConfigProblem]:
    if (directory / "tokenizer.model").exists() or (directory / "vocab.json").exists():
        hint = "save its tokenizer once with transformers: AutoTokenizer.from_pretrained(...).save_pretrained(...)"
    else:
        hint = "copy the tokenizer.json that the model was trained with"
    content, problems = read_object(directory / "tokenizer.json", missing=hint, decode=msgspec.json.decode)
    yield from problems
    if content is not None and not isinstance(content.get("model"), dict):
        message = f"tokenizer.json of model {display_path(directory)} describes no tokenizer (it has no model)"
        yield ConfigProblem(message, "download it again")


def read_vocabulary(directory: Path) -> Mapping[str, int] | None:
    """The id of each token of a model's tokenizer; None where tokenizer.json does not say it."""
    content, _ = read_object(directory / "tokenizer.json", missing="", decode=msgspec.json.decode)
    model = content.get("model") if content is not None else None
    listed = model.get("vocab") if isinstance(model, dict) else None
    added = content.get("added_tokens", []) if content is not None else []
    if not isinstance(listed, dict) or not isinstance(added, list):
        return None
    of_added = {str(one.get("content")): one.get("id") for one in added if isinstance(one, dict)}
    return {**listed, **of_added}


def _inspect_weights(directory: Path) -> tuple[Shapes, list[ConfigProblem]]:
    """The tensors that the weights say they hold, and what is wrong with the files."""
    name = display_path(directory)
    shards = sorted(directory.glob("*.safetensors"))
    if not shards:
        if any(directory.glob("*.bin")) or any(directory.glob("*.pt")):
            hint = "its weights are pickled; convert them with save_pretrained(..., safe_serialization=True)"
        else:
            hint = "download the weights as safetensors"
        return {}, [ConfigProblem(f"model {name} has no *.safetensors", hint, is_of_running=True)]
    shapes: dict[str, tuple[int, ...]] = {}
    problems = []
    for shard in shards:
        found, problem = _read_header(shard)
        shapes |= found
        problems += [problem] if problem is not None else []
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        problems += _index_problems(index, {shard.name for shard in shards})
    return shapes, problems


class _Tensor(msgspec.Struct):
    """The header's entry of one tensor."""

    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def _read_header(shard: Path) -> tuple[Shapes, ConfigProblem | None]:
    name = display_path(shard)
    try:
        size_bytes = shard.stat().st_size
        with open_regular(shard) as stream:
            beginning = stream.read(len(_LFS_BEGINNING))
            header_bytes = int.from_bytes(beginning[:_HEADER_LENGTH_BYTES], "little")
            stream.seek(_HEADER_LENGTH_BYTES)
            header = stream.read(header_bytes) if header_bytes <= _MAX_HEADER_BYTES else b""
    except OSError as error:
        return {}, ConfigProblem(f"cannot read weights {name}: {error.strerror or error}", "check its permissions")
    if beginning == _LFS_BEGINNING:
        hint = "run git lfs pull in the model's folder"
        return {}, ConfigProblem(f"weights {name} are a git-lfs pointer, not tensors", hint)
    try:
        content = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        content.pop("__metadata__", None)
        tensors = {key: msgspec.json.decode(value, type=_Tensor) for key, value in content.items()}
    except (ValueError, RecursionError):
        tensors = None
    places = sorted(tensor.data_offsets for tensor in (tensors or {}).values())
    ends_at = max((end for _, end in places), default=0)
    if any(end < begin or begin < before for (_, before), (begin, end) in pairwise([(0, 0), *places])):
        message = f"weights {name} have tensors that overlap, or that lie outside of the file"
        return {}, ConfigProblem(message, "download them again")
    if tensors is None or _HEADER_LENGTH_BYTES + header_bytes + ends_at > size_bytes:
        message = f"weights {name} are cut off or no safetensors file ({size_bytes} bytes)"
        return {}, ConfigProblem(message, "download them again")
    return {key: tensor.shape for key, tensor in tensors.items()}, None


def _index_problems(index: Path, present: set[str]) -> Iterator[ConfigProblem]:
    content, problems = read_object(index, missing="")
    yield from problems
    files = (content or {"weight_map": {}}).get("weight_map")
    if not isinstance(files, dict):
        yield ConfigProblem(f"{display_path(index)} names no files (it has no weight_map)", "download it again")
        return
    missing = sorted({str(name) for name in files.values()} - present)
    if missing:
        listed = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        message = f"model {display_path(index.parent)} lacks weights that its index names: {listed}"
        yield ConfigProblem(message, "download them")
