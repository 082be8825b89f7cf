"""PendingReplies: what has come, and what is still to come, of one request to some workers.

RequestClient.post() ──what each worker was told──► await_reply() ──► frames_for(): to tell it again
RequestClient, on a reply or a death; the deadline ──payload or error, once for each worker──► end()
                                                                                                │
results(): all payloads, or the first error ◄── one future ─────────────────────────────────────┘
"""

import asyncio
from collections.abc import Callable, Mapping

from corral.workers.requests.messages import ReplyPayload, Request
from corral.workers.streams.codec import Buffer
from corral.workers.streams.errors import StreamError, StreamTimeoutError


class PendingReplies:
    """Replies that are on their way, of one request to some workers. Belongs to the client's loop."""

    def __init__(
        self,
        requests: Mapping[str, Request],
        request_id: str,
        *,
        deadline_s: float,
        listed: dict[str, "PendingReplies"],
    ) -> None:
        """
        Args:
            requests: by worker.
            deadline_s: from now; what is missing then ends with a `StreamTimeoutError`.
            listed: has this under its request id for as long as something is missing.
        """
        what = "/".join(sorted({type(request).__name__ for request in requests.values()}))
        self.request_id = request_id
        self.asked = f"{what} {request_id}"
        """The request, for messages: "TrainStep 3:17"."""
        self._listed = listed
        self._missing: dict[str, list[Buffer]] = {worker: [] for worker in requests}
        self._payloads: dict[str, ReplyPayload] = {}
        # One future for all of them: a future and a deadline per worker would cost more than the messages.
        loop = asyncio.get_running_loop()
        self._done: asyncio.Future[None] = loop.create_future()
        self._done.add_done_callback(_mark_seen)
        self._deadline = loop.call_later(deadline_s, self._expire, deadline_s)
        listed[request_id] = self
        if not self._missing:
            self._complete()

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
        return self._payloads

    def when_settled(self, callback: Callable[[], None]) -> None:
        """Call this once `results` has something to say."""
        self._done.add_done_callback(lambda _: callback())

    def end(self, worker: str, end: ReplyPayload | StreamError) -> None:
        """What has come of a worker; what comes of it after that is late, and nobody waits for it."""
        if self._missing.pop(worker, None) is None:
            return
        if not isinstance(end, StreamError):
            self._payloads[worker] = end
        elif not self._done.done():
            self._done.set_exception(end)
        if not self._missing:
            self._complete()

    def _complete(self) -> None:
        self._deadline.cancel()
        self._listed.pop(self.request_id, None)
        if not self._done.done():
            self._done.set_result(None)

    def _expire(self, deadline_s: float) -> None:
        for worker in self.missing:
            self.end(worker, StreamTimeoutError(f"{worker} did not answer {self.asked} within {deadline_s:.1f} s"))


def _mark_seen(future: "asyncio.Future[None]") -> None:
    """Whoever awaits the replies gets the error; nobody has to."""
    if not future.cancelled():
        future.exception()
