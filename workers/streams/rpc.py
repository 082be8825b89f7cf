"""Requests and replies over ZeroMQ, on asyncio loops: one client class and one handler class, whichever side binds.

    RequestClient.ask({peer: request}) ──request id──► RequestHandler.receive ──► handle(sender, message)
    PendingReplies.results()           ◄────────────── the reply, at once or deferred ◄──┘

    client                                     handler
    requests.client.RankClient   binds         requests.handler.WorkerRequestStream   connects, with an epoch
    ServerClient                 connects      RequestServer                          binds

Guarantee: a client sends what has no reply yet again, under the same id and in order, when a peer has connected again;
a handler runs a request once, and repeats the reply to the request that it has replied to. A *restarted* server has no
memory of requests, so its handler must be idempotent in its own terms.

A handler follows one trainer epoch: an older epoch's request gets a `StaleReply`, and its deferred reply is given up.
Without epochs every request is of epoch 0.
"""

import asyncio
import contextlib
import itertools
import logging
import traceback
import uuid
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

import msgspec

from corral.workers.streams.closing import AsyncClosing, cancel
from corral.workers.streams.codec import Buffer, Message, MessageBody, MessageCodec
from corral.workers.streams.errors import (
    PeerDeadError,
    RemoteError,
    StaleEpochError,
    StreamClosedError,
    StreamError,
    StreamTimeoutError,
)
from corral.workers.streams.link import DealerLink
from corral.workers.streams.router import Peer, RouterEndpoint
from corral.workers.streams.security import StreamSecurity

logger = logging.getLogger(__name__)

SenderT = TypeVar("SenderT")
RequestT = TypeVar("RequestT", bound=msgspec.Struct)
ReplyT = TypeVar("ReplyT", bound=msgspec.Struct)

_NUM_CACHED_REPLIES = 4096  # of all clients of a server together; its replies are small


class ErrorReply(MessageBody, frozen=True, tag="error"):
    """The handler raised."""

    error_type: str
    message: str
    traceback: str


class StaleReply(MessageBody, frozen=True, tag="stale"):
    """The request comes from an epoch that is over."""

    max_epoch: int


def error_reply(error: BaseException) -> ErrorReply:
    """An exception as it travels."""
    lines = traceback.format_exception(error)
    return ErrorReply(error_type=type(error).__name__, message=str(error), traceback="".join(lines))


class PendingReplies(Generic[ReplyT]):
    """The replies to one request, which was sent to some peers. Belongs to the client's loop.

    RequestClient.ask() ──the frames for each peer──► missing: to be sent again when the peer has connected again
    RequestClient, on a reply or a death; the deadline ──reply or error, once for each peer──► end()
                                                                                                 │
    results(): all replies, or the first error ◄── one future ───────────────────────────────────┘
    """

    def __init__(
        self,
        client: "RequestClient[Any, ReplyT]",
        frames: dict[str, list[Buffer]],
        *,
        name: str,
        request_id: str,
        deadline_s: float,
    ) -> None:
        """
        Args:
            frames: by peer; taken over.
            name: of the request, for messages: "TrainStep".
            deadline_s: from now; what is missing then ends with a `StreamTimeoutError`.
        """
        self.missing = frames
        """What was sent to the peers of which neither a reply nor an error has come."""
        self.asked = f"{name} {request_id}"
        self._request_id = request_id
        self._client = client
        self._replies: dict[str, ReplyT] = {}
        # One future for all of them: a future and a deadline per peer would cost more than the messages.
        loop = asyncio.get_running_loop()
        self._done: asyncio.Future[None] = loop.create_future()
        self._deadline = loop.call_later(deadline_s, self._expire, deadline_s)

    async def results(self) -> dict[str, ReplyT]:
        """Every peer's reply, or the first error.

        Raises:
            RemoteError: if a peer's handler raised.
            StaleEpochError: if a peer follows a newer master.
            PeerDeadError: if a peer's process is gone.
            StreamTimeoutError: if a peer did not reply before the deadline.
        """
        await self._done
        return self._replies

    def when_settled(self, callback: Callable[[], None]) -> None:
        """Call this once `results` has a result or an error."""
        self._done.add_done_callback(lambda _: callback())

    def end(self, peer: str, end: ReplyT | StreamError) -> None:
        """A peer's reply or error; a later one is ignored."""
        if self.missing.pop(peer, None) is None:
            return
        if not isinstance(end, StreamError):
            self._replies[peer] = end
        elif not self._done.done():
            self._done.set_exception(end)
            self._done.exception()  # a caller that awaits the replies gets it; nobody has to
        if not self.missing:
            self.complete()

    def complete(self) -> None:
        """Wait for no more replies, and send nothing again."""
        self.missing.clear()
        self._deadline.cancel()
        self._client.pending.pop(self._request_id, None)
        if not self._done.done():
            self._done.set_result(None)

    def _expire(self, deadline_s: float) -> None:
        for peer in list(self.missing):
            name = self._client.describe(peer)
            self.end(peer, StreamTimeoutError(f"{name} did not answer {self.asked} within {deadline_s:.1f} s"))


