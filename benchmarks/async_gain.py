"""What asynchrony gains with answers of heavy-tailed lengths, and what each policy for the slowest costs.

    python benchmarks/async_gain.py [--steps 60] [--trials]

A trial on a clock of its own: who may start, which server answers and what is trained on is decided by the code that
decides in a trial (Admission, ServerTable, ReadySamples); how long things take is given. Four servers make a token of
each of their rows every 10 ms, 128 rows at a time; lengths are log-normal, in part by the prompt; a server stands still
for 2 s at new weights; a train step takes 20 s for a mean batch, in proportion to its tokens. All policies have
the same prompts and draw the same lengths for the same admission.

    time       of all steps, beside eta 0
    trainer    share of the time in which it waits
    rows       share of the servers' rows that are empty
    thrown     answers begun and not trained on: too old, or cancelled
    length     mean of the answers that are trained on, beside those that the policy makes to the same prompts
    age        largest of a trained token, in versions

`--trials` runs whole trials on this machine beside it, in which agents wait for so long as answers would take.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # trials as the tests start them

from corral.scheduling.policy_version import PolicyVersion  # noqa: E402
from corral.scheduling.staleness import ReadySamples, ReorderWindow, StalenessGate, require_trainable  # noqa: E402
from corral.workers.data.answer_seed import AnswerSeeds  # noqa: E402
from corral.workers.manager.admission import Admission  # noqa: E402
from corral.workers.manager.routing import Server, ServerTable  # noqa: E402
from tests.integration.evidence import check_no_token_was_too_old  # noqa: E402
from tests.integration.trial_helpers import make_material, read_lines, submit  # noqa: E402

BATCH, ANSWERS, SERVERS, ROWS = 32, 8, 4, 128
TOKEN_S, UPDATE_S, STEP_S = 0.010, 2.0, 20.0
MEDIAN, SIGMA_OF_PROMPTS, SIGMA_OF_ANSWERS, LONGEST = 500, 0.4, 0.7, 8_192
MEAN = MEDIAN * math.exp((SIGMA_OF_PROMPTS**2 + SIGMA_OF_ANSWERS**2) / 2)
WORKER = "rollout_worker/0"


@dataclass(frozen=True)
class Policy:
    """One line of the table."""

    eta: int
    window: int | None = None
    spare: int = 0

    @property
    def overtaking(self) -> int:
        return 0 if self.window is None else self.window - 1

    @property
    def most_running(self) -> int:
        """As many prompts as fill the servers' rows, if the gate admits them."""
        return min((self.eta + 1) * BATCH - self.overtaking, SERVERS * ROWS // ANSWERS)

    def __str__(self) -> str:
        window = "" if self.window is None else f", window {self.window}"
        return f"eta {self.eta}{window}" + (f", {self.spare} spare answers" if self.spare else "")


POLICIES = [
    Policy(0),
    Policy(0, spare=2),
    Policy(1),
    Policy(1, window=1),
    Policy(1, window=BATCH // 2),
    Policy(1, spare=2),
    Policy(1, window=1, spare=2),
    Policy(2),
    Policy(2, window=1),
    Policy(4),
    Policy(4, window=1),
    Policy(4, window=BATCH),
]


@dataclass(eq=False)
class Answer:
    """A row of a server, or one that waits for a row."""

    group: Group
    length: int
    ends: float = 0.0


@dataclass(eq=False)
class Group:
    """A prompt that was dealt."""

    uid: str
    order: int
    due_step: int
    answers: list[Answer] = field(default_factory=list)
    ended: list[Answer] = field(default_factory=list)
    oldest: int | None = None


@dataclass(eq=False)
class Rows:
    """What a server computes."""

    server: Server
    running: set[Answer] = field(default_factory=set)
    waiting: deque[Answer] = field(default_factory=deque)
    still_until: float = 0.0


def lengths_of(uid: str, step: int, number: int) -> list[int]:
    """Of the answers of one admission; some prompts have longer ones whenever they are asked."""
    of_prompt = Random(uid).gauss(0.0, SIGMA_OF_PROMPTS)
    draws = (Random(seed).gauss(0.0, SIGMA_OF_ANSWERS) for seed in AnswerSeeds(1, uid, step).of_group(number))
    return [min(LONGEST, 1 + int(MEDIAN * math.exp(of_prompt + draw))) for draw in draws]


class Clockwork:
    """A trial without processes."""

    def __init__(self, policy: Policy, steps: int) -> None:
        self.policy, self.now, self.num_events = policy, 0.0, itertools.count()
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.prompts = [f"0:{number}" for number in range(steps * BATCH)]
        self.settled = set[str]()
        gate = StalenessGate(
            batch_size=BATCH,
            max_staleness=policy.eta,
            max_concurrent=policy.most_running,
            overtaking=policy.overtaking,
        )
        self.admission = Admission(
            gate, passes=lambda: self.prompts, is_committed=self.settled.__contains__, trainer="master_worker/0"
        )
        self.table, self.step, self.last = ServerTable(), 0, None
        self.known = PolicyVersion(0, 0)
        window = policy.window and ReorderWindow(policy.window, self.prompts, is_settled=self.settled.__contains__)
        self.ready, self.held = ReadySamples(window or None), dict[str, Group]()
        self.unrouted: list[Group] = []
        self.is_training = False
        self.trained_lengths: list[int] = []
        self.row_s = self.wait_s = 0.0
        self.num_begun = self.oldest_age = 0
        self.rows = [Rows(self._server(number)) for number in range(SERVERS)]

    def _server(self, number: int) -> Server:
        name = f"generation_server/{number}"
        server = self.table.appeared(name, url=name, control="", incarnation="a")
        self.table.happened(server, "updating")
        self.table.happened(server, "verified", version=self.known)
        return server

    def at(self, time: float, act: Callable[[], None]) -> None:
        heapq.heappush(self.events, (time, next(self.num_events), act))

    def run(self) -> None:
        self.admission.at_version(self.known, consumed=0, workers=[WORKER])
        self.admission.report(WORKER, incarnation="a", running={}, finished={})
        while True:
            self.take_prompts()
            self.train()
            if len(self.settled) == len(self.prompts):
                return
            time, _, act = heapq.heappop(self.events)
            spent, self.now = time - self.now, time
            self.row_s += spent * sum(len(rows.running) for rows in self.rows)
            self.wait_s += spent * (not self.is_training)
            act()

    # Prompts

    def take_prompts(self) -> None:
        while self.admission.ask(WORKER, incarnation="a", last=self.last) is None:
            allocation = dict(self.admission.deal()).get(WORKER)
            self.admission.leave(WORKER)
            if allocation is None or allocation.order is None:
                break
            self.last = allocation.order
            group = Group(allocation.uid, allocation.order, allocation.due_step)
            lengths = lengths_of(group.uid, group.due_step, ANSWERS + self.policy.spare)
            group.answers = [Answer(group, length) for length in lengths]
            self.unrouted.append(group)
        self.unrouted = [group for group in self.unrouted if not self.route(group)]

    def route(self, group: Group) -> bool:
        least = self.admission.least_version(group.due_step)
        server = self.table.route(group.uid, tokens=1, version=self.known, least_step=least)
        if server is None:
            return False
        rows = next(rows for rows in self.rows if rows.server is server)
        rows.waiting.extend(group.answers)
        self.fill(rows)
        return True

    def fill(self, rows: Rows) -> None:
        while rows.waiting and len(rows.running) < ROWS and self.now >= rows.still_until:
            answer = rows.waiting.popleft()
            rows.running.add(answer)
            self.num_begun += 1
            assert rows.server.version is not None
            step, group = rows.server.version.step, answer.group
            group.oldest = step if group.oldest is None else min(step, group.oldest)
            answer.ends = self.now + answer.length * TOKEN_S
            self.at(answer.ends, partial(self.end, rows, answer))

    def end(self, rows: Rows, answer: Answer) -> None:
        if answer not in rows.running:
            return  # cancelled
        if answer.ends > self.now:  # it stood still in between
            self.at(answer.ends, partial(self.end, rows, answer))
            return
        group = answer.group
        rows.running.remove(answer)
        group.ended.append(answer)
        if len(group.ended) == ANSWERS:
            rows.running -= set(group.answers)
            rows.waiting = deque(other for other in rows.waiting if other.group is not group)
            self.table.finished(group.uid)
            self.admission.finish(WORKER, group.uid, order=group.order, outcome="finished")
            self.held[group.uid] = group
            assert group.oldest is not None
            self.ready.add(group.uid, order=group.order, head_version=group.oldest)
        self.fill(rows)

    # The trainer

    def train(self) -> None:
        if self.is_training:
            return
        remaining = len(self.prompts) - len(self.settled)
        decision = self.ready.take(version=self.step, eta=self.policy.eta, batch_size=BATCH, remaining=remaining)
        for uid in decision.stale:
            self.admission.finish(WORKER, uid, order=self.held.pop(uid).order, outcome="again")
        if not decision.batch:
            return
        tokens = 0
        for uid in decision.batch:
            group = self.held.pop(uid)
            assert group.oldest is not None
            require_trainable(uid, oldest=group.oldest, trainer_version=self.step, eta=self.policy.eta)
            self.oldest_age = max(self.oldest_age, self.step - group.oldest)
            lengths = [answer.length for answer in group.ended]
            self.trained_lengths += lengths
            tokens += sum(lengths)
        self.is_training = True
        self.at(self.now + STEP_S * tokens / (BATCH * ANSWERS * MEAN), partial(self.publish, decision.batch))

    def publish(self, batch: tuple[str, ...]) -> None:
        self.is_training = False
        self.step += 1
        self.settled.update(batch)
        self.known = PolicyVersion(1, self.step) if self.step else self.known
        self.admission.note_commit(batch)
        self.admission.at_version(self.known, consumed=len(self.settled), workers=[WORKER])
        for rows in self.rows:
            rows.still_until = self.now + UPDATE_S
            for answer in rows.running:
                answer.ends += UPDATE_S
            self.table.happened(rows.server, "updating")
            self.at(rows.still_until, partial(self.updated, rows, self.known))

    def updated(self, rows: Rows, version: PolicyVersion) -> None:
        self.table.happened(rows.server, "verified", version=version)
        self.fill(rows)


def on_the_clock(steps: int) -> Iterator[str]:
    yield f"{'':34}{'time':>8}{'gain':>7}{'trainer':>9}{'rows':>7}{'thrown':>8}{'length':>8}{'age':>5}"
    first = None
    for policy in POLICIES:
        trial = Clockwork(policy, steps)
        trial.run()
        first = first or trial.now
        usual = [length for order, uid in enumerate(trial.prompts) for length in lengths_of(uid, order, ANSWERS)]
        thrown = 1.0 - len(trial.trained_lengths) / trial.num_begun
        length = (sum(trial.trained_lengths) / len(trial.trained_lengths)) / (sum(usual) / len(usual))
        empty = 1.0 - trial.row_s / (trial.now * SERVERS * ROWS)
        yield (
            f"{policy!s:34}{trial.now:7.0f}s{first / trial.now:6.2f}x{trial.wait_s / trial.now:9.0%}{empty:7.0%}"
            f"{thrown:8.1%}{length:8.2f}{trial.oldest_age:5}"
        )


def on_this_machine() -> Iterator[str]:
    """Whole trials: 160 prompts in steps of 8, of an untrained model of some ten thousand weights."""
    yield f"{'':34}{'time':>8}{'gain':>7}{'trainer':>9}{'places':>7}{'thrown':>8}{'length':>8}{'age':>5}"
    first = None
    with tempfile.TemporaryDirectory() as folder:
        material = make_material(Path(folder))
        for number, policy in enumerate([Policy(0), Policy(1), Policy(1, window=1), Policy(4), Policy(4, window=1)]):
            answers = Path(folder) / f"answers-{number}"
            window = {} if policy.window is None else {"rollout.reorder_window": policy.window}
            trial = submit(
                "grpo",
                Path(folder) / str(number),
                material,
                num_rows=160,
                environment={"CORRAL_TEST_ANSWERS": str(answers)},
                overrides={
                    "rollout.agent": "slow_agents:heavy_tailed",
                    "rollout.agent_processes": 1,
                    "rollout.max_head_offpolicyness": policy.eta,
                    "rollout.max_concurrent_rollouts": min(policy.eta + 1, 2) * 8,
                    "control.commit_every": "5 steps",
                    "evaluation": "null",  # whose answers are no prompts
                    **window,
                },
            )
            try:
                trial.wait_for_end()
            finally:
                trial.close()
            lines = [line for line in trial.metrics() if "time/train_s" in line]
            wall_s = lines[-1]["time"] - lines[0]["time"]
            waited_s = sum(line["time/wait_s"] for line in lines[1:])
            made = read_lines(answers)
            trained = {line["id"]: line["seconds"] for line in made}  # of those issued again, the last
            usual = {line["id"]: line["seconds"] for line in reversed(made)}
            first = first or wall_s
            places = min(policy.eta + 1, 2) * 8
            busy = sum(line["seconds"] for line in made) / (places * wall_s)
            yield (
                f"{policy!s:34}{wall_s:7.0f}s{first / wall_s:6.2f}x{waited_s / wall_s:9.0%}{1.0 - busy:7.0%}"
                f"{1.0 - len(trained) / len(made):8.1%}{sum(trained.values()) / sum(usual.values()):8.2f}"
                f"{check_no_token_was_too_old(trial, eta=policy.eta):5}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="train steps on the clock")
    parser.add_argument("--trials", action="store_true", help="whole trials on this machine as well")
    arguments = parser.parse_args()
    for line in on_the_clock(arguments.steps):
        print(line, flush=True)
    if arguments.trials:
        for line in on_this_machine():
            print(line, flush=True)


if __name__ == "__main__":
    main()
