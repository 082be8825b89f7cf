"""The training benchmark compares like with like, and its figures are what their definitions say."""

import json
import multiprocessing
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.training.contender import Turn, serve
from benchmarks.training.sizes import SIZES, make_sequences, save_random_model
from benchmarks.training.table import render
from benchmarks.training.trainers import WAYS, make_trainer
from benchmarks.training.utilization import BF16_PEAK_TFLOPS, TERA, peak_flops, step_flops, utilization
from corral.experiments.inputs.model_directory import transformer_shape
from corral.scheduling.packing import TransformerShape

TINY = SIZES["tiny"]
SHAPE = TransformerShape(
    num_layers=3, hidden_size=8, intermediate_size=20, vocab_size=50, num_heads=3, num_key_value_heads=1, head_dim=4
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_random_model(TINY, directory)
    return directory


def test_all_ways_make_the_same_steps(model: Path) -> None:
    losses = {}
    for name in (name for name, way in WAYS.items() if way.backend != "megatron"):
        trainer = make_trainer(WAYS[name], TINY, model, device=torch.device("cpu"), dtype=torch.float32)
        losses[name] = [trainer.step() for _ in range(3)]
    for name, own in losses.items():
        assert own == pytest.approx(losses["plain"], rel=1e-5), name
    assert len(set(losses["plain"])) == 3, "nothing was trained"


def test_a_process_takes_its_turns_and_starts_again(model: Path) -> None:
    ours, theirs = multiprocessing.Pipe()
    process = threading.Thread(target=serve, args=("fsdp", "cpu", "float32", theirs))
    process.start()
    answers = []
    start = {"do": "start", "size": "tiny", "directory": str(model)}
    for question in (start, {"do": "step"}, {"do": "step"}, {"do": "end"}, start, {"do": "end"}):
        ours.send_bytes(json.dumps(question).encode())
        answers.append(json.loads(ours.recv_bytes()))
    ours.close()
    process.join(timeout=60)
    assert not process.is_alive(), "it waits for questions though nobody asks any more"
    fits, first, second, ended, again, _ = answers
    assert fits == again == {"fits": True} and ended == {}
    assert Turn(**first).loss != Turn(**second).loss
    assert all(Turn(**turn).wall_s > 0 and Turn(**turn).cpu_s > 0 for turn in (first, second))


@pytest.mark.parametrize("name", SIZES)
def test_a_size_fits_its_own_rows_and_context(name: str) -> None:
    size = SIZES[name]
    lengths = [len(ids) for ids in make_sequences(size)]
    assert len(lengths) == size.num_sequences and min(lengths) >= 2
    assert max(lengths) <= size.longest <= min(size.max_tokens, size.model["max_position_embeddings"])


def test_the_weights_of_a_size_are_counted_as_transformers_makes_them(model: Path) -> None:
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model)
    assert TINY.num_parameters == sum(parameter.numel() for parameter in loaded.parameters())
    assert transformer_shape(model) is not None


@given(st.lists(st.integers(1, 30), min_size=1, max_size=5))
def test_a_step_needs_three_times_what_its_products_and_attention_take(lengths: list[int]) -> None:
    products = 0
    for length in lengths:
        for _ in range(SHAPE.num_layers):
            for rows, columns in ((8, 12), (8, 4), (8, 4), (12, 8), (8, 20), (8, 20), (20, 8)):
                products += 2 * length * rows * columns
            products += 2 * length * length * SHAPE.query_size  # half of scores, half of values
        products += 2 * length * SHAPE.hidden_size * SHAPE.vocab_size
    assert step_flops(lengths, SHAPE) == pytest.approx(3 * products)


@pytest.mark.parametrize(
    ("device", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H200", 989.4),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A10G", 70.0),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA GeForce RTX 4090", 165.2),
    ],
)
def test_a_driver_s_name_finds_its_peak(device: str, tflops: float) -> None:
    assert peak_flops(device) == tflops * TERA


@pytest.mark.parametrize("device", ["NVIDIA X100", "NVIDIA H1000", "Tesla T4", ""])
def test_a_device_that_the_table_lacks_has_no_peak(device: str) -> None:
    assert peak_flops(device) is None


def test_every_device_of_the_table_is_found_by_its_own_name() -> None:
    assert all(peak_flops(f"NVIDIA {name}") == value * TERA for name, value in BF16_PEAK_TFLOPS.items())


def test_utilization_is_one_at_the_peak() -> None:
    assert utilization(2 * TERA, seconds=0.5, peak=4 * TERA) == 1.0


def rows_of(table: str) -> dict[str, list[str]]:
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return {cells[0]: cells[1:] for cells in lines}


def turns_of(seconds: Sequence[float]) -> list[Turn]:
    return [Turn(loss=1.0, wall_s=2 * value, cpu_s=value, peak_bytes=3_000_000_000) for value in seconds]


def test_a_ratio_is_the_median_of_those_of_the_rounds() -> None:
    slow, fast = turns_of([4.0, 8.0, 100.0]), turns_of([2.0, 2.0, 10.0])
    rows = rows_of(render({"slow": slow, "fast": fast}, num_tokens=1000, yardstick="slow", by_cpu=True))
    assert rows["slow"] == ["62", "125", "1.00", "3.00 GB"]
    assert rows["fast"] == ["250", "500", "4.00", "3.00 GB"]


def test_ratios_of_a_gpu_are_of_wall_seconds_and_come_with_its_utilization() -> None:
    turns = {"plain": turns_of([1.0]), "fsdp": [replace(turns_of([1.0])[0], wall_s=0.5)]}
    table = render(turns, num_tokens=10, yardstick="plain", by_cpu=False, flops=TERA, peak=4 * TERA)
    assert rows_of(table)["fsdp"] == ["20", "10", "4.00", "3.00 GB", "50.0%"]


def test_a_way_that_does_not_fit_is_a_row_and_leaves_the_others_without_a_ratio() -> None:
    table = render({"plain": [], "fsdp": turns_of([1.0])}, num_tokens=10, yardstick="plain", by_cpu=False)
    assert rows_of(table)["plain"] == ["out of memory", "", "", ""]
    assert rows_of(table)["fsdp"][2] == "-"
