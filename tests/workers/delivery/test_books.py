"""Delivery of trajectories as a simulation: senders, receivers and a network that loses, delays and cuts at any moment.

However the schedule runs, once it calms down every record that no commit covers is with a receiver of the present
session, no receiver has taken one twice in a session, and no more are ever on their way than a window takes.
"""

import random
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corral.workers.delivery.messages import Ack, SenderHello, Session, ToReceiver, ToSender, TrajectoryHeader, Verdict
from corral.workers.delivery.receiver import Outgoing, ReceiverBook
from corral.workers.delivery.sender import WINDOW, SenderBook, Sends

NUM_SENDERS, NUM_RECEIVERS = 2, 2


def header(uid: str, order: int = 0) -> TrajectoryHeader:
    return TrajectoryHeader(uid=uid, dataset_epoch=0, order=order, num_answers=1, status="finished")


@dataclass
class Wire:
    """One connection of a sender to a receiver, in both directions; None as identity means that it is down."""

    identity: bytes | None = None
    up: deque[ToReceiver] = field(default_factory=deque)
    down: deque[ToSender] = field(default_factory=deque)


class World:
    """Real books, simulated everything else."""

    def __init__(self) -> None:
        self.senders = [SenderBook() for _ in range(NUM_SENDERS)]
        self.receivers: list[ReceiverBook[str]] = []
        self.wires = {(s, r): Wire() for s in range(NUM_SENDERS) for r in range(NUM_RECEIVERS)}
        self.unnoticed: list[tuple[int, bytes]] = []
        """Connections that ended, of which the receiver has not heard yet."""
        self.reads: list[tuple[int, int, str]] = []
        """Payloads that senders are reading from their spools."""
        self.drained: dict[tuple[int, str], list[str]] = {}
        self.uncovered: list[tuple[int, str]] = []
        self.num_uids = self.num_sessions = self.num_connections = 0
        for index in range(NUM_RECEIVERS):
            self.receivers.append(ReceiverBook())
            for sender in self.senders:
                sender.add_receiver(index)
            self.new_session(index)

    def step(self, event: str, pick: int) -> None:
        {
            "offer": self.offer,
            "up": self.deliver_up,
            "down": self.deliver_down,
            "read": self.read,
            "connect": self.connect,
            "cut": self.cut,
            "notice": self.notice,
            "drain": self.drain,
            "session": self.new_session,
            "restart": self.restart_receiver,
            "cover": self.cover,
        }[event](pick)
        for sender in self.senders:
            assert all(len(receiver.on_its_way) <= WINDOW for receiver in sender._receivers.values())

    def calm_down(self) -> None:
        """Everything is connected and delivered, and receivers are drained."""
        for pick in range(len(self.wires)):
            self.connect(pick)
        for _ in range(10_000):
            busy = False
            for event in (self.notice, self.deliver_up, self.deliver_down, self.read):
                busy |= event(0)
            if not busy and not any([self.drain(pick) for pick in range(NUM_RECEIVERS)]):
                return
        raise AssertionError("the world does not calm down")

    # events; each says whether there was anything to do

    def offer(self, pick: int) -> bool:
        index = pick % NUM_SENDERS
        uid = f"0:{self.num_uids}"
        self.num_uids += 1
        self.uncovered.append((index, uid))
        self.act(index, self.senders[index].add(uid, order=self.num_uids))
        return True

    def deliver_up(self, pick: int) -> bool:
        ready = [(s, r, wire) for (s, r), wire in self.wires.items() if wire.up]
        if not ready:
            return False
        _, index, wire = ready[pick % len(ready)]
        receiver, message, identity = self.receivers[index], wire.up.popleft(), wire.identity
        assert identity is not None
        match message:
            case SenderHello():
                self.spread(index, receiver.hello(identity))
            case TrajectoryHeader():
                self.spread(index, receiver.record(identity, message.uid, message.uid))
        return True

    def deliver_down(self, pick: int) -> bool:
        ready = [(s, r, wire) for (s, r), wire in self.wires.items() if wire.down]
        if not ready:
            return False
        sender, index, wire = ready[pick % len(ready)]
        book, message = self.senders[sender], wire.down.popleft()
        match message:
            case Session():
                self.act(sender, book.session(index, message.session))
            case Ack():
                self.act(sender, book.ack(index, message))
            case Verdict():
                raise AssertionError(f"nobody judges here: {message}")
        return True

    def read(self, pick: int) -> bool:
        if not self.reads:
            return False
        sender, index, uid = self.reads.pop(pick % len(self.reads))
        if self.senders[sender].is_expected(index, uid):
            self.say(sender, index, header(uid))
        return True

    def connect(self, pick: int) -> bool:
        sender, index = sorted(self.wires)[pick % len(self.wires)]
        if self.wires[sender, index].identity is not None:
            return False
        self.num_connections += 1
        hello: ToReceiver = SenderHello()
        self.wires[sender, index] = Wire(str(self.num_connections).encode(), deque([hello]))
        return True

    def cut(self, pick: int) -> bool:
        sender, index = sorted(self.wires)[pick % len(self.wires)]
        wire = self.wires[sender, index]
        if wire.identity is None:
            return False
        self.unnoticed.append((index, wire.identity))
        self.wires[sender, index] = Wire()
        self.senders[sender].disconnected(index)
        return True

    def notice(self, pick: int) -> bool:
        if not self.unnoticed:
            return False
        index, identity = self.unnoticed.pop(pick % len(self.unnoticed))
        self.receivers[index].disconnected(identity)
        return True

    def drain(self, pick: int) -> bool:
        index = pick % NUM_RECEIVERS
        session = self.receivers[index].session
        assert session is not None
        items = self.receivers[index].drain(2)
        taken = self.drained.setdefault((index, session), [])
        assert not set(items) & set(taken), "a record was taken twice in a session"
        taken += items
        return bool(items)

    def new_session(self, pick: int) -> bool:
        self.num_sessions += 1
        index = pick % NUM_RECEIVERS
        self.spread(index, self.receivers[index].start_session(f"session {self.num_sessions}"))
        return True

    def restart_receiver(self, pick: int) -> bool:
        index = pick % NUM_RECEIVERS
        for sender in range(NUM_SENDERS):
            self.cut(sorted(self.wires).index((sender, index)))
        self.unnoticed = [(receiver, identity) for receiver, identity in self.unnoticed if receiver != index]
        self.receivers[index] = ReceiverBook()
        return self.new_session(index)

    def cover(self, pick: int) -> bool:
        if not self.uncovered:
            return False
        sender, uid = self.uncovered.pop(pick % len(self.uncovered))
        self.act(sender, self.senders[sender].forget([uid]))
        return True

    # plumbing

    def say(self, sender: int, index: int, message: ToReceiver) -> None:
        wire = self.wires[sender, index]
        if wire.identity is not None:
            wire.up.append(message)

    def act(self, sender: int, sends: Sends) -> None:
        self.reads += [(sender, index, uid) for index, uid in sends]

    def spread(self, index: int, outgoing: Outgoing) -> None:
        for identity, message in outgoing:
            for (_, receiver), wire in self.wires.items():
                if receiver == index and wire.identity == identity:
                    wire.down.append(message)


