"""Experiments that are right in themselves or nearly, and that the test cluster can never run: one mistake each.

The cluster: 4 nodes n1..n4 of 8 CPUs, 8000 MB and 8 GPUs without a type; partitions debug (default), spot, and short
(n1 only, one node a job, one minute); no features, reservations or accounting.
"""

from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from tests.experiments.broken_yaml import BrokenCase, read_cases

VALID_SLURM = """\
experiment: async_ppo
name: small-grpo
seed: 3
allocation: hf:d1+fsdp:d1
actor:
  path: model
ppo:
  kl: {coef: 0.0}
rollout:
  max_head_offpolicyness: 1
  sampling:
    max_new_tokens: 8
dataset:
  path: train.jsonl
  max_prompt_tokens: 16
train_batch_size: 8
launch:
  layout: auto
  time_limit: 1:00:00
groups:
  master_worker:
    scheduling: {cpu: 1, gpu: 0, mem: 500M}
  gserver_manager:
    scheduling: {cpu: 1, gpu: 0, mem: 500M}
  model_worker:
    scheduling: {cpu: 1, gpu: 0, mem: 500M}
  generation_server:
    scheduling: {cpu: 1, gpu: 0, mem: 500M}
  rollout_worker:
    count: 2
    scheduling: {cpu: 1, gpu: 0, mem: 500M}
"""

CAN_NEVER_RUN = 5
WRONG_VALUE = 2


@dataclass(frozen=True, kw_only=True)
class RefusedCase(BrokenCase):
    """As a broken case, with the exit code of rl-submit."""

    base: str = VALID_SLURM
    exit_code: int = CAN_NEVER_RUN


_CASES = read_cases(Path(__file__).with_name("wrong_cases.yaml"), RefusedCase)
NAME_CASES, SIZE_CASES, OPTION_CASES = _CASES["name"], _CASES["size"], _CASES["option"]
REFUSED_CASES = tuple(chain(*_CASES.values()))
