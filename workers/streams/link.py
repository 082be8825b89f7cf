"""DealerLink: one DEALER that finds its server, keeps finding it, and never waits in silence.

    RESOLVING --address--> CONNECTING --handshake--> UP --disconnected, or the server moved--> RESOLVING
        ^                      |
        +----unreachable-------+---refused, and never let in---> FAILED (WrongTrialKeyError for everyone who waits)

Every connection is a new socket, so that nothing is re-sent behind our back: the user of the link decides in `on_up`
what to say again. A server that is quiet may have been replaced while its process still hangs on to the port: then the
address provider is asked again, and a new address wins.
"""

import asyncio
import enum
import logging
import math
from collections.abc import Callable
from typing import Generic

import zmq

from corral.name_resolve.base import NameServiceError
from corral.workers.streams.closing import cancel
from corral.workers.streams.codec import BodyT, Buffer, Message, MessageCodec
from corral.workers.streams.errors import (
    MalformedMessageError,
    StreamClosedError,
    StreamError,
    WrongTrialKeyError,
)
from corral.workers.streams.router import Refusals, SocketReader, read_events
from corral.workers.streams.security import MonitoredSocket, StreamSecurity

logger = logging.getLogger(__name__)

_RESOLVE_TIMEOUT_S = 10.0
_HANDSHAKE_TIMEOUT_S = 5.0
_BACKOFF_S = (0.05, 0.1, 0.25, 0.5, 1.0)
# A refusal is certain only if it repeats: a port may have been taken over by another trial between lookup and connect.
_REFUSAL_GRACE_S = 0.7
_DEFAULT_SILENCE_S = 10.0


class _End(enum.Enum):
    """Why a connection is over."""

    UNREACHABLE = "nobody listens there"
    REFUSED = "the handshake was refused"
    LOST = "the connection was lost"
    MOVED = "the server moved to another address"


class _Connection:
    """One socket's life; `end` resolves when it is over."""

    def __init__(
        self, client: MonitoredSocket, *, on_message: Callable[[list[Buffer]], None], on_up: Callable[[], object]
    ) -> None:
        self.client = client
        self.is_up = False
        self.end: asyncio.Future[_End] = asyncio.get_running_loop().create_future()
        self.last_received_s = asyncio.get_running_loop().time()
        self._on_message = on_message
        self._on_up = on_up
        self._is_accepted = False
        self._reader = SocketReader(client.socket, self._deliver)
        self._monitor_reader = read_events(client.monitor, self._handle_event)

    def send(self, frames: list[Buffer]) -> bool:
        try:
            self.client.socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False  # the connection has just ended
        finally:
            self._reader.look_again()
        return True

    def close(self) -> None:
        self._reader.close()
        self._monitor_reader.close()
        self.client.close()

    def _deliver(self, frames: list[zmq.Frame]) -> None:
        self.last_received_s = asyncio.get_running_loop().time()
        if len(frames) > 1 or len(frames[0]) > 0:  # the rest are probes
            self._on_message([frame.buffer for frame in frames])

    def _handle_event(self, event: int, _: int) -> None:
        if self.end.done():
            return
        if event == zmq.EVENT_CONNECTED:
            self._is_accepted = True
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.is_up = True
            self._on_up()
        elif event == zmq.EVENT_DISCONNECTED and self.is_up:
            self._reader.read()
            self.end.set_result(_End.LOST)
        elif self._is_accepted and event != zmq.EVENT_CLOSED:
            # A server without our trial's secret key just hangs up, so a hang-up in the handshake is a refusal as well.
            self.end.set_result(_End.REFUSED)
        else:
            self.end.set_result(_End.UNREACHABLE)


