"""Delivery of trajectories as a simulation: senders, receivers and a network that loses, delays and cuts at any moment.

However the schedule runs, once it calms down every record that no commit covers is with a receiver of the present
session, no receiver has taken one twice in a session, and no receiver has ever held more than it had room for.
"""

import random
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corral.workers.delivery.messages import (
    Ack,
    Grant,
    Offer,
    Record,
    SenderHello,
    Session,
    ToReceiver,
    ToSender,
    TrajectoryHeader,
    Verdict,
    Withdraw,
)
from corral.workers.delivery.receiver import Outgoing, ReceiverBook
from corral.workers.delivery.sender_book import Action, RecordState, Send, SenderBook

RECORD_BYTES = 100
CAPACITIES = [(3, 1000), (5, 250)]  # of each receiver: one is short of records, one of bytes
NUM_SENDERS, NUM_RECEIVERS = 2, 2


def header(uid: str, order: int = 0) -> TrajectoryHeader:
    return TrajectoryHeader(uid=uid, dataset_epoch=0, order=order, num_answers=1, status="finished")


def new_receiver(index: int) -> ReceiverBook[str]:
    capacity_records, capacity_bytes = CAPACITIES[index]
    return ReceiverBook(capacity_records=capacity_records, capacity_bytes=capacity_bytes)


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
        self.reads: list[tuple[int, int, Send]] = []
        """Payloads that senders are reading from their spools."""
        self.drained: dict[tuple[int, str], list[str]] = {}
        self.uncovered: list[tuple[int, str]] = []
        self.num_uids = self.num_sessions = self.num_connections = 0
        for index in range(NUM_RECEIVERS):
            self.receivers.append(new_receiver(index))
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
        for receiver in self.receivers:
            assert receiver.credit.records >= 0
            assert receiver.credit.size_bytes >= 0

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
        self.act(index, self.senders[index].add(uid, order=self.num_uids, size_bytes=RECORD_BYTES))
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
                self.spread(index, receiver.hello(identity, message.sender))
            case Offer():
                self.spread(index, receiver.offer(identity, message))
            case Withdraw():
                self.spread(index, receiver.withdraw(message))
            case Record():
                self.spread(index, receiver.record(identity, message, message.header.uid, RECORD_BYTES))
        return True

    def deliver_down(self, pick: int) -> bool:
        ready = [(s, r, wire) for (s, r), wire in self.wires.items() if wire.down]
        if not ready:
            return False
        sender, index, wire = ready[pick % len(ready)]
        book, message = self.senders[sender], wire.down.popleft()
        match message:
            case Session():
                self.act(sender, book.session(index, message))
            case Grant():
                self.act(sender, book.grant(index, message))
            case Ack():
                self.act(sender, book.ack(index, message))
            case Verdict():
                raise AssertionError(f"nobody judges here: {message}")
        return True

    def read(self, pick: int) -> bool:
        if not self.reads:
            return False
        sender, index, send = self.reads.pop(pick % len(self.reads))
        if self.senders[sender].is_expected(index, send.session, send.uid):
            self.say(sender, index, Record(session=send.session, header=header(send.uid)))
        return True

    def connect(self, pick: int) -> bool:
        sender, index = sorted(self.wires)[pick % len(self.wires)]
        if self.wires[sender, index].identity is not None:
            return False
        self.num_connections += 1
        hello: ToReceiver = SenderHello(sender=str(sender))
        self.wires[sender, index] = Wire(str(self.num_connections).encode(), deque([hello]))
        return True

    def cut(self, pick: int) -> bool:
        sender, index = sorted(self.wires)[pick % len(self.wires)]
        wire = self.wires[sender, index]
        if wire.identity is None:
            return False
        self.unnoticed.append((index, wire.identity))
        self.wires[sender, index] = Wire()
        self.act(sender, self.senders[sender].disconnected(index))
        return True

    def notice(self, pick: int) -> bool:
        if not self.unnoticed:
            return False
        index, identity = self.unnoticed.pop(pick % len(self.unnoticed))
        self.spread(index, self.receivers[index].disconnected(identity))
        return True

    def drain(self, pick: int) -> bool:
        index = pick % NUM_RECEIVERS
        session = self.receivers[index].session
        assert session is not None
        items, outgoing = self.receivers[index].drain(2)
        taken = self.drained.setdefault((index, session), [])
        assert not set(items) & set(taken), "a record was taken twice in a session"
        taken += items
        self.spread(index, outgoing)
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
        self.receivers[index] = new_receiver(index)
        return self.new_session(index)

    def cover(self, pick: int) -> bool:
        if not self.uncovered:
            return False
        sender, uid = self.uncovered.pop(pick % len(self.uncovered))
        self.act(sender, self.senders[sender].covered([uid]))
        return True

    # plumbing

    def say(self, sender: int, index: int, message: ToReceiver) -> None:
        wire = self.wires[sender, index]
        if wire.identity is not None:
            wire.up.append(message)

    def act(self, sender: int, actions: list[Action]) -> None:
        for index, action in actions:
            if isinstance(action, Send):
                self.reads.append((sender, index, action))
            else:
                self.say(sender, index, action)

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
        assert {entry.state for entry in sender._entries.values()} <= {RecordState.ACKED}


