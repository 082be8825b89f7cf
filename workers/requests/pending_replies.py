"""PendingReplies: what has come, and what is still to come, of one request to some workers.

RequestClient.post() ──what each worker was told──► await_reply() ──► frames_for(): to tell it again
RequestClient, on a reply, a death, a deadline ──payload or error, once for each worker──► end()
                                                                                             │
results(): all payloads, or the first error ◄── one future ──────────────────────────────────┘
"""

import asyncio
from collections.abc import Callable, Iterable

from corral.workers.requests.messages import ReplyPayload
from corral.workers.streams.codec import Buffer
from corral.workers.streams.errors import StreamError


class PendingReplies:
    """Replies that are on their way, of one request to some workers. Belongs to the client's loop."""

    def __init__(self, workers: Iterable[str], *, request_id: str, asked: str) -> None:
        """
        Args:
            asked: the request, for messages: "TrainStep 3:17".
        """
        self.request_id = request_id
        self.asked = asked
        self._missing: dict[str, list[Buffer]] = {worker: [] for worker in workers}
        self._workers = tuple(self._missing)
        self._payloads: dict[str, ReplyPayload] = {}
        self._deadline: asyncio.TimerHandle | None = None
        # One future for all of them: a future and a deadline per worker would cost more than the messages.
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._done.add_done_callback(_mark_seen)
        if not self._missing:
            self._done.set_result(None)

    @property
    def is_complete(self) -> bool:
        """Whether a payload or an error has come of every worker."""
        return not self._missing

    @property
    def missing(self) -> tuple[str, ...]:
        """The workers of which neither a payload nor an error has come."""
        return tuple(self._missing)

    def await_reply(self, worker: str, frames: list[Buffer]) -> None:
        """This is what the worker is told."""
        self._missing[worker] = frames

    def frames_for(self, worker: str) -> list[Buffer]:
        """What a worker that is connected anew must be told again; nothing if it has answered, or was not asked."""
        return self._missing.get(worker, [])

    async def results(self) -> dict[str, ReplyPayload]:
        """Every worker's payload, or the first error.

        Raises:
            RemoteError: if a worker's handler raised.
            StaleEpochError: if a worker follows a newer master.
            PeerDeadError: if a worker's process is gone.
            StreamTimeoutError: if a worker did not answer before the deadline.
        """
        await self._done
        return {worker: self._payloads[worker] for worker in self._workers}

    def when_settled(self, callback: Callable[[], None]) -> None:
        """Call this once `results` has something to say."""
        self._done.add_done_callback(lambda _: callback())

    def expire_by(self, deadline: asyncio.TimerHandle) -> None:
        """This timer ends what is missing by then; once nothing is, it is cancelled."""
        self._deadline = deadline
        if not self._missing:
            deadline.cancel()

    def end(self, worker: str, end: ReplyPayload | StreamError) -> None:
        """What has come of a worker; what comes of it after that is late, and nobody waits for it."""
        if self._missing.pop(worker, None) is None:
            return
        if not isinstance(end, StreamError):
            self._payloads[worker] = end
        if not self._done.done():
            if isinstance(end, StreamError):
                self._done.set_exception(end)
            elif not self._missing:
                self._done.set_result(None)
        if not self._missing and self._deadline is not None:
            self._deadline.cancel()


def _mark_seen(future: "asyncio.Future[None]") -> None:
    """Whoever awaits the replies gets the error; nobody has to."""
    if not future.cancelled():
        future.exception()
