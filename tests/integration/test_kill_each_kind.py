"""kill -9 of every kind of process, one after the other, in one trial that goes on by itself and loses nothing.

A stranger wants every port of what is killed, and gets most of them at once: he hears no secret, and changes nothing.
Then the trial is stopped at once, and goes on from its last commit. So does the trial of test_security.py.
"""

import json
from collections.abc import Callable
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

from corral.experiments.trial.secrets import TrialSecrets
from tests.integration.evidence import (
    History,
    check_every_sample_was_consumed_once,
    check_no_token_was_too_old,
    check_nothing_is_left,
)
from tests.integration.test_stop_and_resume import check_stopped, last_committed_step
from tests.integration.trial_helpers import WORKERS, Trial, read_lines
from tests.strangers import Stranger

VICTIMS = (
    "rollout_worker/0",
    "generation_server/0",
    "gserver_manager/0",
    "redis",
    "model_worker/0",
    "master_worker/0",
    "supervisor",
)
ENDS_AN_EPOCH = VICTIMS[-3:]


NUM_STEPS = 52
LONG: dict[str, Any] = {"num_rows": 156, "num_passes": 2, "pause_s": 0.1}
SETTINGS: dict[str, object] = {
    "train_batch_size": 6,
    "evaluation.every": "1000 steps",
    "actor.offload": "optimizer",  # what is gone on from lies in host memory
}


@pytest.mark.slow  # the trial of test_security.py goes through the same with commits that are further apart
def test_any_process_can_be_killed_and_the_trial_trains_every_prompt_once(start_trial: Callable[..., Trial]) -> None:
    trial = start_trial(**LONG, overrides=SETTINGS)
    trial.wait_for_steps(2)
    check_it_outlives_kills_and_a_stop(trial, commit_every_steps=1)


def check_it_outlives_kills_and_a_stop(trial: Trial, *, commit_every_steps: int) -> None:
    """A trial of NUM_STEPS that nothing has happened to yet is taken to its end."""
    secrets = [secret.reveal().encode() for secret in TrialSecrets.load(trial.directory.secrets_path).values()]
    with Stranger() as stranger:
        reached = _kill_each_kind(trial, stranger, commit_every_steps=commit_every_steps)
        rows = trial.wait_until_running()
        # Each once for itself, and once because a new supervisor starts everything anew.
        assert {worker: row["restarts"] for worker, row in rows.items()} == dict.fromkeys(WORKERS, 2)
        assert [event["code"] for event in trial.events("task_ended", who="redis") if not event["caused_by"]] == [-9]
        assert trial.events("leftovers_killed") == []  # workers and Redis end with their supervisor
        trial.wait_for_uncommitted_step(commit_every_steps=commit_every_steps)
    heard = stranger.everything_heard()
    assert not [secret for secret in secrets if secret in heard] and b"Authorization" not in heard

    assert "STOPPED" in trial.run("rl-stop", "--now")
    reached.append(trial.train_steps()[-1])
    check_stopped(trial, by_epoch=None)  # the supervisor fenced the trial before it killed anyone
    # The line of a step is written before its commit, so what is committed has one.
    assert 0 < last_committed_step(trial) <= reached[-1]
    trial.full_speed()
    trial.run_resume()
    trial.wait_for_end()

    check_nothing_is_left(trial)
    check_every_sample_was_consumed_once(trial)
    assert check_no_token_was_too_old(trial, eta=1) == 1
    history = History.of(trial)
    epochs = [entry["epoch"] for entry in history.entries.values() if entry["kind"] == "claim"]
    committed = [history.entries[history.continued_by(epoch)]["step"] for epoch in epochs[1:]]
    assert len(committed) == len(reached)
    if commit_every_steps > 1:
        assert any(kept < step for kept, step in zip(committed, reached, strict=True))  # something was taken back
    # And yet each step of the lineage has one line, and so has each of its samples.
    assert trial.train_steps() == list(range(1, NUM_STEPS + 1))
    assert sorted(line["uid"] for line in read_lines(trial.directory.trajectories_path)) == sorted(trial.uids)
    assert "trial grpo/trial is complete" in trial.run_resume()


def _kill_each_kind(trial: Trial, stranger: Stranger, *, commit_every_steps: int) -> list[int]:
    """The train step that was reached before each kill that ends an epoch."""
    reached: list[int] = []
    for victim in VICTIMS:
        # Right after a commit there would be nothing to take back.
        trial.wait_for_uncommitted_step(commit_every_steps=commit_every_steps)
        if victim in ENDS_AN_EPOCH:
            reached.append(trial.train_steps()[-1])
        wanted = _ports_of(trial.pid(victim)) if victim not in ("redis", "supervisor") else {_port_of_redis(trial)}
        stranger.want(wanted)
        trial.kill(victim)
        trial.wait_for_steps(1)
        if victim == "redis":
            assert wanted == {_port_of_redis(trial)}  # the supervisor has kept it all the while
        else:
            # A rollout worker asks, and listens nowhere.
            assert bool(wanted) is (victim != "rollout_worker/0") and wanted <= stranger.taken.keys()
    return reached


def _ports_of(pid: int) -> set[int]:
    """Where a process listens."""
    connections = psutil.Process(pid).net_connections("tcp")
    return {connection.laddr.port for connection in connections if connection.status == psutil.CONN_LISTEN}


def _port_of_redis(trial: Trial) -> int:
    return int(json.loads(trial.directory.rendezvous_path.read_bytes())["port"])
