"""The engine's thread: commands take effect in their order, and everyone who waits is answered."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import get_args

import pytest

from corral.experiments.config.rollout import UpdateMode
from corral.workers.engine.engine import EngineLoop, EngineStoppedError, GenerationEngine
from corral.workers.engine.requests import AbortFinish, GenerationRequest, RequestOutput
from corral.workers.engine.sampling import SamplingParams
from tests.workers.engine.tiny_models import save_tiny_model

DEADLINE_S = 120.0


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    return [save_tiny_model(root / f"v{seed}", seed=seed) for seed in range(2)]


@pytest.fixture
def loop(directories: list[Path]) -> Iterator[EngineLoop]:
    with EngineLoop(GenerationEngine(directories[0], version="1.0")) as loop:
        yield loop


def request(name: str, *, max_new_tokens: int = 200) -> GenerationRequest:
    sampling = SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True)
    return GenerationRequest(request_id=name, prompt=(7, 8), sampling=sampling)


def versions(output: RequestOutput) -> list[str]:
    return [span.version for span in output.weight_versions]


def start_running(loop: EngineLoop, name: str) -> Future[RequestOutput]:
    """A long request that has made a token."""
    has_begun = threading.Event()
    asked = replace(request(name, max_new_tokens=4000), is_streamed=True)
    future = loop.submit(asked, listener=lambda output: has_begun.set())
    assert has_begun.wait(DEADLINE_S)
    return future


@pytest.mark.parametrize("mode", list(get_args(UpdateMode)))
def test_a_change_over_is_checked_before_the_new_weights_make_a_token(
    loop: EngineLoop, directories: list[Path], mode: UpdateMode
) -> None:
    running = start_running(loop, "running")
    steps: list[int] = []

    def check() -> None:
        steps.append(loop.engine.steps)
        assert loop.engine.version == "1.1" and loop.engine.is_paused

    staged = loop.engine.stage_weights(directories[1])
    done = loop.change_over(staged, version="1.1", mode=mode, check=check).result(DEADLINE_S)
    assert done.stopped_s > 0.0
    assert done.replaced.directory == directories[0]
    after = loop.submit(request("after", max_new_tokens=2)).result(DEADLINE_S)
    assert versions(after) == ["1.1"] and loop.engine.steps > steps[0] and len(steps) == 1
    loop.abort(None).result(DEADLINE_S)
    assert versions(running.result(DEADLINE_S)) == (["1.0"] if mode == "abort" else ["1.0", "1.1"])


def test_a_change_over_that_is_refused_ends_requests_and_no_token_is_made_until_the_next_one(
    loop: EngineLoop, directories: list[Path]
) -> None:
    running = start_running(loop, "running")

    def check() -> None:
        raise RuntimeError("these are other weights")

    staged = loop.engine.stage_weights(directories[1])
    done = loop.change_over(staged, version="1.1", mode="retract", check=check)
    with pytest.raises(RuntimeError, match="these are other weights"):
        done.result(DEADLINE_S)
    ended = running.result(DEADLINE_S)
    assert ended.finish_reason == AbortFinish() and versions(ended) == ["1.0"]
    after, steps = loop.submit(request("after", max_new_tokens=2)), loop.engine.steps
    assert loop.engine.is_paused
    staged = loop.engine.stage_weights(directories[0])
    loop.change_over(staged, version="1.2", mode="retract", check=lambda: None).result(DEADLINE_S)
    assert versions(after.result(DEADLINE_S)) == ["1.2"] and loop.engine.steps > steps


def test_a_request_id_in_flight_is_not_taken_twice_but_may_come_again(loop: EngineLoop) -> None:
    first = loop.submit(request("a"))
    with pytest.raises(ValueError, match="request id 'a' is already in flight"):
        loop.submit(request("a")).result(DEADLINE_S)
    assert len(first.result(DEADLINE_S).output_ids) == 200
    assert len(loop.submit(request("a")).result(DEADLINE_S).output_ids) == 200


def test_stopping_ends_running_and_queued_requests_as_aborted_and_refuses_new_ones(
    directories: list[Path],
) -> None:
    with EngineLoop(GenerationEngine(directories[0])) as loop:
        running = start_running(loop, "running")
        loop.call(partial(loop.engine.pause, "in_place")).result(DEADLINE_S)
        queued = loop.submit(request("queued"))
    assert running.result(0).finish_reason == queued.result(0).finish_reason == AbortFinish()
    with pytest.raises(EngineStoppedError, match="has stopped"):
        loop.submit(request("late")).result(0)
    assert loop.ended.result(0) is None


class FailingEngine(GenerationEngine):
    """Fails at its third step."""

    def step(self) -> list[RequestOutput]:
        if self.steps == 2:
            raise RuntimeError("the device is gone")
        return super().step()


def test_a_failing_step_answers_everyone_and_ends_the_loop(directories: list[Path]) -> None:
    with EngineLoop(FailingEngine(directories[0])) as loop:
        waiting = [loop.submit(request(name)) for name in "ab"]
        for future in waiting:
            with pytest.raises(EngineStoppedError, match="has failed: .*the device is gone"):
                future.result(DEADLINE_S)
        with pytest.raises(RuntimeError, match="the device is gone"):
            loop.ended.result(DEADLINE_S)
        with pytest.raises(EngineStoppedError):
            loop.submit(request("late")).result(0)
