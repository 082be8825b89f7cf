"""What a generation server takes of its host's memory: counted from files, asked for, beside what staging wants."""

import json
import shutil
import struct
import threading
from collections.abc import Sequence
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from corral.experiments.async_ppo import AsyncPPOExperiment
from corral.experiments.checks import generation as generation_checks
from corral.experiments.config.model import LoraConfig, ModelConfig, TrainedModelConfig
from corral.experiments.config.rollout import EngineConfig, WeightsConfig
from corral.experiments.host_memory import BESIDE_MB, EMBEDDED_MB, copied_mb, server_memory
from corral.experiments.inputs.parameters import adapted_bytes, adapter_bytes, served_bytes
from corral.experiments.registry import load_experiment
from corral.experiments.specs import worker_specs
from corral.experiments.worker_specs import GenerationServerSpec
from corral.scheduling.parallel import Mesh, ParallelDims
from corral.workers.backends.base import LossOutput
from corral.workers.backends.fsdp.engine import FSDPEngine
from corral.workers.backends.parallel_context import ParallelContext
from corral.workers.weight_transport.filling import StagingDeadline
from corral.workers.weight_transport.host_weights import HostWeights, NoRoomError
from tests.experiments.broken_yaml import VALID_PPO, write_inputs
from tests.workers.backends.training_helpers import make_sample, optimizer_config, save_tiny_model

MIB = 2**20
VERSIONS = "2 versions of the weights in /dev/shm"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_inputs(tmp_path)
    (tmp_path / "ppo.yaml").write_text(VALID_PPO)
    return tmp_path


def write_model(directory: Path, *, mib: int, num_layers: int = 1) -> None:
    """Float32 weights of this size, which are holes in the file; a layer that adapters go beside has 8 MiB of them."""
    layers = {f"model.layers.{number}.mlp.up_proj.weight": (1024, 2048) for number in range(num_layers)}
    shapes = {"model.embed_tokens.weight": (mib - 8 * num_layers, MIB // 4), **layers}
    header: dict[str, Any] = {}
    end = 0
    for name, (rows, columns) in shapes.items():
        begin, end = end, end + 4 * rows * columns
        header[name] = {"dtype": "F32", "shape": [rows, columns], "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with open(directory / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def ppo(folder: Path, *overrides: str) -> AsyncPPOExperiment:
    experiment = load_experiment(folder / "ppo.yaml", overrides)
    assert isinstance(experiment, AsyncPPOExperiment)
    return experiment


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4, alpha=8.0)])
def test_what_is_counted_of_a_version_is_what_the_trainer_writes(
    tmp_path: Path, dtype: Literal["float32", "bfloat16"], is_tied: bool, lora: LoraConfig | None
) -> None:
    path = save_tiny_model(tmp_path / "model", tie_word_embeddings=is_tied)
    (path / "tokenizer.json").write_bytes(b" " * 50_000)
    engine = FSDPEngine(
        path,
        context=ParallelContext(),
        optimizer=optimizer_config(),
        lora=lora,
        compute_dtype=getattr(torch, dtype),
    )
    written = sum(entry.size for entry in engine.save_weights(tmp_path / "version").values())
    model = TrainedModelConfig(path=path, dtype=dtype, lora=lora)
    counted = served_bytes(model) + adapter_bytes(model)
    assert written - 10_000 < counted <= written + 1_000  # headers of files, which grow with nothing


def test_adapted_weights_are_counted_in_the_type_of_the_files_that_they_are_read_from(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path)
    linear = 2 * (64 * 64 * 2 + 32 * 64 * 2 + 3 * 64 * 96)  # of two layers: q and o; k and v; gate, up and down
    lora = LoraConfig(rank=4, alpha=8.0)
    for dtype in ("float32", "bfloat16"):
        counted = adapted_bytes(TrainedModelConfig.model_validate({"path": path, "dtype": dtype, "lora": lora}))
        assert counted == pytest.approx(4 * linear, rel=0.03)
    assert adapted_bytes(TrainedModelConfig(path=path)) == 0


