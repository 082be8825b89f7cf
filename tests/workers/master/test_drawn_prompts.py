"""Prompts of a sampler follow from the seed and from outcomes, whatever was interrupted, and each counts once."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from pytest import approx

from corral.workers.checkpoint.ledger import Ledger, numbers_of
from corral.workers.data.prompt_weights import middling, unsolved
from corral.workers.data.prompts import split_uid
from corral.workers.master.drawn_prompts import DrawnPrompts, PromptsState, WeightTree

ROWS = [f"a/{number}" for number in range(9)] + [f"b/{number}" for number in range(4)]


async def weigh(histories: Sequence[Sequence[float]]) -> list[float]:
    return [middling(rewards) for rewards in histories]


class Run:
    """A trainer with a window of 1: batches are the first prompts that are not dropped, in the order of the draws.

    What a prompt brings follows from its uid; when it becomes known follows from `timing`.
    """

    def __init__(self, *, eta: int, seed: int, total: int) -> None:
        self.eta, self.seed, self.total = eta, seed, total
        self.ledger = Ledger(numbers_of(ROWS))
        self.trained: list[str] = []
        self.commit: tuple[dict[int, bytes], PromptsState, int] = ({}, PromptsState({}, {}), 0)
        self.go_on(None)

    def go_on(self, state: PromptsState | None) -> None:
        self.drawn = DrawnPrompts(
            ROWS,
            self.ledger,
            seed=self.seed,
            batch_size=3,
            eta=self.eta,
            total=self.total,
            sources={"a": 2.0, "b": 1.0},
            state=state,
        )

    def note_commit(self) -> None:
        self.commit = self.ledger.states(), self.drawn.state(), len(self.trained)

    def die(self) -> None:
        """All of it is forgotten but the commit."""
        states, state, num_trained = self.commit
        self.ledger, self.trained = Ledger(numbers_of(ROWS), states), self.trained[:num_trained]
        self.go_on(state)

    def drop_some(self, timing: Random) -> None:
        for uid in self.drawn.open_uids():
            if is_dropped(uid) and timing.random() < 0.5:
                self.ledger.drop(uid, "filtered: all equal")
                self.drawn.drop(uid, reward_of(uid))

    def step(self, timing: Random) -> None:
        while True:
            ready = self.drawn.open_uids()
            batch, missing = [], False
            for uid in ready:
                if is_dropped(uid):
                    missing = True
                    break
                batch.append(uid)
                if len(batch) == min(3, self.total - self.ledger.consumed_count):
                    break
            if not missing:
                break
            self.drop_some(timing)
        if batch:
            self.ledger.train(1 + len(self.trained) // 3, batch)
            self.trained += batch
            asyncio.run(self.drawn.train({uid: reward_of(uid) for uid in batch}, weigh))


def is_dropped(uid: str) -> bool:
    return Random(f"dropped {uid}").random() < 0.3


def reward_of(uid: str) -> float:
    return Random(f"reward {uid}").choice([0.0, 0.25, 0.5, 1.0])


@given(st.integers(0, 2), st.integers(0, 5), st.integers(0, 99), st.lists(st.sampled_from("cds"), max_size=12))
@settings(deadline=None, max_examples=50)
def test_a_trial_that_is_interrupted_anywhere_draws_what_it_would_have(
    eta: int, seed: int, moment: int, events: list[str]
) -> None:
    whole, other = (Run(eta=eta, seed=seed, total=60) for _ in range(2))
    while whole.ledger.consumed_count < 60:
        whole.step(Random(0))
    timing = Random(moment)
    for event in events:
        if event == "c":
            other.note_commit()
        elif event == "d":
            other.die()
        else:
            other.drop_some(timing)
            other.step(timing)
    while other.ledger.consumed_count < 60:
        other.drop_some(timing)
        other.step(timing)
    assert other.trained == whole.trained
    assert other.ledger.states() == whole.ledger.states() and not other.drawn.open_uids()
    for row in ROWS:  # each pass of a row once, without a gap
        passes = [number for number, held in whole.ledger.states().passes.items() if held[0][ROWS.index(row)]]
        assert sorted(passes) == list(range(len(passes)))
    assert Counter(split_uid(uid)[1][0] for uid in map(str, whole.trained))["a"] > 0


@given(st.lists(st.tuples(st.integers(0, 6), st.sampled_from([0.0, 0.5, 1.0, 3.0])), max_size=20), st.integers(0, 9))
def test_a_tree_of_weights_draws_in_their_proportion_and_only_what_has_one(
    changes: list[tuple[int, float]], seed: int
) -> None:
    tree, again = WeightTree(7), WeightTree(7)
    for at, weight in changes:
        tree[at] = weight
    for at in range(7):
        again[at] = tree[at]
    draws = [tree.draw(Random(f"{seed}/{number}")) for number in range(200)]
    assert draws == [again.draw(Random(f"{seed}/{number}")) for number in range(200)]
    if sum(tree[at] for at in range(7)):
        assert all(tree[at] > 0 for at in draws)


def test_rows_come_as_often_as_their_weights_say() -> None:
    tree = WeightTree(3)
    tree[0], tree[2] = 6.0, 3.0
    counts = Counter(tree.draw(Random(number)) for number in range(10_000))
    assert all(abs(counts[at] / 10_000 - weight / 10) < 0.02 for at, weight in enumerate((6, 1, 3)))


def test_a_row_that_is_solved_is_retired_and_what_stands_there_is_not_drawn_again() -> None:
    ledger = Ledger(numbers_of("abcdef"))
    drawn = DrawnPrompts("abcdef", ledger, seed=3, batch_size=2, eta=0, total=40)

    async def retire(histories: Sequence[Sequence[float]]) -> list[float]:
        return [unsolved(rewards) for rewards in histories]

    seen = Counter[str]()
    while len(seen) < 6 or min(seen.values()) < 2:
        batch = drawn.open_uids()
        assert len({split_uid(uid)[1] for uid in batch}) == 2
        ledger.train(1, batch)
        seen.update(split_uid(uid)[1] for uid in batch)
        asyncio.run(drawn.train({uid: 0.0 if uid.endswith("f") else 1.0 for uid in batch}, retire))
        if seen["a"] > 1 and "a" not in {split_uid(uid)[1] for uid in drawn.open_uids()}:
            break
    rows = drawn.state().rows
    assert rows[5][0] == 1.0 and rows[0][0] == 0.0


def test_the_weights_that_ship() -> None:
    assert middling([]) == 1.0 and middling([0.5] * 4) == 1.0
    assert middling([0.0] * 9) == approx(middling([1.0] * 9)) and middling([0.0] * 9) < 0.5 < middling([0.0, 1.0])
    assert middling([7.0]) == middling([1.0])
    assert [unsolved(rewards) for rewards in ([], [1.0], [0.0, 1.0], [1.0, 1.0])] == [1.0, 1.0, 1.0, 0.0]
