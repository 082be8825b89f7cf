"""A stranger on the node where a trial runs: finds every port, and gets nothing out of any of them.

Then kill -9 of every kind of process, one after the other: the trial goes on by itself and loses nothing. The stranger
wants every port of what is killed, and gets most of them at once: he hears no secret, and changes nothing. At last the
trial is stopped at once, and goes on from its last commit.
"""

import contextlib
import json
import random
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
import redis
import zmq
from zmq.utils.monitor import recv_monitor_message

from corral.experiments.trial.secrets import TrialSecrets
from corral.experiments.trial.trust import Trust
from corral.launcher.trial.redis_server import connect_name_service
from tests.integration.evidence import (
    History,
    check_every_sample_was_consumed_once,
    check_no_token_was_too_old,
    check_nothing_is_left,
    find_secrets,
)
from tests.integration.test_stop_and_resume import check_stopped, last_committed_step
from tests.integration.trial_helpers import WORKERS, Material, Trial, read_lines, submit
from tests.strangers import Stranger
from tests.workers.trusted import redis_client

NUM_BLOBS = 1000
COMMIT_EVERY_STEPS = 3
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
NUM_STEPS = 34
ROLE_BY_STREAM = {
    "streams/master": "model_worker",
    "streams/trajectories/0": "rollout_worker",
    "generation/manager": "rollout_worker",
}
REFUSED = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
}
HTTP_PATHS = ("/generate", "/update_weights_from_disk", "/get_model_info", "/metrics", "/health", "/nowhere")


