"""Gate, admission, routing and choice of batches together: whatever the fleet does, no token is too old and all ends.

    Admission ──deals──► workers ⇄ ServerTable ──► spools ──► ReadySamples ──batch──► trainer ──► version, commits
        ▲                                                          │ stale                           │
        └──────────────────────────────────────────────────────────┴─────────────────────────────────┘

Hypothesis decides what happens: prompts are dealt, servers come and go and take over versions one at a time, answers
are begun, go on elsewhere, end in any order or are filtered, deliveries wait, workers and the manager start again,
training goes back to a commit. A round robin ends the run.
"""

from dataclasses import dataclass, field
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from corral.scheduling.policy_version import Lineage, PolicyVersion
from corral.scheduling.staleness import ReadySamples, ReorderWindow, StalenessGate, require_trainable
from corral.workers.manager.admission import RECORD_GRACE_S, SPOOL_GRACE_S, Admission
from corral.workers.manager.routing import ServerTable

NUM_SERVERS = 3
MASTER = "master_worker/0"


@dataclass
class Group:
    """A prompt that was dealt, as its rollout worker has it."""

    uid: str
    order: int
    due_step: int
    versions: set[PolicyVersion] = field(default_factory=set)
    is_filtered: bool = False
    is_delivered: bool = False


@dataclass
class RolloutWorker:
    """One of them; its spool outlives it."""

    incarnation: int = 0
    is_alive: bool = True
    last: int | None = None
    running: dict[str, Group] = field(default_factory=dict)
    spool: dict[str, Group] = field(default_factory=dict)


