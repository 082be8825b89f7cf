"""Trajectories over real sockets and between real processes: nothing is lost when either end dies."""

import asyncio
import json
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from corral.scheduling.policy_version import VersionSpan
from corral.workers.delivery.messages import TrajectoryHeader, delivery_id
from corral.workers.delivery.receiver import TrajectoryReceiver
from corral.workers.delivery.sender import TrajectorySender
from corral.workers.streams import codec, security
from corral.workers.streams.codec import Tensors
from corral.workers.streams.errors import WrongTrialKeyError
from corral.workers.streams.security import StreamSecurity
from tests.workers.delivery.memory_spool import MemorySpool
from tests.workers.stream_helpers import LOOPBACK, start_stub, until, wait_until, wait_up

AsRole = Callable[[str], StreamSecurity]


def header(index: int) -> TrajectoryHeader:
    return TrajectoryHeader(
        uid=delivery_id(f"0:problem-{index}", index),
        dataset_epoch=0,
        order=index,
        num_answers=2,
        status="finished",
        seqlens={"input_ids": [30, 70]},
        version_spans=[[VersionSpan("1.3", 0, 30)], [VersionSpan("1.3", 0, 20), VersionSpan("1.4", 20, 70)]],
        scalars={"reward": 0.5},
    )


def payload(index: int) -> Tensors:
    return {"input_ids": np.full(100, index, np.int64), "rewards": np.array([0.0, 1.0], np.float32)}


def uids(receiver: TrajectoryReceiver, max_records: int = 100) -> list[str]:
    return [header.uid for header, _ in receiver.drain(max_records)]


@pytest.fixture
def receiver(as_role: AsRole) -> Iterator[TrajectoryReceiver]:
    with TrajectoryReceiver(as_role("model_worker"), address=LOOPBACK) as receiver:
        receiver.start_session("1-a")
        yield receiver


def with_sender(
    security: StreamSecurity,
    test: Callable[[TrajectorySender], Awaitable[None]],
    verdicts: list[tuple[str, str]] | None = None,
    *,
    spool: MemorySpool | None = None,
    in_spool: Sequence[int] = (),
) -> None:
    """Run a test with a sender whose spool holds some records already."""
    spool = spool or MemorySpool()
    for index in in_spool:
        spool.fill(header(index), payload(index), trial_uuid=security.trial_uuid)

    async def run() -> None:
        def note(uid: str, kind: str) -> None:
            if verdicts is not None:
                verdicts.append((uid, kind))

        async with TrajectorySender(security, spool, on_verdict=note) as sender:
            spool.num_reads.clear()
            await test(sender)

    asyncio.run(run())


async def put(sender: TrajectorySender, *indices: int) -> None:
    for index in indices:
        await sender.put(header(index), payload(index))


def waiting(sender: TrajectorySender) -> int:
    return sum(entry.receiver is None for entry in sender._book._entries.values())


def on_their_way(sender: TrajectorySender) -> int:
    return sum(len(receiver.on_its_way) for receiver in sender._book._receivers.values())


def acked(sender: TrajectorySender) -> int:
    return len(sender._book._entries) - waiting(sender) - on_their_way(sender)


async def wait_connected(sender: TrajectorySender, deadline_s: float) -> None:
    await asyncio.gather(*(wait_up(link, deadline_s) for link in sender._links.values()))


def test_a_record_arrives_as_it_was(as_role: AsRole, receiver: TrajectoryReceiver) -> None:
    async def run(sender: TrajectorySender) -> None:
        sender.set_receivers({0: receiver.endpoint})
        await put(sender, 7)
        await until(lambda: acked(sender) == 1, waiting_for="the acknowledgement")
        [(received, tensors)] = receiver.drain(10)
        assert received == header(7)
        assert tensors.keys() == payload(7).keys()
        for name, tensor in payload(7).items():
            np.testing.assert_array_equal(tensors[name], tensor)

    with_sender(as_role("rollout_worker"), run)


def test_each_record_is_announced_once_it_can_be_drained(as_role: AsRole, receiver: TrajectoryReceiver) -> None:
    announced: list[int] = []
    receiver.announce_to(lambda: announced.append(receiver.num_held))

    async def run(sender: TrajectorySender) -> None:
        sender.set_receivers({0: receiver.endpoint})
        await put(sender, 0, 1, 2)
        await until(lambda: acked(sender) == 3, waiting_for="the acknowledgements")
        assert announced == [1, 2, 3]

    with_sender(as_role("rollout_worker"), run)


def test_what_is_at_hand_is_never_read_back_and_what_is_not_is_read_once(
    as_role: AsRole, receiver: TrajectoryReceiver
) -> None:
    async def run(sender: TrajectorySender) -> None:
        await put(sender, *range(15))
        sender.set_receivers({0: receiver.endpoint})
        await until(lambda: acked(sender) == 20, waiting_for="the acknowledgements")
        assert sorted(uids(receiver)) == sorted(header(index).uid for index in range(20))
        assert spool.num_reads == Counter(f"0:problem-{index}" for index in range(15, 20))

    spool = MemorySpool()
    with_sender(as_role("rollout_worker"), run, spool=spool, in_spool=range(15, 20))


