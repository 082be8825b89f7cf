"""An experiment of PPO with four roles, and answers to train it on: everything tiny, and every setting at work.

write_experiment(folder)  ──►  experiment.yaml, train.jsonl, actor/ critic/ ref/ reward/
make_batches(num_steps)   ──►  groups of answers for each train step  ──sample_of──►  what rollout workers deliver
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification, Qwen2ForTokenClassification
from transformers.utils import logging as transformers_logging

from corral.workers.data.sequence_sample import SequenceSample
from tests.experiments.broken_yaml import rows, tokenizer_json

NUM_ROWS = 24
BATCH_SIZE = 4
VOCAB_SIZE = 14
POISON = VOCAB_SIZE - 1
"""A token that is in no answer of `make_batches`, for models that give nothing finite when they see it."""

EXPERIMENT = """\
experiment: async_ppo
name: four-roles
seed: 3
allocation: hf:d1+fsdp:d1
actor:
  path: actor
  max_tokens_per_micro_batch: 40
  optimizer: {lr: 2.0e-3, weight_decay: 0.1, gradient_clipping: 0.3, warmup_steps_proportion: 0.0}
critic:
  path: critic
  max_tokens_per_micro_batch: 48
  optimizer: {lr: 4.0e-3, weight_decay: 0.05, gradient_clipping: 2.0, warmup_steps_proportion: 0.0}
  value_eps_clip: 0.1
ref: {path: ref, ema: 0.2}
reward_model: {path: reward}
ppo:
  group_size: 3
  advantage: gae
  advantage_normalization: batch
  sample_reuse: 2
  discount: 0.98
  gae_lambda: 0.9
  eps_clip: 0.02
  c_clip: 1.03
  is_ratio_clip: 1.5
  kl: {coef: 0.1, place: reward, target: 2.0}
rollout:
  max_head_offpolicyness: 100
  sampling: {max_new_tokens: 8}
dataset: {path: train.jsonl, max_prompt_tokens: 16}
train_batch_size: 4
control: {total_train_epochs: 1, commit_every: 1 step}
groups:
  model_worker: {scheduling: {cpu: 1, gpu: 0, mem: 1G}}
  generation_server: {scheduling: {cpu: 1, gpu: 0, mem: 1G}}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer to a prompt, as a rollout worker knows it."""

    ids: list[int]
    """Prompt and response."""
    prompt_length: int
    old_logprobs: list[float]
    """One per response token."""
    is_cut_off: bool
    reward: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A prompt's answers."""

    uid: str
    answers: Sequence[Answer] = ()
    dropped_because: str = ""
    """Why there are none."""


def write_experiment(folder: Path) -> None:
    """Everything that `load_experiment` reads; the four models differ in all of their weights."""
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    classes: dict[str, Any] = {
        "actor": Qwen2ForCausalLM,
        "ref": Qwen2ForCausalLM,
        "critic": Qwen2ForTokenClassification,
        "reward": Qwen2ForSequenceClassification,
    }
    for seed, (role, model_class) in enumerate(classes.items()):
        torch.manual_seed(seed)
        model_class(_model_config()).save_pretrained(folder / role)
        (folder / role / "tokenizer.json").write_text(tokenizer_json())
    (folder / "train.jsonl").write_text(rows(NUM_ROWS))
    (folder / "experiment.yaml").write_text(EXPERIMENT)


def _model_config() -> Qwen2Config:
    return Qwen2Config(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=64,
        eos_token_id=1,
        num_labels=1,
        classifier_dropout=0.0,
        initializer_range=0.2,
    )


def blind_to_poison(directory: Path) -> None:
    """Let a saved model give NaN wherever it has seen the token `POISON`."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"][POISON] = torch.nan
    save_file(tensors, path, metadata={"format": "pt"})


def make_batches(num_steps: int) -> list[list[Group]]:
    """Batches of prompts with three answers each, of many lengths; some are cut off."""
    rng = np.random.default_rng(7)
    return [
        [_group(rng, f"0:sum-{BATCH_SIZE * step + index}") for index in range(BATCH_SIZE)] for step in range(num_steps)
    ]


def _group(rng: np.random.Generator, uid: str) -> Group:
    prompt = rng.integers(2, POISON, rng.integers(2, 6)).tolist()
    return Group(uid=uid, answers=[_answer(rng, prompt) for _ in range(3)])


def _answer(rng: np.random.Generator, prompt: list[int]) -> Answer:
    length = int(rng.integers(1, 9))
    return Answer(
        ids=[*prompt, *rng.integers(2, POISON, length).tolist()],
        prompt_length=len(prompt),
        old_logprobs=(-np.log(VOCAB_SIZE) + 0.3 * rng.normal(size=length)).astype(np.float32).tolist(),
        is_cut_off=bool(rng.random() < 1 / 3),
    )


def sample_of(group: Group) -> SequenceSample:
    """The group as rollout workers pack it: what belongs to a token stands at the position before it."""
    answers = group.answers
    keys: Mapping[str, list[Any]] = {
        "input_ids": [answer.ids for answer in answers],
        "prompt_mask": [np.arange(len(answer.ids)) < answer.prompt_length for answer in answers],
        "old_logprobs": [[0.0] * (answer.prompt_length - 1) + answer.old_logprobs for answer in answers],
        "versions": [[-1] * (answer.prompt_length - 1) + [0] * len(answer.old_logprobs) for answer in answers],
        "rewards": [answer.reward for answer in answers],
        "seq_no_eos_mask": [answer.is_cut_off for answer in answers],
    }
    return SequenceSample.from_group(group.uid, keys)
