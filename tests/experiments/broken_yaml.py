"""Broken experiments, one mistake each: name -> files and overrides -> words that the error must hold.

    case.write(folder)  ->  folder/experiment.yaml beside a model and datasets that are fine but for the case's mistake

Used through `load_experiment` and through the command line alike.
"""

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

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


def _row(**fields: object) -> str:
    return json.dumps(fields) + "\n"


def _weights(*, cut: int = 0, at: Mapping[str, int] = MappingProxyType({}), **shapes: list[int]) -> str:
    """A safetensors file of float32 zeros, less its last bytes, some said to begin elsewhere; all of it is ASCII."""
    header: dict[str, object] = {}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 4 * math.prod(shape)
        said = at.get(name, begin)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [said, said + end - begin]}
    text = json.dumps(header)
    return struct.pack("<Q", len(text.ljust(127))).decode() + text.ljust(127) + "\0" * (end - cut)


SYNTAX_CASES = (
    BrokenCase(name="tab-indentation", edit=("  path: model\n", "\tpath: model\n"), words=("YAML", "tabs"), line=6),
    BrokenCase(name="unclosed-bracket", edit=("", "cluster: {max_nodes: 1\n"), words=("not valid YAML",)),
    BrokenCase(name="duplicate-key", edit=("", "seed: 4\n"), words=("seed", "twice", "lines 3 and 33"), line=33),
    BrokenCase(
        name="nested-duplicate-key",
        edit=("    lr: 3e-4\n", "    lr: 3e-4\n    lr: 1e-4\n"),
        words=("'lr'", "twice", "lines 8 and 9"),
        line=9,
    ),
    BrokenCase(
        name="alias",
        edit=("  path: model\n", "  path: *where\n"),
        words=("alias", "*where", "quote"),
        line=6,
    ),
    BrokenCase(name="anchor", edit=("  path: model\n", "  path: &where model\n"), words=("anchor", "&where"), line=6),
    BrokenCase(
        name="python-tag",
        edit=("name: small-grpo", "name: !!python/object/apply:os.system [id]"),
        words=("tag", "quote"),
        line=2,
    ),
    BrokenCase(name="two-documents", edit=("", "---\nname: other\n"), words=("one YAML document", "---"), line=33),
    BrokenCase(name="list-at-the-top", base="- experiment: sft\n", words=("mapping", "experiment: sft"), line=1),
    BrokenCase(name="empty-file", base="", words=("mapping", "experiment: sft"), line=1),
    BrokenCase(
        name="control-character",
        edit=("name: small-grpo", 'name: "small\\u0007grpo"'),
        words=("control character", "one line"),
        line=2,
    ),
    BrokenCase(
        name="newline-in-value",
        edit=("  time_limit: 1:00:00\n", "  partition: |\n    gpu\n    #SBATCH --wrap=id\n"),
        words=("control character", "launch.partition", "one line"),
        line=29,
    ),
    BrokenCase(name="huge-number", edit=("seed: 3", "seed: 99999999999999999999999"), words=("64 bits",), line=3),
    BrokenCase(name="infinity", edit=("    lr: 3e-4", "    lr: .inf"), words=("finite",), line=8),
    BrokenCase(name="too-deep", edit=("seed: 3", "seed: " + "[" * 50 + "]" * 50), words=("levels",), line=3),
)