@pytest.mark.parametrize(
    ("weights", "lora", "staged"),
    [
        ({}, False, {VERSIONS: 2 * 101 + 256}),  # the small files are a MiB once more
        ({"transport": "delta"}, False, {VERSIONS: 2 * 101 + 256}),
        ({"transport": "disk"}, False, {}),
        ({"host_directory": "/scratch"}, False, {}),
        ({"host_directory": "/dev/shm/mine"}, False, {"2 versions of the weights in /dev/shm/mine": 2 * 101 + 256}),
        ({}, True, {VERSIONS: 2 * 104 + 256}),  # 2 * 128 * (1024 + 2048) numbers of adapters are 3 MiB
        ({"transport": "lora"}, True, {VERSIONS: 2 * 101 + 256, "the adapted weights of the base beside them": 17}),
    ],
)
@pytest.mark.parametrize("engine", ["float32", "bfloat16"])
@pytest.mark.parametrize(("backend", "ranks", "processes"), [("hf", 1, 400), ("sglang", 1, 1400), ("sglang", 3, 2400)])
def test_versions_processes_and_weights_of_a_server_without_a_gpu_are_added_up(
    folder: Path,
    weights: dict[str, Any],
    lora: bool,
    staged: dict[str, int],
    engine: Literal["float32", "bfloat16"],
    backend: str,
    ranks: int,
    processes: int,
) -> None:
    write_model(folder / "model", mib=200, num_layers=2)
    adapters = LoraConfig(rank=128, alpha=8.0) if lora else None
    model = TrainedModelConfig(path=folder / "model", dtype="bfloat16", lora=adapters)
    config = WeightsConfig.model_validate(weights)

    def counted(*, has_gpus: bool) -> dict[str, int]:
        return server_memory(
            model,
            weights=config,
            engine=EngineConfig(dtype=engine),
            backend=backend,
            ranks=ranks,
            has_gpus=has_gpus,
        )

    on_gpus = counted(has_gpus=True)
    assert on_gpus == {"its processes": processes, **staged}
    own = counted(has_gpus=False)
    name, copies = ("its weights, old and new in an update", 2) if backend == "hf" else ("its weights", 1)
    assert own == on_gpus | {name: copies * (200 if engine == "float32" else 100)}


def test_a_server_that_asks_for_less_than_it_takes_is_warned_of_with_the_sum_and_the_way_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation_checks, "sglang_version", lambda python: "0.0")
    write_model(folder / "model", mib=100)
    total = 400 + (2 * 101 + 256) + 2 * 100
    key = "groups.generation_server.scheduling.mem"
    assert list(ppo(folder, f"{key}={total}").find_warnings()) == []
    (warning,) = ppo(folder, f"{key}={total - 1}").find_warnings()
    assert f"{key} is {total - 1} MB, and a server takes at least {total} MB: 400 MB for its processes + " in warning
    assert f"458 MB for {VERSIONS}" in warning and f"Raise it to {total}M" in warning and "transport: disk" in warning
    (warning,) = ppo(folder, f"{key}=400", "weights.transport=disk").find_warnings()
    assert "at least 600 MB" in warning and "transport: disk" not in warning
    sglang = ("allocation=sglang:d1t2+fsdp:d1", "weights.transport=disk")
    assert list(ppo(folder, *sglang, f"{key}=2000").find_warnings()) == []  # 1400 + 500 + 100
    assert len(list(ppo(folder, *sglang, f"{key}=1999").find_warnings())) == 1
    elastic = "groups.generation_server.elastic={count: 1, scheduling: {gpu: 0, mem: 1000}}"
    (warning,) = ppo(folder, f"{key}={total}", elastic).find_warnings()
    assert warning.startswith("groups.generation_server.elastic.scheduling.mem is 1000 MB")


def test_a_judge_takes_its_own_weights_once_and_no_versions(folder: Path) -> None:
    shutil.copytree(folder / "model", folder / "judge")
    (folder / "judge" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    write_model(folder / "model", mib=100)
    write_model(folder / "judge", mib=2000)
    asks = "{function: 'corral.workers.rewards:Judge', settings: {url: trial, prompt: '{answer}'}}"
    judged = ("allocation=hf:d2+fsdp:d1", f"rollout.reward={{good: {asks}}}", f"rollout.judge.path={folder / 'judge'}")
    key = "groups.generation_server.scheduling.mem"
    (warning,) = ppo(folder, *judged, f"{key}=2399").find_warnings()
    assert f"{key} is 2399 MB, and a judge takes at least 2400 MB: 400 MB for its processes + 2000 MB" in warning
    enough = ppo(folder, *judged, f"{key}=2400")
    assert list(enough.find_warnings()) == []
    servers = [one for one in worker_specs(enough) if isinstance(one, GenerationServerSpec)]
    assert [sum(server.memory_mb.values()) for server in servers] == [400 + (2 * 101 + 256) + 2 * 100, 2400]


@pytest.mark.parametrize(
    ("mib", "asked_mb"), [(1024, 60 * 1024), (40 * 1024, 400 + (2 * (40 * 1024 + 1) + 256) + 8192)]
)
def test_a_server_of_a_large_model_asks_for_as_much_more_as_its_versions_need(
    folder: Path, mib: int, asked_mb: int
) -> None:
    write_model(folder / "model", mib=mib)
    (folder / "ppo.yaml").write_text(
        VALID_PPO.replace("  generation_server: {scheduling: {cpu: 1, gpu: 0, mem: 1G}}", "")
    )
    experiment = ppo(folder, "allocation=hf:d3+fsdp:d1", "control.commit_beside_training=false")
    assert experiment.scheduling_setup()["generation_server"].scheduling.mem == asked_mb
    servers = [one for one in worker_specs(experiment) if isinstance(one, GenerationServerSpec)]
    assert [set(server.memory_mb) for server in servers] == [{"its processes", VERSIONS}] * 3
    assert list(experiment.find_warnings()) == []


@pytest.mark.parametrize("short_of", [0, 2 * MIB])
def test_what_is_counted_for_two_versions_is_what_staging_them_asks_for(tmp_path: Path, short_of: int) -> None:
    """A host whose memory has room for what is counted, and for nothing else."""
    path = save_tiny_model(tmp_path / "model", hidden_size=512, intermediate_size=1024)
    model = TrainedModelConfig(path=path)
    needed = server_memory(model, weights=WeightsConfig(), engine=EngineConfig(), backend="hf", ranks=1, has_gpus=True)
    limit = needed[VERSIONS] * MIB - short_of
    assert sum(needed.values()) == EMBEDDED_MB + needed[VERSIONS]

    def room(directory: Path) -> int:
        return limit - sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())

    size = served_bytes(model)

    def write(into: Path, held: Sequence[Path]) -> int:
        (into / "model.safetensors").write_bytes(b"w" * size)
        return size

    (tmp_path / "memory").mkdir()
    patience = StagingDeadline.of("version 0.1", timeout_s=60.0, given_up=threading.Event())
    with (
        closing(HostWeights(tmp_path / "memory", "ab" * 16, owner="first", room=room)) as first,
        closing(HostWeights(tmp_path / "memory", "ab" * 16, owner="second", room=room)) as second,
    ):
        first.obtain("a" * 64, size_bytes=size, write=write, patience=patience)
        with pytest.raises(NoRoomError) if short_of else nullcontext():  # the first still reads its own
            second.obtain("b" * 64, size_bytes=size, write=write, patience=patience)


