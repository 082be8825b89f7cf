"""RequestClient: the master's end of the request stream.

    post({worker: request}) --one request id--> workers --replies--> PendingReplies.results()
    attach({worker: request}) --with the next message to this worker, without a reply of its own

What each rank gets of its own is encoded for it alone, and what several get alike is encoded once: bytes on the wire
grow with what is said, not with the number of ranks times all of it.

A worker is known from its Hello on:

    HERE --disconnected--> MISSING --Hello, same incarnation--> HERE     unanswered requests are sent again, same ids
                              +------after reconnect_grace_s--> DEAD     PeerDeadError for everyone who waits for it
    any --Hello, new incarnation--> HERE                                 PeerDeadError for requests to the old process
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass

from corral.workers.requests.messages import (
    FromWorker,
    Hello,
    PiggybackedRequest,
    ReplyPayload,
    Request,
    StaleReply,
    WorkerRequest,
)
from corral.workers.streams.calls import ErrorReply, RequestId, remote_error
from corral.workers.streams.closing import Closing
from corral.workers.streams.codec import Buffer, Message, MessageCodec
from corral.workers.streams.errors import (
    MalformedMessageError,
    PeerDeadError,
    StaleEpochError,
    StreamClosedError,
    StreamError,
    StreamTimeoutError,
)
from corral.workers.streams.router import Peer, RouterEndpoint
from corral.workers.streams.security import StreamSecurity

logger = logging.getLogger(__name__)


# PendingReplies: what has come, and what is still to come, of one request to some workers.
#
# RequestClient.post() ──what each worker was told──► await_reply() ──► frames_for(): to tell it again
# RequestClient, on a reply or a death; the deadline ──payload or error, once for each worker──► end()
#                                                                                                 │
# results(): all payloads, or the first error ◄── one future ─────────────────────────────────────┘


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


@dataclass(slots=True)
class _KnownWorker:
    """What the master's end knows of one worker, and has yet to tell it."""

    hello: Hello
    identity: bytes | None
    """None while it is not connected."""
    is_dead: bool = False
    grace_timer: asyncio.TimerHandle | None = None
    piggybacked: tuple[PiggybackedRequest, ...] = ()
    """What goes with the next message to it."""

    def death(self, asked: str) -> PeerDeadError:
        """What a request that it will not answer ends with."""
        name, pid = self.hello.worker, self.hello.pid
        return PeerDeadError(
            f"{name} (pid {pid}) died before it answered {asked}; see the end of its log for the reason"
        )

    def end_grace(self) -> None:
        if self.grace_timer is not None:
            self.grace_timer.cancel()
            self.grace_timer = None


