"""What a rank makes of a model's files: every number of them, in float32, and of no more than it keeps."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from corral.experiments.checks.training import WITHOUT_PACKED_ATTENTION
from corral.experiments.config.model import LoraConfig
from corral.workers.backends.fsdp.engine import FSDPEngine
from corral.workers.backends.fsdp.experts import StoredExperts
from corral.workers.backends.fsdp.loading import load_model, load_over_ranks
from corral.workers.backends.heads import HEADS
from corral.workers.backends.parallel_context import ParallelContext
from corral.workers.backends.sharding import whole
from tests.workers.backends.test_fsdp import padded_logprobs, trainable_sample
from tests.workers.backends.trainer_helpers import play
from tests.workers.backends.training_helpers import (
    LargestTensor,
    load_reference,
    optimizer_config,
    read_weights,
    save_tiny_model,
    tiny_engine,
)

SHAPE = (64, 96)  # of the largest weight: rows of the vocabulary would be fewer numbers
LORA = LoraConfig(rank=2, alpha=4.0)
MIXTURES = {"4 experts": 4, "3 experts": 3}


def save_low(directory: Path, dtype: torch.dtype, *, num_files: int = 1, **overrides: Any) -> Path:
    """A tiny model whose files are of a low type."""
    save_tiny_model(directory / "float32", **overrides)
    model = Qwen2ForCausalLM.from_pretrained(directory / "float32", dtype=dtype)
    size = sum(parameter.nbytes for parameter in model.parameters())
    model.save_pretrained(directory, max_shard_size=size // num_files + 1)
    return directory


def make_engine(
    directory: Path, context: ParallelContext | None = None, *, lora: LoraConfig | None = None
) -> FSDPEngine:
    return tiny_engine(directory, context, optimizer=None if lora is None else optimizer_config(), lora=lora)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_weights_of_any_type_are_held_in_float32_number_by_number(dtype: torch.dtype, tmp_path: Path) -> None:
    directory = save_low(tmp_path, dtype, tie_word_embeddings=True)
    engine, stored = make_engine(directory), read_weights(directory)
    held = dict(engine.model.named_parameters())
    assert held.keys() == stored.keys()
    for name, parameter in held.items():
        assert stored[name].dtype == dtype and parameter.dtype == torch.float32
        assert torch.equal(parameter.detach(), stored[name].float())
    assert engine.model.get_submodule("lm_head").weight is held["model.embed_tokens.weight"]
    sample = trainable_sample()
    expected = padded_logprobs_in_float32(directory, sample)
    np.testing.assert_allclose(engine.forward(sample)["logprobs"], expected, atol=1e-5)


def padded_logprobs_in_float32(directory: Path, sample: Any) -> Any:
    """Of a model that transformers loads whole, in float32."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    copy = directory / "as_float32"
    model.save_pretrained(copy)
    assert load_reference(copy).dtype == torch.float32
    return padded_logprobs(copy, sample)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_stay_in_their_files_until_a_rank_takes_its_rows(dtype: torch.dtype, tmp_path: Path) -> None:
    directory = save_low(tmp_path, dtype, num_files=3)
    with ExitStack() as stack:
        model = load_model(directory, HEADS["lm"], StoredExperts(directory, stack))
    mapped = mapped_files()
    for name, parameter in model.named_parameters():
        places = [path for start, end, path in mapped if start <= parameter.data_ptr() < end]
        assert [path.parent for path in places] == [directory], name
        assert places[0].suffix == ".safetensors"


def mapped_files() -> list[tuple[int, int, Path]]:
    """Where files are mapped into this process's memory: first and last address, and the file."""
    rows = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    found = [(row[0].split("-"), row[5]) for row in rows if len(row) == 6]
    return [(int(start, 16), int(end, 16), Path(path)) for (start, end), path in found]


def test_files_of_several_types_lose_nothing(tmp_path: Path) -> None:
    directory = save_tiny_model(tmp_path)
    stored = read_weights(directory)
    mixed = {name: w.bfloat16() if "mlp" in name else w for name, w in stored.items()}
    save_file(mixed, directory / "model.safetensors", metadata={"format": "pt"})
    held = dict(make_engine(directory).model.named_parameters())
    assert all(torch.equal(held[name].detach(), weight.float()) for name, weight in mixed.items())