EVENTS = ["offer", "offer", "up", "up", "up", "down", "down", "down", "read", "read", "connect", "connect", "drain"]
FAULTS = ["cut", "notice", "session", "restart", "cover"]


@settings(max_examples=200)
@given(
    seed=st.integers(0, 2**32),
    fault_rate=st.sampled_from([0.02, 0.1, 0.4]),
    faults=st.sampled_from([["cover"], ["cut", "notice"], ["session"], ["restart"], ["cut", "cover"], FAULTS]),
)
def test_no_record_is_lost_whatever_breaks(seed: int, fault_rate: float, faults: list[str]) -> None:
    rng = random.Random(seed)
    world = World()
    for _ in range(300):
        event = rng.choice(faults if rng.random() < fault_rate else EVENTS)
        world.step(event, rng.randrange(1000))
    world.calm_down()
    present = {receiver.session for receiver in world.receivers}
    with_receivers = {uid for (_, session), uids in world.drained.items() if session in present for uid in uids}
    assert {uid for _, uid in world.uncovered} <= with_receivers
    for sender in world.senders:
        assert all(entry.receiver is not None for entry in sender._entries.values()), "a record waits"
        assert not any(receiver.on_its_way for receiver in sender._receivers.values())


@given(st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 1000)), max_size=120))
def test_without_faults_every_record_is_delivered_once(schedule: list[tuple[str, int]]) -> None:
    world = World()
    for event, pick in schedule:
        world.step(event, pick)
    world.calm_down()
    drained = [uid for uids in world.drained.values() for uid in uids]
    assert sorted(drained) == sorted(uid for _, uid in world.uncovered)


