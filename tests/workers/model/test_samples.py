"""The samples of a rank: taken in from rows or from rollout workers, kept, and thrown away with or without a word."""

import threading
from collections.abc import Callable, Set
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from corral.experiments.worker_specs import ModelWorkerSpec
from corral.name_resolve.base import NameNotFoundError
from corral.scheduling.policy_version import VersionSpan
from corral.workers.data.sequence_sample import SequenceSample
from corral.workers.delivery.messages import TrajectoryHeader
from corral.workers.delivery.receiver import Trajectory
from corral.workers.model.data_store import DataStore
from corral.workers.model.samples import Samples, open_samples
from corral.workers.requests.messages import SampleMetadata
from corral.workers.streams.security import StreamSecurity
from tests.workers.master.trials import context_of, trial_of


class Receiver:
    """What has been delivered, and what the senders are told."""

    def __init__(self, *arrived: Trajectory) -> None:
        self.arrived = list(arrived)
        self.verdicts: list[tuple[str, str]] = []
        self.forgotten: set[str] = set()
        self.sessions: list[str] = []

    def announce_to(self, on_arrival: Callable[[], None]) -> None:
        """It has all from the beginning."""

    def drain(self, max_records: int) -> list[Trajectory]:
        taken, self.arrived = self.arrived[:max_records], self.arrived[max_records:]
        return taken

    def verdict(self, uid: str, kind: str) -> None:
        self.verdicts.append((uid, kind))

    def forget(self, uids: Set[str]) -> None:
        self.forgotten |= uids

    def start_session(self, session: str) -> None:
        self.sessions.append(session)


def delivered(delivery: str, *, value: int = 1, reason: str = "") -> Trajectory:
    """A group of one answer of three tokens, or a prompt that was given up."""
    if reason:
        return TrajectoryHeader(
            uid=delivery, dataset_epoch=0, order=7, num_answers=0, status="dropped", reason=reason
        ), {}
    header = TrajectoryHeader(
        uid=delivery,
        dataset_epoch=0,
        order=7,
        num_answers=1,
        status="finished",
        seqlens={"input_ids": [3]},
        version_spans=[[VersionSpan("1.4", start=0, end=2)]],
    )
    return header, {"input_ids": np.full(3, value, dtype=np.int32)}


def samples_from(receiver: Receiver) -> tuple[Samples, DataStore]:
    store = DataStore()
    return Samples(store, receiver=cast(Any, receiver)), store


def test_trajectories_are_stored_and_the_master_hears_what_they_are() -> None:
    samples, store = samples_from(Receiver(delivered("0:a#7"), delivered("0:b#8", reason="reward_error")))
    assert samples.fetch(1) == [
        SampleMetadata(uid="0:a", keys=("input_ids",), num_tokens=[3], versions=("1.4",), order=7)
    ]
    assert samples.fetch(9) == [
        SampleMetadata(uid="0:b", keys=(), num_tokens=[], order=7, dropped_because="reward_error")
    ]
    assert store.uids == ["0:a"]


def test_a_rejected_trajectory_is_thrown_away_and_its_sender_is_told() -> None:
    receiver = Receiver(delivered("0:a#7"))
    samples, store = samples_from(receiver)
    samples.fetch(9)
    samples.reject(["0:a"], "stale")
    assert store.uids == []
    assert receiver.verdicts == [("0:a#7", "stale")]


def test_of_two_copies_the_first_one_stays() -> None:
    receiver = Receiver(delivered("0:a#7", value=1), delivered("0:a#9", value=2))
    samples, store = samples_from(receiver)
    samples.fetch(9)
    samples.reject(["0:a"], "duplicate")
    assert np.asarray(store.gather(["0:a"], ["input_ids"]).data["input_ids"]).tolist() == [1, 1, 1]
    assert receiver.verdicts == [("0:a#9", "duplicate")]


def test_a_verdict_goes_to_the_delivery_that_it_is_about_and_a_copy_is_asked_for_again() -> None:
    receiver = Receiver(delivered("0:a#7", value=1), delivered("0:a#9", value=2))
    samples, store = samples_from(receiver)
    samples.fetch(9)
    samples.reject(["0:a"], "duplicate")
    samples.reject(["0:a"], "stale")
    assert receiver.verdicts == [("0:a#9", "duplicate"), ("0:a#7", "stale"), ("0:a#9", "again")] and not store.uids
    receiver.arrived.append(delivered("0:a#9", value=2))
    assert [one.uid for one in samples.fetch(9)] == ["0:a"]
    assert store.gather(["0:a"], ["input_ids"]).data["input_ids"].tolist() == [2, 2, 2]
    samples.reject(["0:a"], "not_finite")
    assert receiver.verdicts[3:] == [("0:a#9", "not_finite")]


