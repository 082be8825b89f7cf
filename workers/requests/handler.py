"""WorkerRequestStream: the model worker's end of the request stream.

    master --DEALER--> I/O thread --non-blocking--> callback in the I/O thread --> reply
                           |                            |  DeferredReply: again at each look_again(), until its time
                           |  blocking                  |  is over
                           v                            +-------------------------> reply
                       released --next_blocking()--> main thread --reply()--> I/O thread --> master

Blocking requests contain collectives: if one worker ran A before B and another B before A, both would wait for ever. A
master sends one request to several workers under one id, the next one under a higher id, and all of them again in this
order to a worker that comes back. What would run here after a higher id is refused, so that any two workers run the
requests that they share in the same order, whatever becomes of messages.

Which master is obeyed is decided by epoch: a request of an older epoch than the newest one seen is answered with
StaleReply, and only Initialize raises the epoch.

So no request of a master that was replaced runs on models that its successor has initialized. What such a master may
write for good is not decided here, but by the trial log.
"""

import asyncio
import logging
import os
import queue
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from corral.workers.requests.messages import (
    BlockingRequest,
    Hello,
    Initialize,
    NonBlockingRequest,
    ReplyPayload,
    ToWorker,
)
from corral.workers.streams.closing import Closing
from corral.workers.streams.codec import Message, MessageCodec
from corral.workers.streams.errors import StreamError
from corral.workers.streams.link import DealerLink
from corral.workers.streams.loop_thread import LoopThread
from corral.workers.streams.rpc import RequestHandler, error_reply
from corral.workers.streams.security import StreamSecurity

logger = logging.getLogger(__name__)

_NUM_CACHED_REPLIES = 64


@dataclass(frozen=True, slots=True)
class DeferredReply:
    """What a callback returns that has nothing to say yet: it is asked again at each `look_again`."""

    wait_s: float
    """From the request's arrival; then it is answered all the same. Infinite where who asks has a deadline."""
    otherwise: ReplyPayload
    """The answer when the time is over."""


NonBlockingHandler = Callable[[NonBlockingRequest], ReplyPayload | DeferredReply]


@dataclass(frozen=True, slots=True)
class Envelope:
    """A blocking request that may run now."""

    epoch: int
    request: BlockingRequest
    deferred: asyncio.Future[ReplyPayload]
    """Its reply, which belongs to the I/O thread."""


