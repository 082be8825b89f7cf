"""HeldOutBook: the held-out problems of an evaluation, the workers that answer them, and the results so far.

                  deal                  answered
       open ───────────────► out ───────────────────► counted
        ▲                     │
        └── its worker is gone or another process, or does not say that it has it

One evaluation at a time, that of the newest trainer epoch that has asked for one. A rollout worker says with each
request for work which problems it has, so nobody has to remember for it: a manager that has just started learns it, and
what was dealt in an answer that got lost is dealt again.

Guarantee: each problem counts once, since the first answers to it take it out of the book, and what comes later, of
whichever worker had it before, or of another evaluation, is not in it. Pure, but for `evaluate`, by which the master
waits.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from corral.scheduling.policy_version import PolicyVersion
from corral.workers.data.held_out import added
from corral.workers.manager.routing import ServerTable
from corral.workers.requests.manager_messages import Answered, EvaluateVersion, Evaluation, HeldOutProblem


@dataclass(slots=True)
class HeldOutBook:
    """Of all held-out problems of a trial.

    Example:
        book = HeldOutBook({"": ["a", "b"]}, most_out=64)
        book.begin(EvaluateVersion(epoch=1, version="1.20"))
        problem = book.deal("rollout_worker/0")
        book.answered(Answered(problem=problem, sums={"correct": 1.0}, versions=["1.20"]))
        book.reply().num_done       # 1
    """

    row_ids: Mapping[str, Sequence[str]]
    """By name of the data set."""
    most_out: int
    """At a time: what an evaluation may take of servers that answer for training, too."""
    asked: EvaluateVersion | None = None
    _open: dict[HeldOutProblem, None] = field(default_factory=dict)
    _out: dict[HeldOutProblem, str] = field(default_factory=dict)
    """The worker that has it."""
    _sums: dict[str, dict[str, float]] = field(default_factory=dict)
    _versions: set[str] = field(default_factory=set)
    _failures: dict[str, str] = field(default_factory=dict)
    _has_ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def num_problems(self) -> int:
        return sum(map(len, self.row_ids.values()))

    @property
    def is_done(self) -> bool:
        return not self._open and not self._out

    @property
    def version(self) -> PolicyVersion | None:
        """Which a server must have reached to answer; None where nothing is to be dealt now."""
        is_wanted = self.asked is not None and self._open and len(self._out) < self.most_out
        return PolicyVersion.parse(self.asked.version) if self.asked and is_wanted else None

    def begin(self, asked: EvaluateVersion) -> bool:
        """Whether that is another evaluation than before; that of an earlier trainer epoch takes the place of none."""
        if asked == self.asked or (self.asked is not None and asked.epoch < self.asked.epoch):
            return False
        self.asked = asked
        self._open = {
            HeldOutProblem(asked.epoch, asked.version, dataset, row_id): None
            for dataset, row_ids in self.row_ids.items()
            for row_id in row_ids
        }
        self._out, self._sums, self._versions = {}, {name: {} for name in self.row_ids}, set()
        self._failures = {}
        self._has_ended.clear()
        return True

    async def evaluate(self, asked: EvaluateVersion, *, on_begin: Callable[[], None], longest_s: float) -> Evaluation:
        """How far it is, once it is complete, or after so long."""
        if self.begin(asked):
            on_begin()
        with suppress(TimeoutError):
            async with asyncio.timeout(longest_s):
                await self._has_ended.wait()
        return self.reply()

    def has(self, worker: str, problems: Collection[HeldOutProblem]) -> None:
        """A rollout worker says what it is answering: all that it has."""
        self.lose(worker, but=problems)
        for problem in problems:
            if problem in self._open:
                del self._open[problem]
                self._out[problem] = worker

    def deal(self, worker: str) -> HeldOutProblem | None:
        """The next problem, for a worker that asks for work; None if there is none to deal now."""
        if self.version is None:
            return None
        problem = next(iter(self._open))
        del self._open[problem]
        self._out[problem] = worker
        return problem

    def deal_to(
        self, workers: Iterable[str], version: PolicyVersion, table: ServerTable
    ) -> Iterator[tuple[str, HeldOutProblem]]:
        """Problems for the waiting workers, once a server has the version that is evaluated, or a later one.

        Args:
            version: the trainer's, as the manager has seen it, which may be behind what is asked for.
        """
        wanted = self.version
        if wanted is None or version.step < wanted.step or not any(table.serving(version, least_step=wanted.step)):
            return
        for worker in list(workers):
            if (problem := self.deal(worker)) is not None:
                yield worker, problem

    def answered(self, answered: Answered) -> None:
        """What came out of a problem, unless that is known already."""
        problem = answered.problem
        if problem not in self._open and self._out.pop(problem, None) is None:
            return
        self._open.pop(problem, None)
        self._sums[problem.dataset] = added(self._sums[problem.dataset], answered.sums)
        self._versions.update(answered.versions)
        if answered.failure:
            self._failures.setdefault(problem.dataset, answered.failure)
        if self.is_done:
            self._has_ended.set()

    def lose(self, worker: str, *, but: Collection[HeldOutProblem] = ()) -> None:
        """A worker has nothing any more, but for these."""
        for problem in [one for one, other in self._out.items() if other == worker and one not in but]:
            del self._out[problem]
            self._open[problem] = None

    def reply(self) -> Evaluation:
        """How far it is; what counts is complete once all problems are done."""
        assert self.asked is not None, "nothing was asked for"
        return Evaluation(
            epoch=self.asked.epoch,
            version=self.asked.version,
            num_problems=self.num_problems,
            num_done=self.num_problems - len(self._open) - len(self._out),
            sums=self._sums,
            versions=sorted(self._versions),
            failures=self._failures,
        )