class DealerLink(Generic[BodyT]):
    """A connection that is made anew whenever it ends. All methods belong to the loop's thread."""

    def __init__(
        self,
        security: StreamSecurity,
        codec: MessageCodec[BodyT],
        address_provider: Callable[[], str],
        *,
        server: str,
        on_message: Callable[[Message[BodyT]], None],
        on_up: Callable[[], object],
        on_down: Callable[[], None] = lambda: None,
        on_failure: Callable[[StreamError], None] = lambda _: None,
        bulk: bool = False,
        silence_s: float = _DEFAULT_SILENCE_S,
    ) -> None:
        """
        Args:
            codec: of what the server says; what else arrives is counted and dropped.
            address_provider: gives "tcp://host:port" of the server as it is known now, or raises a NameServiceError,
                OSError or LookupError while nobody is registered. It runs in another thread and may block for some
                seconds.
            server: who is at the other end, for messages: "master_worker".
            on_message: gets every message; may raise nothing but `MalformedMessageError`, which counts as above.
            on_up: the server let us in; it knows nothing of earlier connections.
            on_down: the connection ended; there will be another one.
            on_failure: the link has given up for good.
            silence_s: ask for the address again when the server has said nothing for so long.
        """
        self._security = security
        self._codec = codec
        self._address_provider = address_provider
        self._server = server
        self._on_message = on_message
        self._on_up = on_up
        self._on_down = on_down
        self._on_failure = on_failure
        self._bulk = bulk
        self._silence_s = silence_s
        self._malformed = Refusals(f"malformed messages of {server}")
        self._loop = asyncio.get_running_loop()
        self._connection: _Connection | None = None
        self.failure: StreamError | None = None
        """Why the link has given up for good."""
        self._reason = "not tried yet"
        self._endpoint = ""
        self._was_up = False
        self._task = asyncio.create_task(self._run(), name=f"link to {server}")
        self._task.add_done_callback(self._handle_task_done)

    @property
    def is_up(self) -> bool:
        return self._connection is not None and self._connection.is_up

    def describe(self) -> str:
        """The server and the state of the link, for messages."""
        where = f"{self._server} at {self._endpoint}" if self._endpoint else self._server
        return f"{where} (connected)" if self.is_up else f"{where} ({self._reason})"

    def send(self, frames: list[Buffer]) -> bool:
        """Send now; False if the link is not up, and then nothing was sent."""
        return self._connection is not None and self._connection.is_up and self._connection.send(frames)

    def raise_failure(self) -> None:
        """Raise why the link has given up, if it has."""
        if self.failure is not None:
            raise self.failure

    async def close(self) -> None:
        await cancel(self._task)
        self.failure = self.failure or StreamClosedError(f"the link to {self._server} is closed")

    async def _run(self) -> None:
        attempt, refused_since_s = 0, math.inf
        while self.failure is None:
            endpoint = await self._resolve()
            end = None if endpoint is None else await self._live(endpoint)
            attempt = 0 if end in (_End.LOST, _End.MOVED) else attempt + 1
            now_s = self._loop.time()
            refused_since_s = min(refused_since_s, now_s) if end is _End.REFUSED else math.inf
            # Once let in, our key is right: who refuses it has the port of a server that is away, however long.
            if not self._was_up and now_s - refused_since_s >= _REFUSAL_GRACE_S:
                refused = f"{self._server} at {self._endpoint} refused the {self._security.role} key of trial"
                self._fail(
                    WrongTrialKeyError(
                        f"{refused} {self._security.trial_uuid}: it belongs to another trial or does not serve this "
                        "role. Check that this process reads the secrets of the trial that it connects to, and that "
                        "the address is not left over from an earlier trial"
                    )
                )
                return
            step = 2 if end is _End.REFUSED else min(attempt, len(_BACKOFF_S) - 1)
            await asyncio.sleep(_BACKOFF_S[step])

    async def _resolve(self) -> str | None:
        try:
            async with asyncio.timeout(_RESOLVE_TIMEOUT_S):
                return await self._loop.run_in_executor(None, self._address_provider)
        except (NameServiceError, OSError, LookupError, TimeoutError) as error:
            self._reason = f"its address is not known: {error}"
            return None

    async def _live(self, endpoint: str) -> _End:
        """One connection, from connecting to its end."""
        self._endpoint = endpoint
        try:
            client = self._security.connect_dealer(endpoint, bulk=self._bulk)
        except ValueError as error:
            self._reason = str(error)
            return _End.UNREACHABLE
        connection = _Connection(client, on_message=self._receive, on_up=self._on_up)
        self._connection = connection
        try:
            end = await self._wait_for_end(connection)
        finally:
            self._connection = None
            connection.close()
        self._was_up |= connection.is_up
        self._reason = end.value
        if connection.is_up:
            logger.info("connection to %s at %s ended: %s", self._server, endpoint, end.value)
            self._on_down()
        return end

    async def _wait_for_end(self, connection: _Connection) -> _End:
        began = self._loop.time()
        while True:
            await asyncio.wait({connection.end}, timeout=min(_HANDSHAKE_TIMEOUT_S, self._silence_s))
            if connection.end.done():
                return connection.end.result()
            if not connection.is_up:
                if self._loop.time() - began >= _HANDSHAKE_TIMEOUT_S:
                    return _End.UNREACHABLE
            elif self._loop.time() - connection.last_received_s >= self._silence_s:
                endpoint = await self._resolve()
                if endpoint is not None and endpoint != connection.client.endpoint:
                    return _End.MOVED

    def _receive(self, frames: list[Buffer]) -> None:
        try:
            self._on_message(self._codec.decode(frames))
        except MalformedMessageError as error:
            self._malformed.note(error)

    def _fail(self, failure: StreamError) -> None:
        self.failure = failure
        self._on_failure(failure)

    def _handle_task_done(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            # Only the user's address provider can get here; the caller that waits must hear of it.
            failure = StreamError(f"the link to {self._server} broke: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._fail(failure)