class WorkerRequestStream(Closing):
    """Requests of the master in, replies out.

    Example:
        with WorkerRequestStream(security, lambda: names.get(keys.master_stream()), worker_id="model_worker/3",
                                 incarnation=uuid4().hex, non_blocking=answer) as stream:
            while (envelope := stream.next_blocking(timeout_s=1.0)) is not None:
                stream.reply(envelope, run(envelope.request))
    """

    def __init__(
        self,
        security: StreamSecurity,
        address_provider: Callable[[], str],
        *,
        worker_id: str,
        incarnation: str,
        host: str = "",
        non_blocking: NonBlockingHandler,
        silence_s: float = 10.0,
    ) -> None:
        """
        Args:
            address_provider: the master's endpoint; see `DealerLink`. Asked again after a disconnect or a silence.
            worker_id: "model_worker/3".
            incarnation: new in every process.
            host: equal for workers that may be able to share memory.
            non_blocking: answers non-blocking requests, in the I/O thread, also while the main thread runs a blocking
                one.
            silence_s: look for another master when this one has said nothing for so long.
        """
        self.worker_id = worker_id
        self._non_blocking = non_blocking
        codec: MessageCodec[ToWorker] = MessageCodec(ToWorker, trial_uuid=security.trial_uuid)
        self._released: queue.SimpleQueue[Envelope | None] = queue.SimpleQueue()
        self._newest = 0, 0
        """Epoch and number of the last one that was released."""
        self._news = asyncio.Event()
        """Of one `look_again`; the next one sets another."""
        self._handler: RequestHandler[None, ToWorker] = RequestHandler(
            codec=codec,
            handle=self._handle,
            send=lambda _, frames: self._link.send(frames),
            name=f"requests to {worker_id}",
            num_cached_replies=_NUM_CACHED_REPLIES,
        )
        hello = Hello(worker=worker_id, incarnation=incarnation, pid=os.getpid(), host=host)
        self._thread = LoopThread(f"requests of {worker_id}")
        self._link: DealerLink[ToWorker]

        def connect() -> None:
            # Set in the I/O thread: a master that is quick lets us in before this thread hears of the link.
            self._link = DealerLink(
                security,
                codec,
                address_provider,
                server="master_worker",
                on_message=partial(self._handler.receive, None),
                on_up=lambda: self._link.send(codec.encode(hello, epoch=self.max_epoch)),
                on_failure=lambda _: self._released.put(None),  # wakes next_blocking
                silence_s=silence_s,
            )

        self._thread.call(connect)

    @property
    def max_epoch(self) -> int:
        """The newest trainer epoch seen; 0 before the first Initialize."""
        return self._handler.max_epoch

    def next_blocking(self, timeout_s: float) -> Envelope | None:
        """The next request to run, or None after `timeout_s`.

        Raises:
            WrongTrialKeyError: if the master does not let this worker in.
        """
        deadline_s = time.monotonic() + timeout_s
        while (remaining_s := deadline_s - time.monotonic()) >= 0:
            self._link.raise_failure()
            try:
                envelope = self._released.get(timeout=remaining_s)
            except queue.Empty:
                return None
            if envelope is not None and envelope.epoch >= self.max_epoch:
                return envelope
        return None

    def reply(self, envelope: Envelope, payload: ReplyPayload) -> None:
        """Answer a request."""

        def settle() -> None:
            if not envelope.deferred.done():  # else the master that asked was replaced
                envelope.deferred.set_result(payload)

        self._thread.call(settle)

    def reply_error(self, envelope: Envelope, error: BaseException) -> None:
        """Answer a request with an exception; the master's call raises it as `RemoteError`."""
        self.reply(envelope, error_reply(error))

    def look_again(self) -> None:
        """What a deferred reply waits for may have come; from any thread."""
        self._thread.post(self._announce)

    def close(self) -> None:
        async def close() -> None:
            await self._handler.close()
            await self._link.close()

        try:
            self._thread.wait(close())
        finally:
            self._thread.close()

    # --- everything below runs in the I/O thread --------------------------------------------------------------------

    def _announce(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    def _handle(self, master: None, message: Message[ToWorker]) -> ReplyPayload | Awaitable[ReplyPayload]:
        request, epoch = message.body.request, message.epoch
        for piggybacked in message.body.piggybacked:
            self._non_blocking(piggybacked)  # its error is what the master hears in place of an answer
        if isinstance(request, NonBlockingRequest):
            answer = self._non_blocking(request)
            return self._defer(request, answer, self._news) if isinstance(answer, DeferredReply) else answer
        came, number = f"{type(request).__name__} {message.request_id} came", int(message.request_id.rpartition(":")[2])
        if epoch > self.max_epoch and not isinstance(request, Initialize):
            raise StreamError(f"{came} before an Initialize of its epoch; this worker follows epoch {self.max_epoch}")
        if (epoch, number) < self._newest:
            newest = "{}:{}".format(*self._newest)
            raise StreamError(f"{came} after {newest}, and other workers may have run it before")
        if epoch > self.max_epoch:
            logger.info("%s follows trainer epoch %d", self.worker_id, epoch)
            self._handler.follow(epoch)
        self._newest = epoch, number
        deferred: asyncio.Future[ReplyPayload] = asyncio.get_running_loop().create_future()
        self._released.put(Envelope(epoch, request, deferred))
        return deferred

    async def _defer(self, request: NonBlockingRequest, answer: DeferredReply, news: asyncio.Event) -> ReplyPayload:
        """The callback's first reply at a `look_again`, from `news` on.

        Cancelled with its epoch: what has arrived for a master that was replaced is sent again in the new session.
        """
        deadline = asyncio.get_running_loop().time() + answer.wait_s
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    await news.wait()
            except TimeoutError:
                return answer.otherwise
            news = self._news  # before the look, so that nothing is missed that comes during it
            if not isinstance(found := self._non_blocking(request), DeferredReply):
                return found
