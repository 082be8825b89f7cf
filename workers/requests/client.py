"""RequestClient: the master's end of the request stream.

    post({worker: request}) --one request id--> workers --replies--> PendingReplies.results()
    attach({worker: request}) --aboard the next message to this worker, without a reply of its own
    post_aboard(workers, fetch) --the same, with a reply of its own

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
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from types import MappingProxyType

from corral.workers.requests.known_worker import Boarding, KnownWorker
from corral.workers.requests.messages import (
    Fetch,
    FromWorker,
    Hello,
    Passenger,
    PostHook,
    PreHook,
    ReplyPayload,
    Request,
    Rider,
    StaleReply,
    WorkerRequest,
)
from corral.workers.requests.pending_replies import PendingReplies
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


class RequestClient(Closing):
    """Sends requests to the model workers. All methods belong to the loop's thread.

    Example:
        with RequestClient(security, address="10.0.0.7", epoch=3) as client:
            names.add(keys.master_stream(), client.endpoint, replace=True)
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
        self._worker_by_id: dict[str, KnownWorker] = {}
        self._worker_by_identity: dict[bytes, KnownWorker] = {}
        self._pending: dict[str, PendingReplies] = {}
        """In the order of posting, by request id as it is written: what a reply names is looked up, and not read."""
        self._arrival = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._is_closed = False
        self._boarding: dict[str, Boarding] = {}
        """What waits for a message to go with, by request id."""
        self.num_late = 0
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
    def num_malformed(self) -> int:
        """Messages that were counted and dropped."""
        return self._router.num_malformed

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

    def post(
        self,
        requests: Mapping[str, Request],
        *,
        deadline_s: float,
        pre_hooks: Mapping[str, Sequence[PreHook]] = MappingProxyType({}),
        post_hooks: Mapping[str, Sequence[PostHook]] = MappingProxyType({}),
    ) -> PendingReplies:
        """Send one request to some workers now, under one id, and wait for the replies later.

        Each worker starts the blocking ones after whatever was posted to it before. Nothing is awaited while posting,
        so that of two requests which two workers share, both start the one that was posted first, first.

        Args:
            requests: by worker id, and all of one type; they may differ in what each rank gets. One object that several
                workers get, one after the other, is encoded once.
            deadline_s: from now; then the replies that are missing are a `StreamTimeoutError`.
            pre_hooks, post_hooks: by worker id; a worker that is not named has none.
        """
        replies = self._begin(requests, "/".join(sorted({type(request).__name__ for request in requests.values()})))
        # A step posts to a thousand workers some times: what they have in common is made once.
        content: tuple[object, ...] = ()
        frames: list[Buffer] = []
        for worker_id, request in requests.items():
            if (worker := self._living(worker_id, replies)) is None:
                continue
            before, after = pre_hooks.get(worker_id, ()), post_hooks.get(worker_id, ())
            riders, passengers = worker.take_riders(), self._set_off(worker)
            previous, content = content, (request, before, after, riders, passengers)
            if not (previous and all(map(operator.is_, content, previous))):
                body = WorkerRequest(
                    request=request,
                    pre_hooks=tuple(before),
                    post_hooks=tuple(after),
                    riders=tuple(riders),
                    passengers=passengers,
                )
                frames = self._codec.encode(
                    body, epoch=self._epoch, request_id=replies.request_id, deadline_s=deadline_s
                )
            replies.await_reply(worker_id, frames)
            self._send(worker, frames)
        replies.expire_by(self._loop.call_later(deadline_s, self._expire, replies, deadline_s))
        return replies

    def attach(self, requests: Mapping[str, Rider]) -> None:
        """Let each of these ride with the next message to its worker: it costs no message, and has no own answer.

        They are done in the order in which they were attached, and none of them twice; those of a worker that dies, or
        that gets no further message, are not done.
        """
        for worker_id, request in requests.items():
            if (worker := self._worker_by_id.get(worker_id)) is not None:
                worker.riders.append(request)

    def post_aboard(self, workers: Collection[str], request: Fetch, *, deadline_s: float) -> PendingReplies:
        """Ask some workers for the same, each with the next message to it: it costs none, and has its own answer.

        It is sent by itself to a worker that comes back, and to all that got no message before `send_waiting`; whatever
        brings it, and if two messages do, a worker begins it once.

        Args:
            deadline_s: from when the last of them has been told: what nobody was told yet, nobody can answer.
        """
        replies = self._begin(workers, type(request).__name__)
        apart = self._codec.encode(
            WorkerRequest(request=request), epoch=self._epoch, request_id=replies.request_id, deadline_s=deadline_s
        )
        aboard = (Passenger(request_id=replies.request_id, request=request),)
        boarding = self._boarding[replies.request_id] = Boarding(replies, deadline_s)
        for worker_id in workers:
            if (worker := self._living(worker_id, replies)) is not None:
                replies.await_reply(worker_id, apart)
                worker.passengers = worker.passengers + aboard if worker.passengers else aboard
                boarding.untold.add(worker_id)
        self._start_deadline(replies.request_id)
        return replies

    def send_waiting(self) -> None:
        """What was posted aboard, and has found no message by now, goes by itself."""
        if not self._boarding:
            return
        for worker_id, worker in self._worker_by_id.items():
            for passenger in self._set_off(worker):
                if self._is_missing(passenger.request_id, worker_id):
                    self._send(worker, self._pending[passenger.request_id].frames_for(worker_id))

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        for worker in self._worker_by_id.values():
            worker.end_grace()
        for replies in list(self._pending.values()):
            for worker_id in replies.missing:
                self._end(replies, worker_id, None, StreamClosedError("the master's request stream was closed"))
        self._router.close()

    # --- sending ----------------------------------------------------------------------------------------------------

    def _begin(self, workers: Collection[str], what: str) -> PendingReplies:
        """Replies to a new request, which is yet to be sent."""
        request_id = str(RequestId(self._epoch, next(self._sequence)))
        replies = PendingReplies(workers, request_id=request_id, asked=f"{what} {request_id}")
        if workers:
            self._pending[request_id] = replies
        return replies

    def _set_off(self, worker: KnownWorker) -> tuple[Passenger, ...]:
        """What goes with a message that leaves for this worker now; deadlines of what all have been told begin."""
        passengers = worker.take_passengers()
        for passenger in passengers:
            self._boarding[passenger.request_id].untold.discard(worker.hello.worker)
            self._start_deadline(passenger.request_id)
        return passengers

    def _start_deadline(self, request_id: str) -> None:
        """Of what was posted aboard, if no worker is still to be told."""
        if not (boarding := self._boarding[request_id]).untold:
            del self._boarding[request_id]
            replies, deadline_s = boarding.replies, boarding.deadline_s
            replies.expire_by(self._loop.call_later(deadline_s, self._expire, replies, deadline_s))

    def _living(self, worker_id: str, replies: PendingReplies) -> KnownWorker | None:
        """A worker that can be asked; else that is what the request ends with."""
        worker = self._worker_by_id.get(worker_id)
        if worker is not None and not worker.is_dead:
            return worker
        asked = replies.asked
        self._end(replies, worker_id, None, worker.death(asked) if worker else _not_here(worker_id, asked))
        return None

    def _expire(self, replies: PendingReplies, deadline_s: float) -> None:
        for worker_id in replies.missing:
            error = StreamTimeoutError(f"{worker_id} did not answer {replies.asked} within {deadline_s:.1f} s")
            self._end(replies, worker_id, None, error)

    def _send(self, worker: KnownWorker, frames: list[Buffer]) -> None:
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
            worker = self._worker_by_id[hello.worker] = KnownWorker(hello, identity)
            logger.info("%s (pid %d) is connected", hello.worker, hello.pid)
        if worker.identity is not None:
            self._worker_by_identity.pop(worker.identity, None)
        worker.end_grace()
        worker.is_dead = False
        worker.hello = hello
        worker.identity = identity
        self._worker_by_identity[identity] = worker
        self._set_off(worker)  # what was aboard goes by itself, with all else that is unanswered
        for replies in self._pending.values():
            if frames := replies.frames_for(hello.worker):
                self._send(worker, frames)
        self._arrival.set()

    def _settle(self, identity: bytes, request_id: str, reply: ReplyPayload) -> None:
        worker = self._worker_by_identity.get(identity)
        if worker is None:
            raise MalformedMessageError("a reply came before a hello")
        replies, worker_id = self._pending.get(request_id), worker.hello.worker
        if replies is None:
            is_awaited = False
        elif isinstance(reply, (ErrorReply, StaleReply)):
            is_awaited = self._end(replies, worker_id, None, self._refusal(worker_id, reply, replies.asked))
        else:
            is_awaited = self._end(replies, worker_id, reply)
        if not is_awaited:
            self.num_late += 1

    def _end(
        self, replies: PendingReplies, worker_id: str, payload: ReplyPayload | None, error: StreamError | None = None
    ) -> bool:
        """A request to a worker ends once, whatever comes first; False if nobody waits for this (any more)."""
        is_awaited = replies.end(worker_id, payload, error)
        if replies.is_complete:
            self._pending.pop(replies.request_id, None)
        return is_awaited

    def _is_missing(self, request_id: str, worker_id: str) -> bool:
        return request_id in self._pending and self._pending[request_id].is_missing(worker_id)

    def _refusal(self, worker_id: str, reply: ErrorReply | StaleReply, asked: str) -> StreamError:
        if isinstance(reply, StaleReply):
            return StaleEpochError(peer=worker_id, epoch=self._epoch, max_epoch=reply.max_epoch)
        return remote_error(f"{worker_id} ({asked})", reply)

    # --- liveness ---------------------------------------------------------------------------------------------------

    def _handle_peer_gone(self, identity: bytes) -> None:
        worker = self._worker_by_identity.pop(identity, None)
        if worker is None or worker.is_dead or self._is_closed:  # a dead one was replaced by another process
            return
        worker.identity = None
        logger.warning("%s disconnected; it has %.1f s to come back", worker.hello.worker, self._reconnect_grace_s)
        worker.grace_timer = self._loop.call_later(self._reconnect_grace_s, self._bury, worker)

    def _bury(self, worker: KnownWorker) -> None:
        """The process behind this worker id is gone for good."""
        worker.end_grace()
        if worker.is_dead:
            return
        self._set_off(worker)  # it hears nothing more, and nobody waits for that
        worker.bury()
        for replies in list(self._pending.values()):
            if replies.is_missing(worker.hello.worker):
                self._end(replies, worker.hello.worker, None, worker.death(replies.asked))
        logger.warning("%s (pid %d) is dead", worker.hello.worker, worker.hello.pid)
        if self._on_worker_dead is not None:
            self._on_worker_dead(worker.hello.worker)


def _not_here(worker_id: str, asked: str) -> PeerDeadError:
    return PeerDeadError(f"{worker_id} got {asked} but has not said hello; wait_for_workers first")
