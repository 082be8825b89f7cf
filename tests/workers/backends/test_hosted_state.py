"""An optimizer whose state lies in host memory: the bits of one whose state stays, and no memory between its steps."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from corral.experiments.config.model import LoraConfig, OptimizerConfig
from corral.workers.backends.fsdp.engine import FSDPEngine
from corral.workers.backends.host_copies import Blocks
from tests.workers.backends.test_optimizers import likelihood, sample_of
from tests.workers.backends.training_helpers import optimizer_config, read_weights, save_tiny_model, tiny_engine

MUON = {"type": "muon"}
LORA = LoraConfig(rank=2, alpha=4.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "qwen2")


def make_engine(
    directory: Path, *, is_hosted: bool = True, lora: LoraConfig | None = None, **optimizer: Any
) -> FSDPEngine:
    config = OptimizerConfig.model_validate(optimizer_config(weight_decay=0.1).model_dump() | optimizer)
    return tiny_engine(directory, optimizer=config, lora=lora, hosts_optimizer=is_hosted, total_steps=10)


def train(engine: FSDPEngine, *seeds: int) -> list[dict[str, float]]:
    return [engine.train_batch(sample_of(seed), loss_fn=likelihood) for seed in seeds]


def moments(engine: FSDPEngine) -> list[Tensor]:
    """What the optimizer keeps, but for scalars."""
    return [value for state in engine._optimizer.state.values() for value in state.values() if value.ndim]


def held_bytes(tensors: list[Tensor]) -> list[int]:
    return [tensor.untyped_storage().nbytes() for tensor in tensors]


def saved(engine: FSDPEngine, directory: Path) -> dict[str, Tensor]:
    engine.state_shard().copied().write(directory)
    return read_weights(directory)


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


@pytest.mark.parametrize(
    ("optimizer", "lora"), [({}, None), (MUON, None), ({}, LORA)], ids=["adamw", "muon", "adapters"]
)
def test_steps_are_those_of_a_state_that_stays_bit_for_bit(
    optimizer: dict[str, Any], lora: LoraConfig | None, model: Path, tmp_path: Path
) -> None:
    engines = [make_engine(model, is_hosted=is_hosted, lora=lora, **optimizer) for is_hosted in (True, False)]
    hosted, staying = (train(engine, 1, 2, 3) for engine in engines)
    assert hosted == staying
    assert_same(*(saved(engine, tmp_path / str(number)) for number, engine in enumerate(engines)))
    assert sum(held_bytes(moments(engines[0]))) == 0 < min(held_bytes(moments(engines[1])))


def test_the_state_is_here_for_the_step_and_for_no_pass(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(model)
    train(engine, 1)
    seen: list[tuple[str, bool]] = []
    for where, method in (("pass", "_backward"), ("step", "_make_step")):
        run = getattr(engine, method)

        def look(*arguments: Any, where: str = where, run: Any = run, **named: Any) -> None:
            seen.append((where, min(held_bytes(moments(engine))) > 0))
            run(*arguments, **named)

        monkeypatch.setattr(engine, method, look)
    train(engine, 2)
    assert seen == [("pass", False), ("step", True)]


def test_training_goes_on_from_a_saved_state_wherever_it_lies(model: Path, tmp_path: Path) -> None:
    first = make_engine(model)
    train(first, 1, 2)
    first.state_shard().write(tmp_path / "saved")
    others = [make_engine(model, is_hosted=is_hosted) for is_hosted in (True, False)]
    train(others[0], 7)  # has state already, which is another one's
    for engine in others:
        engine.load_state(tmp_path / "saved")
    assert sum(held_bytes(moments(others[0]))) == 0
    expected = train(first, 3, 4)
    for engine in others:
        assert train(engine, 3, 4) == expected
    wanted = saved(first, tmp_path / "wanted")
    for number, engine in enumerate(others):
        assert_same(saved(engine, tmp_path / f"found-{number}"), wanted)


def test_what_was_copied_for_a_file_does_not_change_with_the_next_step(model: Path, tmp_path: Path) -> None:
    engine = make_engine(model)
    train(engine, 1)
    copied = engine.state_shard().copied()
    before = {name: tensor.clone() for name, tensor in copied.tensors.items()}
    train(engine, 2)
    assert_same(dict(copied.tensors), before)
    assert any(not torch.equal(tensor, before[name]) for name, tensor in engine.state_shard().tensors.items())


def test_parameters_may_leave_the_device_besides(model: Path) -> None:
    engine, staying = make_engine(model), make_engine(model, is_hosted=False)
    train(engine, 1)
    train(staying, 1)
    engine.offload()
    assert sum(held_bytes([*engine._model.parameters(), *moments(engine)])) == 0
    assert train(engine, 2) == train(staying, 2)
    assert sum(held_bytes(moments(engine))) == 0 < min(held_bytes(list(engine.model.parameters())))


# --- copies in host memory ------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 3 * 2**20), min_size=1, max_size=60))
def test_pieces_of_blocks_have_no_byte_in_common_and_blocks_are_powers_of_two(sizes: list[int]) -> None:
    blocks = Blocks(is_pinned=False)
    pieces = [blocks.take(size) for size in sizes]
    assert [piece.numel() for piece in pieces] == sizes
    assert all(piece.data_ptr() % 64 == 0 for piece in pieces)
    spans = sorted((piece.data_ptr(), piece.data_ptr() + piece.numel()) for piece in pieces)
    assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))
    storages = {piece.untyped_storage().data_ptr(): piece.untyped_storage().nbytes() for piece in pieces}
    assert all(size.bit_count() == 1 for size in storages.values())  # which torch rounds up to themselves
    assert sum(storages.values()) == blocks.total_bytes


def test_a_share_of_a_7b_model_takes_a_tenth_more_than_itself_and_not_nine_tenths() -> None:
    """Its rows on one of eight ranks with two moments in float32, scaled down by 64 so that they fit in here."""
    hidden, inner, keys, vocabulary = 3584, 18944, 512, 152064
    layer = [hidden, hidden, keys * hidden, keys * hidden, hidden**2, hidden**2, *([hidden * inner] * 3)]
    numbers = [vocabulary * hidden, *(layer * 28), vocabulary * hidden, hidden]
    sizes = [max(4, 4 * number // 8 // 64) for number in numbers for _ in range(3)]
    blocks = Blocks(is_pinned=False, largest=2**28 // 64)
    for size in sizes:
        blocks.take(size)
    one_by_one = sum(1 << (size - 1).bit_length() for size in sizes)
    assert one_by_one > 1.9 * sum(sizes)
    assert blocks.total_bytes < 1.1 * sum(sizes)
