"""RankClient: the master's end of the request stream, which binds.

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
import logging
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass

from corral.workers.requests.messages import (
    FromWorker,
    Hello,
    PiggybackedRequest,
    ReplyPayload,
    Request,
    WorkerRequest,
)
from corral.workers.streams.closing import Closing
from corral.workers.streams.codec import Buffer, Message, MessageCodec
from corral.workers.streams.errors import MalformedMessageError, PeerDeadError, StreamClosedError, StreamTimeoutError
from corral.workers.streams.router import Peer, RouterEndpoint
from corral.workers.streams.rpc import PendingReplies, RequestClient
from corral.workers.streams.security import StreamSecurity

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _KnownWorker:
    """One worker as the master's end knows it, and the pending messages to it."""

    hello: Hello
    identity: bytes | None = None
    """None while it is not connected."""
    num_hellos: int = 0
    piggybacked: tuple[PiggybackedRequest, ...] = ()
    """What goes with the next message to it."""


class RankClient(RequestClient[WorkerRequest, ReplyPayload], Closing):
    """Sends requests to the model workers. All methods belong to the loop's thread.

    Example:
        with RankClient(security, address="10.0.0.7", epoch=3) as client:
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
        on_worker_dead: Callable[[str], None] = lambda _: None,
    ) -> None:
        """
        Args:
            address: IP address of the interface to listen on.
            epoch: trainer epoch; goes into every request.
            workers: who may say hello; None is any model worker. A stranger's death would be a death too.
            reconnect_grace_s: how long a disconnected worker may stay away before it counts as dead.
            on_worker_dead: called once for each worker that died or was replaced by a new process.
        """
        codec: MessageCodec[FromWorker] = MessageCodec(FromWorker, trial_uuid=security.trial_uuid)
        super().__init__(codec, epoch=epoch)
        self._expected = workers
        self._reconnect_grace_s = reconnect_grace_s
        self._on_worker_dead = on_worker_dead
        self._worker_by_id: dict[str, _KnownWorker] = {}
        """Those that live, as far as is known."""
        self._gone: dict[str, str] = {}
        """What a request ends with that a worker gets after its death, by worker id."""
        self._worker_by_identity: dict[bytes, _KnownWorker] = {}
        self._arrival = asyncio.Event()
        self._is_closed = False
        self._router = RouterEndpoint(
            security,
            codec,
            address=address,
            roles={"model_worker"},
            purpose="requests",
            on_message=self._receive,
            on_peer_gone=self._handle_peer_gone,
        )
        self.endpoint = self._router.endpoint
        """Where workers connect: "tcp://host:port"."""

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

    def post(self, requests: Mapping[str, Request], *, deadline_s: float) -> PendingReplies[ReplyPayload]:
        """Send one request to some workers now, with what was attached for them, and wait for the replies later.

        Each worker starts the blocking ones after whatever was posted to it before. Nothing is awaited while posting,
        so that of two requests which two workers share, both start the one that was posted first, first.

        Args:
            requests: by worker id, and all of one type; they may differ in what each rank gets.
            deadline_s: from now; then the replies that are missing are a `StreamTimeoutError`.
        """
        # A step posts to a thousand workers some times: what they have in common is one object, and encoded once.
        last_requests: dict[str, WorkerRequest] = {}
        last: WorkerRequest | None = None
        for worker_id, request in requests.items():
            piggybacked: tuple[PiggybackedRequest, ...] = ()
            if (worker := self._worker_by_id.get(worker_id)) is not None:
                piggybacked, worker.piggybacked = worker.piggybacked, ()
            if last is None or last.request is not request or last.piggybacked is not piggybacked:
                last = WorkerRequest(request=request, piggybacked=piggybacked)
            last_requests[worker_id] = last
        name = "/".join(sorted({type(request).__name__ for request in requests.values()}))
        return self.ask(last_requests, deadline_s=deadline_s, name=name)

    def attach(self, requests: Mapping[str, PiggybackedRequest]) -> None:
        """Let each of these ride with the next message to its worker: it costs no message, and has no own reply.

        They are done in the order in which they were attached, and none of them twice; those of a worker that dies, or
        that gets no further message, are not done.
        """
        for worker_id, request in requests.items():
            if (worker := self._worker_by_id.get(worker_id)) is not None:
                worker.piggybacked += (request,)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self.fail(lambda _: StreamClosedError("the master's request stream was closed"))
            self._router.close()

    # --- the link -----------------------------------------------------------------------------------------------------

    def send(self, peer: str, frames: list[Buffer]) -> None:
        worker = self._worker_by_id.get(peer)
        if worker is None:
            gone = self._gone.get(peer, f"{peer} got %s but has not said hello; wait_for_workers first")
            self.fail(lambda asked: PeerDeadError(gone % asked), peer=peer)
        elif worker.identity is not None:  # else it is sent when the worker comes back
            try:
                self._router.send(worker.identity, frames)
            except PeerDeadError:
                self._handle_peer_gone(worker.identity)

    def _receive(self, peer: Peer, message: Message[FromWorker]) -> None:
        body = message.body
        if isinstance(body, Hello):
            self._welcome(peer.identity, body)
        elif (worker := self._worker_by_identity.get(peer.identity)) is not None:
            self.receive(worker.hello.worker, message.request_id, body)
        else:
            raise MalformedMessageError("a reply came before a hello")

    def _welcome(self, identity: bytes, hello: Hello) -> None:
        if self._expected is not None and hello.worker not in self._expected:
            raise MalformedMessageError(f"a hello came of {hello.worker[:64]!r}, which is no worker of this stream")
        worker = self._worker_by_id.get(hello.worker)
        if worker is not None and worker.hello.incarnation != hello.incarnation:
            self._bury(worker, worker.num_hellos)
            worker = None
        if worker is None:
            worker = self._worker_by_id[hello.worker] = _KnownWorker(hello)
            logger.info("%s (pid %d) is connected", hello.worker, hello.pid)
        if worker.identity is not None:
            self._worker_by_identity.pop(worker.identity, None)
        worker.num_hellos += 1
        worker.hello, worker.identity = hello, identity
        self._worker_by_identity[identity] = worker
        self.send_again(hello.worker)
        self._arrival.set()

    # --- liveness ---------------------------------------------------------------------------------------------------

    def _handle_peer_gone(self, identity: bytes) -> None:
        worker = self._worker_by_identity.pop(identity, None)
        if worker is None or self._worker_by_id.get(worker.hello.worker) is not worker:
            return  # it was replaced by another process
        worker.identity = None
        logger.warning("%s disconnected; it has %.1f s to come back", worker.hello.worker, self._reconnect_grace_s)
        loop = asyncio.get_running_loop()
        loop.call_later(self._reconnect_grace_s, self._bury, worker, worker.num_hellos)

    def _bury(self, worker: _KnownWorker, num_hellos: int) -> None:
        """The process behind this worker id is gone for good, unless it has said hello again."""
        name, pid = worker.hello.worker, worker.hello.pid
        if self._is_closed or worker.num_hellos != num_hellos or self._worker_by_id.get(name) is not worker:
            return
        del self._worker_by_id[name]
        gone = f"{name} (pid {pid}) died before it answered %s; see the end of its log for the reason"
        self._gone[name] = gone
        self.fail(lambda asked: PeerDeadError(gone % asked), peer=name)
        logger.warning("%s (pid %d) is dead", name, pid)
        self._on_worker_dead(name)
