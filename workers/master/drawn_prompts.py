"""DrawnPrompts: the prompts of a trial with a sampler, of which later ones follow from what earlier ones have brought.

    a step is trained ──► what stands up to its last prompt goes ──rewards──► histories of rows ──► weights
                              │                                                                       │
                              └── drawn anew until (eta + 1) batches stand there ◄────────────────────┘
    a prompt is dropped ──► where fewer than a batch are left, one is drawn in its place

What comes next follows from the seed and from outcomes, and not from when they became known: each draw has a generator
of its own, by its number; weights change with a step alone, in the order of the prompts; and that too few are left is
true of a batch, whichever worker heard of it first. Where answers come in any order, so do the outcomes, and the draws
follow them; with `rollout.reorder_window: 1` they come in one, and a trial that was interrupted draws what it would
have.

A pass of a row is a draw of it: the uid "2:gsm8k/17" is its third, so that no uid comes twice, and in the ledger a row
may be in its tenth pass while another one is in none. "No prompt is trained twice or lost" means: of each row, passes
0, 1, 2, ... are each trained or dropped once, and the ones that are not yet stand here.
"""

import random
from array import array
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from itertools import accumulate, islice
from types import MappingProxyType

import msgspec

from corral.workers.checkpoint.ledger import Ledger, numbers_of
from corral.workers.data.prompt_weights import MOST_REMEMBERED
from corral.workers.data.prompts import split_uid, turns_of_sources

_TRIES = 32  # to draw a row that does not stand there; then it may stand there twice
Weigh = Callable[[Sequence[Sequence[float]]], Awaitable[Sequence[float]]]