@dataclass
class Fleet:
    """A trial without processes."""

    num_prompts: int
    batch_size: int
    eta: int
    window: int | None
    max_concurrent: int

    def __post_init__(self) -> None:
        if self.window is not None:
            self.window = min(self.window, self.eta * self.batch_size + 1)  # as a configuration has to
        self.overtaking = 0 if self.window is None else self.window - 1
        self.prompts = [f"0:{number}" for number in range(self.num_prompts)]
        self.workers = {f"rollout_worker/{number}": RolloutWorker() for number in range(2)}
        self.table = ServerTable(clock=lambda: self.now)
        self.commits: list[PolicyVersion] = []
        self.committed: dict[str, int] = {}
        """Step that trained it, 0 if it was dropped, by uid."""
        self.now, self.epoch, self.num_stale, self.most_overtaking = 0.0, 0, 0, 0
        self.start_trainer()
        self.restart_manager(0)
        for choice in range(NUM_SERVERS):
            self.replace_server(choice)

    # The trainer

    def start_trainer(self) -> None:
        self.epoch += 1
        self.lineage = Lineage(self.commits, epoch=self.epoch)
        self.step = self.commits[-1].step if self.commits else 0
        self.settled = dict(self.committed)
        self.held: dict[str, Group] = {}
        window = self.window and ReorderWindow(self.window, self.prompts, is_settled=self.settled.__contains__)
        self.ready = ReadySamples(window or None)
        for worker in self.workers.values():
            for group in worker.spool.values():
                group.is_delivered = False

    def deliver(self, choice: int) -> bool:
        records = [(worker, group) for worker in self.workers.values() for group in worker.spool.values()]
        waiting = [pair for pair in records if not pair[1].is_delivered and pair[0].is_alive]
        if not waiting:
            return False
        _, group = waiting[choice % len(waiting)]
        group.is_delivered = True
        if group.uid in self.held or group.uid in self.settled:
            return True
        if group.is_filtered:
            self.settled[group.uid] = 0
        elif not all(map(self.lineage.contains, group.versions)):
            self.reject(group.uid)
        else:
            self.held[group.uid] = group
            head = min(version.step for version in group.versions)
            self.ready.add(group.uid, order=group.order, head_version=head)
        return True

    def train(self, choice: int) -> bool:
        remaining = self.num_prompts - len(self.settled)
        decision = self.ready.take(version=self.step, eta=self.eta, batch_size=self.batch_size, remaining=remaining)
        for uid in decision.stale:
            self.num_stale += 1
            self.reject(self.held.pop(uid).uid)
        for uid in decision.batch or ():
            oldest = min(version.step for version in self.held.pop(uid).versions)
            require_trainable(uid, oldest=oldest, trainer_version=self.step, eta=self.eta)
            assert uid not in self.settled
        if decision.batch:
            self.step += 1
            self.settled |= dict.fromkeys(decision.batch, self.step)
            self.note_overtaking(decision.batch)
        return bool(decision.batch or decision.stale)

    def note_overtaking(self, batch: tuple[str, ...]) -> None:
        """How far the youngest of a batch is ahead of the oldest that is left behind and not filtered already."""
        places = {uid: place for place, uid in enumerate(self.prompts)}
        gone = {uid for worker in self.workers.values() for uid, group in worker.spool.items() if group.is_filtered}
        gone |= self.settled.keys()
        behind = min((place for uid, place in places.items() if uid not in gone), default=self.num_prompts)
        self.most_overtaking = max(self.most_overtaking, max(places[uid] for uid in batch) - behind)

    def reject(self, uid: str) -> None:
        """Whoever has sent it, a second copy as well."""
        for name, worker in self.workers.items():
            group = worker.spool.get(uid)
            if worker.is_alive and group is not None and group.is_delivered:
                del worker.spool[uid]
                self.admission.finish(name, uid, order=group.order, outcome="again")

    def commit(self, choice: int) -> bool:
        if self.settled == self.committed:
            return False
        new = [uid for uid in self.settled if uid not in self.committed]
        self.commits.append(PolicyVersion(self.epoch, self.step))
        self.committed = dict(self.settled)
        for worker in self.workers.values():
            for uid in new:
                worker.spool.pop(uid, None)
        self.admission.note_commit(
            [uid for uid in new if self.settled[uid]], [uid for uid in new if not self.settled[uid]]
        )
        return True

    def fall_back(self, choice: int) -> bool:
        self.start_trainer()
        return True

    # Manager and servers

    def restart_manager(self, choice: int) -> bool:
        gate = StalenessGate(
            batch_size=self.batch_size,
            max_staleness=self.eta,
            max_concurrent=self.max_concurrent,
            overtaking=self.overtaking,
        )
        self.admission = Admission(
            gate, passes=lambda: self.prompts, is_committed=lambda uid: uid in self.committed, trainer=MASTER
        )
        self.gate, self.known = gate, None
        self.publish(choice)
        return True

    def publish(self, choice: int) -> bool:
        version = self.lineage.version(self.step)
        if version == self.known:
            return False
        self.known = version
        self.admission.at_version(
            version,
            consumed=sum(map(bool, self.committed.values())),
            workers=[name for name, worker in self.workers.items() if worker.is_alive],
        )
        return True

    def replace_server(self, choice: int) -> bool:
        number = choice % NUM_SERVERS
        self.now += 1
        self.table.appeared(f"generation_server/{number}", url=f"u{number}", control="", incarnation=str(self.now))
        return True

    def update_server(self, choice: int) -> bool:
        needing = self.table.needing(self.known) if self.known else []
        if needing and self.known:
            server = needing[choice % len(needing)]
            self.table.happened(server, "updating")
            self.table.happened(server, "verified", version=self.known)
        return bool(needing)

    # Rollout workers

    def ask(self, choice: int, *, is_lost: bool = False) -> bool:
        name = sorted(self.workers)[choice % len(self.workers)]
        worker = self.workers[name]
        if not worker.is_alive:
            return False
        answer = lost = self.admission.ask(name, incarnation=str(worker.incarnation), last=worker.last)
        if answer is None:
            answer = dict(self.admission.deal()).get(name)
            self.admission.leave(name)
        if answer is None or is_lost:
            return False
        if answer.must_report:
            self.admission.report(
                name,
                incarnation=str(worker.incarnation),
                running={uid: group.order for uid, group in worker.running.items()},
                finished={uid: group.order for uid, group in worker.spool.items() if not group.is_filtered},
                dropped=[uid for uid, group in worker.spool.items() if group.is_filtered],
            )
            return True
        assert answer.order is not None
        assert answer.due_step <= self.gate.version + self.eta and self.gate.order_of(answer.uid) == answer.order
        assert lost is not None or self.gate.version <= answer.due_step  # others may have trained since it was lost
        worker.last = answer.order
        worker.running[answer.uid] = Group(answer.uid, answer.order, answer.due_step)
        return True

    def lose_answer(self, choice: int) -> bool:
        """The manager has answered, and the worker never hears of it."""
        return self.ask(choice, is_lost=True)

    def running(self, *, begun: bool) -> list[tuple[str, Group]]:
        pairs = [(name, group) for name, worker in self.workers.items() for group in worker.running.values()]
        return [(name, group) for name, group in pairs if bool(group.versions) is begun]

    def begin(self, choice: int) -> bool:
        return self.generate(choice, begun=False)

    def go_on(self, choice: int) -> bool:
        self.generate(choice, begun=True)
        return False  # no progress by itself

    def generate(self, choice: int, *, begun: bool) -> bool:
        groups = self.running(begun=begun)
        if not groups or self.known is None:
            return False
        _, group = groups[choice % len(groups)]
        least = (
            min(version.step for version in group.versions) if begun else self.admission.least_version(group.due_step)
        )
        server = self.table.route(group.uid, tokens=1, version=self.known, least_step=least)
        if server is None or server.version is None:
            return False
        group.versions.add(server.version)
        return True

    def end(self, choice: int, *, is_filtered: bool = False) -> bool:
        groups = self.running(begun=True)
        if not groups:
            return False
        name, group = groups[choice % len(groups)]
        group.is_filtered = is_filtered
        worker = self.workers[name]
        worker.spool[group.uid] = worker.running.pop(group.uid)
        self.table.finished(group.uid)
        outcome = "dropped" if is_filtered else "finished"
        for _ in range(1 + (choice == -1)):  # some news come twice
            self.admission.finish(name, group.uid, order=group.order, outcome=outcome)
        return True

    def filter(self, choice: int) -> bool:
        return self.end(choice, is_filtered=True)

    def fail(self, choice: int) -> bool:
        groups = self.running(begun=True)
        if not groups:
            return False
        name, group = groups[choice % len(groups)]
        del self.workers[name].running[group.uid]
        self.admission.finish(name, group.uid, order=group.order, outcome="again")
        return True

    def kill(self, choice: int) -> bool:
        worker = self.workers[sorted(self.workers)[choice % len(self.workers)]]
        worker.is_alive, worker.running, worker.last = False, {}, None
        worker.incarnation += 1
        return True

    def come_back(self, choice: int) -> bool:
        worker = self.workers[sorted(self.workers)[choice % len(self.workers)]]
        was_away, worker.is_alive = not worker.is_alive, True
        if was_away:
            worker.spool = {uid: group for uid, group in worker.spool.items() if uid not in self.committed}
            for group in worker.spool.values():
                group.is_delivered = False  # it does not know what it was told of them
        return was_away

    def lose(self, choice: int) -> bool:
        """A worker and its spool are gone for good, and another one joins."""
        name = sorted(self.workers)[choice % len(self.workers)]
        self.now += 1
        self.workers[f"rollout_worker/{self.now:.0f}"] = RolloutWorker()
        del self.workers[name]
        return True

    def look(self, choice: int) -> bool:
        self.now += (1.0, RECORD_GRACE_S, SPOOL_GRACE_S)[choice % 3]
        alive = [name for name, worker in self.workers.items() if worker.is_alive]
        return bool(self.admission.look(alive, now=self.now))

    def forget(self, choice: int) -> bool:
        """The name service knows nobody for a moment."""
        self.now += 1.0
        return bool(self.admission.look([], now=self.now))

    # All of it

    def run_to_the_end(self) -> None:
        """Only what always happens sooner or later."""
        for choice in range(len(self.workers)):
            self.come_back(choice)
        for _ in range(3):
            self.look(2)
        quiet = 0
        while len(self.settled) < self.num_prompts:
            did = [getattr(self, event)(choice) for event in USUAL for choice in range(2)]
            quiet = 0 if any(did) else quiet + 1
            assert quiet < 3, f"stuck at {self.step}: {self.gate.explain()}; {len(self.ready)} are ready"