def test_a_sender_is_connected_to_hundreds_of_receivers(as_role: AsRole, receiver: TrajectoryReceiver) -> None:
    """They listen at one address here; for the sender each is a connection of its own."""

    async def run(sender: TrajectorySender) -> None:
        sender.set_receivers(dict.fromkeys(range(400), receiver.endpoint))
        await wait_connected(sender, 60)

    with_sender(as_role("rollout_worker"), run)


def test_nothing_is_taken_in_before_a_session_starts(as_role: AsRole) -> None:
    async def run(sender: TrajectorySender) -> None:
        with TrajectoryReceiver(as_role("model_worker"), address=LOOPBACK) as receiver:
            await put(sender, 1)
            sender.set_receivers({0: receiver.endpoint})
            await wait_connected(sender, 10)
            await asyncio.sleep(0.05)
            assert waiting(sender) == 1
            receiver.start_session("1-a")
            await until(lambda: acked(sender) == 1, waiting_for="the acknowledgement")

    with_sender(as_role("rollout_worker"), run)


def test_a_new_session_gets_everything_again_that_no_commit_covers(
    as_role: AsRole, receiver: TrajectoryReceiver
) -> None:
    async def run(sender: TrajectorySender) -> None:
        await put(sender, 0, 1, 2)
        sender.set_receivers({0: receiver.endpoint})
        await until(lambda: acked(sender) == 3, waiting_for="three acknowledgements")
        assert len(uids(receiver)) == 3
        assert await sender.remove(["0:problem-0"]) == ["0:problem-0"]
        await asyncio.to_thread(receiver.start_session, "2-a")
        await until(lambda: acked(sender) == 2 and receiver.num_held == 2, waiting_for="the other two, again")
        assert uids(receiver) == [header(1).uid, header(2).uid]

    with_sender(as_role("rollout_worker"), run)


def test_a_verdict_reaches_the_sender_and_ends_the_delivery(as_role: AsRole, receiver: TrajectoryReceiver) -> None:
    verdicts: list[tuple[str, str]] = []

    async def run(sender: TrajectorySender) -> None:
        await put(sender, 1)
        sender.set_receivers({0: receiver.endpoint})
        await until(lambda: acked(sender) == 1, waiting_for="the acknowledgement")
        await asyncio.to_thread(receiver.verdict, header(1).uid, "stale")
        await until(lambda: bool(verdicts), waiting_for="the verdict")
        assert verdicts == [(header(1).uid, "stale")]
        await asyncio.to_thread(receiver.start_session, "2-a")
        await asyncio.sleep(0.05)
        assert not sender._book._entries, "it would be sent again"

    with_sender(as_role("rollout_worker"), run, verdicts)


def test_a_record_whose_prompt_was_dropped_is_kept_and_has_nothing_to_train(
    as_role: AsRole, receiver: TrajectoryReceiver
) -> None:
    verdicts: list[tuple[str, str]] = []

    async def run(sender: TrajectorySender) -> None:
        await put(sender, 0, 1)
        sender.set_receivers({0: receiver.endpoint})
        await until(lambda: acked(sender) == 2, waiting_for="the acknowledgements")
        assert sender.orders("finished") == {"0:problem-0": 0, "0:problem-1": 1}
        await asyncio.to_thread(receiver.verdict, header(1).uid, "dropped")
        await until(lambda: bool(verdicts), waiting_for="the verdict")
        assert (sender.orders("finished"), sender.orders("dropped")) == ({"0:problem-0": 0}, {"0:problem-1": 1})
        await asyncio.to_thread(receiver.start_session, "2-a")
        await until(lambda: receiver.num_held == 2, waiting_for="both, again: the drop may be lost with its session")

    with_sender(as_role("rollout_worker"), run, verdicts)


def test_an_unreadable_payload_is_said_and_holds_nobody_up(as_role: AsRole, receiver: TrajectoryReceiver) -> None:
    verdicts: list[tuple[str, str]] = []

    async def run(sender: TrajectorySender) -> None:
        spool.torn = {f"0:problem-{index}" for index in range(8)}
        await put(sender, 8)
        sender.set_receivers({0: receiver.endpoint})
        await until(lambda: acked(sender) == 1, waiting_for="the readable record")
        await until(lambda: len(verdicts) == 8, waiting_for="the others, which are read at the same time")
        assert sorted(verdicts) == [(header(index).uid, "unreadable") for index in range(8)]

    spool = MemorySpool()
    with_sender(as_role("rollout_worker"), run, verdicts, spool=spool, in_spool=range(8))


