"""Requests to a bound server, asyncio at both ends: rollout workers -> manager.

    AsyncRequestClient --request, request id--> AsyncRequestServer --> handler(peer, body)
                       <------reply-----------

The client waits through a restart of the server: it finds the new address, and re-sends what was not answered under
the same id, which the server runs only once. A *restarted* server has no memory of it, so handlers must be idempotent
in their own terms.
"""

import asyncio
import itertools
import logging
import uuid
from collections.abc import Awaitable, Callable, Set
from functools import partial
from typing import Any, Generic, TypeVar

import msgspec

from corral.workers.streams.calls import ErrorReply, ReplyCache, error_reply, remote_error
from corral.workers.streams.closing import AsyncClosing, cancel
from corral.workers.streams.codec import Buffer, Message, MessageCodec
from corral.workers.streams.errors import PeerDeadError, StreamClosedError, StreamError, StreamTimeoutError
from corral.workers.streams.link import DealerLink
from corral.workers.streams.router import Peer, RouterEndpoint
from corral.workers.streams.security import StreamSecurity

logger = logging.getLogger(__name__)

RequestT = TypeVar("RequestT", bound=msgspec.Struct)
ReplyT = TypeVar("ReplyT", bound=msgspec.Struct)

_NUM_CACHED_REPLIES = 4096  # of all clients together; replies of these servers are small


class AsyncRequestServer(AsyncClosing, Generic[RequestT]):
    """Answers requests with a handler on the running loop; many handlers may run at the same time.

    Example:
        server = AsyncRequestServer(security, ManagerRequest, handle, address="10.0.0.7", roles={"rollout_worker"},
                                    purpose="manager")
        names.add(keys.manager(), server.endpoint)
    """

    def __init__(
        self,
        security: StreamSecurity,
        request_type: Any,
        handler: Callable[[Peer, RequestT], msgspec.Struct | Awaitable[msgspec.Struct]],
        *,
        address: str,
        roles: Set[str],
        purpose: str,
    ) -> None:
        """
        Args:
            request_type: a tagged struct, or a union of them; what else arrives is counted and dropped.
            handler: gets the sender and its request, and gives the reply, or what it comes from; it sees to it that one
                comes some time. What it raises becomes a `RemoteError` at the client.
        """
        self._handler = handler
        self._purpose = purpose
        self._codec: MessageCodec[RequestT] = MessageCodec(request_type, trial_uuid=security.trial_uuid)
        self._replies = ReplyCache(_NUM_CACHED_REPLIES)
        self._identity_by_request_id: dict[str, bytes] = {}
        self._unanswered: set[asyncio.Future[msgspec.Struct]] = set()
        self._router = RouterEndpoint(
            security,
            self._codec,
            address=address,
            roles=roles,
            purpose=purpose,
            on_message=self._receive,
            on_peer_gone=lambda _: None,
        )

    @property
    def endpoint(self) -> str:
        """Where clients connect: "tcp://host:port"."""
        return self._router.endpoint

    def is_connected(self, peer: Peer) -> bool:
        """Whether who has sent something is still there."""
        return self._router.knows(peer)

    async def close(self) -> None:
        await cancel(*self._unanswered)
        self._router.close()

    def _receive(self, peer: Peer, message: Message[RequestT]) -> None:
        request_id = message.request_id
        self._identity_by_request_id[request_id] = peer.identity  # a repeated request comes from where the reply goes
        self._replies.run_once(
            request_id,
            run=lambda: self._start(peer, message),
            repeat=lambda frames: self._send(request_id, frames),
        )

    def _start(self, peer: Peer, message: Message[RequestT]) -> None:
        answer: msgspec.Struct | Awaitable[msgspec.Struct] | Exception
        try:
            answer = self._handler(peer, message.body)
        except Exception as error:
            answer = error
        if isinstance(answer, msgspec.Struct | Exception):
            self._reply(message.request_id, answer)
            return
        later = asyncio.ensure_future(answer)
        self._unanswered.add(later)
        later.add_done_callback(partial(self._handle_answer, message.request_id))

    def _handle_answer(self, request_id: str, answer: "asyncio.Future[msgspec.Struct]") -> None:
        self._unanswered.discard(answer)
        if not answer.cancelled():
            self._reply(request_id, answer.exception() or answer.result())

    def _reply(self, request_id: str, reply: msgspec.Struct | BaseException) -> None:
        try:
            if isinstance(reply, BaseException):
                raise reply
            frames = self._codec.encode(reply, epoch=0, request_id=request_id)
        except Exception as error:  # whatever it is, the client asked and must hear it
            logger.exception("the %s handler failed", self._purpose)
            frames = self._codec.encode(error_reply(error), epoch=0, request_id=request_id)
        self._replies.finish(request_id, frames)
        self._send(request_id, frames)

    def _send(self, request_id: str, frames: list[Buffer]) -> None:
        identity = self._identity_by_request_id.pop(request_id)
        try:
            self._router.send(identity, frames)
        except PeerDeadError:
            logger.debug(
                "the client of %s request %s is gone; it asks again if it reconnects", self._purpose, request_id
            )


