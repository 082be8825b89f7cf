"""Commits that are on their way while training goes on; there is at most one.

    step 7 ──begin──► ranks copy; ledger, lines, published weights as they are ──► step 8 ──► step 9 ──begin──► ...
                                │                                                                      │
                                └─ ranks write, fsync, hash ──► manifest ──► entry of the log ──settled┘
                                            └─ a disk says no ──► told; the next commit covers this one's samples, too

What is committed is decided by the entry of the trial log alone: who dies before it leaves the commit before, whose
ledger has none of the steps since, and a directory that no entry names, which a later epoch removes.
"""

import asyncio
import time
from collections.abc import Mapping

from corral.scheduling.policy_version import PolicyVersion
from corral.workers.master.disk import Disk
from corral.workers.master.durable_state import CommitMoment, DurableState
from corral.workers.master.epoch_parts import EpochParts
from corral.workers.master.notices import tell
from corral.workers.requests.messages import TrainNotice
from corral.workers.streams.closing import AsyncClosing

_MOST_FAILURES = 3  # in a row; a disk that stays full must not let an hour of training pass for nothing


class CommitFailedError(RuntimeError):
    """What ranks have to write cannot be written, again and again: what is trained now would never count."""


class Commits(AsyncClosing):
    """Begins commits, and says when they count.

    Example:
        async with Commits(parts, disk, durable) as commits:
            await commits.begin(7, version)     # returns when all is copied
            ...                                 # steps 8 and 9
            commits.check()
            await commits.settle()              # step 7 is committed, or it is known why not
    """

    def __init__(self, parts: EpochParts, disk: Disk, durable: DurableState) -> None:
        self._parts = parts
        self._disk = disk
        self._durable = durable
        self._in_flight: asyncio.Task[None] | None = None
        self.step = 0
        """Of the last commit that was begun."""
        self._failed_in_a_row = 0
        self._writing_s = 0.0

    async def close(self) -> None:
        """The epoch is over: what is on its way is left behind, unless its entry is being appended."""
        if self._in_flight is not None:
            self._in_flight.cancel()
            await asyncio.gather(self._in_flight, return_exceptions=True)

    async def begin(self, step: int, version: PolicyVersion) -> None:
        """Take the present state, and let it be written; waits for the commit before, if that is not settled.

        Raises:
            as `settle`
        """
        await self.settle()
        parts = self._parts
        with parts.presence.during("copy", waits_for=parts.gang.workers, deadline_s=parts.step_timeout_s):
            moment = await self._durable.begin_commit(step, version)
        self.step = step
        self._in_flight = asyncio.create_task(self._finish(moment))
        self._in_flight.add_done_callback(lambda _: parts.gang.news.set())

    async def settle(self) -> None:
        """Wait until nothing is on its way.

        Raises:
            CommitFailedError: no commit could be written for some time.
            GangLostError: a model worker died, or did not end in time.
            SupersededError, StoppedError, DoneError: another process decides about the trial now.
        """
        if self._in_flight is None:
            return
        parts = self._parts
        if not self._in_flight.done():
            with parts.presence.during("commit", waits_for=parts.gang.still_writing(), deadline_s=parts.step_timeout_s):
                await asyncio.wait([self._in_flight])
        task, self._in_flight = self._in_flight, None
        task.result()

    def check(self) -> None:
        """Costs nothing; raises what `settle` would, if that is known by now."""
        if self._in_flight is not None and self._in_flight.done():
            self._in_flight.result()

    def take_writing_s(self) -> float:
        """Seconds from the copy to the entry, of what was committed since this was last asked; 0.0 if nothing was."""
        writing_s, self._writing_s = self._writing_s, 0.0
        return writing_s

    async def _finish(self, moment: CommitMoment) -> None:
        started = time.monotonic()
        if problems := await self._durable.finish_commit(moment):
            await self._note_failure(moment.step, problems)
            return
        self._writing_s += time.monotonic() - started
        if self._failed_in_a_row:
            self._failed_in_a_row = 0
            await self._tell(moment.step, is_alarm=False, text=f"step {moment.step} could be committed", causes=[])
        await self._durable.remove_old_checkpoints()

    async def _note_failure(self, step: int, problems: Mapping[str, str]) -> None:
        self._failed_in_a_row += 1
        causes = [f"{worker}: {problem}" for worker, problem in sorted(problems.items())]
        text = f"step {step} could not be committed"
        await self._tell(step, is_alarm=True, text=text, causes=causes)
        if self._failed_in_a_row >= _MOST_FAILURES:
            raise CommitFailedError(f"{text}, as {_MOST_FAILURES} in a row could not: {causes[0]}")

    async def _tell(self, step: int, *, is_alarm: bool, text: str, causes: list[str]) -> None:
        details = f"the last commit is that of step {self._durable.committed_step}"
        notice = TrainNotice(topic="commit", is_alarm=is_alarm, text=text, details=details, causes=causes)
        await tell(self._parts, self._disk, notice, step=step)