def test_a_record_larger_than_a_frame_may_be_arrives_and_so_does_the_next(
    as_role: AsRole, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(security, "BULK_MESSAGE_BYTES", 8192)
    monkeypatch.setattr(codec, "FRAME_BYTES", 4096)
    experts = np.arange(5000, dtype=np.int64)

    async def run(sender: TrajectorySender) -> None:
        await sender.put(header(1), {"experts": experts})
        await put(sender, 2)
        sender.set_receivers({0: receiver.endpoint})
        await until(lambda: acked(sender) == 2, waiting_for="the acknowledgements")
        received = {header.uid: tensors for header, tensors in receiver.drain(2)}
        np.testing.assert_array_equal(received[header(1).uid]["experts"], experts)

    with TrajectoryReceiver(as_role("model_worker"), address=LOOPBACK) as receiver:
        receiver.start_session("1-a")
        with_sender(as_role("rollout_worker"), run)


def test_what_a_vanished_receiver_held_goes_to_another(as_role: AsRole, receiver: TrajectoryReceiver) -> None:
    async def run(sender: TrajectorySender) -> None:
        with TrajectoryReceiver(as_role("model_worker"), address=LOOPBACK) as vanishing:
            vanishing.start_session("1-b")
            await put(sender, 1)
            sender.set_receivers({1: vanishing.endpoint})
            await until(lambda: acked(sender) == 1, waiting_for="the acknowledgement")
        sender.set_receivers({0: receiver.endpoint})
        await until(lambda: receiver.num_held == 1, waiting_for="the record at the other receiver")
        assert spool.num_reads == {"0:problem-1": 1}

    spool = MemorySpool()
    with_sender(as_role("rollout_worker"), run, spool=spool)


def test_a_sender_of_another_trial_hears_of_it(stranger: StreamSecurity, receiver: TrajectoryReceiver) -> None:
    async def run(sender: TrajectorySender) -> None:
        sender.set_receivers({0: receiver.endpoint})
        with pytest.raises(WrongTrialKeyError, match="trajectory receiver 0"):
            await wait_connected(sender, 2.0)
        with pytest.raises(WrongTrialKeyError):
            sender.raise_failure()

    with_sender(stranger, run)


class Processes:
    """Real senders and receivers, which can be killed."""

    def __init__(self, secrets: Path, directory: Path) -> None:
        self._secrets = secrets
        self._addresses = directory / "addresses.json"
        self._addresses.write_text("{}")
        self._output = directory / "drained.jsonl"
        self._output.touch()
        self._all: list[subprocess.Popen[str]] = []

    def sender(self, name: str, count: int) -> "subprocess.Popen[str]":
        return self._start("delivery.stub_rollout_worker", self._addresses, name, count)

    def receiver(self, index: int, session: str) -> "subprocess.Popen[str]":
        return self._start("delivery.stub_receiver", self._addresses, index, session, self._output)

    def drained(self) -> list[tuple[str, str, bool]]:
        """(session, uid, whether the content was right) of every record that a receiver took out."""
        complete_lines = self._output.read_text().rpartition("\n")[0]  # the last one may still be being written
        return [tuple(json.loads(line)) for line in complete_lines.splitlines()]

    def uids(self, *sessions: str) -> list[str]:
        return [uid for session, uid, _ in self.drained() if session in sessions]

    def end(self) -> None:
        for process in self._all:
            process.kill()
            process.communicate()

    def _start(self, stub: str, *arguments: object) -> "subprocess.Popen[str]":
        self._all.append(start_stub(stub, self._secrets, *arguments))
        return self._all[-1]


@pytest.fixture
def processes(secrets_directory: Path, tmp_path: Path) -> Iterator[Processes]:
    processes = Processes(secrets_directory, tmp_path)
    yield processes
    processes.end()


def kill(process: "subprocess.Popen[str]") -> None:
    os.kill(process.pid, signal.SIGKILL)
    process.wait(10)


def test_nothing_is_lost_or_doubled_when_a_sender_and_then_the_receiver_are_killed(processes: Processes) -> None:
    """A sender's successor offers the whole spool again; within the session everything arrives once. A receiver's gets
    everything."""
    receiver = processes.receiver(0, "1-a")
    sender = processes.sender("w", 300)
    wait_until(lambda: len(processes.drained()) > 20, waiting_for="some records")
    kill(sender)
    processes.sender("w", 300)
    wait_until(lambda: len(processes.drained()) >= 300, waiting_for="the rest")
    assert sorted(processes.uids("1-a")) == sorted(f"0:w-{index}#{index}" for index in range(300))
    processes.sender("v", 150)
    wait_until(lambda: len(processes.drained()) > 320, waiting_for="some records of another")
    kill(receiver)
    processes.receiver(0, "2-b")
    wait_until(lambda: len(processes.uids("2-b")) >= 450, waiting_for="everything, again")
    expected = [f"0:{name}-{index}#{index}" for name, number in (("v", 150), ("w", 300)) for index in range(number)]
    assert sorted(processes.uids("2-b")) == sorted(expected)
    assert all(is_right for _, _, is_right in processes.drained())