class RequestClient(ABC, Generic[RequestT, ReplyT]):
    """Requests to named peers, and the replies that are on their way. All methods belong to the loop of the link.

    The class that owns the link sends, and calls `receive`, `fail`, and `send_again` when a peer is connected.
    """

    def __init__(self, codec: MessageCodec[Any], *, epoch: int = 0) -> None:
        """epoch: of the trainer; goes into every request. 0 is none."""
        self._codec = codec
        self.epoch = epoch
        self._id_prefix = str(epoch) if epoch else uuid.uuid4().hex[:16]  # many clients may ask one server
        self._sequence = itertools.count(1)
        self.pending: dict[str, PendingReplies[ReplyT]] = {}
        """By request id, in the order of posting."""

    @abstractmethod
    def send(self, peer: str, frames: list[Buffer]) -> None:
        """Send to a peer that is connected; to a peer that may come back nothing is sent now."""

    def describe(self, peer: str) -> str:
        """A peer, for messages."""
        return peer

    def ask(self, requests: Mapping[str, RequestT], *, deadline_s: float, name: str) -> PendingReplies[ReplyT]:
        """Send a request to some peers now, under one id, and wait for the replies later. Nothing is awaited here.

        Args:
            requests: by peer. One object that several peers get, one after the other, is encoded once.
            deadline_s: from now; then the replies that are missing are a `StreamTimeoutError`.
            name: of the request, for messages: "TrainStep".
        """
        request_id = f"{self._id_prefix}:{next(self._sequence)}"
        encoded, frames = None, []
        frames_by_peer: dict[str, list[Buffer]] = {}
        for peer, request in requests.items():
            if request is not encoded:
                frames = self._codec.encode(request, epoch=self.epoch, request_id=request_id, deadline_s=deadline_s)
                encoded = request
            frames_by_peer[peer] = frames
        pending = PendingReplies(self, frames_by_peer, name=name, request_id=request_id, deadline_s=deadline_s)
        self.pending[request_id] = pending
        for peer, frames in list(frames_by_peer.items()):
            self.send(peer, frames)
        if not requests:
            pending.complete()
        return pending

    def send_again(self, peer: str) -> None:
        """The peer is connected, and knows nothing of earlier connections."""
        for pending in list(self.pending.values()):
            if frames := pending.missing.get(peer):
                self.send(peer, frames)

    def receive(self, peer: str, request_id: str, reply: ReplyT | ErrorReply | StaleReply) -> None:
        """A reply has come."""
        if (pending := self.pending.get(request_id)) is None:
            return  # nobody waits for it any more
        if isinstance(reply, StaleReply):
            pending.end(peer, StaleEpochError(peer=peer, epoch=self.epoch, max_epoch=reply.max_epoch))
        elif isinstance(reply, ErrorReply):
            raised = f"{peer} ({pending.asked}) raised {reply.error_type}: {reply.message}"
            pending.end(peer, RemoteError(f"{raised}\n--- traceback of {peer} ---\n{reply.traceback}"))
        else:
            pending.end(peer, reply)

    def fail(self, error: Callable[[str], StreamError], *, peer: str | None = None) -> None:
        """No reply will come of this peer, or of any; `error` makes an error of what was asked, "TrainStep 3:17"."""
        for pending in list(self.pending.values()):
            for missing in [missing for missing in pending.missing if peer in (None, missing)]:
                pending.end(missing, error(pending.asked))