def test_where_the_copy_alone_lies_here_its_sender_is_asked_for_it_again() -> None:
    receiver = Receiver(delivered("0:a#9"))
    samples, store = samples_from(receiver)
    samples.fetch(9)
    samples.reject(["0:a"], "duplicate")
    samples.reject(["0:a"], "stale")  # that of another rank was
    assert receiver.verdicts == [("0:a#9", "duplicate"), ("0:a#9", "again")] and not store.uids
    samples.reject(["0:a"], "stale")
    assert len(receiver.verdicts) == 2
    receiver.arrived += [delivered("0:a#9"), delivered("0:a#11")]
    samples.fetch(9)
    samples.reject(["0:a"], "duplicate")
    samples.clear(["0:a"])
    assert receiver.forgotten == {"0:a#9", "0:a#11"} and receiver.verdicts[2:] == [("0:a#11", "duplicate")]


def test_what_was_trained_on_is_freed_without_a_word() -> None:
    receiver = Receiver(delivered("0:a#7"))
    samples, store = samples_from(receiver)
    samples.fetch(9)
    samples.clear(["0:a"])
    assert store.uids == [] and receiver.verdicts == []
    assert receiver.forgotten == {"0:a#7"}


def test_a_new_epoch_starts_with_nothing() -> None:
    receiver = Receiver(delivered("0:a#7"))
    samples, store = samples_from(receiver)
    samples.fetch(9)
    samples.forget()
    samples.start_session("2-abc")
    samples.reject(["0:a"], "stale")
    assert store.uids == [] and receiver.sessions == ["2-abc"]
    assert receiver.verdicts == []  # nobody knows that delivery any more


def test_there_are_no_rows_where_samples_are_trajectories() -> None:
    samples, _ = samples_from(Receiver())
    with pytest.raises(ValueError, match="this rank has no rows of a dataset: samples come from rollout workers"):
        loaded(samples, ["0:sum-1"])


def loaded(samples: Samples, uids: list[str]) -> list[SampleMetadata]:
    """Asks for rows as a worker does: again once there is news."""
    news = threading.Semaphore(0)
    samples.announce_to(news.release)
    while (rows := samples.load_rows(uids)) is None:
        assert news.acquire(timeout=120.0)
    return rows


class SlowRows:
    """Reads a row when it may."""

    def __init__(self) -> None:
        self.begun, self.may_go_on = threading.Event(), threading.Event()

    def load(self, uid: str) -> SequenceSample:
        self.begun.set()
        assert self.may_go_on.wait(120.0)
        return SequenceSample.from_group(uid, {"input_ids": [np.arange(3, dtype=np.int32)]})


def test_rows_that_take_long_hold_up_no_other_request() -> None:
    store, slow, news = DataStore(), SlowRows(), threading.Event()
    samples = Samples(store, rows=cast(Any, slow))
    samples.announce_to(news.set)
    assert samples.load_rows(["0:a", "0:b"]) is None and slow.begun.wait(120.0)
    assert samples.load_rows(["0:a", "0:b"]) is None, "they are read once"
    assert samples.fetch(9) == [] and not news.is_set()
    slow.may_go_on.set()
    assert news.wait(120.0)
    rows = samples.load_rows(["0:a", "0:b"])
    assert rows is not None and [row.uid for row in rows] == store.uids == ["0:a", "0:b"]


def test_a_new_epoch_waits_for_rows_that_are_being_read_and_forgets_them() -> None:
    store, slow = DataStore(), SlowRows()
    samples = Samples(store, rows=cast(Any, slow))
    assert samples.load_rows(["0:a"]) is None and slow.begun.wait(120.0)
    threading.Timer(0.2, slow.may_go_on.set).start()
    samples.forget()
    assert store.uids == []


def test_rows_are_read_when_they_are_asked_for(tmp_path: Path) -> None:
    store = DataStore()
    with context_of(*trial_of(tmp_path), "model_worker") as context:
        spec = context.specification(ModelWorkerSpec)
        with open_samples(context, spec, store) as samples:
            assert samples.fetch(9) == []
            length = len("3+1=") + len("4") + 1  # one token a character, and the end
            (metadata,) = loaded(samples, ["0:sum-3"])
            assert metadata == SampleMetadata(uid="0:sum-3", keys=("input_ids", "prompt_mask"), num_tokens=[length])
            assert store.uids == ["0:sum-3"]
            samples.clear(["0:sum-3"])
            assert store.uids == []


def test_rollout_workers_find_a_receiver_while_it_is_open(
    tmp_path: Path, as_role: Callable[[str], StreamSecurity]
) -> None:
    with context_of(*trial_of(tmp_path), "model_worker") as without_keys:
        context = replace(without_keys, security=as_role("model_worker"))
        key = context.keys.trajectory_receiver(3)
        spec = context.specification(ModelWorkerSpec).model_copy(update={"index": 3, "dataset": None})
        with open_samples(context, spec, DataStore()):
            assert context.names.get(key).startswith(f"tcp://{context.address}:")
        with pytest.raises(NameNotFoundError):
            context.names.get(key)


def test_nothing_comes_in_at_a_rank_that_takes_no_samples(tmp_path: Path) -> None:
    with context_of(*trial_of(tmp_path), "model_worker") as context:
        spec = context.specification(ModelWorkerSpec).model_copy(update={"takes_samples": False})
        with open_samples(context, spec, DataStore()) as samples:
            assert (samples.receiver, samples.rows) == (None, None)
