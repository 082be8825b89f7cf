"""Fingerprints of some tensors, and what they say of a server."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from corral.workers.engine.engine import GenerationEngine
from corral.workers.generation.held_weights import Fingerprints, Probe, stale_tensors
from tests.workers.engine.tiny_models import save_tiny_model

OLD, NEW, OTHER = "0" * 16, "1" * 16, "2" * 16


def digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Of whole tensors as torch has them."""
    return {
        name: hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
        for name, tensor in tensors.items()
    }


@pytest.mark.parametrize("max_shard_size", ["60KB", "1GB"])
def test_the_embedded_engine_says_of_its_tensors_what_their_files_say(tmp_path: Path, max_shard_size: str) -> None:
    directory = save_tiny_model(tmp_path / "model", seed=1, max_shard_size=max_shard_size)
    probe = Probe.of(directory)
    tensors = {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}
    last = max(int(name.split(".")[2]) for name in tensors if name.startswith("model.layers."))
    names = {f"model.layers.{layer}.self_attn.o_proj.weight" for layer in (0, last)} | {"model.norm.weight"}
    assert probe.fingerprints == {name: digest for name, digest in digests(tensors).items() if name in names}
    assert GenerationEngine(directory).checksums(probe.skipped) == probe.fingerprints
    other_dtype = GenerationEngine(directory, dtype="bfloat16").checksums(probe.skipped)
    rounded = {name: tensor.bfloat16() for name, tensor in tensors.items() if name in names}
    assert other_dtype == digests(rounded)


def test_a_model_without_such_tensors_has_no_fingerprints(tmp_path: Path) -> None:
    save_file({"transformer.h.0.attn.c_proj.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    assert Probe.of(tmp_path).fingerprints == {}


@pytest.mark.parametrize(
    ("file", "before", "after", "is_stale"),
    [
        pytest.param(NEW, OLD, NEW, False, id="it holds the new one"),
        pytest.param(NEW, OLD, OLD, True, id="it holds the old one"),
        pytest.param(NEW, OLD, OTHER, True, id="it holds what is in no file"),
        pytest.param(OLD, OLD, OLD, False, id="this tensor did not change"),
        pytest.param(OLD, OLD, OTHER, True, id="this tensor did not change, and it holds another"),
        pytest.param(NEW, "a", "b", False, id="it hashes in a way of its own, and its own has changed"),
        pytest.param(NEW, "a", "a", True, id="it hashes in a way of its own, and its own has not changed"),
        pytest.param(OLD, "a", "a", False, id="it hashes in a way of its own, and nothing changed"),
    ],
)
def test_a_tensor_is_stale_if_the_server_shows_anything_but_the_change(
    file: str, before: str, after: str, is_stale: bool
) -> None:
    def of(value: str) -> Fingerprints:
        return {"fine": value, "probed": value}

    found = stale_tensors(
        files_before=of(OLD),
        files={"fine": NEW, "probed": file},
        held_before=[of(OLD), {"fine": OLD, "probed": before}],
        held=[{"fine": NEW, "probed": NEW if file == NEW else OLD}, {"fine": NEW, "probed": after}],
    )
    assert found == (["probed"] if is_stale else [])


def test_tensors_that_a_rank_does_not_have_say_nothing() -> None:
    assert stale_tensors(files_before={"a": OLD}, files={"a": NEW}, held_before=[{"a": OLD}], held=[{}]) == []
    assert stale_tensors(files_before={}, files={"a": NEW}, held_before=[{"a": OLD}], held=[{"a": OLD}]) == []
