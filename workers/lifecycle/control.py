"""Control of one worker from outside: a command such as "status" -> an answer, also while the worker computes.

rl-status, rl-stop, master --control_call--> ControlServer thread --callback(command)--> answer
"""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from corral.workers.streams.closing import Closing
from corral.workers.streams.loop_thread import LoopThread
from corral.workers.streams.rpc import AsyncRequestClient, AsyncRequestServer
from corral.workers.streams.security import StreamSecurity

_ROLES = frozenset({"launcher", "master_worker"})


class ControlRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="control"):
    """A command to one worker, such as "ping", "status", "stacks" or "exit"."""

    command: str


class ControlAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="answer"):
    """What the worker says; the keys depend on the command and end at a person's eyes."""

    fields: dict[str, Any]


class ControlServer(Closing):
    """Answers control requests in a thread of its own, while the main thread is busy.

    Example:
        with ControlServer(security, answer, address="10.0.0.7") as control:
            names.lease(keys.worker("model_worker", 3), control.endpoint, ttl_s=10, owner=incarnation)
    """

    def __init__(self, security: StreamSecurity, callback: Callable[[str], Mapping[str, Any]], *, address: str) -> None:
        """
        Args:
            callback: gets the command; answers with what msgpack can carry. It runs in the control thread, must not
                wait for the main thread, and raises ValueError for a command that it does not know.
            address: IP address of the interface to listen on.
        """

        async def handle(role: str, request: ControlRequest) -> ControlAnswer:
            return ControlAnswer(dict(callback(request.command)))

        async def start() -> AsyncRequestServer[ControlRequest]:
            return AsyncRequestServer(
                security, ControlRequest, handle, address=address, roles=_ROLES, purpose="control"
            )

        self._thread = LoopThread("control")
        try:
            self._server = self._thread.wait(start())
        except BaseException:
            self._thread.close()
            raise

    @property
    def endpoint(self) -> str:
        """Where `control_call` connects: "tcp://host:port"."""
        return self._server.endpoint

    def close(self) -> None:
        try:
            self._thread.wait(self._server.close())
        finally:
            self._thread.close()


async def control_call(
    endpoint: str, command: str, security: StreamSecurity, *, worker: str, deadline_s: float
) -> dict[str, Any]:
    """Ask one worker.

    Args:
        endpoint: of its ControlServer.
        worker: whom we ask, for messages: "model_worker/3".

    Raises:
        StreamTimeoutError: if it did not answer before the deadline.
        WrongTrialKeyError: if it belongs to another trial.
        RemoteError: if its callback raised, such as for an unknown command.
    """
    client: AsyncRequestClient[ControlRequest, ControlAnswer]
    client = AsyncRequestClient(security, ControlAnswer, lambda: endpoint, server=worker)
    async with client:
        return (await client.request(ControlRequest(command), deadline_s=deadline_s)).fields
