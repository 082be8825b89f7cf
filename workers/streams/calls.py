"""Request ids, and the two memories that make a request happen once although it may be sent twice.

caller     request id -> future        re-sent under the same id after a reconnect
responder  request id -> reply frames  a request that was answered before gets the same answer again (ReplyCache)
"""

import traceback
from collections import OrderedDict
from enum import Enum
from typing import NamedTuple

from corral.workers.streams.codec import Buffer, MessageBody
from corral.workers.streams.errors import MalformedMessageError


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


class Known(Enum):
    """What a ReplyCache knows of a request that it cannot answer from memory."""

    NEW = "run it"
    RUNNING = "it is being worked on; its reply will come"


class ReplyCache:
    """Remembers the last replies, and which requests are being worked on."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._running: set[str] = set()
        self._replies: OrderedDict[str, list[Buffer]] = OrderedDict()

    def begin(self, request_id: str) -> Known | list[Buffer]:
        """NEW (and from now on RUNNING), RUNNING, or the frames of the reply that was given before."""
        if request_id in self._replies:
            return self._replies[request_id]
        if request_id in self._running:
            return Known.RUNNING
        self._running.add(request_id)
        return Known.NEW

    def finish(self, request_id: str, frames: list[Buffer]) -> None:
        """The reply is known."""
        self._running.discard(request_id)
        self._replies[request_id] = frames
        while len(self._replies) > self._capacity:
            self._replies.popitem(last=False)

    def forget_running(self) -> None:
        """What is being worked on will not be answered any more."""
        self._running.clear()


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
