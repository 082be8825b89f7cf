"""A worker's record says what it does; a worker that hangs, or was replaced, leaves by itself."""

import subprocess
import sys
from collections import Counter

import msgspec
import pytest

from corral.experiments.exit_codes import WorkerExit
from corral.experiments.trial.guarded_listener import Unproven
from corral.experiments.trial.worker_record import WorkerRecord
from corral.workers.lifecycle.presence import Presence
from tests.name_services import MemoryNameService, MemoryStore, NamesAddress, running_names
from tests.workers.stream_helpers import wait_until

KEY = "workers/rollout_worker/0"


def test_connections_of_strangers_are_named_in_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Unproven, "refused", Counter({4711: 12}))
    store = MemoryStore()
    with Presence(MemoryNameService(store), KEY, owner="a", ttl_s=10, identity=WorkerRecord()) as presence:
        presence.enter("wait for a prompt")
        wait_until(lambda: "wait for a prompt" in MemoryNameService(store).get(KEY), waiting_for="the phase")
        record = msgspec.json.decode(MemoryNameService(store).get(KEY), type=WorkerRecord)
    assert record.phase == "wait for a prompt; 12 connections from strangers refused at port 4711;"


def test_a_phase_and_whom_it_waits_for_reach_the_record() -> None:
    store = MemoryStore()
    observer = MemoryNameService(store)
    with Presence(MemoryNameService(store), KEY, owner="a", ttl_s=10, identity=WorkerRecord(index=3)) as presence:
        presence.enter("wait for a batch", waiting_for="3 of 8 trajectories", waits_for=["rollout_worker/1"])
        presence.beat(version="1.7")
        wait_until(
            lambda: msgspec.json.decode(observer.get(KEY), type=WorkerRecord).version == "1.7", waiting_for="the phase"
        )
        record = msgspec.json.decode(observer.get(KEY), type=WorkerRecord)
        assert (record.phase, record.waiting_for) == ("wait for a batch", "3 of 8 trajectories")
        assert record.waits_for == ("rollout_worker/1",)
        assert (record.index, record.is_setting_up) == (3, False)
    assert observer.get_subtree("workers") == {}


def test_a_phase_inside_another_gives_way_to_it_again() -> None:
    with Presence(MemoryNameService(MemoryStore()), KEY, owner="a", ttl_s=10, identity=WorkerRecord()) as presence:
        presence.enter("generate", waits_for=["a/0"], works_with=["b/0"])
        with presence.during("commit", waits_for=["c/0"], deadline_s=5):
            inside = presence.snapshot()
            assert (inside.phase, inside.waiting_for, inside.waits_for) == ("commit", "", ("c/0",))
        after = presence.snapshot()
        assert (after.phase, after.waiting_for) == ("generate", "")
        assert (after.waits_for, after.works_with) == (("a/0",), ("b/0",))


def test_what_a_frozen_worker_did_last_outlives_its_lease_and_goes_when_it_leaves() -> None:
    store = MemoryStore()
    observer = MemoryNameService(store)
    with Presence(MemoryNameService(store), KEY, owner="a", ttl_s=10, identity=WorkerRecord()) as presence:
        presence.enter("train step", waits_for=["model_worker/0"])
        wait_until(lambda: "last_seen/rollout_worker/0" in observer.get_subtree("last_seen"), waiting_for="the copy")
        observer.delete(KEY)  # as the end of its time to live does
        assert msgspec.json.decode(observer.get("last_seen/rollout_worker/0"), type=WorkerRecord).waits_for == (
            "model_worker/0",
        )
    assert observer.get_subtree("last_seen") == {}


def run_worker(names: NamesAddress, body: str) -> "subprocess.Popen[str]":
    code = (
        "import sys, time\n"
        "from corral.experiments.trial.worker_record import WorkerRecord\n"
        "from corral.workers.lifecycle.presence import Presence\n"
        "from pathlib import PosixPath\n"
        "from tests.name_services import NamesAddress\n"
        f"names = {names!r}.connect()\n"
        f"presence = Presence(names, {KEY!r}, owner='a', ttl_s=10, identity=WorkerRecord())\n"
        f"{body}\n"
    )
    return subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)


def test_a_phase_that_outstays_its_deadline_ends_the_process_with_its_stacks() -> None:
    with running_names() as names:
        worker = run_worker(names, "presence.enter('train step', deadline_s=0.2)\ntime.sleep(60)")
        _, output = worker.communicate(timeout=120)
    assert worker.returncode == WorkerExit.HUNG
    assert "train step" in output and "Thread" in output and "time.sleep" not in output.splitlines()[0]


def test_a_worker_whose_place_was_taken_leaves_and_its_successor_keeps_the_record() -> None:
    body = "presence.enter('generate')\nprint('up', file=sys.stderr, flush=True)\ntime.sleep(60)"
    with running_names() as address, address.connect() as names, run_worker(address, body) as worker:
        assert worker.stderr is not None and worker.stderr.readline() == "up\n"
        with Presence(names, KEY, owner="b", ttl_s=10, identity=WorkerRecord(incarnation="b")):
            assert worker.wait(timeout=120) == WorkerExit.SUPERSEDED
            assert msgspec.json.decode(names.get(KEY), type=WorkerRecord).incarnation == "b"
