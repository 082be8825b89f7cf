"""Adapters in an experiment file: what is refused, with the way out, and how many numbers are trained."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from corral.experiments.config.model import LoraConfig, ModelConfig, TrainedModelConfig
from corral.experiments.errors import ConfigError
from corral.experiments.inputs.parameters import count_parameters
from corral.experiments.registry import load_experiment
from corral.experiments.specs import role_specs, worker_specs
from corral.experiments.worker_specs import GenerationServerSpec, Head, MasterWorkerSpec
from corral.workers.backends.fsdp.engine import FSDPEngine
from corral.workers.backends.parallel_context import ParallelContext
from tests.experiments.broken_yaml import VALID_PPO, VALID_SFT, write_inputs
from tests.workers.backends.training_helpers import optimizer_config, save_tiny_model

LORA = "{rank: 4, alpha: 8}"
SHAPES = {
    "model.embed_tokens.weight": (14, 6),
    "model.layers.0.self_attn.q_proj.weight": (6, 6),
    "model.layers.0.mlp.down_proj.weight": (6, 10),
    "lm_head.weight": (14, 6),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_inputs(tmp_path)
    write_tensors(tmp_path / "model" / "model.safetensors", SHAPES)
    (tmp_path / "sft.yaml").write_text(VALID_SFT)
    (tmp_path / "ppo.yaml").write_text(VALID_PPO)
    return tmp_path


def write_tensors(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    save_file({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, path)


def write_adapter(directory: Path, *, rank: int = 4, layers: tuple[str, ...] = ("q_proj",), **settings: Any) -> Path:
    """An adapter of the fixture's model as peft writes it."""
    directory.mkdir()
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "bias": "none"} | settings
    (directory / "adapter_config.json").write_text(json.dumps(config))
    shapes: dict[str, tuple[int, ...]] = {}
    for name, (rows, columns) in SHAPES.items():
        layer = name.removesuffix(".weight")
        if layer.endswith(layers):
            shapes[f"base_model.model.{layer}.lora_A.weight"] = (rank, columns)
            shapes[f"base_model.model.{layer}.lora_B.weight"] = (rows, rank)
    write_tensors(directory / "adapter_model.safetensors", shapes)
    return directory


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.lora={alpha: 8}", ("model.lora.rank is missing", "Rows of A")),
        ("model.lora={rank: 0, alpha: 8}", ("model.lora.rank must be greater than or equal to 1",)),
        ("model.lora={rank: 4, alpha: 0}", ("model.lora.alpha must be greater than 0",)),
        ("model.lora={rank: 4, alpha: 8, dropout: 1.0}", ("model.lora.dropout must be less than 1",)),
        ("model.lora={rank: 4, alpha: 8, bias: all}", ("unknown key 'bias' in model.lora",)),
        ("model.lora={rank: 4, alpha: 8, targets: []}", ("targets names no layer", "null adapts all")),
        ("model.lora={rank: 4, alpha: 8, targets: [lm_head]}", ("'lm_head'", "leave it out")),
        ("model.lora={rank: 4, alpha: 8, targets: [q_pro]}", ("ends in 'q_pro'", "did you mean 'q_proj'?")),
        ("model.lora={rank: 4, alpha: 8, targets: [c_attn]}", ("ends in 'c_attn'", "down_proj, q_proj")),
        ("model.lora={rank: 4, alpha: 8, adapter: nowhere}", ("adapter_config.json", "save_pretrained")),
    ],
)
def test_settings_that_mean_nothing_are_refused_with_the_way_out(
    folder: Path, override: str, words: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_experiment(folder / "sft.yaml", [override])
    assert [word for word in words if word not in str(refusal.value)] == [], str(refusal.value)


def test_a_model_that_nothing_trains_has_no_adapter(folder: Path) -> None:
    overrides = ["ref={path: " + str(folder / "model") + ", lora: " + LORA + "}", "ppo.kl.coef=0.1"]
    with pytest.raises(ConfigError, match=r"unknown key 'lora' in ref[\s\S]*did you mean actor.lora"):
        load_experiment(folder / "ppo.yaml", overrides)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rank": 2}, ("has r: 2, and lora.rank is 4", "set lora.rank")),
        ({"lora_alpha": 16}, ("has lora_alpha: 16, and lora.alpha is 8", "set lora.alpha")),
        ({"use_rslora": True}, ("use_rslora: true", "merge_and_unload")),
        ({"rank_pattern": {"q_proj": 8}}, ("rank_pattern", "merge_and_unload")),
        ({"layers": ("q_proj", "down_proj")}, ("down_proj.lora_A.weight is expected as no such tensor", "[4, 10]")),
        ({"layers": ("embed_tokens",)}, ("embed_tokens.lora_A.weight is expected as no such tensor", "lora.targets")),
        ({"layers": ()}, ("no adapter_model.safetensors that can be read", "copy it again")),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused_before_submission(
    folder: Path, changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    adapter = write_adapter(folder / "adapter", **changes)
    override = f"model.lora={{rank: 4, alpha: 8, targets: [q_proj], adapter: {adapter}}}"
    with pytest.raises(ConfigError) as refusal:
        load_experiment(folder / "sft.yaml", [override])
    assert [word for word in words if word not in str(refusal.value)] == [], str(refusal.value)


def test_what_training_starts_from_is_published_where_servers_cannot_make_it_from_the_models_directory(
    folder: Path,
) -> None:
    adapter = write_adapter(folder / "adapter")
    settings = f"lora={{rank: 4, alpha: 8, targets: [q_proj], adapter: {adapter}}}"
    assert load_experiment(folder / "sft.yaml", [f"model.{settings}"]).models["actor"].path == folder / "model"
    plain = "lora={rank: 4, alpha: 8, targets: [q_proj]}"
    for name, override, is_written, starts_as in (
        ("sft", f"model.{settings}", False, []),  # nobody answers
        ("ppo", f"actor.{settings}", True, ["base"]),
        ("ppo", f"actor.{plain}", False, ["0.0"]),
    ):
        workers = worker_specs(load_experiment(folder / f"{name}.yaml", [override]))
        (master,) = (worker for worker in workers if isinstance(worker, MasterWorkerSpec))
        assert master.writes_first_version == is_written
        servers = [worker for worker in workers if isinstance(worker, GenerationServerSpec)]
        assert [server.initial_version for server in servers] == starts_as


@pytest.mark.parametrize("head", ["lm", "value"])
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize(
    "lora", [None, LoraConfig(rank=4, alpha=8.0), LoraConfig(rank=2, alpha=2.0, targets=("up_proj",))]
)
def test_what_submission_counts_is_what_the_engine_holds(
    tmp_path: Path, head: Head, is_tied: bool, lora: LoraConfig | None
) -> None:
    directory = save_tiny_model(tmp_path, tie_word_embeddings=is_tied)
    counted = count_parameters(TrainedModelConfig(path=directory, lora=lora), head=head)
    engine = FSDPEngine(directory, context=ParallelContext(), head=head, optimizer=optimizer_config(), lora=lora)
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in engine.model.parameters()]
    assert counted is not None
    assert counted.trained == engine.num_trained == sum(size for size, is_trained in sizes if is_trained)
    assert counted.frozen == sum(size for size, is_trained in sizes if not is_trained)
    read_only = count_parameters(ModelConfig(path=directory), head=head)
    assert read_only is not None and (read_only.trained, read_only.frozen) == (0, engine.num_parameters)


def test_files_that_say_nothing_are_not_guessed(tmp_path: Path) -> None:
    assert count_parameters(ModelConfig(path=tmp_path / "nowhere"), head="lm") is None


def test_a_replica_that_generates_takes_over_weights_and_has_no_adapters(folder: Path) -> None:
    asynchronous = ("  max_head_offpolicyness: 1\n", "  generation_server: {scheduling: {cpu: 1, gpu: 0, mem: 1G}}\n")
    text = VALID_PPO.replace("experiment: async_ppo", "experiment: ppo")
    for line in asynchronous:
        text = text.replace(line, "")
    (folder / "sync.yaml").write_text(text)
    overrides = ["allocation=actor=fsdp:d1,generation=fsdp:d1", f"actor.lora={LORA}"]
    actor, replica = role_specs(load_experiment(folder / "sync.yaml", overrides))
    assert (actor.replica_id, actor.lora) == (0, LoraConfig(rank=4, alpha=8.0))
    assert (replica.replica_id, replica.lora, replica.optimizer) == (1, None, None)
    assert actor.num_parameters is not None and replica.num_parameters is not None
    assert replica.num_parameters.frozen == actor.num_parameters.frozen > 0 == replica.num_parameters.trained


def test_dropout_is_warned_of_where_ratios_are_computed(folder: Path) -> None:
    def warnings(dropout: float) -> list[str]:
        settings = f"actor.lora={{rank: 4, alpha: 8, dropout: {dropout}}}"
        return list(load_experiment(folder / "ppo.yaml", [settings]).find_warnings())

    assert warnings(0.0) == []
    assert len(warnings(0.1)) == 1 and "actor.lora.dropout" in warnings(0.1)[0]