SCHEMA_CASES = (
    BrokenCase(name="no-experiment", edit=("experiment: async_ppo\n", ""), words=("experiment is missing", "sft")),
    BrokenCase(
        name="unknown-experiment",
        edit=("experiment: async_ppo", "experiment: async-ppo"),
        words=("async-ppo", "did you mean 'async_ppo'"),
        line=1,
    ),
    BrokenCase(
        name="experiment-by-another-name",
        edit=("experiment: async_ppo", "experiment: grpo"),
        words=("there is no experiment grpo", "it is async_ppo with ppo.algorithm: grpo"),
        line=1,
    ),
    BrokenCase(
        name="key-like-no-other",
        edit=("    lr: 3e-4", "    zzz: 3e-4"),
        words=("unknown key 'zzz' in actor.optimizer", "known keys"),
        line=8,
    ),
    BrokenCase(
        name="misspelt-key",
        edit=("train_batch_size", "train_bach_size"),
        words=("unknown key 'train_bach_size'", "did you mean 'train_batch_size'"),
        line=19,
    ),
    BrokenCase(
        name="key-by-another-name",
        edit=("    lr: 3e-4", "    learning_rate: 3e-4"),
        words=("unknown key 'learning_rate' in actor.optimizer", "did you mean actor.optimizer.lr?"),
        line=8,
    ),
    BrokenCase(
        name="key-in-the-wrong-place",
        edit=("seed: 3", "max_new_tokens: 3"),
        words=("unknown key 'max_new_tokens'", "rollout.sampling.max_new_tokens"),
        line=3,
    ),
    BrokenCase(name="missing-name", edit=("name: small-grpo\n", ""), words=("name is missing", "add name")),
    BrokenCase(
        name="missing-model", edit=("  path: model\n", ""), words=("actor.path is missing", "config.json"), line=5
    ),
    BrokenCase(
        name="slash-in-name",
        edit=("name: small-grpo", "name: small/grpo"),
        words=("name", "'small/grpo'", "A-Z a-z 0-9"),
        line=2,
    ),
    BrokenCase(
        name="yes-is-no-boolean",
        edit=("  group_size: 4", "  use_decoupled_loss: yes"),
        words=("ppo.use_decoupled_loss", "true or false"),
        line=10,
    ),
    BrokenCase(
        name="quoted-number", edit=("    lr: 3e-4", '    lr: "3e-4"'), words=("actor.optimizer.lr", "number"), line=8
    ),
    BrokenCase(name="fractional-count", edit=("seed: 3", "seed: 3.5"), words=("seed", "whole number"), line=3),
    BrokenCase(name="number-as-name", edit=("name: small-grpo", "name: 7"), words=("text", 'quotes: "7"'), line=2),
    BrokenCase(
        name="negative-eta",
        edit=("  max_head_offpolicyness: 1", "  max_head_offpolicyness: -1"),
        words=("rollout.max_head_offpolicyness", "must be greater than or equal to 0", "synchronous"),
        line=13,
    ),
    BrokenCase(
        name="zero-temperature",
        overrides=("rollout.sampling.temperature=0",),
        words=("rollout.sampling.temperature", "must be greater than 0"),
    ),
    BrokenCase(name="zero-top-k", overrides=("rollout.sampling.top_k=0",), words=("top_k", "-1")),
    BrokenCase(
        name="unknown-layout",
        edit=("  time_limit: 1:00:00", "  layout: paked"),
        words=("launch.layout", "'auto', 'packed'", "did you mean 'packed'"),
        line=29,
    ),
    BrokenCase(
        name="bad-time-limit",
        edit=("  time_limit: 1:00:00", "  time_limit: 2 hours"),
        words=("launch.time_limit", "'2 hours'", "HOURS:MINUTES:SECONDS"),
        line=29,
    ),
    BrokenCase(
        name="time-limit-as-a-number",
        edit=("  time_limit: 1:00:00", "  time_limit: 30"),
        words=("launch.time_limit", "quoted"),
        line=29,
    ),
    BrokenCase(
        name="owned-sbatch-argument",
        edit=("  time_limit: 1:00:00", "  extra_sbatch_arguments: [--job-name=x]"),
        words=("launch.extra_sbatch_arguments", "--job-name"),
        line=29,
    ),
    BrokenCase(
        name="bad-memory",
        edit=("  model_worker: {scheduling: {cpu: 1, gpu: 0, mem: 1G}}", "  model_worker: {scheduling: {mem: lots}}"),
        words=("groups.model_worker.scheduling.mem", "lots", "20G"),
        line=31,
    ),
    BrokenCase(
        name="number-as-environment-variable",
        edit=("gpu: 0, mem: 1G}}\n  generation_server", "env_vars: {OMP_NUM_THREADS: 2}}}\n  generation_server"),
        words=("groups.model_worker.scheduling.env_vars.OMP_NUM_THREADS", "text", 'quotes: "2"'),
        line=31,
    ),
    BrokenCase(
        name="number-in-a-list",
        edit=("  time_limit: 1:00:00", "  extra_sbatch_arguments: [--licenses=a, 3]"),
        words=("launch.extra_sbatch_arguments.1", "text", 'quotes: "3"'),
        line=29,
    ),
    BrokenCase(
        name="import-path-without-colon",
        overrides=("rollout.reward=my_pkg.rewards.score",),
        words=("rollout.reward", "my_pkg.rewards.score", "package.module:name", "colon"),
    ),
    BrokenCase(
        name="unknown-key-of-a-reward's-part",
        overrides=('rollout.reward={good: {function: "my_rewards:score", wieght: 2.0}}',),
        words=("rollout.reward.good", "wieght", "did you mean 'weight'?"),
    ),
    BrokenCase(
        name="wrong-weight-of-a-reward's-part",
        overrides=("rollout.reward={good: {function: 'my_rewards:score', weight: much}}",),
        words=("rollout.reward.good.weight", "must be a number", "much"),
    ),
    BrokenCase(name="no-part-of-a-reward", overrides=("rollout.reward={}",), words=("rollout.reward", "have a part")),
    BrokenCase(
        name="part-of-a-reward-that-no-metric-can-be-called",
        overrides=("rollout.reward={a/b: {function: 'my_rewards:score'}}",),
        words=("rollout.reward", "'a/b'", "letters, digits"),
    ),
    BrokenCase(
        name="settings-of-the-exact-match",
        overrides=("rollout.reward={x: {function: 'corral.workers.rewards:exact_match', settings: {a: 1}}}",),
        words=("rollout.reward.x", "exact_match has no settings"),
    ),
    BrokenCase(name="scalar-for-a-section", edit=("seed: 3", "cluster: here"), words=("cluster", "mapping"), line=3),
    BrokenCase(
        name="override-without-value", overrides=("actor.optimizer.lr",), words=("key.path=value", "actor.optimizer.lr")
    ),
    BrokenCase(
        name="misspelt-override",
        overrides=("ppo.eps_clp=0.1",),
        words=("-s ppo.eps_clp=0.1", "did you mean 'eps_clip'"),
    ),
    BrokenCase(
        name="misspelt-section-of-an-override",
        overrides=("actor.optimiser.lr=1e-4",),
        words=("optimiser", "did you mean 'optimizer'", "-s actor.optimiser.lr=1e-4"),
    ),
    BrokenCase(
        name="override-below-a-number", overrides=("seed.value=1",), words=("seed has no key 'value'", "-s seed=")
    ),
)