def connected() -> ReceiverBook[str]:
    """A receiver with one sender, "s"."""
    book: ReceiverBook[str] = ReceiverBook()
    book.start_session("1")
    book.hello(b"s")
    return book


def test_a_record_that_is_known_is_acknowledged_and_not_taken_in_again() -> None:
    book, acked = connected(), [(b"s", Ack(session="1", uid="0:a"))]
    assert book.record(b"s", "0:a", "0:a") == acked
    assert book.record(b"s", "0:a", "0:a") == acked
    assert book.drain(10) == ["0:a"]
    assert book.record(b"s", "0:a", "0:a") == acked
    assert book.drain(10) == []


def test_a_verdict_is_told_and_repeated() -> None:
    book = connected()
    book.record(b"s", "0:a", "0:a")
    verdict = (b"s", Verdict(session="1", uid="0:a", kind="stale"))
    assert book.verdict("0:a", "stale") == [verdict]
    assert book.record(b"s", "0:a", "0:a") == [verdict]
    assert book.hello(b"s") == [(b"s", Session(session="1")), verdict]


def ready(num_receivers: int = 1) -> SenderBook:
    """A sender whose receivers have all said their session, "1"."""
    book = SenderBook()
    for index in range(num_receivers):
        book.add_receiver(index)
        book.session(index, "1")
    return book


def test_a_judged_record_is_not_sent_in_the_next_session() -> None:
    book = ready()
    assert book.add("0:a", order=1) == [(0, "0:a")]
    assert book.verdict(0, Verdict(session="1", uid="0:a", kind="stale")) == (True, [])
    assert book.session(0, "2") == []
    late = Verdict(session="1", uid="0:a", kind="stale")
    assert book.verdict(0, late) == (False, []), "a verdict of an earlier session is no news"


@pytest.mark.parametrize("kind", ["duplicate", "consumed", "dropped"])
def test_what_was_held_or_trained_on_but_not_committed_is_sent_again_in_the_next_session(kind: str) -> None:
    """The copy that made it a duplicate is gone with its session, and so is the train step that no commit covers."""
    book = ready()
    book.add("0:a", order=1)
    assert book.verdict(0, Verdict(session="1", uid="0:a", kind=kind)) == (True, [])  # type: ignore[arg-type]
    assert book.session(0, "2") == [(0, "0:a")]


def test_a_record_that_is_asked_for_again_is_sent_and_taken_in_once_more_even_if_its_sender_was_away() -> None:
    sender, receiver = ready(), connected()
    assert sender.add("0:a", order=1) == [(0, "0:a")]
    receiver.record(b"s", "0:a", "first")
    assert receiver.drain(9) == ["first"]
    receiver.disconnected(b"s")
    receiver.verdict("0:a", "duplicate")
    assert receiver.verdict("0:a", "again") == []
    (_, again) = receiver.hello(b"s")[1]
    assert isinstance(again, Verdict)
    sender.ack(0, Ack(session="1", uid="0:a"))
    assert sender.verdict(0, again) == (False, [(0, "0:a")])
    assert receiver.record(b"s", "0:a", "second") == [(b"s", Ack(session="1", uid="0:a"))]
    assert receiver.drain(9) == ["second"]


def test_a_broken_connection_keeps_its_records_and_other_records_go_elsewhere() -> None:
    book = ready(2)
    assert book.add("0:a", order=0) == [(0, "0:a")]
    book.disconnected(0)
    assert book.add("0:b", order=2) == [(1, "0:b")]
    assert book.session(0, "1") == [(0, "0:a")]


def test_a_window_holds_records_back_until_one_is_taken_in() -> None:
    book = ready()
    sent = [send for order in range(2 * WINDOW) for send in book.add(f"0:{order}", order=order)]
    assert sent == [(0, f"0:{order}") for order in range(WINDOW)]
    assert book.ack(0, Ack(session="1", uid="0:1")) == [(0, f"0:{WINDOW}")]


@pytest.mark.parametrize("num_senders", [1, 3, 64])
def test_few_records_of_many_senders_are_spread_over_all_receivers(num_senders: int) -> None:
    """Admission numbers are of the trial: whoever made a record, its turn follows from its number."""
    senders = [ready(64) for _ in range(num_senders)]
    receivers = [senders[order % num_senders].add(f"0:{order}", order=order)[0][0] for order in range(64)]
    assert sorted(receivers) == list(range(64))