@given(st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 1000)), max_size=120))
def test_without_faults_every_record_is_delivered_once(schedule: list[tuple[str, int]]) -> None:
    world = World()
    for event, pick in schedule:
        world.step(event, pick)
    world.calm_down()
    drained = [uid for uids in world.drained.values() for uid in uids]
    assert sorted(drained) == sorted(uid for _, uid in world.uncovered)


def connected(capacity_records: int = 3, capacity_bytes: int = 250) -> ReceiverBook[str]:
    """A receiver with one sender, "s"."""
    book: ReceiverBook[str] = ReceiverBook(capacity_records=capacity_records, capacity_bytes=capacity_bytes)
    book.start_session("1")
    book.hello(b"s", "rollout_worker/0")
    return book


def deliver(book: ReceiverBook[str], uid: str, *, size_bytes: int = 100, identity: bytes = b"s") -> list[ToSender]:
    """Offer and, if it is granted, send; the messages to the sender."""
    answers = [message for _, message in book.offer(identity, Offer(session="1", uid=uid, size_bytes=size_bytes))]
    if Grant(session="1", uid=uid) in answers:
        record = Record(session="1", header=header(uid))
        answers += [message for _, message in book.record(identity, record, uid, size_bytes)]
    return answers


def test_a_record_that_is_held_is_acknowledged_without_being_sent_again() -> None:
    book = connected()
    assert Ack(session="1", uid="0:a") in deliver(book, "0:a")
    assert deliver(book, "0:a") == [Ack(session="1", uid="0:a")]
    assert book.drain(10)[0] == ["0:a"]
    assert deliver(book, "0:a") == [Ack(session="1", uid="0:a")]
    assert book.drain(10)[0] == []


def test_room_in_bytes_is_kept_too() -> None:
    book = connected()
    deliver(book, "0:a")
    deliver(book, "0:b")
    assert deliver(book, "0:c") == []
    assert book.drain(1)[1][0] == (b"s", Grant(session="1", uid="0:c"))


def test_a_record_larger_than_all_room_comes_alone() -> None:
    book = connected()
    deliver(book, "0:a")
    assert deliver(book, "0:huge", size_bytes=10_000) == []
    assert (b"s", Grant(session="1", uid="0:huge")) in book.drain(1)[1]


def test_a_record_larger_than_its_offer_is_refused() -> None:
    book = connected()
    book.offer(b"s", Offer(session="1", uid="0:a", size_bytes=10))
    outgoing = book.record(b"s", Record(session="1", header=header("0:a")), "0:a", 11)
    assert outgoing == [(b"s", Verdict(session="1", uid="0:a", kind="malformed"))]
    assert book.credit.records == 3


def test_a_record_of_an_earlier_session_is_not_taken() -> None:
    book = connected()
    book.offer(b"s", Offer(session="1", uid="0:a", size_bytes=10))
    book.start_session("2")
    book.offer(b"s", Offer(session="2", uid="0:a", size_bytes=10))
    assert book.record(b"s", Record(session="1", header=header("0:a")), "0:a", 10) == []
    assert book.num_held == 0