@dataclass(slots=True, kw_only=True)
class RequestHandler(Generic[SenderT, RequestT]):
    """Runs each request once, and replies to it. Belongs to the loop of the link, whose owner calls `receive`."""

    codec: MessageCodec[RequestT]
    handle: Callable[[SenderT, Message[RequestT]], msgspec.Struct | Awaitable[msgspec.Struct]]
    """Gets a request and its sender, and gives the reply, or what the deferred reply comes from; it sees to it that a
    reply comes some time. An exception becomes a `RemoteError` at the client."""
    send: Callable[[SenderT, list[Buffer]], object]
    """Sends a reply; if the sender is not connected, it asks again under the same id."""
    name: str
    """For the log: "manager requests"."""
    num_cached_replies: int
    """How many of the last replies can be repeated."""
    max_epoch: int = 0
    """The trainer epoch that is followed."""
    _sender_by_request_id: dict[str, SenderT] = field(default_factory=dict)
    """Of the requests without a reply: the last to have asked."""
    _deferred: dict[str, tuple[int, asyncio.Future[msgspec.Struct]]] = field(default_factory=dict)
    """Epoch and reply by request id."""
    _replies: OrderedDict[str, list[Buffer]] = field(default_factory=OrderedDict)

    def receive(self, sender: SenderT, message: Message[RequestT]) -> None:
        """A request has come, perhaps again."""
        epoch, request_id = message.epoch, message.request_id
        if epoch < self.max_epoch:
            stale = StaleReply(max_epoch=self.max_epoch)
            self.send(sender, self.codec.encode(stale, epoch=epoch, request_id=request_id))
        elif (frames := self._replies.get(request_id)) is not None:
            self.send(sender, frames)
        elif request_id in self._sender_by_request_id:
            self._sender_by_request_id[request_id] = sender  # its reply will come
        else:
            self._sender_by_request_id[request_id] = sender
            try:
                answer = self.handle(sender, message)
            except Exception as error:
                self._reply(epoch, request_id, error)
                return
            if isinstance(answer, msgspec.Struct):
                self._reply(epoch, request_id, answer)
                return
            deferred = asyncio.ensure_future(answer)
            self._deferred[request_id] = epoch, deferred
            deferred.add_done_callback(partial(self._reply_deferred, epoch, request_id))

    def follow(self, epoch: int) -> None:
        """Another trainer epoch has begun: the master that still waits for an older one's replies was replaced."""
        self.max_epoch = epoch
        for began, deferred in self._deferred.values():
            if began < epoch:
                deferred.cancel()

    async def close(self) -> None:
        """Give up the deferred replies."""
        await cancel(*(deferred for _, deferred in self._deferred.values()))

    def _reply_deferred(self, epoch: int, request_id: str, deferred: "asyncio.Future[msgspec.Struct]") -> None:
        del self._deferred[request_id]
        if deferred.cancelled():
            del self._sender_by_request_id[request_id]
        else:
            self._reply(epoch, request_id, deferred.exception() or deferred.result())

    def _reply(self, epoch: int, request_id: str, reply: msgspec.Struct | BaseException) -> None:
        sender = self._sender_by_request_id.pop(request_id)
        if epoch < self.max_epoch:
            return
        try:
            if isinstance(reply, BaseException):
                raise reply
            frames = self.codec.encode(reply, epoch=epoch, request_id=request_id)
        except Exception as error:  # whatever it is, the client asked and must hear it
            logger.exception("the handler of %s failed", self.name)
            frames = self.codec.encode(error_reply(error), epoch=epoch, request_id=request_id)
        self._replies[request_id] = frames
        if len(self._replies) > self.num_cached_replies:
            self._replies.popitem(last=False)
        self.send(sender, frames)