CONTRADICTION_CASES = (
    BrokenCase(
        name="rows-in-words",
        overrides=("dataset.rows=first 10",),
        words=("dataset.rows is not in the form that it must have", "or :500 for the first 500"),
    ),
    BrokenCase(
        name="reward-as-a-file",
        overrides=("rollout.reward=./my_reward.py",),
        words=("must look like package.module:name", "without .py, as in my_reward:score"),
    ),
    BrokenCase(
        name="number-in-quotes",
        edit=("train_batch_size: 8", 'train_batch_size: "8"'),
        words=('train_batch_size must be a whole number, got the text "8"',),
        line=19,
    ),
    BrokenCase(
        name="memory-without-its-unit",
        edit=("model_worker: {scheduling: {cpu: 1, gpu: 0, mem: 1G}}", "model_worker: {scheduling: {gpu: 0, mem: 16}}"),
        words=("16 MB of memory are too few", "groups.model_worker.scheduling.mem: 16", "did you mean 16G?"),
        line=31,
    ),
    BrokenCase(
        name="best-by-a-number-that-is-none",
        edit=("evaluation:\n", "evaluation:\n  best: acuracy\n"),
        words=("an evaluation has no number 'acuracy'", "did you mean 'accuracy'"),
        line=21,
    ),
    BrokenCase(
        name="learning-rate-of-two",
        overrides=("actor.optimizer.lr=2",),
        words=("actor.optimizer.lr must be less than or equal to 1",),
    ),
    BrokenCase(
        name="staleness-of-a-thousand",
        overrides=("rollout.max_head_offpolicyness=1000",),
        words=("rollout.max_head_offpolicyness must be less than or equal to 100",),
    ),
    BrokenCase(
        name="kl-without-ref",
        edit=("  kl: {coef: 0.0}", "  kl: {coef: 0.1}"),
        words=("ppo.kl.coef", "reference model", "ref.path"),
        line=11,
    ),
    BrokenCase(
        name="distillation-without-a-teacher",
        overrides=("ppo.algorithm=distillation",),
        words=("ppo.distillation.coef 1.0 needs a teacher", "teacher.path", "ppo.distillation.coef: 0"),
    ),
    BrokenCase(
        name="nothing-to-learn-from",
        overrides=("ppo.advantage=none",),
        words=("nothing would be learned", "ppo.distillation.coef: 1"),
    ),
    BrokenCase(
        name="teacher-with-other-tokens",
        files={"teacher/tokenizer.json": tokenizer_json().replace('"+": 11', '"+": 12').replace('"=": 12', '"=": 11')},
        edit=("", "teacher: {path: teacher}\n"),
        overrides=("ppo.algorithm=distillation",),
        words=("teacher has another tokenizer", "2 of the actor's 13 tokens", "such as '+'", "of the actor's family"),
    ),
    BrokenCase(
        name="teacher-with-fewer-rows",
        files={"teacher/config.json": json.dumps({"model_type": "qwen2", "vocab_size": 13, "eos_token_id": 1})},
        edit=("", "teacher: {path: teacher}\n"),
        overrides=("ppo.algorithm=distillation",),
        words=("teacher has a vocabulary of 13, the actor one of 14", "at least as many rows"),
    ),
    BrokenCase(
        name="group-of-one", edit=("  group_size: 4", "  group_size: 1"), words=("group_size", "all 0"), line=10
    ),
    BrokenCase(
        name="absurd-concurrency",
        overrides=("rollout.max_concurrent_rollouts=1000",),
        words=("max_concurrent_rollouts 1000", "can never be reached", "at most 16"),
    ),
    BrokenCase(
        name="window-that-leaves-no-batch",
        overrides=("rollout.reorder_window=10",),
        words=("reorder_window 10 leaves no batch", "overtaken by 9 prompts", "= 8 are there", "at most 9"),
    ),
    BrokenCase(
        name="window-and-absurd-concurrency",
        overrides=("rollout.reorder_window=5", "rollout.max_concurrent_rollouts=13"),
        words=("max_concurrent_rollouts 13", "- (reorder_window 5 - 1) = 12", "at most 12"),
    ),
    BrokenCase(
        name="episodes-that-nothing-holds",
        overrides=(EPISODES, "rollout.episode.max_tokens=64", "engine.max_total_tokens=64", MICRO_BATCH),
        words=("a sequence of 64 tokens does not fit actor.max_tokens_per_micro_batch = 32", "to 32"),
    ),
    BrokenCase(
        name="episodes-without-an-answer",
        overrides=(EPISODES, "rollout.episode.max_tokens=16"),
        words=("a prompt of 16 tokens leaves no room for an answer in 16", "raise rollout.episode.max_tokens"),
    ),
    BrokenCase(
        name="equal-rewards-that-teach",
        overrides=("rollout.drop_uniform_groups=true", "ppo.advantage=rewards_to_go"),
        words=("drop_uniform_groups", "ppo.advantage: rewards_to_go", "set it to false"),
    ),
    BrokenCase(
        name="batch-larger-than-data",
        edit=("train_batch_size: 8", "train_batch_size: 81"),
        words=("train_batch_size 81", "40 rows x 2 epochs", "at most 80"),
        line=19,
    ),
    BrokenCase(
        name="batch-smaller-than-ranks",
        edit=("hf:d1+fsdp:d1", "hf:d1+fsdp:d9"),
        words=("train_batch_size 8", "without work: there are 9 of actor", "at least 9", "at most d8"),
        line=19,
    ),
    BrokenCase(
        name="batch-smaller-than-the-ranks-of-one-role",
        edit=("hf:d1+fsdp:d1", "hf:d1+actor=fsdp:d2,ref=fsdp:d9"),
        overrides=("ref.path=model", "ppo.kl.coef=0.1"),
        words=("train_batch_size 8", "there are 9 of ref", "at least 9", "at most d8"),
        line=19,
    ),
    BrokenCase(
        name="more-mini-batches-than-answers-of-a-rank",
        edit=("hf:d1+fsdp:d1", "hf:d1+fsdp:d4"),
        overrides=("ppo.n_minibatches=9",),
        words=("ppo.n_minibatches 9", "8 prompts x 4 answers / 4 ranks = 8", "at most 8", "at least 9"),
    ),
    BrokenCase(
        name="too-long-evaluation",
        edit=("{max_new_tokens: 8}\n  dataset", "{max_new_tokens: 64}\n  dataset"),
        words=("16 prompt tokens + 64 new tokens = 80", "max_position_embeddings = 64", "lower max_new_tokens"),
        line=22,
    ),
    BrokenCase(
        name="too-long-answers",
        edit=("    max_new_tokens: 8\ndataset", "    max_new_tokens: 49\ndataset"),
        words=("= 65", "max_position_embeddings = 64"),
        line=15,
    ),
    BrokenCase(
        name="allocation-typo",
        edit=("hf:d1+fsdp:d1", "hf:d1+fsdq:d1"),
        words=("unknown backend 'fsdq'", "did you mean 'fsdp'"),
        line=4,
    ),
    BrokenCase(
        name="the-embedded-engine-on-two-gpus",
        edit=("hf:d1+fsdp:d1", "hf:d2t2+fsdp:d1"),
        words=("the embedded engine (hf) takes one GPU", "t2", "hf:d4 for as many GPUs", "sglang:d2t2"),
        line=4,
    ),
    BrokenCase(
        name="a-server-of-stages",
        edit=("hf:d1+fsdp:d1", "sglang:d1p2+fsdp:d1"),
        words=("a generation server has no pipeline stages", "use t"),
        line=4,
    ),
    BrokenCase(
        name="other-gpus-than-the-allocation-says",
        edit=("hf:d1+fsdp:d1", "sglang:d1t2+fsdp:d1"),
        overrides=("groups.generation_server.scheduling.gpu=1",),
        words=("asks for 1 GPUs, and the allocation gives it 2", "remove gpu", "gpu: 0"),
    ),
    BrokenCase(
        name="elastic-servers-of-another-size",
        edit=("hf:d1+fsdp:d1", "sglang:d1t2+fsdp:d1"),
        overrides=("groups.generation_server.elastic={count: 1, scheduling: {gpu: 4}}",),
        words=("groups.generation_server.elastic", "asks for 4 GPUs", "t4 in the allocation"),
    ),
    BrokenCase(
        name="a-server-wider-than-a-node",
        edit=("hf:d1+fsdp:d1", "sglang:d1t4+fsdp:d1"),
        overrides=("cluster.gpus_per_node=2", "groups.generation_server.scheduling.gpu=4"),
        words=("wants 4 GPUs in one task; a node has 2", "GPUs are of one node", "t in the allocation to at most 2"),
    ),
    BrokenCase(
        name="more-servers-than-the-nodes-hold",
        edit=("hf:d1+fsdp:d1", "sglang:d3t2+fsdp:d1"),
        overrides=(
            "cluster.gpus_per_node=4",
            "cluster.max_nodes=1",
            "groups.generation_server.scheduling.gpu=2",
            "groups.model_worker.scheduling.gpu=1",
        ),
        words=("no room left", "2 such nodes are enough", "1 of 3 generation servers fit"),
    ),
    BrokenCase(
        name="layers-without-experts-in-a-mixture-for-sglang",
        edit=("hf:d1+fsdp:d1", "sglang:d1+fsdp:d1"),
        files={
            "model/config.json": '{"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 14, '
            '"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "head_dim": 8, "num_experts": 4, '
            '"num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": [1], '
            '"max_position_embeddings": 64, "eos_token_id": 1, "model_type": "qwen3_moe"}',
        },
        words=("layers 1 of", "have no experts, and SGLang computes every layer", "hf:d1 in place of sglang:d1"),
    ),
    BrokenCase(
        name="a-mixture-that-the-embedded-engine-does-not-run",
        files={
            "model/config.json": '{"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 14, '
            '"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_local_experts": 4, '
            '"num_experts_per_tok": 2, "max_position_embeddings": 64, "eos_token_id": 1, "model_type": "mixtral"}',
        },
        words=("is a mixtral, and the embedded engine runs llama", "sglang:d1 in place of hf:d1"),
    ),
    BrokenCase(
        name="a-tied-output-in-a-mixture-for-sglang",
        edit=("hf:d1+fsdp:d1", "sglang:d1+fsdp:d1"),
        files={
            "model/config.json": '{"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 14, '
            '"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8, "num_experts": 4, '
            '"num_experts_per_tok": 2, "moe_intermediate_size": 16, "tie_word_embeddings": true, '
            '"max_position_embeddings": 64, "eos_token_id": 1, "model_type": "qwen3_moe"}',
        },
        words=("the output of", "is its embedding", "which no file would fill", "hf:d1 in place of sglang:d1"),
    ),
    BrokenCase(
        name="heads-that-do-not-go-round",
        edit=("hf:d1+fsdp:d1", "sglang:d1t3+fsdp:d1"),
        files={
            "model/config.json": '{"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 14, '
            '"max_position_embeddings": 64, "eos_token_id": 1}',
        },
        words=("3 GPUs cannot share the 4 attention heads (2 of keys and values)", "t1 or t2 or t4 works"),
    ),
    BrokenCase(
        name="tp-size-beside-the-allocation",
        edit=("allocation: hf:d1+fsdp:d1", "allocation: sglang:d1+fsdp:d1\nsglang: {flags: {tp-size: 2}}"),
        words=("--tp-size contradicts the allocation", "sglang:d4t2"),
        line=5,
    ),
    BrokenCase(
        name="replicas-inside-a-server",
        edit=("allocation: hf:d1+fsdp:d1", "allocation: sglang:d1t2+fsdp:d1\nsglang: {flags: {dp-size: 2}}"),
        words=("--dp-size takes its multiple of the GPUs", "raise d in the allocation", "attn-dp-size"),
        line=5,
    ),
    BrokenCase(
        name="attention-ranks-that-do-not-divide",
        edit=(
            "allocation: hf:d1+fsdp:d1",
            "allocation: sglang:d1t4+fsdp:d1\nsglang: {flags: {attn-dp-size: 2, attn-cp-size: 4}}",
        ),
        words=("--attn-dp-size 2 x --attn-cp-size 4 does not divide the 4 GPUs", "what divides them is 1, 2, 4"),
        line=5,
    ),
    BrokenCase(
        name="data-parallel-attention-on-cpus",
        edit=("allocation: hf:d1+fsdp:d1", "allocation: sglang:d1t2+fsdp:d1\nsglang: {flags: {attn-dp-size: 2}}"),
        words=("--attn-dp-size 2 needs GPUs", "remove it", "gpu: 0"),
        line=5,
    ),
    BrokenCase(
        name="expert-ranks-that-do-not-divide",
        edit=("allocation: hf:d1+fsdp:d1", "allocation: sglang:d1t2+fsdp:d1\nsglang: {flags: {ep: 4}}"),
        words=("--ep 4 does not divide the 2 GPUs", "or change t"),
        line=5,
    ),
    BrokenCase(
        name="sglang-settings-without-sglang",
        edit=("", "sglang: {python: python3}\n"),
        words=("sglang", "no effect", "embedded engine", "sglang:d1"),
        line=33,
    ),
    BrokenCase(
        name="a-python-without-sglang",
        edit=("allocation: hf:d1+fsdp:d1", "allocation: sglang:d1+fsdp:d1\nsglang: {python: /bin/false}"),
        words=("there is no SGLang", "/bin/false", "make sglang"),
        line=5,
    ),
    BrokenCase(
        name="an-sglang-flag-of-the-trials",
        edit=("allocation: hf:d1+fsdp:d1", "allocation: sglang:d1+fsdp:d1\nsglang: {flags: {api-key: mine}}"),
        words=("--api-key is set by the trial", "remove it from flags"),
        line=5,
    ),
    BrokenCase(
        name="a-vocabulary-and-key-heads-that-megatron-cannot-cut",
        edit=("hf:d1+fsdp:d1", "hf:d1+megatron:t4"),
        files={
            "model/config.json": '{"model_type": "qwen2", "num_hidden_layers": 3, "hidden_size": 8, '
            '"intermediate_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 15, '
            '"max_position_embeddings": 64, "eos_token_id": 1}',
        },
        words=("t4 cannot divide the 2 key and value heads", "t4 cannot divide the 15 tokens of the vocabulary"),
        line=4,
    ),
    BrokenCase(
        name="layers-that-stages-cannot-share",
        edit=("hf:d1+fsdp:d1", "hf:d1+megatron:p4"),
        files={
            "model/config.json": '{"model_type": "qwen2", "num_hidden_layers": 3, "hidden_size": 8, '
            '"intermediate_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 15, '
            '"max_position_embeddings": 64, "eos_token_id": 1}',
        },
        words=("p4 leaves a stage without one of the 3 layers", "p may be 1, 2, 3"),
        line=4,
    ),
    BrokenCase(
        name="heads-that-context-parallel-ranks-of-megatron-cannot-share",
        edit=("hf:d1+fsdp:d1", "hf:d1+megatron:t2c4"),
        files={
            "model/config.json": '{"model_type": "qwen2", "num_hidden_layers": 3, "hidden_size": 8, '
            '"intermediate_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 14, '
            '"max_position_embeddings": 64, "eos_token_id": 1}',
        },
        words=("c4 cannot divide the 2 attention heads left by t2", "c may be 1, 2"),
        line=4,
    ),
    BrokenCase(
        name="experts-that-ranks-cannot-share",
        edit=("hf:d1+fsdp:d1", "hf:d1+megatron:d4t2e4"),
        files={
            "model/config.json": '{"model_type": "qwen3_moe", "num_hidden_layers": 2, "hidden_size": 8, '
            '"intermediate_size": 15, "moe_intermediate_size": 4, "num_experts": 6, "num_experts_per_tok": 2, '
            '"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 14, '
            '"max_position_embeddings": 64, "eos_token_id": 1}',
        },
        words=("e4 cannot divide the 6 experts", "e may be 1, 2, 3, 6"),
        line=4,
    ),
    BrokenCase(
        name="experts-that-the-model-does-not-have",
        edit=("hf:d1+fsdp:d1", "hf:d1+megatron:d2e2"),
        files={
            "model/config.json": '{"model_type": "qwen2", "num_hidden_layers": 2, "hidden_size": 8, '
            '"intermediate_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 14, '
            '"max_position_embeddings": 64, "eos_token_id": 1}',
        },
        words=("e2 spreads experts over ranks", "(actor) has none", "leave e out"),
        line=4,
    ),
    BrokenCase(
        name="columns-of-layers-without-experts-with-megatron",
        edit=("hf:d1+fsdp:d1", "hf:d1+megatron:t2"),
        files={
            "model/config.json": '{"model_type": "qwen3_moe", "num_hidden_layers": 2, "hidden_size": 8, '
            '"intermediate_size": 15, "moe_intermediate_size": 4, "num_experts": 6, "num_experts_per_tok": 2, '
            '"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 14, "decoder_sparse_step": 2, '
            '"max_position_embeddings": 64, "eos_token_id": 1}',
        },
        words=("t2 cannot divide the 15 columns of the MLP", "t may be 1, 3"),
        line=4,
    ),
    BrokenCase(
        name="experts-spread-by-fsdp",
        edit=("hf:d1+fsdp:d1", "hf:d1+fsdp:d2e2"),
        words=("the fsdp backend does not spread experts over ranks (d2t1p1e2)", "megatron:d2e2"),
        line=4,
    ),
    BrokenCase(
        name="a-model-that-megatron-does-not-know",
        edit=("hf:d1+fsdp:d1", "hf:d1+megatron:d1"),
        files={"model/config.json": '{"model_type": "gemma3", "vocab_size": 14, "eos_token_id": 1}'},
        words=("does not compute a model with model_type 'gemma3'", "use the fsdp backend"),
        line=4,
    ),
    BrokenCase(
        name="rotary-positions-that-megatron-would-leave-out",
        edit=("hf:d1+fsdp:d1", "hf:d1+megatron:d1"),
        files={
            "model/config.json": '{"model_type": "qwen3", "rope_scaling": {"type": "linear", "factor": 2.0}, '
            '"vocab_size": 14, "eos_token_id": 1}'
        },
        words=("rotary positions of type 'linear'", "use the fsdp backend"),
        line=4,
    ),
    BrokenCase(
        name="adapters-beside-experts-with-megatron",
        edit=("hf:d1+fsdp:d1", "hf:d1+megatron:d1"),
        overrides=("actor.lora.rank=4", "actor.lora.alpha=8"),
        files={
            "model/config.json": '{"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, '
            '"moe_intermediate_size": 8, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, '
            '"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 14, "max_position_embeddings": 64, '
            '"eos_token_id": 1}',
        },
        words=("adapters beside a mixture of experts are trained by the fsdp backend only", "leave lora out"),
    ),
    BrokenCase(
        name="a-stage-of-megatron-without-adapters",
        edit=("hf:d1+fsdp:d1", "hf:d1+megatron:p2"),
        overrides=("actor.lora.rank=4", "actor.lora.alpha=8", "actor.lora.targets=[layers.0.self_attn.q_proj]"),
        files={
            "model/config.json": '{"model_type": "qwen2", "hidden_size": 8, "intermediate_size": 16, '
            '"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 14, '
            '"max_position_embeddings": 64, "eos_token_id": 1}',
        },
        words=("p2 has a stage with the layers 1 to 1, none of which has an adapter", "or lower p"),
    ),
    BrokenCase(
        name="optimizer-state-in-host-memory-with-megatron",
        edit=("hf:d1+fsdp:d1", "hf:d1+megatron:d1"),
        overrides=("actor.offload=optimizer",),
        words=("the megatron backend keeps the state of its optimizer on the device", "set none or between_calls"),
    ),
    BrokenCase(
        name="optimizer-state-in-host-memory-of-a-model-without-one",
        overrides=("ref.path=model", "ref.offload=optimizer", "ppo.kl.coef=0.1"),
        words=("ref is not trained, and has no optimizer", "set none or between_calls"),
    ),
    BrokenCase(
        name="heads-that-context-parallel-ranks-cannot-share",
        edit=("hf:d1+fsdp:d1", "hf:d1+fsdp:d2c3"),
        files={
            "model/config.json": '{"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 14, '
            '"max_position_embeddings": 64, "eos_token_id": 1}',
        },
        words=("c3 cannot divide the 4 attention heads", "(actor, d2c3)", "c may be 1, 2, 4"),
    ),
    BrokenCase(
        name="heads-that-tensor-parallel-ranks-cannot-share",
        edit=("hf:d1+fsdp:d1", "hf:d1+fsdp:t4"),
        files={
            "model/config.json": '{"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 14, '
            '"max_position_embeddings": 64, "eos_token_id": 1}',
        },
        words=("t4 cannot divide the 2 key and value heads", "t may be 1, 2"),
        line=4,
    ),
    BrokenCase(
        name="heads-that-context-parallel-ranks-cannot-share-once-they-are-cut",
        edit=("hf:d1+fsdp:d1", "hf:d1+fsdp:t2c4"),
        files={
            "model/config.json": '{"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 14, '
            '"max_position_embeddings": 64, "eos_token_id": 1}',
        },
        words=(
            "c4 cannot divide the 2 attention heads left by t2",
            "c may be 1, 2",
        ),
        line=4,
    ),
    BrokenCase(
        name="a-model-that-tensor-parallel-ranks-cannot-share",
        edit=("hf:d1+fsdp:d1", "hf:d1+fsdp:d2t2"),
        files={
            "model/config.json": '{"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 14, '
            '"max_position_embeddings": 64, "eos_token_id": 1, "model_type": "qwen3_moe"}',
        },
        words=("is a qwen3_moe", "(actor, d2t2)", "t works with llama, qwen2, qwen3"),
        line=4,
    ),
    BrokenCase(
        name="a-model-whose-attention-is-its-own",
        edit=("hf:d1+fsdp:d1", "sglang:d1+fsdp:d1"),
        files={
            "model/config.json": '{"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 14, '
            '"max_position_embeddings": 64, "eos_token_id": 1, "model_type": "gpt_oss"}',
        },
        words=("is a gpt_oss", "(actor, d1)", "packed sequences", "take a model of another type"),
        line=6,
    ),
    BrokenCase(
        name="stages-with-fsdp",
        edit=("hf:d1+fsdp:d1", "hf:d1+fsdp:d2p2"),
        words=("the fsdp backend has no pipeline parallel training", "megatron:d2p2"),
        line=4,
    ),
    BrokenCase(
        name="no-generation-side",
        edit=("hf:d1+fsdp:d1", "fsdp:d1"),
        words=("no generation side", "hf:d1+fsdp:d1"),
        line=4,
    ),
    BrokenCase(
        name="generation-side-for-sft",
        base=VALID_SFT,
        edit=("", "allocation: hf:d1+fsdp:d1\n"),
        words=("generates nothing", "fsdp:d1"),
        line=13,
    ),
    BrokenCase(
        name="count-against-the-allocation",
        edit=("", "  gserver_manager: {count: 2}\n"),
        words=("groups.gserver_manager.count is 2", "a trial has one", "write 1"),
        line=33,
    ),
    BrokenCase(
        name="servers-against-the-allocation",
        edit=("  generation_server: {scheduling: {cpu: 1, gpu: 0, mem: 1G}}", "  generation_server: {count: 3}"),
        words=("groups.generation_server.count is 3", "the allocation says 1", "change the allocation"),
        line=32,
    ),
    BrokenCase(
        name="rollout-workers-for-sft",
        base=VALID_SFT,
        edit=("", "  rollout_worker: {count: 2}\n"),
        words=("no rollout_worker", "remove it"),
        line=13,
    ),
    BrokenCase(
        name="more-gpus-than-a-node",
        overrides=("cluster.gpus_per_node=0", "groups.model_worker.scheduling.gpu=1"),
        words=("model_worker wants 1 GPUs", "a node has 0", "gpu: 0 runs on CPUs"),
    ),
    BrokenCase(
        name="more-nodes-than-the-cluster",
        edit=("hf:d1+fsdp:d1", "hf:d1+fsdp:d8"),
        overrides=("cluster.max_nodes=1", "cluster.cpus_per_node=30"),
        words=("no room left", "1 node(s) of 30 CPUs", "3 such nodes are enough", "1 of 8 model workers"),
    ),
    BrokenCase(
        name="container-without-runtime",
        overrides=("groups.model_worker.scheduling.container_image=torch.sif",),
        words=("container_image", "cluster.container_runtime", "apptainer, singularity or pyxis"),
    ),
    BrokenCase(
        name="mounts-without-container",
        overrides=("groups.model_worker.scheduling.container_mounts=[/data:/data]",),
        words=("container_mounts", "without container_image"),
    ),
)