USUAL = ["ask", "begin", "go_on", "end", "deliver", "train", "publish", "update_server", "commit", "come_back", "look"]
FAULTS = [
    *("filter", "fail", "kill", "lose", "lose_answer", "forget"),
    *("restart_manager", "replace_server", "fall_back"),
]
fleets = st.builds(
    Fleet,
    num_prompts=st.integers(1, 24),
    batch_size=st.integers(1, 4),
    eta=st.integers(0, 4),
    window=st.none() | st.integers(1, 8),
    max_concurrent=st.integers(1, 12),
)


def let_happen(fleet: Fleet, random: Random, faults: list[str]) -> None:
    """So much that servers are behind, places are full and steps are trained; each run has odds of its own."""
    odds = [random.choice((0.3, 1.0, 3.0)) for _ in USUAL]
    how_faulty = random.choice((0.0, 0.02, 0.1))
    for name in random.choices(USUAL, odds, k=random.randrange(1500)):
        fault = random.random() < how_faulty
        getattr(fleet, random.choice(faults) if fault else name)(random.choice((0, -1, random.randrange(30))))
    fleet.run_to_the_end()


@settings(max_examples=200, deadline=None)
@given(fleets, st.integers(0, 1 << 32).map(Random))
def test_whatever_the_fleet_does_no_token_is_too_old_and_every_prompt_is_settled(fleet: Fleet, random: Random) -> None:
    let_happen(fleet, random, FAULTS)


@settings(max_examples=200, deadline=None)
@given(fleets.filter(lambda fleet: fleet.window is not None), st.integers(0, 1 << 32).map(Random))
def test_with_a_window_nothing_is_too_old_in_whatever_order_answers_end_and_none_gets_further_ahead(
    fleet: Fleet, random: Random
) -> None:
    let_happen(fleet, random, ["filter", "replace_server"])
    assert fleet.num_stale == 0
    assert fleet.most_overtaking <= fleet.overtaking


def test_a_window_does_not_wait_for_a_prompt_whose_place_others_have_taken() -> None:
    """Training went back, and what it had trained on is lost with a worker, whose prompts come after all others."""
    fleet = Fleet(num_prompts=12, batch_size=2, eta=1, window=1, max_concurrent=12)
    fleet.ask(1)
    for event in ["update_server", "ask", *["ask", "begin", "end", "deliver"] * 4, "train", "train", "publish"]:
        getattr(fleet, event)(0)
    for event in ["ask"] * 5:
        getattr(fleet, event)(1)
    assert fleet.step == 2 and len(fleet.running(begun=False)) == 4
    fleet.lose(0)
    fleet.fall_back(0)
    fleet.publish(0)
    fleet.run_to_the_end()
