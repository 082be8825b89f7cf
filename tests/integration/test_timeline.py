"""A server, a rank and a reward that are slow, one after the other in one trial: the sentence names each of them."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tests.integration.evidence import check_every_sample_was_consumed_once
from tests.integration.trial_helpers import Trial

_STEPS = 12  # of each, so that a rank has worked for long enough to be judged


@pytest.mark.slow
def test_whoever_is_slow_is_named(start_trial: Callable[..., Trial]) -> None:
    trial = start_trial(
        num_rows=96,
        num_passes=4,
        pause_s=0.01,
        overrides={
            "allocation": "hf:d2+fsdp:d2",
            "groups.rollout_worker.count": 2,
            "evaluation.every": "1000 steps",
            # One answer at a time, and many of them: steps wait for servers, more so where one of these is slow.
            "ppo.group_size": 16,
            "engine.max_running_requests": 1,
        },
    )
    trial.wait_for_steps(2)
    with throttled(trial, "generation_server/1"):
        assert "ms for each token of generation_server/1, and" in said_of_next_steps(trial)
    with throttled(trial, "model_worker/1"):
        assert "model_worker/1 holds up the other ranks" in said_of_next_steps(trial)
    trial.pace(0.3)
    assert "for its reward" in said_of_next_steps(trial).splitlines()[0]
    trial.full_speed()
    trial.wait_for_end()
    check_every_sample_was_consumed_once(trial)


def said_of_next_steps(trial: Trial) -> str:
    """What rl-trace says of the next steps, but for the first of them, which has begun before."""
    before = max(trial.train_steps())
    trial.wait_for_steps(_STEPS)
    last = before + _STEPS
    # What has happened by the end of a step is in the files a second later.
    trial.wait_for(lambda: "spans" in _written(trial, last), f"the timeline to have step {last}")
    return trial.run("rl-trace", "--steps", f"{before + 2}:{last}")


def _written(trial: Trial, step: int) -> str:
    return (
        "spans" if f'"step":{step}}}' in (trial.directory.timeline_path / "master_worker-0.jsonl").read_text() else ""
    )


@contextlib.contextmanager
def throttled(trial: Trial, worker: str) -> Iterator[None]:
    """A process of the trial that stands still for most of the time."""
    is_over, pid = threading.Event(), trial.pid(worker)

    def throttle() -> None:
        while not is_over.is_set():
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.6)
            os.kill(pid, signal.SIGCONT)
            is_over.wait(0.05)

    thread = threading.Thread(target=throttle)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