FILE_CASES = (
    BrokenCase(
        name="agent-with-tools-on-a-template-that-shows-none",
        overrides=("rollout.agent=corral.agents:tools", "rollout.agent_settings={tools: [my:tool]}"),
        files={"model/chat_template.jinja": "{{ messages[0].content }}="},
        words=("rollout.agent_settings", "the model's chat template shows no tools", "agent_settings.call"),
    ),
    BrokenCase(
        name="columns-between-semicolons",
        edit=("path: train.jsonl", "path: train.csv"),
        files={"train.csv": "prompt;answer\n1+1=;2\n"},
        words=("the file has one column, named prompt;answer", "commas", "';'"),
    ),
    BrokenCase(
        name="folder-of-a-trial-as-a-model",
        edit=("  path: model", "  path: run"),
        files={"run/exports/final/config.json": "{}"},
        words=("has no config.json", "such as exports/final below this one"),
        line=6,
    ),
    BrokenCase(
        name="argument-of-the-template-misspelled",
        overrides=("dataset.chat_template_kwargs={enable_thinkng: false}",),
        files={"model/chat_template.jinja": "{{ messages[0].content }}{{ '?' if enable_thinking }}="},
        words=("dataset.chat_template_kwargs", "takes no argument 'enable_thinkng'", "it takes: enable_thinking"),
    ),
    BrokenCase(
        name="arguments-for-a-model-without-a-template",
        overrides=("dataset.chat_template_kwargs={enable_thinking: false}",),
        words=("dataset.chat_template_kwargs", "has no chat template", "use the instruction-tuned model"),
    ),
    BrokenCase(
        name="held-out-rows-with-other-arguments-of-the-template",
        overrides=(
            "evaluation.dataset={path: heldout.jsonl, max_prompt_tokens: 16, chat_template_kwargs: {thinks: true}}",
        ),
        words=("evaluation.dataset.chat_template_kwargs differs", "held-out rows take those of dataset; remove it"),
    ),
    BrokenCase(
        name="missing-model-directory",
        edit=("  path: model", "  path: modle"),
        words=("modle", "does not exist", "config.json"),
        line=6,
    ),
    BrokenCase(
        name="model-without-config", files={"model/config.json": None}, words=("no config.json", "actor.path"), line=6
    ),
    BrokenCase(
        name="model-without-weights",
        files={"model/model.safetensors": None, "model/pytorch_model.bin": "x"},
        words=("no *.safetensors", "pickled", "convert"),
        line=6,
    ),
    BrokenCase(
        name="model-without-tokenizer", files={"model/tokenizer.json": None}, words=("no tokenizer.json",), line=6
    ),
    BrokenCase(
        name="weights-are-a-pointer",
        files={"model/model.safetensors": "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"},
        words=("git-lfs pointer", "git lfs pull"),
        line=6,
    ),
    BrokenCase(
        name="weights-cut-off",
        files={"model/model.safetensors": "\xff\x00"},
        words=("cut off", "download them again"),
        line=6,
    ),
    BrokenCase(
        name="index-names-absent-weights",
        files={"model/model.safetensors.index.json": json.dumps({"weight_map": {"w": "model-2.safetensors"}})},
        words=("model-2.safetensors", "index", "download"),
        line=6,
    ),
    BrokenCase(
        name="model-with-a-negative-size",
        files={"model/config.json": '{"hidden_size": -64, "vocab_size": 14, "eos_token_id": 1}'},
        words=("hidden_size: -64", "at least 1", "actor.path"),
        line=6,
    ),
    BrokenCase(
        name="model-with-more-layers-than-weights",
        files={
            "model/config.json": '{"num_hidden_layers": 1000000000, "vocab_size": 14, "eos_token_id": 1}',
            "model/model.safetensors": _weights(**{"model.layers.1.mlp.weight": [2, 2]}),
        },
        words=("num_hidden_layers: 1000000000", "its weights have 2", "actor.path"),
        line=6,
    ),
    BrokenCase(
        name="model-of-another-width-than-its-weights",
        files={
            "model/config.json": '{"hidden_size": 64, "vocab_size": 14, "eos_token_id": 1}',
            "model/model.safetensors": _weights(**{"model.embed_tokens.weight": [14, 32]}),
        },
        words=("hidden_size: 64", "model.embed_tokens.weight has shape [14, 32]"),
        line=6,
    ),
    BrokenCase(
        name="model-with-more-tokens-than-embeddings",
        files={
            "model/config.json": json.dumps({"hidden_size": 32, "vocab_size": 2**40, "eos_token_id": 1}),
            "model/model.safetensors": _weights(**{"model.embed_tokens.weight": [14, 32]}),
        },
        words=("vocab_size: 1099511627776", "model.embed_tokens.weight has shape [14, 32]"),
        line=6,
    ),
    BrokenCase(
        name="model-with-tensors-that-overlap",
        files={"model/model.safetensors": _weights(at={"b": 8}, a=[4], b=[4])},
        words=("tensors that overlap", "download them again"),
        line=6,
    ),
    BrokenCase(
        name="model-with-a-tensor-before-the-file",
        files={"model/model.safetensors": _weights(at={"a": -8}, a=[4], b=[4])},
        words=("outside of the file", "download them again"),
        line=6,
    ),
    BrokenCase(
        name="model-whose-last-tensor-is-cut-off",
        files={"model/model.safetensors": _weights(cut=8, **{"model.embed_tokens.weight": [2, 2]})},
        words=("cut off", "download them again", "actor.path"),
        line=6,
    ),
    BrokenCase(
        name="tokenizer-that-is-none",
        files={"model/tokenizer.json": '{"version": "1.0"}'},
        words=("tokenizer.json", "describes no tokenizer", "download it again"),
        line=6,
    ),
    BrokenCase(
        name="tokenizer-that-is-no-json",
        files={"model/tokenizer.json": "<html>404</html>"},
        words=("cannot read tokenizer.json", "download it again"),
        line=6,
    ),
    BrokenCase(
        name="model-without-end-token",
        files={"model/config.json": '{"vocab_size": 14, "max_position_embeddings": 64}'},
        words=("eos_token_id", "config.json"),
        line=6,
    ),
    BrokenCase(
        name="ref-with-another-vocabulary",
        edit=("seed: 3", "ref: {path: other}"),
        files={
            "other/config.json": '{"vocab_size": 99, "eos_token_id": 1}',
            "other/tokenizer.json": tokenizer_json(),
            "other/model.safetensors": struct.pack("<Q", 2).decode() + "{}",
        },
        words=("vocabulary of 99", "14", "same tokenizer"),
        line=3,
    ),
    BrokenCase(
        name="missing-dataset",
        files={"train.jsonl": None},
        words=("cannot read dataset", "train.jsonl", "no such file", "relative to that file's folder"),
        line=17,
    ),
    BrokenCase(
        name="prompt-too-long",
        files={
            "model/tokenizer.json": tokenizer_json(),
            "train.jsonl": _row(id="long", prompt="1+" * 8 + "1=", answer="9"),
        },
        words=(
            "every row is too long",
            "train.jsonl:1",
            "prompt has 18 tokens",
            "max_prompt_tokens 16",
            "raise dataset.max_prompt_tokens",
        ),
        line=17,
    ),
    BrokenCase(
        name="source-of-which-nothing-is-left",
        edit=("  path: train.jsonl\n", "  sources: {short: {path: train.jsonl}, long: {path: long.jsonl}}\n"),
        files={
            "model/tokenizer.json": tokenizer_json(),
            "long.jsonl": _row(id="long", prompt="1+" * 8 + "1=", answer="9"),
        },
        words=("every row of sources.long is too long", "long.jsonl:1", "prompt has 18 tokens", "or remove it"),
    ),
    BrokenCase(
        name="answers-to-show-that-no-row-has",
        edit=("rollout:\n", "rollout:\n  demonstrations: anwser\n"),
        words=("no row that was looked at has an answer to show in a field 'anwser'", "did you mean 'answer'?"),
        line=13,
    ),
    BrokenCase(
        name="judge-that-nobody-asks",
        edit=("rollout:\n", "rollout:\n  judge: {path: model}\n"),
        words=("{url: trial} asks rollout.judge", "only one of both is there"),
    ),
    BrokenCase(
        name="judge-that-leaves-no-server-for-the-policy",
        edit=("rollout:\n", "rollout:\n  judge: {path: model}\n"),
        words=("rollout.judge.servers 1 of 1 generation servers leave none for the policy", "hf:d2"),
    ),
    BrokenCase(
        name="judge-without-a-template",
        edit=("rollout:\n", "rollout:\n  judge: {path: model}\n"),
        words=("model has no chat template", "take a model that has one"),
    ),
    BrokenCase(
        name="temperature-that-no-row-has",
        edit=("  path: train.jsonl\n", "  path: train.jsonl\n  columns: {temperature: anwser}\n"),
        words=("no row that was looked at has a temperature in a field 'anwser'", "did you mean 'answer'?"),
        line=18,
    ),
    BrokenCase(
        name="temperature-of-text",
        edit=("  path: train.jsonl\n", "  path: train.jsonl\n  columns: {temperature: warmth}\n"),
        files={"train.jsonl": rows(2) + _row(id="c", prompt="1+1=", answer="2", warmth="0.7")},
        words=("train.jsonl:3", "'warmth' must be a temperature, a number from 0.01 to 10", "0.7"),
        line=17,
    ),
    BrokenCase(
        name="row-too-long-for-a-micro-batch",
        base=VALID_SFT,
        overrides=("model.max_tokens_per_micro_batch=20",),
        files={
            "model/tokenizer.json": tokenizer_json(),
            "train.jsonl": _row(id="long", prompt="1+1=", answer="2" * 16),
        },
        words=("train.jsonl:1", "4 + 17 tokens", "max_tokens_per_micro_batch 20"),
        line=8,
    ),
    BrokenCase(
        name="parquet",
        files={"train.jsonl": "PAR1\x15\x04\n\n\n"},
        words=("train.jsonl cannot be read as Parquet", "write it anew"),
        line=17,
    ),
    BrokenCase(
        name="json-array",
        files={"train.jsonl": '[\n{"prompt": "1+1=", "answer": "2"}\n]\n'},
        words=("train.jsonl is a JSON array", "one JSON object a line", "jq -c"),
        line=17,
    ),
    BrokenCase(
        name="held-out-prompt-too-long",
        files={
            "model/tokenizer.json": tokenizer_json(),
            "heldout.jsonl": _row(prompt="1+" * 8 + "1=", answer="9"),
        },
        words=(
            "every row is too long",
            "heldout.jsonl:1",
            "prompt has 18 tokens",
            "evaluation.dataset.max_prompt_tokens",
        ),
        line=24,
    ),
    BrokenCase(
        name="long-prompts-and-no-tokenizer-to-measure-them",
        files={
            "train.jsonl": rows(39) + _row(prompt="1+" * 8 + "1=", answer="9"),
            "model/tokenizer.json": '{"model": {}}',
        },
        words=("cannot use the tokenizer", "download it again"),
        line=17,
    ),
    BrokenCase(
        name="condition-on-a-misspelled-field",
        overrides=("dataset.where=len(promt) < 9",),
        words=("train.jsonl:1", "where 'len(promt) < 9' fails: this row has no 'promt'", "did you mean 'prompt'?"),
        line=17,
    ),
    BrokenCase(
        name="condition-that-calls",
        overrides=("dataset.where=open(prompt)",),
        words=("dataset.where", "'open(prompt)' cannot be asked of a row", "use transform"),
    ),
    BrokenCase(
        name="order-by-text",
        overrides=("dataset.order=prompt",),
        words=("train.jsonl:1", "order 'prompt' goes by numbers"),
        line=17,
    ),
    BrokenCase(
        name="sampler-without-rewards",
        base=VALID_SFT,
        overrides=("dataset.sampler=my_prompts:weigh",),
        words=("dataset.sampler", "has none", "experiment: async_ppo"),
    ),
    BrokenCase(
        name="vote-for-nothing",
        overrides=(r"evaluation.vote=\d+",),
        words=("evaluation.vote", "has no group", "put parentheses"),
    ),
    BrokenCase(name="empty-dataset", files={"train.jsonl": "\n\n"}, words=("no rows", "JSON object"), line=17),
    BrokenCase(
        name="row-without-prompt",
        files={"train.jsonl": rows(2) + _row(id="c", promt="1+1=", answer="2")},
        words=("train.jsonl:3", "no prompt", "columns.prompt: promt"),
        line=17,
    ),
    BrokenCase(
        name="empty-prompt",
        files={"train.jsonl": _row(prompt="", answer="2")},
        words=("train.jsonl:1", "'prompt'", "at least one character"),
        line=17,
    ),
    BrokenCase(
        name="row-without-answer",
        files={"heldout.jsonl": rows(1) + _row(prompt="1+1=")},
        words=("heldout.jsonl:2", "no answer", "columns.answer"),
        line=24,
    ),
    BrokenCase(
        name="list-as-answer",
        base=VALID_SFT,
        files={"train.jsonl": _row(prompt="1+1=", answer={"is": 2})},
        words=("train.jsonl:1", "'answer' must be text or a number", "{"),
        line=8,
    ),
    BrokenCase(
        name="duplicate-id",
        files={"train.jsonl": rows(5) + rows(1, first=3)},
        words=("train.jsonl:6", "'sum-3'", "train.jsonl:4", "unique"),
        line=17,
    ),
    BrokenCase(
        name="line-number-is-taken",
        files={"train.jsonl": _row(id="1", prompt="a", answer="b") + _row(prompt="c", answer="d")},
        words=("train.jsonl:2: 'id' '1' is also that of", "train.jsonl:1", "by its number"),
        line=17,
    ),
    BrokenCase(
        name="row-is-not-json",
        files={"train.jsonl": rows(1) + "{'prompt': 'a'}\n"},
        words=("train.jsonl:2", "not JSON", "one JSON object a line"),
        line=17,
    ),
    BrokenCase(
        name="row-is-a-list",
        files={"train.jsonl": "[1, 2]\n"},
        words=("train.jsonl:1", "got `array`", "one JSON object a line"),
        line=17,
    ),
)

BROKEN_CASES = (*SYNTAX_CASES, *SCHEMA_CASES, *CONTRADICTION_CASES, *FILE_CASES)