class WeightTree:
    """[rows] weights, of which one is drawn with a probability in proportion, and changed, in log(rows) additions.

    Every node is the sum of its two children whenever one of them changes, so it follows from the present weights alone
    and not from what they were before: who resumes has the same sums to the last bit.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._sums = array("d", [0.0]) * size + array("d", [1.0]) * size
        for node in range(size - 1, 0, -1):
            self._sums[node] = self._sums[2 * node] + self._sums[2 * node + 1]

    def __getitem__(self, at: int) -> float:
        return self._sums[self._size + at]

    def __setitem__(self, at: int, weight: float) -> None:
        node, sums = self._size + at, self._sums
        sums[node] = weight
        while node > 1:
            node //= 2
            sums[node] = sums[2 * node] + sums[2 * node + 1]

    def draw(self, generator: random.Random) -> int:
        """All alike where no weight is above 0."""
        sums, node = self._sums, 1
        if not sums[1] > 0.0:
            return generator.randrange(self._size)
        point = generator.random() * sums[1]
        while node < self._size:
            node *= 2
            if point >= sums[node] and sums[node + 1] > 0.0:
                point -= sums[node]
                node += 1
        return node - self._size


class PromptsState(msgspec.Struct, forbid_unknown_fields=True):
    """What a commit holds of them, beside the ledger."""

    ahead: dict[str, float | None]
    """Those that stand there, in order; the mean reward of one that is dropped already and had one."""
    rows: dict[int, list[float]]
    """Weight and history of every row that has one, by its number."""


class DrawnPrompts:
    """
    Example:
        drawn = DrawnPrompts(rows, ledger, seed=1, batch_size=8, eta=0, total=640)
        tell(drawn.open_uids())
        ...
        ledger.train(step, batch)
        await drawn.train(rewards_by_uid, weigh)
        tell(drawn.open_uids())
    """

    def __init__(
        self,
        row_ids: Sequence[str],
        ledger: Ledger,
        *,
        seed: int,
        batch_size: int,
        eta: int,
        total: int,
        sources: Mapping[str, float | None] = MappingProxyType({}),
        state: PromptsState | None = None,
    ) -> None:
        """
        Args:
            row_ids: in the order of sources and files.
            total: prompts of the whole trial.
            sources: weight of each source by its name, as `turns_of_sources` takes them.
            state: of a commit, which the ledger is of, too; None at the beginning.
        """
        self._row_ids, self._ledger, self._seed = row_ids, ledger, seed
        self._number_by_row = numbers_of(row_ids)
        self._batch_size, self._most, self._total = batch_size, (eta + 1) * batch_size, total
        sizes = Counter(row.partition("/")[0] if sources else "" for row in row_ids)
        self._starts = list(accumulate((sizes[name] for name in sources or ("",)), initial=0))
        self._trees = [WeightTree(sizes[name]) for name in sources or ("",)]
        state = state or PromptsState({}, {})
        self._ahead, self._rows = dict(state.ahead), dict(state.rows)
        for number, (weight, *_) in state.rows.items():
            self._weigh(number, weight)
        self._unplaced = deque(self._ahead)
        self._next_pass = Counter[str]()
        """At least so many passes of a row stand here or were consumed, for ever."""
        self._num_drawn = ledger.consumed_count + len(self.open_uids())
        self._turns = islice(turns_of_sources(sources, sizes), self._num_drawn, None)
        self._fill()

    def __contains__(self, uid: str) -> bool:
        """Whether it stands here, or was consumed; what else arrives a trainer has drawn that a failure took back."""
        return uid in self._ahead or self._ledger.consumed(uid)

    def open_uids(self) -> list[str]:
        """Those that are neither trained nor dropped, in order."""
        return [uid for uid in self._ahead if not self._ledger.consumed(uid)]

    def drawn_uids(self) -> Iterator[str]:
        """One after the other as they are drawn, for a single reader: when it ends, more may come later."""
        return iter(_Emptying(self._unplaced))

    def state(self) -> PromptsState:
        """For the commit that holds the ledger as it is now."""
        return PromptsState(dict(self._ahead), dict(self._rows))

    def drop(self, uid: str, reward: float | None) -> bool:
        """One is in the ledger as dropped, with the mean reward of its answers if they have some; whether others were
        drawn for it."""
        if uid in self._ahead:
            self._ahead[uid] = reward
        before = self._num_drawn
        self._replace()
        return self._num_drawn > before

    async def train(self, rewards: Mapping[str, float | None], weigh: Weigh) -> None:
        """These are in the ledger as trained by a step, with the mean rewards of their answers."""
        order = list(self._ahead)
        last = max(at for at, uid in enumerate(order) if uid in rewards)
        histories: dict[int, list[float]] = {}
        for uid in order[: last + 1]:
            if not self._ledger.consumed(uid):
                continue  # it was overtaken
            dropped_with, number = self._ahead.pop(uid), self._number_by_row[split_uid(uid)[1]]
            if (reward := rewards.get(uid, dropped_with)) is not None:
                history = histories.get(number) or self._rows.get(number, ())[1:]
                histories[number] = [*history, reward][-MOST_REMEMBERED:]
        weights = await weigh(list(histories.values()))
        for (number, history), weight in zip(histories.items(), weights, strict=True):
            self._rows[number] = [weight, *history]
            self._weigh(number, weight)
        self._fill()

    def _fill(self) -> None:
        while len(self._ahead) < self._most and self._draw():
            pass
        self._replace()

    def _replace(self) -> None:
        missing = self._batch_size - len(self.open_uids())
        while missing > 0 and self._draw():
            missing -= 1

    def _draw(self) -> bool:
        """Whether there is one more to draw."""
        if self._num_drawn >= self._total:
            return False
        generator, source = random.Random(f"{self._seed}/draw/{self._num_drawn}"), next(self._turns)
        self._num_drawn += 1
        tree, start = self._trees[source], self._starts[source]
        for _ in range(_TRIES):
            row = self._row_ids[start + tree.draw(generator)]
            while (uid := f"{self._next_pass[row]}:{row}") in self:
                self._next_pass[row] += 1
            dataset_epoch = self._next_pass[row]
            if not dataset_epoch or f"{dataset_epoch - 1}:{row}" not in self._ahead:
                break
        self._ahead[uid] = None
        self._unplaced.append(uid)
        return True

    def _weigh(self, number: int, weight: float) -> None:
        source = bisect_right(self._starts, number) - 1
        self._trees[source][number - self._starts[source]] = weight


class _Emptying(Iterator[str]):
    def __init__(self, waiting: deque[str]) -> None:
        self._waiting = waiting

    def __next__(self) -> str:
        if not self._waiting:
            raise StopIteration
        return self._waiting.popleft()