# --- training ranks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4, alpha=8.0)], ids=["all", "adapters"])
@pytest.mark.parametrize(
    ("published", "dtype"), [("actor", "bfloat16"), ("another", "bfloat16"), ("another", "float32")]
)
def test_what_is_counted_of_a_commit_is_what_a_rank_copies(
    tmp_path: Path, published: str, dtype: Literal["float32", "bfloat16"], lora: LoraConfig | None
) -> None:
    path = save_tiny_model(tmp_path / "model", hidden_size=256, intermediate_size=768)
    config = optimizer_config()
    engine = FSDPEngine(
        path,
        context=ParallelContext(),
        optimizer=config,
        lora=lora,
        compute_dtype=getattr(torch, dtype),
    )
    engine.train_batch(
        make_sample([[8, 6]]), loss_fn=lambda scores, _: LossOutput(-scores.logprobs.sum()), counted="prompt_mask"
    )
    copied = sum(tensor.nbytes for tensor in engine.state_shard().copied().tensors.values())
    if published != "actor":
        copied += sum(tensor.nbytes for _, tensor in engine.weight_shard().copied().weights)
    model = TrainedModelConfig(path=path, dtype=dtype, lora=lora, optimizer=config)
    counted = copied_mb(
        {"actor": model}, {"actor": Mesh(ranks=(0,), dims=ParallelDims())}, heads={}, published=published
    )
    assert counted - 1 <= copied / MIB <= counted


def test_the_copies_of_roles_on_one_rank_are_added_up_and_cut_over_the_ranks_of_each(tmp_path: Path) -> None:
    write_model(tmp_path, mib=200)
    actor, critic = (TrainedModelConfig(path=tmp_path, dtype="bfloat16") for _ in range(2))
    models: dict[str, ModelConfig] = {"actor": actor, "critic": critic, "ref": ModelConfig(path=tmp_path)}
    on = {"actor": Mesh(ranks=(0, 1), dims=ParallelDims(dp=2)), "critic": Mesh(ranks=(1,), dims=ParallelDims())}
    counted = partial(copied_mb, models, heads={"critic": "value"}, published="actor")
    assert counted(on) == 600 / 2 + 600 + 100 + 4  # of the score layer, a quarter of a million parameters
    assert counted({"actor": on["actor"]}) == 300
    assert counted({}) == 0


def test_a_rank_that_asks_for_less_than_it_copies_is_warned_of_and_asks_for_enough_by_itself(folder: Path) -> None:
    def warned(*overrides: str) -> list[str]:
        return [text for text in ppo(folder, *overrides).find_warnings() if "commit_beside_training" in text]

    few = "groups.model_worker.scheduling.mem=200M"
    write_model(folder / "model", mib=200)
    (warning,) = warned(few)
    assert warning.startswith("groups.model_worker.scheduling.mem is 200 MB, and a training rank takes at least ")
    assert warning.endswith("set control.commit_beside_training: false, which takes no copies and lets training wait")
    assert warned(few, "control.commit_beside_training=false") == [] == warned()
    default = ppo(folder).default_scheduling("model_worker").mem
    write_model(folder / "model", mib=60 * 1024)
    copied = copied_mb(ppo(folder).models, ppo(folder).meshes, heads=ppo(folder).heads, published="actor")
    assert ppo(folder).default_scheduling("model_worker").mem == copied + BESIDE_MB > default