class RequestClient(Closing):
    """Sends requests to the model workers. All methods belong to the loop's thread.

    Example:
        with RequestClient(security, address="10.0.0.7", epoch=3) as client:
            names.add(keys.master_stream(), client.endpoint)
            await client.wait_for_workers(workers, timeout_s=300)
            step = client.post({worker: TrainStep(...) for worker in actors}, deadline_s=600)
            forward = client.post({worker: Inference(...) for worker in references}, deadline_s=600)
            stats, done = await step.results(), await forward.results()
    """

    def __init__(
        self,
        security: StreamSecurity,
        *,
        address: str,
        epoch: int,
        workers: Set[str] | None = None,
        reconnect_grace_s: float = 3.0,
        on_worker_dead: Callable[[str], None] | None = None,
    ) -> None:
        """
        Args:
            address: IP address of the interface to listen on.
            epoch: trainer epoch; goes into every request.
            workers: who may say hello; None is any model worker. A stranger's death would be a death too.
            reconnect_grace_s: how long a disconnected worker may stay away before it counts as dead.
            on_worker_dead: called once for each worker that died or was replaced by a new process.
        """
        self._epoch = epoch
        self._expected = workers
        self._reconnect_grace_s = reconnect_grace_s
        self._on_worker_dead = on_worker_dead
        self._codec: MessageCodec[FromWorker] = MessageCodec(FromWorker, trial_uuid=security.trial_uuid)
        self._sequence = itertools.count(1)
        self._worker_by_id: dict[str, _KnownWorker] = {}
        self._worker_by_identity: dict[bytes, _KnownWorker] = {}
        self._pending: dict[str, PendingReplies] = {}
        """In the order of posting, by request id as it is written: what a reply names is looked up, and not read."""
        self._arrival = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._is_closed = False
        self._router = RouterEndpoint(
            security,
            self._codec,
            address=address,
            roles={"model_worker"},
            purpose="requests",
            on_message=self._receive,
            on_peer_gone=self._handle_peer_gone,
        )

    @property
    def endpoint(self) -> str:
        """Where workers connect: "tcp://host:port"."""
        return self._router.endpoint

    def hello_of(self, worker: str) -> Hello | None:
        """How a worker that is connected introduced itself; None if it is not here."""
        state = self._worker_by_id.get(worker)
        return None if state is None or state.identity is None else state.hello

    async def wait_for_workers(self, workers: Iterable[str], *, timeout_s: float) -> None:
        """Wait until each of them has connected and said hello.

        Raises:
            StreamTimeoutError: naming those that did not.
        """
        wanted = sorted(workers)

        def missing() -> list[str]:
            return [worker for worker in wanted if self.hello_of(worker) is None]

        try:
            async with asyncio.timeout(timeout_s):
                while missing():
                    self._arrival.clear()
                    await self._arrival.wait()
        except TimeoutError as error:
            raise StreamTimeoutError(
                f"{', '.join(missing())} did not connect to the master at {self.endpoint} within {timeout_s:.0f} s "
                f"({len(wanted) - len(missing())} of {len(wanted)} workers are here); see their logs"
            ) from error

    def post(self, requests: Mapping[str, Request], *, deadline_s: float) -> PendingReplies:
        """Send one request to some workers now, under one id, and wait for the replies later.

        Each worker starts the blocking ones after whatever was posted to it before. Nothing is awaited while posting,
        so that of two requests which two workers share, both start the one that was posted first, first.

        Args:
            requests: by worker id, and all of one type; they may differ in what each rank gets. One object that several
                workers get, one after the other, is encoded once.
            deadline_s: from now; then the replies that are missing are a `StreamTimeoutError`.
        """
        request_id = str(RequestId(self._epoch, next(self._sequence)))
        replies = PendingReplies(requests, request_id, deadline_s=deadline_s, listed=self._pending)
        # A step posts to a thousand workers some times: what they have in common is made once.
        encoded: WorkerRequest | None = None
        frames: list[Buffer] = []
        for worker_id, request in requests.items():
            worker, asked = self._worker_by_id.get(worker_id), replies.asked
            if worker is None or worker.is_dead:
                unknown = PeerDeadError(f"{worker_id} got {asked} but has not said hello; wait_for_workers first")
                replies.end(worker_id, worker.death(asked) if worker else unknown)
                continue
            piggybacked, worker.piggybacked = worker.piggybacked, ()
            if encoded is None or encoded.request is not request or encoded.piggybacked is not piggybacked:
                encoded = WorkerRequest(request=request, piggybacked=piggybacked)
                frames = self._codec.encode(encoded, epoch=self._epoch, request_id=request_id, deadline_s=deadline_s)
            replies.await_reply(worker_id, frames)
            self._send(worker, frames)
        return replies

    def attach(self, requests: Mapping[str, PiggybackedRequest]) -> None:
        """Let each of these ride with the next message to its worker: it costs no message, and has no own answer.

        They are done in the order in which they were attached, and none of them twice; those of a worker that dies, or
        that gets no further message, are not done.
        """
        for worker_id, request in requests.items():
            if (worker := self._worker_by_id.get(worker_id)) is not None:
                worker.piggybacked += (request,)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        for worker in self._worker_by_id.values():
            worker.end_grace()
        for replies in list(self._pending.values()):
            for worker_id in replies.missing:
                replies.end(worker_id, StreamClosedError("the master's request stream was closed"))
        self._router.close()

    # --- sending ----------------------------------------------------------------------------------------------------

    def _send(self, worker: _KnownWorker, frames: list[Buffer]) -> None:
        if worker.identity is None:
            return  # it is sent when the worker comes back
        try:
            self._router.send(worker.identity, frames)
        except PeerDeadError:
            self._handle_peer_gone(worker.identity)

    # --- receiving --------------------------------------------------------------------------------------------------

    def _receive(self, peer: Peer, message: Message[FromWorker]) -> None:
        body = message.body
        if isinstance(body, Hello):
            self._welcome(peer.identity, body)
        else:
            self._settle(peer.identity, message.request_id, body)

    def _welcome(self, identity: bytes, hello: Hello) -> None:
        if self._expected is not None and hello.worker not in self._expected:
            raise MalformedMessageError(f"a hello came of {hello.worker[:64]!r}, which is no worker of this stream")
        worker = self._worker_by_id.get(hello.worker)
        if worker is not None and worker.hello.incarnation != hello.incarnation:
            self._bury(worker)
            worker = None
        if worker is None:
            worker = self._worker_by_id[hello.worker] = _KnownWorker(hello, identity)
            logger.info("%s (pid %d) is connected", hello.worker, hello.pid)
        if worker.identity is not None:
            self._worker_by_identity.pop(worker.identity, None)
        worker.end_grace()
        worker.is_dead = False
        worker.hello = hello
        worker.identity = identity
        self._worker_by_identity[identity] = worker
        for replies in self._pending.values():
            if frames := replies.frames_for(hello.worker):
                self._send(worker, frames)
        self._arrival.set()

    def _settle(self, identity: bytes, request_id: str, reply: ReplyPayload) -> None:
        worker = self._worker_by_identity.get(identity)
        if worker is None:
            raise MalformedMessageError("a reply came before a hello")
        if (replies := self._pending.get(request_id)) is None:
            return  # nobody waits for it any more
        worker_id = worker.hello.worker
        if isinstance(reply, StaleReply):
            replies.end(worker_id, StaleEpochError(peer=worker_id, epoch=self._epoch, max_epoch=reply.max_epoch))
        elif isinstance(reply, ErrorReply):
            replies.end(worker_id, remote_error(f"{worker_id} ({replies.asked})", reply))
        else:
            replies.end(worker_id, reply)

    # --- liveness ---------------------------------------------------------------------------------------------------

    def _handle_peer_gone(self, identity: bytes) -> None:
        worker = self._worker_by_identity.pop(identity, None)
        if worker is None or worker.is_dead or self._is_closed:  # a dead one was replaced by another process
            return
        worker.identity = None
        logger.warning("%s disconnected; it has %.1f s to come back", worker.hello.worker, self._reconnect_grace_s)
        worker.grace_timer = self._loop.call_later(self._reconnect_grace_s, self._bury, worker)

    def _bury(self, worker: _KnownWorker) -> None:
        """The process behind this worker id is gone for good."""
        worker.end_grace()
        if worker.is_dead:
            return
        worker.is_dead, worker.piggybacked = True, ()  # it hears nothing more
        for replies in list(self._pending.values()):
            replies.end(worker.hello.worker, worker.death(replies.asked))
        logger.warning("%s (pid %d) is dead", worker.hello.worker, worker.hello.pid)
        if self._on_worker_dead is not None:
            self._on_worker_dead(worker.hello.worker)
