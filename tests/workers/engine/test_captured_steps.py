"""Steps of rounded shapes, captured once and replayed, answer as plain ones do, whatever comes and goes.

A CPU captures nothing: a stand-in computes each step once when it is captured and again when it is replayed, as a GPU
does. In double precision, since products of other shapes are rounded otherwise: in float32 outputs must then be equal.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from corral.workers.engine import engine as engine_module
from corral.workers.engine.engine import (
    GenerationEngine,
    GenerationRequest,
    PauseMode,
    RequestOutput,
    SamplingParams,
)
from corral.workers.engine.steps import runner
from corral.workers.engine.steps.graphs import Graphs, Launch
from tests.workers.engine.tiny_models import save_tiny_model

LONG, FIFTY = tuple(range(1, 38)), tuple(range(1, 51))


class CountedGraphs:
    """Notes what happens to it: "captured", "replayed", "closed"."""

    size_bytes = 0

    def __init__(self, events: list[str]) -> None:
        self._events = events
        self._is_closed = False

    def capture(self, launch: Launch) -> Callable[[], None]:
        assert not self._is_closed
        launch()
        self._events.append("captured")
        return lambda: self._replay(launch)

    def close(self) -> None:
        self._is_closed = True
        self._events.append("closed")

    def _replay(self, launch: Launch) -> None:
        assert not self._is_closed
        launch()
        self._events.append("replayed")


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of every graph of the test."""
    noted: list[str] = []

    def graphs_of(device: torch.device) -> Callable[[], Graphs]:
        return lambda: CountedGraphs(noted)

    monkeypatch.setattr(runner, "graphs_of", graphs_of)
    monkeypatch.setitem(engine_module.DTYPES, "float64", torch.float64)
    return noted


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    return [save_tiny_model(root / f"v{seed}", seed=seed) for seed in range(2)]


def request(name: str, prompt: tuple[int, ...] = (7,), **sampling: Any) -> GenerationRequest:
    params = SamplingParams(**{"max_new_tokens": 8, "ignore_eos": True, "sampling_seed": len(name), **sampling})
    return GenerationRequest(request_id=name, prompt=prompt, sampling=params)


def both(directory: Path, **options: Any) -> Iterator[GenerationEngine]:
    """One that replays, reading a step later as on a GPU, and a plain one."""
    for settings in ({"cuda_graphs": True, "read_lag": 1}, {}):
        yield GenerationEngine(directory, dtype="float64", version="1.0", **options, **settings)


def come_and_go(engine: GenerationEngine, new_weights: Path) -> dict[str, RequestOutput]:
    """Three rows become six and outgrow the cache; some leave, are aborted, retracted, and go on by other weights."""
    outputs: list[RequestOutput] = []

    def steps(count: int) -> None:
        for _ in range(count):
            outputs.extend(engine.step())

    for name, prompt in (("a", (7,)), ("bb", LONG), ("ccc", (5, 9, 3))):
        engine.add(request(name, prompt, max_new_tokens=40))
    steps(5)
    for number in range(3):
        engine.add(request("d" * (4 + number), max_new_tokens=4 + number, frequency_penalty=0.5))
    steps(6)
    outputs.extend(engine.abort(frozenset({"a"})))
    steps(2)
    outputs.extend(engine.pause(PauseMode.RETRACT))
    engine.update_weights(new_weights, version="1.1")
    engine.resume()
    steps(3)
    outputs.extend(engine.pause(PauseMode.IN_PLACE))
    engine.update_weights(new_weights, version="1.2")
    engine.resume()
    while engine.has_work:
        steps(1)
    return {output.request_id: output for output in outputs}


def test_answers_are_those_of_plain_steps(directories: list[Path], events: list[str]) -> None:
    replayed, plain = (come_and_go(engine, directories[1]) for engine in both(directories[0]))
    assert len(plain) == 6 and replayed == plain
    assert events.count("replayed") > 2 * events.count("captured")


def test_a_shape_is_captured_once_and_again_for_tensors_that_are_new(
    directories: list[Path], events: list[str]
) -> None:
    engine, _ = both(directories[0])
    staged = engine.stage_weights(directories[1])

    def captured(num_requests: int, num_tokens: int) -> int:
        """While so many get so many tokens behind 50; a shape is of a power of two, and of 64 positions at least."""
        before = events.count("captured")
        engine.generate([request("r" * (1 + row), FIFTY, max_new_tokens=num_tokens) for row in range(num_requests)])
        return events.count("captured") - before

    assert [captured(4, 10), captured(4, 3), captured(3, 8), captured(2, 3)] == [1, 0, 0, 1]
    assert captured(3, 50) == 2 and "closed" in events  # the cache of 60 positions is replaced by longer ones
    assert [captured(3, 20), captured(3, 20)] == [1, 0]  # what the one between them had captured went with it
    assert engine.flush_cache()
    assert captured(4, 5) == 1
    before = events.count("closed")
    engine.apply_weights(staged, version="2.0")
    assert captured(4, 5) == 1 and events.count("closed") == before + 1


def test_a_free_row_is_within_a_cache_that_has_become_smaller(directories: list[Path], events: list[str]) -> None:
    """The fourth row stood far along when its request ended, and is computed as a free one beside three short ones."""
    replayed, plain = (answers_after_a_long_row(engine) for engine in both(directories[0]))
    assert replayed == plain


def answers_after_a_long_row(engine: GenerationEngine) -> list[RequestOutput]:
    engine.generate([*(request("a" * (1 + row)) for row in range(3)), request("long", LONG * 6)])
    assert engine.flush_cache()
    return engine.generate([request("b" * (1 + row)) for row in range(3)])


def test_rows_are_no_more_than_the_cache_can_hold(directories: list[Path], events: list[str]) -> None:
    requests = [request("r" * (1 + row), LONG, max_new_tokens=20) for row in range(5)]
    limits = {"max_running_requests": 3, "max_total_tokens": 3 * 57}
    replayed, plain = (engine.generate(requests) for engine in both(directories[0], **limits))
    assert replayed == plain


def test_a_mixture_is_refused(tmp_path: Path) -> None:
    directory = save_tiny_model(tmp_path / "mixture", model_type="qwen3_moe")
    with pytest.raises(ValueError, match=r"layers 0, 2 ask the host .* set engine.cuda_graphs to false"):
        GenerationEngine(directory, cuda_graphs=True)