class AsyncRequestClient(AsyncClosing, Generic[RequestT, ReplyT]):
    """Asks a server that may restart and move.

    Example:
        address = lambda: names.get(keys.manager())
        manager = AsyncRequestClient(security, ManagerReply, address, server="gserver_manager")
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
        self._server = server
        self._codec: MessageCodec[ReplyT | ErrorReply] = MessageCodec(
            reply_type | ErrorReply, trial_uuid=security.trial_uuid
        )
        self._client_id = uuid.uuid4().hex[:16]
        self._sequence = itertools.count(1)
        self._unanswered: dict[str, tuple[list[Buffer], asyncio.Future[ReplyT]]] = {}
        """By request id: what the server was told, in the order in which it was, and what it is to answer."""
        self._link = DealerLink(
            security,
            self._codec,
            address_provider,
            server=server,
            on_message=self._receive,
            on_up=self._send_all,
            on_down=self._handle_down,
        )

    async def request(self, body: RequestT, *, deadline_s: float) -> ReplyT:
        """Ask and wait for the answer, through restarts of the server.

        Raises:
            StreamTimeoutError: if there was no answer before the deadline.
            RemoteError: if the handler raised.
            WrongTrialKeyError: if the server does not let us in.
        """
        self._link.raise_failure()
        request_id = f"{self._client_id}:{next(self._sequence)}"
        frames = self._codec.encode(body, epoch=0, request_id=request_id, deadline_s=deadline_s)
        future: asyncio.Future[ReplyT] = asyncio.get_running_loop().create_future()
        self._unanswered[request_id] = frames, future
        self._link.send(frames)
        try:
            async with asyncio.timeout(deadline_s) as deadline:
                return await future
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise StreamTimeoutError(
                f"{self._link.describe()} did not answer {type(body).__name__} within {deadline_s:.1f} s"
            ) from error
        finally:
            del self._unanswered[request_id]

    async def close(self) -> None:
        await self._link.close()
        self._fail_all(StreamClosedError(f"the connection to {self._server} was closed"))

    def _send_all(self) -> None:
        for frames, _ in self._unanswered.values():
            self._link.send(frames)

    def _handle_down(self, reason: str) -> None:
        if self._link.failure is not None:  # else the link comes back by itself, and then everything is sent again
            self._fail_all(self._link.failure)

    def _fail_all(self, error: StreamError) -> None:
        for _, future in self._unanswered.values():
            if not future.done():
                future.set_exception(error)

    def _receive(self, message: Message[ReplyT | ErrorReply]) -> None:
        _, future = self._unanswered.get(message.request_id, (None, None))
        if future is None or future.done():
            return  # nobody waits for it any more
        if isinstance(message.body, ErrorReply):
            future.set_exception(remote_error(self._server, message.body))
        else:
            future.set_result(message.body)
