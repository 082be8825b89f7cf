"""One real server of SGLang whose layers two processes share, each on CPUs of its own.

The reference is transformers, in one process.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from corral.workers.generation.backend import BackendLostError
from corral.workers.generation.sglang import SglangBackend
from tests.workers.engine.tiny_models import load_reference, reference_greedy, reference_logprobs, save_tiny_model
from tests.workers.generation.servers import Served, serving

pytestmark = pytest.mark.slow

PROMPT = [7, 31, 15, 8]
TOLERANCE = 1e-4  # float32


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    return [save_tiny_model(root / f"v{seed}", seed=seed) for seed in range(2)]


@pytest.fixture(scope="module")
def served(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving("sglang", models[0], tmp_path_factory.mktemp("server"), tensor_parallel_size=2) as served:
        yield served


def schedulers(served: Served) -> list[psutil.Process]:
    """The processes that hold a part of the model."""
    assert isinstance(served.backend, SglangBackend) and served.backend._process is not None
    children = psutil.Process(served.backend._process.pid).children(recursive=True)
    return [child for child in children if "scheduler" in child.name()]


def check_answers(served: Served, model: Path) -> None:
    reference = load_reference(model)
    answer: Any = served.client.generate(PROMPT, max_new_tokens=16, temperature=0, ignore_eos=True)
    assert answer["output_ids"] == reference_greedy(reference, PROMPT, max_new_tokens=16)
    found = [logprob for logprob, _, _ in answer["meta_info"]["output_token_logprobs"]]
    expected = reference_logprobs(reference, PROMPT, answer["output_ids"])
    assert found == pytest.approx(expected.tolist(), abs=TOLERANCE)


def test_two_processes_answer_as_one_model_and_both_take_new_weights(served: Served, models: list[Path]) -> None:
    assert len(schedulers(served)) == 2
    check_answers(served, models[0])
    served.bring_to("1.0", models[1])
    check_answers(served, models[1])
    assert served.client.get("/model_info")["weight_version"] == "1.0"


def test_the_death_of_one_of_them_is_that_of_the_server(served: Served) -> None:
    os.kill(schedulers(served)[1].pid, signal.SIGKILL)
    with pytest.raises(BackendLostError, match="SGLang ended"):
        served.run(served.backend.wait_ended())