class Target:
    """A running trial, with what its own processes know and a stranger does not."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self.secrets = TrialSecrets.load(trial.directory.secrets_path)
        self.secret_values = [secret.reveal() for secret in self.secrets.values()]
        with connect_name_service(trial.directory, trial.uuid, timeout_s=5.0) as names:
            records = names.get_subtree("")
        server = json.loads(records["generation/servers/0"])
        self.http, self.http_control = str(server["url"]), str(server["control"])
        self.zeromq = {name: records[name] for name in ROLE_BY_STREAM}
        self.redis_port = int(json.loads(trial.directory.rendezvous_path.read_bytes())["port"])

    def listening(self) -> set[tuple[str, int]]:
        """(address, port) of everything on which a process of the trial listens."""
        connections = [
            connection for pid in self.trial.processes() for connection in psutil.Process(pid).net_connections("tcp")
        ]
        return {(c.laddr.ip, c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN}


@pytest.fixture(scope="module")
def target(material: Material, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """One trial for all tests of this file; the last of them takes it to its end."""
    trial = submit(
        "grpo",
        tmp_path_factory.mktemp("target"),
        material,
        num_rows=102,
        num_passes=2,
        pause_s=0.1,
        overrides=sampled(material)
        | {
            "train_batch_size": 6,
            "control.commit_every": f"{COMMIT_EVERY_STEPS} steps",
            "evaluation.every": "1000 steps",
            "actor.offload": "optimizer",  # what is gone on from lies in host memory
        },
    )
    try:
        trial.wait_for_steps(1)
        trial.wait_until_running()
        yield Target(trial)
    finally:
        trial.close()


def test_nothing_listens_but_what_needs_a_key(target: Target) -> None:
    ports = [
        int(endpoint.rpartition(":")[2]) for endpoint in (*target.zeromq.values(), target.http, target.http_control)
    ]
    # A trial of one training rank has no trainer group, so torch listens nowhere.
    assert target.listening() == {("127.0.0.1", port) for port in (*ports, target.redis_port)}
    assert len(target.listening()) == 6


def test_random_bytes_disturb_nobody(target: Target) -> None:
    rng = random.Random(1)
    openings = [
        b"",
        b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03",
        b"POST /generate HTTP/1.1\r\n",
        b"*3\r\n$3\r\nSET",
    ]
    ports = sorted(target.listening())
    before = dict.fromkeys(WORKERS, 0)
    for number in range(NUM_BLOBS):
        with socket.create_connection(ports[number % len(ports)], timeout=5.0) as connection:
            try:
                connection.sendall(rng.choice(openings) + rng.randbytes(rng.randint(1, 3000)))
            except (ConnectionResetError, BrokenPipeError):
                continue  # it hung up in the middle
    target.trial.wait_for_steps(1)
    assert {worker: row["restarts"] for worker, row in target.trial.workers().items()} == before


@pytest.mark.parametrize("key", [None, "Bearer ", "Bearer wrong", "Basic dXNlcjpwYXNz"])
def test_the_generation_server_answers_nothing_without_the_key(target: Target, key: str | None) -> None:
    for path in HTTP_PATHS:
        assert http_status(target, target.http + path, key) == 401, path
        assert http_status(target, target.http_control + path, key) == 401, path


def test_the_generation_server_answers_its_own_trial(target: Target) -> None:
    assert http_status(target, target.http + "/get_model_info", f"Bearer {target.secrets.http_api_key.reveal()}") == 200


@pytest.mark.parametrize("user", ["default", "trial", "starter"])
@pytest.mark.parametrize("password", [None, "wrong"])
def test_redis_answers_nobody_without_the_password(target: Target, user: str, password: str | None) -> None:
    username = None if password is None else user
    with connect(target, username=username, password=password) as client:
        for command in (("PING",), ("KEYS", "*"), ("CONFIG", "GET", "*")):
            with pytest.raises(redis.AuthenticationError):
                client.execute_command(*command)


def test_even_the_password_opens_only_the_keys_of_this_trial(target: Target) -> None:
    password = target.secrets.redis_password.reveal()
    with connect(target, username="trial", password=password) as client:
        assert client.execute_command("GET", f"corral/{target.trial.uuid}/nothing") is None
        for command in (("GET", "corral/other"), ("FLUSHALL",), ("CONFIG", "GET", "*"), ("SHUTDOWN",), ("DEBUG", "x")):
            with pytest.raises(redis.ResponseError, match="(?i)permission"):
                client.execute_command(*command)


def test_zeromq_lets_nobody_in_without_the_key_of_a_role_that_it_serves(target: Target) -> None:
    public, secret = zmq.curve_keypair()
    server = target.secrets.server.public.encode()
    # The generation server has a key, but is a client of nobody.
    other_role = target.secrets.clients["generation_server"]
    strangers: dict[str, dict[int, bytes]] = {
        "no mechanism": {},
        "a password": {zmq.PLAIN_USERNAME: b"trial", zmq.PLAIN_PASSWORD: b"trial"},
        "an unknown key": {zmq.CURVE_SERVERKEY: server, zmq.CURVE_PUBLICKEY: public, zmq.CURVE_SECRETKEY: secret},
        "another server": {zmq.CURVE_SERVERKEY: public, zmq.CURVE_PUBLICKEY: public, zmq.CURVE_SECRETKEY: secret},
        "another role": {
            zmq.CURVE_SERVERKEY: server,
            zmq.CURVE_PUBLICKEY: other_role.public.encode(),
            zmq.CURVE_SECRETKEY: other_role.secret.reveal().encode(),
        },
    }
    for name, options in strangers.items():
        for endpoint in target.zeromq.values():
            events = knock(endpoint, options)
            assert zmq.EVENT_HANDSHAKE_SUCCEEDED not in events and events & REFUSED, (name, endpoint, events)
    logs = [
        target.trial.directory.worker_log(0, kind, 0) for kind in ("master_worker", "model_worker", "gserver_manager")
    ]
    for words in ("unknown key", "not the role generation_server"):
        target.trial.wait_for(
            lambda words=words: all(words in log.read_text() for log in logs),  # type: ignore[misc]
            f"{words!r} in the log of every worker that listens",
            timeout_s=10.0,
        )


def test_zeromq_lets_its_own_trial_in(target: Target) -> None:
    server = target.secrets.server.public.encode()
    for name, endpoint in target.zeromq.items():
        own = target.secrets.clients[ROLE_BY_STREAM[name]]
        keys = {
            zmq.CURVE_SERVERKEY: server,
            zmq.CURVE_PUBLICKEY: own.public.encode(),
            zmq.CURVE_SECRETKEY: own.secret.reveal().encode(),
        }
        assert zmq.EVENT_HANDSHAKE_SUCCEEDED in knock(endpoint, keys), name


def test_the_trial_trains_on_tells_nobody_its_secrets_and_outlives_whoever_is_killed(target: Target) -> None:
    trial, canaries = target.trial, target.secret_values
    assert len(canaries) > 5 and min(map(len, canaries)) >= 40
    pids = [*trial.processes(), *(trial.events(name)[0]["pid"] for name in ("submitted", "supervisor_started"))]
    shown = [Path(f"/proc/{pid}/{file}").read_bytes() for pid in pids for file in ("cmdline", "environ")]
    assert len(pids) >= len(WORKERS) + 3
    assert not [canary for canary in canaries if any(canary.encode() in text for text in shown)]
    trial.wait_for_steps(2)
    assert {row["restarts"] for row in trial.workers().values()} == {0}
    assert find_secrets(trial.directory, canaries) == {"secrets/secrets.json", "secrets/server.pem"}
    check_it_outlives_kills_and_a_stop(trial, canaries)
    check_evaluations(trial, [0, NUM_STEPS])
    assert find_secrets(trial.directory, canaries) == set()


def sampled(material: Material) -> dict[str, Any]:
    """Settings: several answers to each problem, and the same problems from another file."""
    return {
        "evaluation.sampling.temperature": 1.0,
        "evaluation.answers_per_problem": 4,
        "evaluation.vote": r"(\d+)",
        "evaluation.more.twice": material.held_out,
    }


def check_evaluations(trial: Trial, steps: Sequence[int]) -> None:
    """Of these steps, beside which nothing was trained."""
    evaluated = {line["step"]: line for line in trial.metrics() if "eval/accuracy" in line}
    for line in (evaluated[step] for step in steps):
        assert line["eval/problems"] == line["eval/twice/problems"] == 8 and line["eval/unjudged"] == 0
        assert line["eval/version_min"] == line["eval/version_max"] == line["step"]
        # The seeds follow from the row alone, not from its file or the server that answers.
        assert line["eval/reward/mean"] == pytest.approx(line["eval/twice/reward/mean"])
        assert line["eval/accuracy"] <= line["eval/pass@2"] <= line["eval/pass@4"] >= line["eval/majority"]


def check_it_outlives_kills_and_a_stop(trial: Trial, secrets: Sequence[str]) -> None:
    """A trial of NUM_STEPS that nothing has happened to yet is taken to its end."""
    with Stranger() as stranger:
        reached = _kill_each_kind(trial, stranger)
        rows = trial.wait_until_running()
        # Each once for itself, and once because a new supervisor starts everything anew.
        assert {worker: row["restarts"] for worker, row in rows.items()} == dict.fromkeys(WORKERS, 2)
        assert [event["code"] for event in trial.events("task_ended", who="redis") if not event["caused_by"]] == [-9]
        assert trial.events("leftovers_killed") == []  # workers and Redis end with their supervisor
        trial.wait_for_uncommitted_step(commit_every_steps=COMMIT_EVERY_STEPS)
    heard = stranger.everything_heard()
    assert not [secret for secret in secrets if secret.encode() in heard] and b"Authorization" not in heard

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
    assert any(kept < step for kept, step in zip(committed, reached, strict=True))  # something was taken back
    # And yet each step of the lineage has one line, and so has each of its samples.
    assert trial.train_steps() == list(range(1, NUM_STEPS + 1))
    assert sorted(line["uid"] for line in read_lines(trial.directory.trajectories_path)) == sorted(trial.uids)
    assert "trial grpo/trial is complete" in trial.run_resume()


def _kill_each_kind(trial: Trial, stranger: Stranger) -> list[int]:
    """The train step that was reached before each kill that ends an epoch."""
    reached: list[int] = []
    for victim in VICTIMS:
        # Right after a commit there would be nothing to take back.
        trial.wait_for_uncommitted_step(commit_every_steps=COMMIT_EVERY_STEPS)
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


def connect(target: Target, *, username: str | None, password: str | None) -> "redis.Redis":
    trust = Trust(target.trial.directory.secrets_path)
    return redis_client("127.0.0.1", target.redis_port, username=username, password=password, by=trust)


def http_status(target: Target, url: str, authorization: str | None) -> int:
    headers = {} if authorization is None else {"Authorization": authorization}
    body = b"{}" if url.endswith(("/generate", "/update_weights_from_disk")) else None
    request, tls = urllib.request.Request(url, body, headers), Trust(target.trial.directory.secrets_path).client()
    try:
        with urllib.request.urlopen(request, timeout=10.0, context=tls) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        return error.code


def knock(endpoint: str, options: dict[int, bytes]) -> set[zmq.Event]:
    """What happens to a connection of somebody who wants to say something, until it is closed."""
    events: set[zmq.Event] = set()
    with zmq.Context() as context:
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.RECONNECT_IVL, -1)
        for option, value in options.items():
            dealer.setsockopt(option, value)
        monitor = dealer.get_monitor_socket()
        try:
            dealer.connect(endpoint)
            # Where the server was faster than this line, there is no connection left to wait for.
            with contextlib.suppress(zmq.Again):
                dealer.send(b"let me in", zmq.NOBLOCK)
            while not events & {zmq.EVENT_DISCONNECTED, zmq.EVENT_CLOSED, zmq.EVENT_HANDSHAKE_SUCCEEDED}:
                assert monitor.poll(20_000), f"the server neither let a stranger in nor sent it away: {events}"
                events.add(zmq.Event(recv_monitor_message(monitor)["event"]))
        finally:
            # In this order: the last event would wait for ever for somebody to read it.
            dealer.disable_monitor()
            monitor.close(linger=0)
            dealer.close(linger=0)
    return events
