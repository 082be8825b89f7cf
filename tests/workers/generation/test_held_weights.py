"""Fingerprints of some tensors, and what they say of a server."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from corral.workers.engine.engine import GenerationEngine
from corral.workers.generation.held_weights import Probe, compare
from tests.workers.engine.tiny_models import save_tiny_model

OLD, NEW, OTHER = "0" * 16, "1" * 16, "2" * 16
State = tuple[list[str], bool]
FINE: State = ([], False)
STALE: State = (["probed"], False)
UNMOVED: State = ([], True)


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
    held = GenerationEngine(directory).checksums
    assert held.of(held.names(skipped=probe.skipped)) == probe.fingerprints
    other_dtype = GenerationEngine(directory, dtype="bfloat16").checksums.of(names)
    rounded = {name: tensor.bfloat16() for name, tensor in tensors.items() if name in names}
    assert other_dtype == digests(rounded)


def test_files_of_another_dtype_are_not_compared(tmp_path: Path) -> None:
    probes = []
    for number, (weight, norm) in enumerate([(torch.float32, torch.float32), (torch.bfloat16, torch.float32)]):
        tensors = {
            "model.layers.0.self_attn.o_proj.weight": torch.ones(2, 2, dtype=weight),
            "model.norm.weight": torch.ones(2, dtype=norm),
        }
        (tmp_path / f"{number}").mkdir()
        save_file(tensors, tmp_path / f"{number}" / "model.safetensors")
        probes.append(Probe.of(tmp_path / f"{number}"))
    assert probes[0].comparable_with(probes[1]).keys() == {"model.norm.weight"}
    assert probes[0].comparable_with(probes[0]) == probes[0].fingerprints


def test_a_model_without_such_tensors_has_no_fingerprints(tmp_path: Path) -> None:
    save_file({"transformer.h.0.attn.c_proj.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    assert Probe.of(tmp_path).fingerprints == {}


@pytest.mark.parametrize(
    ("file", "before", "after", "state"),
    [
        pytest.param(NEW, OLD, NEW, FINE, id="it holds the new one"),
        pytest.param(NEW, OLD, OLD, STALE, id="it holds the old one"),
        pytest.param(NEW, OLD, OTHER, STALE, id="it holds what is in no file"),
        pytest.param(OLD, OLD, OLD, FINE, id="this tensor did not change"),
        pytest.param(OLD, OLD, OTHER, STALE, id="this tensor did not change, and it holds another"),
        pytest.param(NEW, "a", "b", FINE, id="it hashes in a way of its own, and its own has changed"),
        pytest.param(NEW, "a", "a", UNMOVED, id="it hashes in a way of its own, and its own has not changed"),
        pytest.param(OLD, "a", "a", FINE, id="it hashes in a way of its own, and nothing changed"),
    ],
)
def test_a_server_is_stale_if_it_shows_anything_but_the_change(
    file: str, before: str, after: str, state: State
) -> None:
    files_before, files = {"probed": OLD}, {"probed": file}
    alone = compare(files_before=files_before, files=files, held_before=[{"probed": before}], held=[{"probed": after}])
    assert alone == state
    fine = {rank: {"fine": rank} for rank in (OLD, NEW)}
    beside_one_that_is_fine = compare(
        files_before=files_before | fine[OLD],
        files=files | fine[NEW],
        held_before=[{"probed": before}, fine[OLD]],
        held=[{"probed": after}, fine[NEW]],
    )
    assert beside_one_that_is_fine == (STALE if state == STALE else FINE)


def test_one_of_several_tensors_that_moved_is_enough_for_a_server_that_rounds() -> None:
    files_before, files = {"a": OLD, "b": OLD}, {"a": NEW, "b": NEW}
    before, after = {"a": "x", "b": "y"}, {"a": "x", "b": "z"}
    assert compare(files_before=files_before, files=files, held_before=[before], held=[after]) == FINE


def test_tensors_that_a_rank_does_not_have_say_nothing() -> None:
    held = [{"a": OLD}]
    assert compare(files_before={"a": OLD}, files={"a": NEW}, held_before=held, held=[{}]) == FINE
    assert compare(files_before={}, files={"a": NEW}, held_before=held, held=held) == FINE
