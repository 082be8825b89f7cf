"""The trainer dies after it has published weights and before the commit that covers them.

    step k ──► weights/vK-e1 ──► published ──► servers answer with 1.k ──┬──► commit: never
                                                                         └──► master and ranks start again from step k-1

What 1.k has made is thrown away, its samples are trained on by epoch 2, and its weights go. Servers take over versions
by deltas: none leads from 1.k, and from the commit on they lead again.
"""

import os
import re
import signal
import time
from collections.abc import Callable

import pytest

from tests.integration.evidence import (
    History,
    check_every_sample_was_consumed_once,
    check_no_token_was_too_old,
    check_nothing_is_left,
)
from tests.integration.trial_helpers import DEADLINE_S, Trial


@pytest.mark.slow  # test_trainer_epoch.py shows it step by step, and test_security.py counts the samples
def test_versions_that_no_commit_covers_are_never_trained_on(start_trial: Callable[..., Trial]) -> None:
    trial = start_trial(
        num_rows=96,
        num_passes=2,
        pause_s=0.02,
        runs_on=True,
        overrides={
            "control.commit_every": "1 step",
            "evaluation.every": "1000 steps",
            "actor.dtype": "bfloat16",
            "actor.optimizer.lr": 1e-6,
            "weights.transport": "delta",
        },
    )
    trial.wait_for_steps(2)
    model_worker = trial.pid("model_worker/0")
    step = freeze_between_publication_and_commit(trial, model_worker)
    trial.wait_for(lambda: spool_holds(trial, f"1.{step}"), f"a trajectory that 1.{step} has made")
    trial.kill("master_worker/0")
    os.kill(model_worker, signal.SIGCONT)
    trial.full_speed()
    trial.wait_for_end()

    history = History.of(trial)
    assert history.tag(epoch=2, step=step) == f"2.{step}"
    # The rank was perhaps still writing for the commit before.
    assert step - 2 <= history.entries[history.continued_by(2)]["step"] < step
    check_nothing_is_left(trial)
    check_every_sample_was_consumed_once(trial)
    check_no_token_was_too_old(trial, eta=1)
    assert trial.train_steps() == list(range(1, 25))
    assert f"v{step:08d}-e1" not in os.listdir(trial.directory.weights_path)
    taken_over = trial.directory.worker_log(0, "generation_server", 0).read_text()
    for epoch in (1, 2):
        assert re.search(rf"v\d+-e{epoch}: (\d+) of \1 files from the version before, 0 read whole", taken_over), epoch
    assert "are from weights that a failure took back" in trial.directory.worker_log(0, "master_worker", 0).read_text()


def freeze_between_publication_and_commit(trial: Trial, model_worker: int) -> int:
    """Stops a rank that has written weights and not yet its training state; the step that is not committed.

    The rank may have been quicker: then it goes on, and the next step is tried.
    """
    while True:
        step = last_committed_step(trial) + 2
        manifest = trial.directory.weights_path / f"v{step:08d}-e1" / "manifest.json"
        deadline = time.monotonic() + DEADLINE_S
        while not manifest.exists():
            assert time.monotonic() < deadline, f"waited {DEADLINE_S:.0f} s for {manifest}\n{trial.tails()}"
        os.kill(model_worker, signal.SIGSTOP)
        trial.status()  # by the time that it has answered, a commit that the master had in hand is in the log
        if last_committed_step(trial) < step:
            wait_for_server(trial, f"1.{step}")
            return step
        os.kill(model_worker, signal.SIGCONT)


def wait_for_server(trial: Trial, version: str) -> None:
    """Until the generation server answers with a version, and has said so."""
    trial.wait_for(
        lambda: trial.workers()["generation_server/0"]["version"] == version, f"the server to take over {version}"
    )


def last_committed_step(trial: Trial) -> int:
    history = History.of(trial)
    return int(history.entries[history.last_commit()]["step"]) if history.last_commit() else 0


def spool_holds(trial: Trial, tag: str) -> bool:
    """Whether a record names this version: tags are in its header, as strings of msgpack."""
    text = bytes([0xA0 + len(tag)]) + tag.encode()
    return any(text in path.read_bytes() for path in trial.directory.spool_path(0).glob("record-*"))
