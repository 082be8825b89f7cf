"""Request ids, and the two memories that make a request happen once although it may be sent twice.

caller     PendingCalls  request id -> frames, future  re-sent under the same id after a reconnect
responder  ReplyCache    request id -> reply frames    who asks again gets the same answer again

A call ends once; what comes for it afterwards is late.

    ask() --reply---------------------------> settle() -+
          --error reply, link is closed-----> fail()   -+-> its future
          --after deadline_s----------------> expire() -+
          --its caller was cancelled--------> forget()
"""

import asyncio
import traceback
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, TypeVar

import msgspec

from corral.workers.streams.codec import Buffer, MessageBody
from corral.workers.streams.errors import MalformedMessageError, RemoteError, StreamError, StreamTimeoutError

RequestIdT = TypeVar("RequestIdT", bound=Hashable)
ReplyT = TypeVar("ReplyT")


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


class _Call(msgspec.Struct, Generic[ReplyT], frozen=True):
    """A request that was not answered yet."""

    asked: str
    frames: list[Buffer]
    reply: asyncio.Future[ReplyT]


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

    def ask(
        self, request_id: RequestIdT, frames: list[Buffer], *, asked: str, deadline_s: float
    ) -> asyncio.Future[ReplyT]:
        """Remember a request, which the caller sends; after `deadline_s` its answer is a `StreamTimeoutError`.

        Args:
            asked: what is asked, for messages.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[ReplyT] = loop.create_future()
        timer = loop.call_later(deadline_s, self.expire, request_id, deadline_s)

        def done(future: asyncio.Future[ReplyT]) -> None:
            timer.cancel()
            mark_seen(future)

        future.add_done_callback(done)
        self._call_by_id[request_id] = _Call(asked, frames, future)
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
        if call is None or call.reply.done():
            return False
        call.reply.set_result(reply)
        return True

    def fail(self, request_id: RequestIdT, error_of: Callable[[str], StreamError]) -> bool:
        """There will be no reply, but an error made of what was asked; False if nobody waits for it (any more)."""
        call = self._call_by_id.pop(request_id, None)
        if call is None or call.reply.done():
            return False
        call.reply.set_exception(error_of(call.asked))
        return True

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