class ServerClient(RequestClient[RequestT, ReplyT], AsyncClosing):
    """Asks a server that may restart and move: finds its new address, and asks again.

    Example:
        address = lambda: names.get(keys.manager())
        manager = ServerClient(security, ManagerReply, address, server="gserver_manager")
        route = await manager.request(Schedule(...), deadline_s=30)
    """

    def __init__(
        self, security: StreamSecurity, reply_type: Any, address_provider: Callable[[], str], *, server: str
    ) -> None:
        """
        Args:
            reply_type: a tagged struct, or a union of them.
            address_provider: see `DealerLink`.
            server: who answers, for messages.
        """
        super().__init__(MessageCodec(reply_type | ErrorReply, trial_uuid=security.trial_uuid))
        self._server = server
        self._link: DealerLink[ReplyT | ErrorReply] = DealerLink(
            security,
            self._codec,
            address_provider,
            server=server,
            on_message=lambda message: self.receive(server, message.request_id, message.body),
            on_up=lambda: self.send_again(server),
            on_failure=lambda failure: self.fail(lambda _: failure),
        )

    async def request(self, body: RequestT, *, deadline_s: float) -> ReplyT:
        """Ask and wait for the reply, through restarts of the server.

        Raises:
            StreamTimeoutError: if there was no reply before the deadline.
            RemoteError: if the handler raised.
            WrongTrialKeyError: if the server does not let us in.
        """
        self._link.raise_failure()
        pending = self.ask({self._server: body}, deadline_s=deadline_s, name=type(body).__name__)
        try:
            return (await pending.results())[self._server]
        except asyncio.CancelledError:
            pending.complete()  # it is not sent again
            raise

    def send(self, peer: str, frames: list[Buffer]) -> None:
        self._link.send(frames)

    def describe(self, peer: str) -> str:
        return self._link.describe()

    async def close(self) -> None:
        await self._link.close()
        self.fail(lambda _: StreamClosedError(f"the connection to {self._server} was closed"))


class RequestServer(AsyncClosing, Generic[RequestT]):
    """Answers requests of many clients, bound to an address; many handlers may run at the same time.

    Example:
        server = RequestServer(security, ManagerRequest, handle, address="10.0.0.7", roles={"rollout_worker"},
                               purpose="manager")
        names.add(keys.manager(), server.endpoint)
    """

    def __init__(
        self,
        security: StreamSecurity,
        request_type: Any,
        handle: Callable[[Peer, RequestT], msgspec.Struct | Awaitable[msgspec.Struct]],
        *,
        address: str,
        roles: Set[str],
        purpose: str,
    ) -> None:
        """
        Args:
            request_type: a tagged struct, or a union of them; what else arrives is counted and dropped.
            handle: as for `RequestHandler`.
        """
        codec: MessageCodec[RequestT] = MessageCodec(request_type, trial_uuid=security.trial_uuid)
        self._handler: RequestHandler[Peer, RequestT] = RequestHandler(
            codec=codec,
            handle=lambda peer, message: handle(peer, message.body),
            send=self._send,
            name=f"{purpose} requests",
            num_cached_replies=_NUM_CACHED_REPLIES,
        )
        receive = self._handler.receive
        self._router = RouterEndpoint(
            security, codec, address=address, roles=roles, purpose=purpose, on_message=receive
        )
        self.endpoint = self._router.endpoint
        """Where clients connect: "tcp://host:port"."""
        self.is_connected = self._router.knows
        """Whether a peer that has asked is still there."""

    async def close(self) -> None:
        await self._handler.close()
        self._router.close()

    def _send(self, peer: Peer, frames: list[Buffer]) -> None:
        with contextlib.suppress(PeerDeadError):  # it asks again if it reconnects
            self._router.send(peer.identity, frames)