def test_what_a_model_computes_beside_its_weights_is_not_rounded_to_their_type(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        hidden_size=24,  # whose square root, by which it scales its embeddings, is no bfloat16
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=12,
        vocab_size=64,
        max_position_embeddings=256,
    )
    Gemma3ForCausalLM(config).bfloat16().save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    sample = trainable_sample()
    expected = padded_logprobs_in_float32(tmp_path, sample)
    np.testing.assert_allclose(make_engine(tmp_path).forward(sample)["logprobs"], expected, atol=1e-5)


def play_rank(context: ParallelContext, directory: Path) -> None:
    """Load, count, and give back what was loaded."""
    for name, lora, model in (("plain", None, "model"), ("lora", LORA, "model"), *((m, None, m) for m in MIXTURES)):
        with LargestTensor(None if name in MIXTURES else torch.float32) as largest:
            load_over_ranks(directory / model, HEADS["lm"], context, lora, seed=0, compute_dtype=torch.float32)
        engine = make_engine(directory / model, context, lora=lora)
        weights = {name: whole(parameter) for name, parameter in engine.model.named_parameters()}
        save_file(weights, directory / f"{name}-{context.rank}.safetensors")
        (directory / f"{name}-{context.rank}.numel").write_text(str(largest.numel))


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("loading")
    (directory / "model").mkdir()
    save_low(directory / "model", torch.bfloat16, num_files=3, tie_word_embeddings=True)
    for name, num_experts in MIXTURES.items():
        save_low_mixture(directory / name, num_experts)
    play(play_rank, directory, world_size=2, directory=directory)
    return directory


def save_low_mixture(directory: Path, num_experts: int) -> None:
    """In bfloat16, in several files; what is not of experts is small."""
    config = Qwen3MoeConfig(
        hidden_size=16,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        vocab_size=64,
        num_experts=num_experts,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
    )
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).bfloat16().save_pretrained(directory, max_shard_size=20_000)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", ["plain", "lora"])
def test_no_rank_makes_more_in_float32_than_its_rows(name: str, rank: int, two_ranks: Path) -> None:
    largest = int((two_ranks / f"{name}-{rank}.numel").read_text())
    assert largest == SHAPE[0] * SHAPE[1] // 2


@pytest.mark.parametrize("name", ["4 experts", "3 experts"])
def test_no_rank_reads_more_of_the_experts_than_it_keeps(name: str, two_ranks: Path) -> None:
    """Two experts of four, and of three a part each: of any type, and on no device, is more than a layer's share."""
    assert len(list((two_ranks / name).glob("*.safetensors"))) > 1
    share = MIXTURES[name] * 2 * 48 * 16 // 2
    assert [int((two_ranks / f"{name}-{rank}.numel").read_text()) for rank in range(2)] == [share] * 2
    expected = AutoModelForCausalLM.from_pretrained(two_ranks / name, dtype=torch.float32).state_dict()
    for rank in range(2):
        found = load_file(two_ranks / f"{name}-{rank}.safetensors")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], weight) for key, weight in expected.items())


@pytest.mark.parametrize("name", ["plain", "lora"])
def test_two_ranks_hold_what_one_does(name: str, two_ranks: Path) -> None:
    alone = make_engine(two_ranks / "model", lora=LORA if name == "lora" else None)
    expected = {name: parameter.detach() for name, parameter in alone.model.named_parameters()}
    for rank in range(2):
        found = load_file(two_ranks / f"{name}-{rank}.safetensors")
        assert found.keys() == expected.keys()
        assert all(found[key].dtype == torch.float32 for key in found)
        assert all(torch.equal(found[key], weight) for key, weight in expected.items())


@pytest.mark.slow
def test_the_types_of_models_that_submission_refuses_are_those_that_transformers_cannot_load() -> None:
    names = {
        kind: [name] if isinstance(name, str) else name for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
    }
    classes = {kind: getattr(transformers, of_kind[0]) for kind, of_kind in names.items()}
    assert WITHOUT_PACKED_ATTENTION == {kind for kind, made in classes.items() if not made._supports_sdpa}
