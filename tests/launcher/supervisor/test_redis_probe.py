"""A Redis server that is frozen has not ended; it is told by its silence."""

import os
import signal
from pathlib import Path

from corral.experiments.trial.directory import TrialDirectory
from corral.experiments.trial.secrets import TrialSecrets
from corral.experiments.trial.trust import Trust
from corral.launcher.supervisor.redis import TrialRedis
from corral.launcher.supervisor.redis_probe import RedisProbe
from tests.launcher.conftest import MakeTrial
from tests.launcher.trials import wait_until


def test_a_frozen_server_is_noticed_and_one_that_was_started_again_is_not_taken_for_it(tmp_path: Path) -> None:
    directory = TrialDirectory(tmp_path / "trial")
    directory.create()
    directory.attempt_logs(0).mkdir()
    TrialSecrets.create(directory.secrets_path)
    redis = TrialRedis(
        directory=directory,
        trial_uuid="0" * 32,
        secrets=TrialSecrets.load(directory.secrets_path),
        attempt=0,
        host="127.0.0.1",
        probe=RedisProbe(trust=Trust(directory.secrets_path), timeout_s=0.2, pause_s=0.05, max_silent=3),
    )
    redis.start()
    address = redis.address
    assert not redis.is_frozen()
    os.kill(redis.pid, signal.SIGSTOP)
    wait_until(redis.is_frozen, "its silence")
    assert redis.poll() is None
    redis.kill()
    wait_until(lambda: redis.poll() is not None, "its end")
    redis.start()
    assert (redis.address, redis.is_frozen()) == (address, False)
    redis.kill()


def test_a_frozen_redis_is_replaced_on_its_port_while_the_workers_go_on(make_trial: MakeTrial) -> None:
    trial = make_trial({"master_worker/0": ["master"]}, model_workers=1, servers=0)
    trial.start()
    (redis,) = trial.wait_for("redis_started")
    os.kill(redis["pid"], signal.SIGSTOP)
    wait_until(lambda: len(trial.events("redis_started")) == 2, "another Redis", timeout_s=60.0)
    assert trial.events("redis_frozen")[0]["pid"] == redis["pid"]
    assert {event["port"] for event in trial.events("redis_started")} == {redis["port"]}
    assert len(trial.starts("model_worker/0")) == 1
