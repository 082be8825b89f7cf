"""The staleness bound: which prompts start, which samples are trained on, and that neither ever gets stuck."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corral.scheduling.staleness import (
    BatchDecision,
    ReadySamples,
    ReorderWindow,
    StalenessGate,
    StaleTokenError,
    is_trainable,
    require_trainable,
)


def open_gate(*, batch_size: int = 2, max_staleness: int = 0, max_concurrent: int = 99) -> StalenessGate:
    return StalenessGate(batch_size=batch_size, max_staleness=max_staleness, max_concurrent=max_concurrent)


def admit_all(gate: StalenessGate) -> list[str]:
    """Admit prompts p0, p1, ... until the gate closes."""
    admitted = []
    while gate.admit(f"p{gate.accepted + gate.running}") is not None:
        admitted.append(f"p{gate.accepted + gate.running - 1}")
    return admitted


@pytest.mark.parametrize(("eta", "version", "admitted"), [(0, 0, 2), (0, 1, 4), (1, 0, 4), (3, 2, 12)])
def test_the_gate_admits_eta_plus_version_plus_one_batches(eta: int, version: int, admitted: int) -> None:
    gate = open_gate(max_staleness=eta)
    gate.set_version(version)
    assert gate.capacity == admitted
    assert len(admit_all(gate)) == admitted
    assert gate.capacity == 0


def test_stale_rollouts_are_not_admitted() -> None:
    gate = open_gate(max_staleness=1)
    for uid in admit_all(gate):
        gate.finish(uid)
    assert (gate.accepted, gate.running) == (4, 0)
    assert gate.admit("next") is None
    gate.set_version(1)
    assert gate.admit("next") == 4


def test_no_more_run_than_may_run_at_once() -> None:
    gate = open_gate(batch_size=8, max_concurrent=3)
    assert admit_all(gate) == ["p0", "p1", "p2"]
    gate.finish("p1")
    assert gate.admit("p3") == 3
    assert gate.admit("p4") is None


def test_a_closed_gate_says_why() -> None:
    gate = StalenessGate(batch_size=64, max_staleness=1, max_concurrent=128)
    assert gate.explain() == "open for 128: accepted 0 + running 0 < (eta 1 + version 0 + 1) x 64"
    for uid in admit_all(gate):
        gate.finish(uid)
    assert gate.explain() == "closed: accepted 128 + running 0 >= (eta 1 + version 0 + 1) x 64"
    busy = open_gate(batch_size=8, max_concurrent=2)
    admit_all(busy)
    assert busy.explain() == "closed: running 2 >= max_concurrent 2"


def test_dropped_samples_free_their_place() -> None:
    gate = open_gate()
    admit_all(gate)
    gate.finish("p0")
    gate.drop("p0")
    gate.drop("p1")
    assert (gate.running, gate.accepted, gate.capacity) == (0, 0, 2)
    assert gate.admit("p0") == 2  # as if new: its tokens will be


def test_events_that_arrive_twice_count_once() -> None:
    gate = open_gate(max_staleness=1)
    assert [gate.admit("a"), gate.admit("a"), gate.admit("b")] == [0, 0, 1]
    for event, arguments in [
        (gate.finish, "a"), (gate.drop, "b"), (gate.finish, "b"), (gate.consume, ["a"]),
        (gate.drop, "a"), (gate.set_version, 1),
    ]:  # fmt: skip
        event(arguments)
        event(arguments)
    gate.set_version(0)
    assert (gate.running, gate.accepted, gate.consumed, gate.version) == (0, 1, 1, 1)


def test_a_sample_trained_before_its_finish_event_counts_once() -> None:
    gate = open_gate()
    gate.admit("a")
    gate.consume(["a"])
    gate.finish("a")
    assert (gate.running, gate.accepted) == (0, 1)


def test_a_finished_sample_cannot_start_again_before_it_is_dropped() -> None:
    gate = open_gate()
    gate.admit("a")
    gate.finish("a")
    with pytest.raises(ValueError, match="'a' has finished already"):
        gate.admit("a")


def test_a_restarted_manager_counts_as_the_old_one_did() -> None:
    old = open_gate(batch_size=2, max_staleness=1)
    for uid in admit_all(old):
        if uid != "p3":
            old.finish(uid)
    old.consume(["p0", "p1"])
    old.set_version(1)
    new = open_gate(batch_size=2, max_staleness=1)
    new.rebuild(version=1, consumed=2)
    new.adopt("p2", order=2, is_finished=True)
    new.adopt("p3", order=3, is_finished=False)
    assert (new.running, new.accepted, new.capacity) == (old.running, old.accepted, old.capacity)
    assert [new.order_of("p2"), new.order_of("p3"), new.admit("p4")] == [2, 3, old.admit("p4")]


def test_order_numbers_go_on_after_those_of_consumed_samples() -> None:
    gate = open_gate()
    gate.rebuild(version=3, consumed=6)
    assert gate.admit("a") == 6


def test_a_worker_that_reports_late_is_counted_although_the_gate_is_closed() -> None:
    gate = open_gate(batch_size=1)
    gate.admit("a")
    gate.adopt("b", order=7, is_finished=False)
    gate.adopt("c", order=5, is_finished=True)
    gate.adopt("c", order=5, is_finished=False)  # the older of two reports, late
    assert (gate.running, gate.accepted, gate.capacity) == (2, 1, 0)
    gate.set_version(9)
    assert gate.admit("d") == 8


def test_training_from_an_earlier_commit_takes_the_version_back() -> None:
    gate = open_gate()
    gate.set_version(5)
    gate.rebuild(version=3, consumed=6)
    gate.adopt("late", order=9, is_finished=True)
    assert (gate.version, gate.accepted, gate.capacity) == (3, 7, 1)


def ready(*samples: tuple[str, int, int]) -> ReadySamples:
    """Samples as (uid, order, head_version)."""
    made = ReadySamples()
    for uid, order, head_version in samples:
        made.add(uid, order=order, head_version=head_version)
    return made


@pytest.mark.parametrize(
    ("min_version", "trainer_version", "eta", "trainable"),
    [(5, 5, 0, True), (4, 5, 0, False), (4, 5, 1, True), (3, 5, 1, False), (6, 5, 1, False)],
)
def test_only_what_is_at_most_eta_versions_old_is_trainable(
    min_version: int, trainer_version: int, eta: int, trainable: bool
) -> None:
    assert is_trainable(min_version, trainer_version, eta) is trainable


def test_what_is_not_trainable_is_refused_with_its_numbers() -> None:
    require_trainable("0:a", oldest=4, trainer_version=5, eta=1)
    with pytest.raises(StaleTokenError, match="sample 0:a .* at version 7: .* of version 5, 2 versions ago, .* 0 to 1"):
        require_trainable("0:a", oldest=5, trainer_version=7, eta=1)


def test_a_gate_leaves_room_for_those_that_may_overtake() -> None:
    gate = StalenessGate(batch_size=4, max_staleness=1, max_concurrent=99, overtaking=3)
    assert gate.capacity == 5
    assert gate.explain() == "open for 5: accepted 0 + running 0 < (eta 1 + version 0 + 1) x 4 - overtaking 3"
    due = [(gate.due_step, gate.admit(f"p{number}"))[0] for number in range(5)]
    assert due == [0, 1, 1, 1, 1] and [gate.least_version(step) for step in (0, 1)] == [-1, 0]


def window_of(size: int, settled: set[str] | None = None) -> ReorderWindow:
    prompts = [f"p{number}" for number in range(8)]
    return ReorderWindow(size, prompts, is_settled=(settled or set()).__contains__)


def test_a_sample_waits_for_older_ones_that_are_further_behind_than_its_window() -> None:
    samples = ReadySamples(window_of(2))
    for order, uid in enumerate(["p2", "p1"]):
        samples.add(uid, order=order, head_version=0)
    assert samples.take(version=0, eta=3, batch_size=2, remaining=8) == BatchDecision(
        batch=None, waiting_for=1, behind="p0"
    )
    samples.add("p0", order=9, head_version=0)  # issued again, it has its place
    assert samples.take(version=0, eta=3, batch_size=2, remaining=8).batch == ("p0", "p1")


def test_what_is_settled_keeps_nobody_waiting_and_what_was_given_up_does_again() -> None:
    settled = {"p0"}
    samples = ReadySamples(window_of(1, settled))
    samples.add("p1", order=1, head_version=0)
    samples.add("p2", order=2, head_version=4)
    assert samples.take(version=4, eta=1, batch_size=1, remaining=7) == BatchDecision(
        batch=None, stale=("p1",), waiting_for=1, behind="p1"
    )
    settled.add("p1")
    assert samples.take(version=4, eta=1, batch_size=1, remaining=6).batch == ("p2",)


def test_nobody_waits_for_a_sample_where_all_that_may_be_made_is_there() -> None:
    samples = ReadySamples(window_of(1))
    for number in (1, 2, 3):
        samples.add(f"p{number}", order=number, head_version=0)
    assert samples.take(version=0, eta=1, batch_size=2, remaining=8).batch is None
    samples.add("p4", order=4, head_version=0)
    assert samples.take(version=0, eta=1, batch_size=2, remaining=8).batch == ("p1", "p2")


def test_a_sample_of_no_prompt_of_the_run_is_an_error() -> None:
    with pytest.raises(ValueError, match="'q' is no prompt of this run"):
        ReadySamples(window_of(1)).add("q", order=0, head_version=0)


def test_the_oldest_samples_are_trained_first() -> None:
    samples = ready(("a", 2, 1), ("c", 0, 1), ("b", 1, 1))
    decision = samples.take(version=1, eta=1, batch_size=2, remaining=10)
    assert decision == BatchDecision(batch=("c", "b"))


def test_stale_samples_are_named_and_replaced_by_younger_ones() -> None:
    samples = ready(("old", 0, 1), ("a", 1, 2), ("b", 2, 3))
    decision = samples.take(version=3, eta=1, batch_size=2, remaining=10)
    assert decision == BatchDecision(batch=("a", "b"), stale=("old",))


def test_too_few_samples_wait_for_the_rest() -> None:
    decision = ready(("old", 0, 0), ("a", 1, 3)).take(version=3, eta=1, batch_size=3, remaining=10)
    assert decision == BatchDecision(batch=None, stale=("old",), waiting_for=2)


def test_samples_of_a_version_that_the_trainer_has_not_made_are_held_back() -> None:
    decision = ready(("a", 0, 4), ("b", 1, 3)).take(version=3, eta=1, batch_size=2, remaining=10)
    assert decision == BatchDecision(batch=None, waiting_for=1)


def test_the_last_batch_is_smaller_and_waits_for_all_that_remain() -> None:
    assert ready(("a", 0, 1)).take(version=1, eta=0, batch_size=4, remaining=2).waiting_for == 1
    samples = ready(("a", 0, 1), ("b", 1, 1))
    assert samples.take(version=1, eta=0, batch_size=4, remaining=2).batch == ("a", "b")
    assert ready().take(version=1, eta=0, batch_size=4, remaining=0) == BatchDecision(batch=None)


def test_a_stale_sample_still_remains_to_be_trained() -> None:
    decision = ready(("old", 0, 0), ("a", 1, 5)).take(version=5, eta=0, batch_size=4, remaining=2)
    assert decision == BatchDecision(batch=None, stale=("old",), waiting_for=1)


def test_samples_counted_wrongly_are_refused() -> None:
    with pytest.raises(ValueError, match="2 samples are ready but only 1 remain"):
        ready(("a", 0, 1), ("b", 1, 1)).take(version=1, eta=0, batch_size=4, remaining=1)
    with pytest.raises(ValueError, match="ready twice"):
        ready(("a", 0, 1), ("a", 1, 1))


def slow_decision(
    held: dict[str, tuple[int, int]],
    *,
    version: int,
    eta: int,
    batch_size: int,
    remaining: int,
    window: int = 0,
    settled: frozenset[int] = frozenset(),
) -> BatchDecision:
    """What `take` must decide, by sorting everything; `held` is (order, head_version) by uid.

    Args:
        settled: orders that are not waited for.
    """
    oldest_first = sorted(held, key=lambda uid: (held[uid][0], uid))
    stale = tuple(uid for uid in oldest_first if held[uid][1] < version - eta)
    fresh = [uid for uid in oldest_first if version - eta <= held[uid][1] <= version]
    needed = min(batch_size, remaining)
    if window and len(held) - len(stale) < (eta + 1) * batch_size - (window - 1) and len(fresh) >= needed:
        here = settled | {held[uid][0] for uid in held if uid not in stale}
        first_missing = next(order for order in range(1000) if order not in here)
        fresh = [uid for uid in fresh if held[uid][0] < first_missing + window]
    if needed == 0 or len(fresh) < needed:
        return BatchDecision(batch=None, stale=stale, waiting_for=needed - len(fresh))
    return BatchDecision(batch=tuple(fresh[:needed]), stale=stale)


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 6)), max_size=8), max_size=8),
    st.integers(0, 3),
    st.integers(1, 5),
)
def test_batches_are_those_that_sorting_everything_would_give(
    arrivals: list[list[tuple[int, int]]], eta: int, batch_size: int
) -> None:
    samples, held, version = ReadySamples(), dict[str, tuple[int, int]](), 0
    for number, arrived in enumerate(arrivals):
        for index, (order, head_version) in enumerate(arrived):
            uid = f"{number}:{index}"
            samples.add(uid, order=order, head_version=head_version)
            held[uid] = (order, head_version)
        remaining = len(held) + (len(arrivals) - number - 1)  # the last batches are smaller
        expected = slow_decision(held, version=version, eta=eta, batch_size=batch_size, remaining=remaining)
        assert samples.take(version=version, eta=eta, batch_size=batch_size, remaining=remaining) == expected
        for uid in (*expected.stale, *(expected.batch or ())):
            del held[uid]
        assert len(samples) == len(held)
        version += bool(expected.batch)


@given(
    st.lists(st.tuples(st.permutations(range(12)), st.integers(0, 3)), min_size=1, max_size=1),
    st.integers(0, 3),
    st.integers(1, 4),
    st.integers(1, 6),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), min_size=12, max_size=12),
)
def test_batches_in_a_window_are_those_that_looking_at_every_prompt_would_give(
    arrivals: list[tuple[list[int], int]], eta: int, batch_size: int, size: int, ages: list[tuple[int, int]]
) -> None:
    ((order_of_arrival, num_dropped),) = arrivals
    size = min(size, eta * batch_size + 1)
    settled, held, version = set(range(num_dropped)), dict[str, tuple[int, int]](), 0
    prompts = [f"p{number:02}" for number in range(12)]
    samples = ReadySamples(ReorderWindow(size, prompts, is_settled=lambda uid: int(uid[1:]) in settled))
    for number, (age, polls) in zip(order_of_arrival, ages, strict=True):
        if number not in settled:
            held[prompts[number]] = number, max(0, version - age)
            samples.add(prompts[number], order=0, head_version=held[prompts[number]][1])
        for _ in range(polls):
            asked = {"version": version, "eta": eta, "batch_size": batch_size, "remaining": 12 - len(settled)}
            expected = slow_decision(held, **asked, window=size, settled=frozenset(settled))
            assert replace(samples.take(**asked), behind="") == expected
            for uid in (*expected.stale, *(expected.batch or ())):
                del held[uid]
            settled |= {int(uid[1:]) for uid in expected.batch or ()}
            version += bool(expected.batch)


@dataclass
class Rollout:
    """A sample as its worker knows it."""

    order: int
    head_version: int | None = None
    """None until its first token is made."""


class Simulation:
    """Prompts, workers, servers, trainer and gate; hypothesis decides what happens next, a round robin ends the run.

    The manager and the servers learn of a new version late, and events reach the manager twice.
    """

    def __init__(self, *, num_prompts: int, batch_size: int, eta: int, max_concurrent: int) -> None:
        self.gate = StalenessGate(batch_size=batch_size, max_staleness=eta, max_concurrent=max_concurrent)
        self.batch_size, self.eta, self.max_concurrent = batch_size, eta, max_concurrent
        self.waiting = [f"0:{number}" for number in range(num_prompts)]
        self.running: dict[str, Rollout] = {}
        self.ready: dict[str, Rollout] = {}
        self.samples = ReadySamples()
        self.trained: dict[str, int] = {}
        self.num_prompts = num_prompts
        self.trainer_version = self.server_version = 0
        self.num_stale = 0

    def happen(self, event: str, choice: int) -> bool:
        """Whether the event changed anything."""
        changed: bool = getattr(self, event)(choice)
        self.check()
        return changed

    def admit(self, choice: int) -> bool:
        if not self.waiting:
            return False
        uid = self.waiting[choice % len(self.waiting)]
        order = self.gate.admit(uid)
        if order is None:
            return False
        assert self.gate.admit(uid) == order
        self.waiting.remove(uid)
        self.running[uid] = Rollout(order=order)
        return True

    def generate(self, choice: int) -> bool:
        starting = [rollout for rollout in self.running.values() if rollout.head_version is None]
        if starting:
            starting[choice % len(starting)].head_version = self.server_version
        return bool(starting)

    def finish(self, choice: int) -> bool:
        complete = [uid for uid, rollout in self.running.items() if rollout.head_version is not None]
        if not complete:
            return False
        uid = complete[choice % len(complete)]
        rollout = self.ready[uid] = self.running.pop(uid)
        assert rollout.head_version is not None
        self.samples.add(uid, order=rollout.order, head_version=rollout.head_version)
        self.gate.finish(uid)
        self.gate.finish(uid)
        return True

    def fail(self, choice: int) -> bool:
        if not self.running:
            return False
        uid = sorted(self.running)[choice % len(self.running)]
        del self.running[uid]
        self.gate.drop(uid)
        self.gate.drop(uid)
        self.waiting.append(uid)
        return True

    def train(self, choice: int) -> bool:
        decision = self.samples.take(
            version=self.trainer_version,
            eta=self.eta,
            batch_size=self.batch_size,
            remaining=self.num_prompts - len(self.trained),
        )
        for uid in decision.stale:
            del self.ready[uid]
            self.gate.drop(uid)
            self.waiting.append(uid)
        self.num_stale += len(decision.stale)
        for uid in decision.batch or ():
            head_version = self.ready.pop(uid).head_version
            assert head_version is not None and 0 <= self.trainer_version - head_version <= self.eta
            assert uid not in self.trained
            self.trained[uid] = self.trainer_version
        if decision.batch:
            self.trainer_version += 1
            self.gate.consume(decision.batch)
        return bool(decision.batch or decision.stale)

    def update_servers(self, choice: int) -> bool:
        changed = self.server_version < self.trainer_version
        self.server_version = self.trainer_version
        return changed

    def tell_manager(self, choice: int) -> bool:
        before = self.gate.version
        self.gate.set_version(self.trainer_version)
        return self.gate.version > before

    def restart_manager(self, choice: int) -> bool:
        self.gate = StalenessGate(
            batch_size=self.batch_size, max_staleness=self.eta, max_concurrent=self.max_concurrent
        )
        running = {uid: rollout.order for uid, rollout in self.running.items()}
        finished = {uid: rollout.order for uid, rollout in self.ready.items()}
        self.gate.rebuild(version=self.server_version, consumed=len(self.trained))
        for uid, order in finished.items():
            self.gate.adopt(uid, order=order, is_finished=True)
        for uid, order in running.items():
            self.gate.adopt(uid, order=order, is_finished=False)
        return True

    def check(self) -> None:
        assert self.gate.running == len(self.running) <= self.max_concurrent
        assert self.gate.accepted == len(self.ready) + len(self.trained)
        orders = [rollout.order for rollout in (*self.running.values(), *self.ready.values())]
        assert len(set(orders)) == len(orders)
        assert len(self.waiting) + len(self.running) + len(self.ready) + len(self.trained) == self.num_prompts

    def run_to_the_end(self) -> None:
        """Only what always happens sooner or later: no failures, no restarts."""
        usual = ["admit", "generate", "finish", "train", "update_servers", "tell_manager"]
        while len(self.trained) < self.num_prompts:
            assert any([self.happen(event, 0) for event in usual]), f"stuck: {self.gate.explain()}"


EVENTS = ["admit", "generate", "finish", "train", "update_servers", "tell_manager", "fail", "restart_manager"]
simulations = st.builds(
    Simulation,
    num_prompts=st.integers(1, 12),
    batch_size=st.integers(1, 4),
    eta=st.integers(0, 3),
    max_concurrent=st.integers(1, 6),
)


@settings(max_examples=300)
@given(simulations, st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 20)), max_size=80))
def test_whatever_happens_the_bound_holds_nothing_leaks_and_the_run_ends(
    simulation: Simulation, events: list[tuple[str, int]]
) -> None:
    for event, choice in events:
        simulation.happen(event, choice)
    simulation.run_to_the_end()
    assert len(simulation.trained) == simulation.num_prompts
    assert (simulation.gate.running, simulation.gate.accepted) == (0, simulation.num_prompts)


def in_order(simulation: Simulation) -> Iterator[str]:
    """Events after each of which everyone knows the newest version, and of which rollouts finish in their order."""
    while len(simulation.trained) < simulation.num_prompts:
        yield from ("admit", "generate", "finish", "train", "update_servers", "tell_manager")


@given(simulations)
def test_samples_that_finish_in_order_are_never_stale(simulation: Simulation) -> None:
    for event in in_order(simulation):
        simulation.happen(event, 0)
    assert simulation.num_stale == 0


@given(st.integers(1, 4), st.integers(1, 12), st.randoms(use_true_random=False))
def test_without_staleness_a_step_trains_exactly_the_prompts_that_synchronous_training_would(
    batch_size: int, num_prompts: int, random: Random
) -> None:
    simulation = Simulation(num_prompts=num_prompts, batch_size=batch_size, eta=0, max_concurrent=num_prompts)
    prompts = list(simulation.waiting)
    while len(simulation.trained) < num_prompts:
        while simulation.happen("admit", 0):
            pass
        while simulation.happen("generate", random.randrange(100)) or simulation.happen(
            "finish", random.randrange(100)
        ):
            pass
        for event in ("train", "update_servers", "tell_manager"):
            simulation.happen(event, 0)
    assert simulation.num_stale == 0
    assert [simulation.trained[uid] for uid in prompts] == [number // batch_size for number in range(num_prompts)]
