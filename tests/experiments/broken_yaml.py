"""Broken experiments of broken_cases.yaml, one mistake each: files and overrides -> words that the error must hold.

    case.write(folder)  ->  folder/experiment.yaml beside a model and datasets that are fine but for the case's mistake

Used through `load_experiment` and through the command line alike.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import yaml

Case = TypeVar("Case", bound="BrokenCase")

VALID_SFT = """\
experiment: sft
name: small-sft
model:
  path: model
  optimizer:
    lr: 1e-3
dataset:
  path: train.jsonl
  max_prompt_tokens: 16
train_batch_size: 8
groups:
  model_worker: {scheduling: {cpu: 1, gpu: 0, mem: 1G}}
"""

VALID_PPO = """\
experiment: async_ppo
name: small-grpo
seed: 3
allocation: hf:d1+fsdp:d1
actor:
  path: model
  optimizer:
    lr: 3e-4
ppo:
  group_size: 4
  kl: {coef: 0.0}
rollout:
  max_head_offpolicyness: 1
  sampling:
    max_new_tokens: 8
dataset:
  path: train.jsonl
  max_prompt_tokens: 16
train_batch_size: 8
evaluation:
  every: 2 steps
  sampling: {max_new_tokens: 8}
  dataset:
    path: heldout.jsonl
    max_prompt_tokens: 16
control:
  total_train_epochs: 2
launch:
  time_limit: 1:00:00
groups:
  model_worker: {scheduling: {cpu: 1, gpu: 0, mem: 1G}}
  generation_server: {scheduling: {cpu: 1, gpu: 0, mem: 1G}}
"""

NUM_TRAINING_ROWS = 40
EPISODES = "rollout.agent=corral.agents:feedback"
MICRO_BATCH = "actor.max_tokens_per_micro_batch=32"


def rows(count: int, *, first: int = 0) -> str:
    """A jsonl dataset of additions."""
    numbers = range(first, first + count)
    return "".join(json.dumps({"id": f"sum-{n}", "prompt": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in numbers)


def tokenizer_json() -> str:
    """A tokenizer.json of one token a character."""
    vocabulary = {character: number for number, character in enumerate("?0123456789+=")}
    split = {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "?"}
    return json.dumps({"version": "1.0", "pre_tokenizer": split, "model": model})


def write_inputs(folder: Path) -> None:
    """A model directory and two datasets that submission finds nothing wrong with."""
    model = folder / "model"
    model.mkdir(parents=True, exist_ok=True)
    config = {"model_type": "qwen2", "vocab_size": 14, "max_position_embeddings": 64, "eos_token_id": 1}
    (model / "config.json").write_text(json.dumps(config))
    (model / "tokenizer.json").write_text(tokenizer_json())
    (model / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    (folder / "train.jsonl").write_text(rows(NUM_TRAINING_ROWS))
    (folder / "heldout.jsonl").write_text(rows(10, first=1000))


@dataclass(frozen=True, kw_only=True)
class BrokenCase:
    """One mistake.

    edit: (what stands in the valid file, what stands there instead); "" appends.
    files: files of the folder that differ; None removes one.
    words: each must be in the error, in any letter case.
    line: the line of experiment.yaml that the error must name; None where no line is to blame.
    """

    name: str
    words: tuple[str, ...]
    base: str = VALID_PPO
    edit: tuple[str, str] = ("", "")
    overrides: tuple[str, ...] = ()
    files: Mapping[str, str | None] = field(default_factory=dict)
    line: int | None = None

    def yaml_text(self) -> str:
        """The broken experiment file."""
        old, new = self.edit
        if not old:
            return self.base + new
        if self.base.count(old) != 1:
            raise ValueError(f"case {self.name}: {old!r} must occur once in the valid file")
        return self.base.replace(old, new)

    def write(self, folder: Path) -> Path:
        """Write the case's files into `folder`; returns the path of experiment.yaml."""
        write_inputs(folder)
        for name, content in self.files.items():
            path = folder / name
            if content is None:
                path.unlink()
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(content)
        path = folder / "experiment.yaml"
        path.write_text(self.yaml_text())
        return path


def read_cases(file: Path, kind: type[Case]) -> dict[str, tuple[Case, ...]]:
    """The cases of a file, by their section; a `base` may be the name of a valid file of this module."""
    return {
        section: tuple(kind(**{key: _as_field(key, value) for key, value in case.items()}) for case in cases)
        for section, cases in yaml.safe_load(file.read_text(encoding="utf-8")).items()
    }


def _as_field(key: str, value: Any) -> Any:
    if key == "base":
        return {"VALID_SFT": VALID_SFT}.get(value, value)
    return tuple(value) if isinstance(value, list) else value


BROKEN_CASES = tuple(chain(*read_cases(Path(__file__).with_name("broken_cases.yaml"), BrokenCase).values()))
