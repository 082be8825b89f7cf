"""Request ids, and the two memories that make a request happen once although it may be sent twice.

caller     PendingCalls  request id -> frames, future  re-sent under the same id after a reconnect
responder  ReplyCache    request id -> reply frames    who asks again gets the same answer again

A call ends once; what comes for it afterwards is late.

    start() --reply---------------------------> settle() -+
            --error reply, dead peer, closed--> fail()   -+-> its Waiter, or the future of ask()
            --its caller was cancelled--------> forget()
    ask()   --after deadline_s----------------> StreamTimeoutError
"""

import asyncio
import traceback
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

import msgspec

from corral.workers.streams.codec import Buffer, MessageBody
from corral.workers.streams.errors import MalformedMessageError, RemoteError, StreamError, StreamTimeoutError

RequestIdT = TypeVar("RequestIdT", bound=Hashable)
ReplyT = TypeVar("ReplyT")
ReplyT_contra = TypeVar("ReplyT_contra", contravariant=True)


class RequestId(NamedTuple):
    """Requests of a master, in the order in which every worker runs them.

    Example:
        str(RequestId(3, 17)) == "3:17"
    """

    epoch: int
    sequence: int

    def __str__(self) -> str:
        return f"{self.epoch}:{self.sequence}"

    @classmethod
    def parse(cls, text: str) -> "RequestId":
        """Read "epoch:sequence".

        Raises:
            MalformedMessageError: if the text is something else.
        """
        epoch, separator, sequence = text.partition(":")
        if not (separator and epoch.isascii() and epoch.isdigit() and sequence.isascii() and sequence.isdigit()):
            raise MalformedMessageError(f"a request id is written epoch:sequence, not {text!r}")
        return cls(int(epoch), int(sequence))


class Waiter(Protocol[ReplyT_contra]):
    """Whoever hears how one call ends; False if nobody wants to know any more."""

    def settle(self, reply: ReplyT_contra) -> bool: ...

    def fail(self, error: StreamError) -> bool: ...


class _Call(msgspec.Struct, Generic[ReplyT], frozen=True):
    """A request that was not answered yet. One is made for every message, for which a frozen dataclass is slow."""

    asked: str
    frames: list[Buffer]
    waiter: Waiter[ReplyT]


@dataclass(frozen=True, slots=True)
class _FutureWaiter(Generic[ReplyT]):
    """A future that is awaited, or not."""

    future: asyncio.Future[ReplyT]

    def settle(self, reply: ReplyT) -> bool:
        if self.future.done():
            return False
        self.future.set_result(reply)
        return True

    def fail(self, error: StreamError) -> bool:
        if self.future.done():
            return False
        self.future.set_exception(error)
        return True


class PendingCalls(Generic[RequestIdT, ReplyT]):
    """What one peer was asked and has not answered, in the order in which it was asked. Belongs to a loop's thread.

    Example:
        pending: PendingCalls[str, Sum] = PendingCalls(lambda: "gserver_manager")
        future = pending.ask("a:1", frames, asked="Add", deadline_s=30)
        pending.settle("a:1", Sum(2))  # by whoever receives
        await future  # Sum(2)
    """

    def __init__(self, describe_peer: Callable[[], str]) -> None:
        """describe_peer: the peer as it is now, for messages about deadlines."""
        self._describe_peer = describe_peer
        self._call_by_id: dict[RequestIdT, _Call[ReplyT]] = {}

    def __contains__(self, request_id: RequestIdT) -> bool:
        return request_id in self._call_by_id

    def start(self, request_id: RequestIdT, frames: list[Buffer], *, asked: str, waiter: Waiter[ReplyT]) -> None:
        """Remember a request, which the caller sends and sets a deadline for.

        Args:
            asked: what is asked, for messages.
            waiter: hears of the reply, or why there is none.
        """
        self._call_by_id[request_id] = _Call(asked, frames, waiter)

    def ask(
        self, request_id: RequestIdT, frames: list[Buffer], *, asked: str, deadline_s: float
    ) -> asyncio.Future[ReplyT]:
        """As `start`, for one who waits for this reply alone; after `deadline_s` it is a `StreamTimeoutError`."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[ReplyT] = loop.create_future()
        timer = loop.call_later(deadline_s, self.expire, request_id, deadline_s)

        def done(future: asyncio.Future[ReplyT]) -> None:
            timer.cancel()
            mark_seen(future)

        future.add_done_callback(done)
        self.start(request_id, frames, asked=asked, waiter=_FutureWaiter(future))
        return future

    def expire(self, request_id: RequestIdT, deadline_s: float) -> None:
        """It was to be answered within so many seconds, which are over."""
        self.fail(
            request_id,
            lambda asked: StreamTimeoutError(
                f"{self._describe_peer()} did not answer {asked} within {deadline_s:.1f} s"
            ),
        )

    def settle(self, request_id: RequestIdT, reply: ReplyT) -> bool:
        """The peer has answered; False if nobody waits for it (any more)."""
        call = self._call_by_id.pop(request_id, None)
        return call is not None and call.waiter.settle(reply)

    def fail(self, request_id: RequestIdT, error_of: Callable[[str], StreamError]) -> bool:
        """There will be no reply, but an error made of what was asked; False if nobody waits for it (any more)."""
        call = self._call_by_id.pop(request_id, None)
        return call is not None and call.waiter.fail(error_of(call.asked))

    def fail_all(self, error_of: Callable[[str], StreamError]) -> None:
        """As `fail`, for every request."""
        for request_id in list(self._call_by_id):
            self.fail(request_id, error_of)

    def forget(self, request_id: RequestIdT) -> None:
        """Nobody waits for the reply any more, if it has not come."""
        self._call_by_id.pop(request_id, None)

    def frames(self) -> list[list[Buffer]]:
        """What a peer that is connected anew must be told again, in order."""
        return [call.frames for call in self._call_by_id.values()]


def mark_seen(future: asyncio.Future[ReplyT]) -> None:
    """Whoever awaits the reply gets the error; nobody has to."""
    if not future.cancelled():
        future.exception()


class ReplyCache:
    """Remembers the last replies, and which requests are being worked on."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._running: set[str] = set()
        self._replies: OrderedDict[str, list[Buffer]] = OrderedDict()

    def run_once(self, request_id: str, *, run: Callable[[], None], repeat: Callable[[list[Buffer]], object]) -> None:
        """A request came: `run` it if it is new, `repeat` its reply if it was answered before.

        One that is being worked on needs nothing: its reply will come.
        """
        if request_id in self._replies:
            repeat(self._replies[request_id])
        elif request_id not in self._running:
            self._running.add(request_id)
            run()

    def finish(self, request_id: str, frames: list[Buffer]) -> None:
        """The reply is known."""
        self._running.discard(request_id)
        self._replies[request_id] = frames
        while len(self._replies) > self._capacity:
            self._replies.popitem(last=False)


class ErrorReply(MessageBody, frozen=True, tag="error"):
    """The handler raised."""

    error_type: str
    message: str
    traceback: str


def error_reply(error: BaseException) -> ErrorReply:
    """An exception as it travels."""
    return ErrorReply(
        error_type=type(error).__name__, message=str(error), traceback="".join(traceback.format_exception(error))
    )


def remote_error(peer: str, reply: ErrorReply) -> RemoteError:
    """An exception as it arrives; `peer` raised it."""
    return RemoteError(peer=peer, remote_type=reply.error_type, message=reply.message, remote_traceback=reply.traceback)
