"""How often the host waits for the device: twice a train step, never for a micro-batch, once a decode step.

`python -m pytest -p tests.pretended_gpu.installed tests/pretended_gpu/test_waits.py -s` prints them with their lines.
"""

import itertools
from collections import Counter
from pathlib import Path
from typing import Literal

import pytest
import torch

from corral.scheduling.packing import MicroBatchSpec
from corral.workers.algorithms.sft import SFTInterface
from corral.workers.backends.mesh_engine import DeviceSums
from corral.workers.backends.micro_batches import make_micro_batches
from corral.workers.backends.parallel_context import ParallelContext
from corral.workers.engine.engine import GenerationEngine
from corral.workers.engine.requests import GenerationRequest
from corral.workers.engine.sampling import SamplingParams
from tests.pretended_gpu import cuda
from tests.workers.backends.layout_scene import MakeEngine, Variant, batch, make_engine, save_tiny
from tests.workers.backends.megatron_scene import make_megatron
from tests.workers.engine.tiny_models import save_tiny_model

pytestmark = pytest.mark.gpu
PER_TRAIN_STEP, PER_MICRO_BATCH, PER_DECODE_STEP = 2, 0, 1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("qwen3", tmp_path_factory.mktemp("model"))


def waits_of_steps(make: MakeEngine, model: Path) -> tuple[int, float]:
    """Of a train step with one micro-batch, and of each micro-batch more."""
    engine = make(model, ParallelContext(device=torch.device("cuda", 0)), Variant(dtype=torch.bfloat16))
    tokens = [sum(batch(1).answer_lengths()), 40]
    counts, num_micro_batches = [], []
    for max_tokens in tokens:
        engine.micro_batches = MicroBatchSpec(max_tokens_per_micro_batch=max_tokens)
        num_micro_batches.append(len(list(engine._micro_batches(batch(1)))))  # type: ignore[attr-defined]
        SFTInterface().train_step(engine, batch(0), version=0)  # what is made once is made
        counts.append(counted(lambda: SFTInterface().train_step(engine, batch(1), version=1)).total())
    assert num_micro_batches[0] == 1 < num_micro_batches[1]
    return counts[0], (counts[1] - counts[0]) / (num_micro_batches[1] - 1)


def counted(act: object) -> Counter[str]:
    assert callable(act)
    cuda.waits.clear()
    act()
    for line, count in sorted(cuda.waits.items()):
        print(f"{count:4} x {line}")
    return Counter(cuda.waits)


@pytest.mark.parametrize("make", [make_engine, make_megatron], ids=["fsdp", "megatron"])
def test_a_train_step_waits_for_its_sums_and_for_its_weights_alone(make: MakeEngine, model: Path) -> None:
    assert waits_of_steps(make, model) == (PER_TRAIN_STEP, PER_MICRO_BATCH)


def test_a_number_that_is_read_of_each_micro_batch_is_found(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def add(self: DeviceSums, values: dict[str, torch.Tensor]) -> None:
        own(self, {name: torch.tensor(value.item(), device=value.device) for name, value in values.items()})

    own = DeviceSums.add
    monkeypatch.setattr(DeviceSums, "add", add)
    _, per_micro_batch = waits_of_steps(make_engine, model)
    assert per_micro_batch > PER_MICRO_BATCH


def test_a_tensor_that_is_left_on_the_host_is_found(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def on_host(*arguments: object, device: torch.device, **options: object) -> object:
        for at_home, there in zip(
            make_micro_batches(*arguments, device=torch.device("cpu"), **options),  # type: ignore[arg-type]
            make_micro_batches(*arguments, device=device, **options),  # type: ignore[arg-type]
            strict=True,
        ):
            object.__setattr__(there, "position_ids", at_home.position_ids)
            yield there

    monkeypatch.setattr("corral.workers.backends.mesh_engine.make_micro_batches", on_host)
    with pytest.raises(RuntimeError, match="same device"):
        waits_of_steps(make_engine, model)


@pytest.mark.parametrize("read_lag", [0, 1])
def test_a_decode_step_waits_for_its_tokens_alone(read_lag: Literal[0, 1], tmp_path: Path) -> None:
    engine = GenerationEngine(save_tiny_model(tmp_path / "model"), device="cuda", read_lag=read_lag)
    numbers = itertools.count()

    def generate(num_tokens: int) -> None:
        sampling = SamplingParams(temperature=1.0, max_new_tokens=num_tokens, ignore_eos=True)
        engine.generate(
            [GenerationRequest(request_id=str(next(numbers)), prompt=(5, 9, 3), sampling=sampling) for _ in range(3)]
        )

    generate(40)  # what is made once is made
    few, many = (counted(lambda n=n: generate(n)).total() for n in (12, 36))
    assert many - few == 24 * PER_DECODE_STEP