def test_a_verdict_is_told_and_repeated() -> None:
    book = connected()
    deliver(book, "0:a")
    verdict = Verdict(session="1", uid="0:a", kind="stale")
    assert book.verdict("0:a", "stale") == [(b"s", verdict)]
    assert deliver(book, "0:a") == [verdict]


def test_a_forgotten_record_would_be_taken_again() -> None:
    book = connected()
    deliver(book, "0:a")
    book.drain(1)
    book.forget({"0:a"})
    assert Grant(session="1", uid="0:a") in deliver(book, "0:a")


@pytest.mark.parametrize("kind", ["stale", "malformed"])
def test_a_judged_record_is_not_offered_in_the_next_session(kind: str) -> None:
    sender = SenderBook()
    sender.add_receiver(0)
    book = connected()
    sender.session(0, Session(session="1", credit=book.credit))
    sender.add("0:a", order=1, size_bytes=10)
    assert sender.verdict(0, Verdict(session="1", uid="0:a", kind=kind))[0]  # type: ignore[arg-type]
    assert sender.session(0, Session(session="2", credit=book.credit)) == []
    late = Verdict(session="1", uid="0:a", kind="stale")
    assert sender.verdict(0, late) == (False, []), "a verdict of an earlier session is no news"


@pytest.mark.parametrize("kind", ["duplicate", "consumed"])
def test_what_was_held_or_trained_on_but_not_committed_is_offered_again_in_the_next_session(kind: str) -> None:
    """The copy that made it a duplicate is gone with its session, and so is the train step that no commit covers."""
    sender = SenderBook()
    sender.add_receiver(0)
    book = connected()
    sender.session(0, Session(session="1", credit=book.credit))
    sender.add("0:a", order=1, size_bytes=10)
    assert sender.verdict(0, Verdict(session="1", uid="0:a", kind=kind)) == (True, [])  # type: ignore[arg-type]
    assert sender.session(0, Session(session="2", credit=book.credit)) == [
        (0, Offer(session="2", uid="0:a", size_bytes=10))
    ]


def test_a_record_that_may_have_arrived_is_offered_to_the_same_receiver_again() -> None:
    sender = SenderBook()
    for index in (0, 1):
        sender.add_receiver(index)
    sender.session(0, Session(session="1", credit=connected().credit))
    sender.add("0:a", order=1, size_bytes=10)
    sender.grant(0, Grant(session="1", uid="0:a"))
    sender.session(1, Session(session="2", credit=connected().credit))
    assert sender.disconnected(0) == []
    assert sender.session(0, Session(session="1", credit=connected().credit)) == [
        (0, Offer(session="1", uid="0:a", size_bytes=10))
    ]


def test_the_oldest_record_is_offered_first() -> None:
    sender = SenderBook()
    sender.add_receiver(0)
    for order in (5, 3, 4):
        sender.add(f"0:{order}", order=order, size_bytes=10)
    offers = sender.session(0, Session(session="1", credit=connected().credit))
    assert [offer.uid for _, offer in offers if isinstance(offer, Offer)] == ["0:3", "0:4", "0:5"]


def test_the_receiver_with_most_room_is_asked() -> None:
    sender = SenderBook()
    full, empty = connected(capacity_records=1), connected(capacity_records=9)
    for index, book in enumerate((full, empty)):
        sender.add_receiver(index)
        sender.session(index, Session(session=str(index), credit=book.credit))
    for order in range(5):
        (index, _) = sender.add(f"0:{order}", order=order, size_bytes=1)[0]
        assert index == 1


def test_what_a_vanished_receiver_held_goes_to_another() -> None:
    sender = SenderBook()
    for index in (0, 1):
        sender.add_receiver(index)
    sender.session(0, Session(session="1", credit=connected().credit))
    sender.add("0:a", order=1, size_bytes=10)
    sender.ack(0, Ack(session="1", uid="0:a"))
    sender.session(1, Session(session="2", credit=connected().credit))
    assert sender.remove_receiver(0) == [(1, Offer(session="2", uid="0:a", size_bytes=10))]
