"""Request ids, the memory that makes a request happen once although it may be sent twice, and errors as they travel.

caller      re-sends under the same id after a reconnect
responder   ReplyCache    request id -> reply frames    who asks again gets the same answer again
"""

import traceback
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from corral.workers.streams.codec import Buffer, MessageBody
from corral.workers.streams.errors import MalformedMessageError, RemoteError


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
