"""The master's looks and writes on the shared file system, beside its event loop.

    event loop --run(action)--> one thread --> weights' manifests, commits, metrics, what is removed
                                    ^
    LogWatch --twice a second-------+--> stop request, what others wrote into the trial log --> on_news
                                                                                            --> check, stop_requested

One thread, because the trial log is one object and its entries have an order: an action begins when the one before it
has ended. A file system that takes its time holds up what is written, and neither the streams nor the loop.
"""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, Self, TypeVar

from corral.experiments.trial.directory import TrialDirectory
from corral.experiments.trial.log import LogWriter
from corral.workers.streams.closing import AsyncClosing, cancel

logger = logging.getLogger(__name__)

_LOOK_INTERVAL_S = 0.5  # two opens each time, on a shared file system; a stop waits for the end of a step anyway
P = ParamSpec("P")
T = TypeVar("T")


class Disk(AsyncClosing):
    """A thread for everything that blocks on files.

    Example:
        async with Disk() as disk:
            digest = await disk.run(write_manifest, directory, {"version": "1.3"})
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="disk")

    async def close(self) -> None:
        # What has begun ends before anybody else uses the log: an epoch that follows, in this process, does.
        await asyncio.to_thread(self._executor.shutdown, cancel_futures=True)

    async def run(self, action: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of an action, which has the thread for itself; it goes on if the caller is cancelled."""
        return await asyncio.wrap_future(self._executor.submit(action, *args, **kwargs))


class LogWatch(AsyncClosing):
    """Whether somebody else has decided about the trial: a later claim, a stop, a request to stop.

    It saves a replaced master the rest of a step; that it cannot commit is the trial log's own doing.

    Example:
        async with LogWatch(disk, writer, trial, on_news=event.set) as watch:
            while not watch.stop_requested:
                watch.check()
                await event.wait()
    """

    def __init__(self, disk: Disk, writer: LogWriter, trial: TrialDirectory, *, on_news: Callable[[], None]) -> None:
        """on_news: called in the event loop when `check` or `stop_requested` has something to say."""
        self._on_news = on_news
        self._disk = disk
        self._writer = writer
        self._trial = trial
        self.stop_requested = False
        self._is_blind = False
        """Whether the last look failed."""

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._look_again_and_again())
        self._task.add_done_callback(lambda _: self._on_news())
        return self

    async def close(self) -> None:
        await cancel(self._task)

    def check(self) -> None:
        """Costs nothing; says what the last look saw.

        Raises:
            SupersededError, StoppedError, DoneError: this epoch is over.
        """
        if self._task.done():
            self._task.result()

    async def _look_again_and_again(self) -> None:
        while True:
            await self._disk.run(self._look)
            if self.stop_requested:
                self._on_news()
            await asyncio.sleep(_LOOK_INTERVAL_S)

    def _look(self) -> None:
        try:
            self._writer.check()
            request = self._trial.read_stop_request()
        except OSError as error:
            # The next look may see it; that a replaced master commits nothing does not rest on this.
            if not self._is_blind:
                logger.warning("the trial log cannot be looked at, and is tried again: %s", error)
            self._is_blind = True
            return
        self._is_blind = False
        # "now" is the supervisor's: it fences the log and kills.
        self.stop_requested = request is not None and not request.now
