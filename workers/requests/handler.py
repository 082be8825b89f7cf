"""WorkerRequestStream: the model worker's end of the request stream.

    master --DEALER--> I/O thread --non-blocking--> callback in the I/O thread --> reply
                           |                            |  Later: again at each look_again(), until its time is over
                           |  blocking                  +-------------------------> reply
                           v
                       released --next_blocking()--> main thread --reply()--> I/O thread --> master

Blocking requests contain collectives: if one worker ran A before B and another B before A, both would wait for ever. A
master sends one request to several workers under one id, the next one under a higher id, and all of them again in this
order to a worker that comes back. What would run here after a higher id is refused, so that any two workers run the
requests that they share in the same order, whatever becomes of messages.

Which master is obeyed is decided by epoch: a request of an older epoch than the newest one seen is answered with
StaleReply, and only Initialize raises the epoch. A request that was answered before gets the same reply again.

So no request of a master that was replaced runs on models that its successor has initialized. What such a master may
write for good is not decided here, but by the trial log.
"""

import asyncio
import logging
import os
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass

from corral.workers.requests.messages import (
    BlockingRequest,
    Hello,
    Initialize,
    NonBlockingRequest,
    ReplyPayload,
    StaleReply,
    ToWorker,
    WorkerRequest,
)
from corral.workers.streams.calls import ErrorReply, ReplyCache, RequestId, error_reply
from corral.workers.streams.closing import Closing
from corral.workers.streams.codec import Buffer, Message, MessageCodec
from corral.workers.streams.errors import MalformedMessageError
from corral.workers.streams.link import DealerLink
from corral.workers.streams.loop_thread import LoopThread
from corral.workers.streams.security import StreamSecurity

logger = logging.getLogger(__name__)

_NUM_CACHED_REPLIES = 64


@dataclass(frozen=True, slots=True)
class DeferredReply:
    """What a handler returns that has nothing to say yet: it is asked again at each `look_again`."""

    wait_s: float
    """From the request's arrival; then it is answered all the same. Infinite where who asks has a deadline."""
    otherwise: ReplyPayload
    """The answer when the time is over."""


NonBlockingHandler = Callable[[NonBlockingRequest], ReplyPayload | DeferredReply]


@dataclass(frozen=True, slots=True)
class Envelope:
    """A blocking request that may run now."""

    request_id: RequestId
    request: BlockingRequest


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
        self._incarnation = incarnation
        self._host = host
        self._non_blocking = non_blocking
        self._codec: MessageCodec[ToWorker] = MessageCodec(ToWorker, trial_uuid=security.trial_uuid)
        self._released: queue.SimpleQueue[Envelope | None] = queue.SimpleQueue()
        self._newest = RequestId(0, 0)
        """The last one that was released."""
        self._deferred: dict[RequestId, tuple[NonBlockingRequest, asyncio.TimerHandle]] = {}
        """Non-blocking requests that have no answer yet, each with the end of its time."""
        self._replies = ReplyCache(_NUM_CACHED_REPLIES)
        self.max_epoch = 0
        """The newest trainer epoch seen; 0 before the first Initialize."""
        self._thread = LoopThread(f"requests of {worker_id}")
        self._link: DealerLink[ToWorker]

        def connect() -> None:
            # Set in the I/O thread: a master that is quick lets us in before this thread hears of the link.
            self._link = DealerLink(
                security,
                self._codec,
                address_provider,
                server="master_worker",
                on_message=self._receive,
                on_up=self._say_hello,
                on_down=self._handle_down,
                silence_s=silence_s,
            )

        self._thread.call(connect)

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
            if envelope is not None and envelope.request_id.epoch >= self.max_epoch:
                return envelope
        return None

    def reply(self, envelope: Envelope, payload: ReplyPayload) -> None:
        """Answer a request."""
        self._thread.call(lambda: self._finish(envelope.request_id, payload))

    def reply_error(self, envelope: Envelope, error: BaseException) -> None:
        """Answer a request with an exception; the master's call raises it as `RemoteError`."""
        self.reply(envelope, error_reply(error))

    def look_again(self) -> None:
        """What a deferred answer waits for may have come; from any thread."""
        self._thread.post(self._answer_deferred)

    def close(self) -> None:
        try:
            self._thread.wait(self._link.close())
        finally:
            self._thread.close()

    # --- everything below runs in the I/O thread --------------------------------------------------------------------

    def _say_hello(self) -> None:
        hello = Hello(
            worker=self.worker_id,
            incarnation=self._incarnation,
            pid=os.getpid(),
            host=self._host,
        )
        self._link.send(self._codec.encode(hello, epoch=self.max_epoch))

    def _handle_down(self, reason: str) -> None:
        if self._link.failure is not None:
            self._released.put(None)  # wakes next_blocking

    def _receive(self, message: Message[ToWorker]) -> None:
        request_id = RequestId.parse(message.request_id)
        if request_id.epoch != message.epoch:
            raise MalformedMessageError(f"request {request_id} arrived under epoch {message.epoch}")
        if request_id.epoch < self.max_epoch:
            self._send(request_id, StaleReply(max_epoch=self.max_epoch))
            return
        self._replies.run_once(str(request_id), run=lambda: self._start(request_id, message), repeat=self._link.send)

    def _start(self, request_id: RequestId, message: Message[WorkerRequest]) -> None:
        request = message.body.request
        answers = map(self._ask_handler, message.body.piggybacked)
        # The first error of what came with it, which the master must hear in place of an answer.
        if (failed := next((answer for answer in answers if isinstance(answer, ErrorReply)), None)) is not None:
            self._finish(request_id, failed)
        elif isinstance(request, NonBlockingRequest):
            self._answer_now(request_id, request)
        elif request_id.epoch > self.max_epoch and not isinstance(request, Initialize):
            came = f"{type(request).__name__} of epoch {request_id.epoch} came before its Initialize"
            refused = _refused("EpochNotInitializedError", f"{came}; this worker still follows epoch {self.max_epoch}")
            self._finish(request_id, refused)
        elif request_id < self._newest:
            came = f"{type(request).__name__} {request_id} came after {self._newest}"
            refused = _refused("OutOfOrderError", f"{came}, and other workers may have run it before")
            self._finish(request_id, refused)
        else:
            self._raise_epoch(request_id.epoch)
            self._newest = request_id
            self._released.put(Envelope(request_id, request))

    def _raise_epoch(self, epoch: int) -> None:
        if epoch > self.max_epoch:
            logger.info("%s follows trainer epoch %d", self.worker_id, epoch)
            self.max_epoch = epoch
            # Whoever asked is no longer our master, and what has arrived for it is sent again in the new session.
            for request_id in [request_id for request_id in self._deferred if request_id.epoch < epoch]:
                self._deferred.pop(request_id)[1].cancel()

    def _answer_now(self, request_id: RequestId, request: NonBlockingRequest) -> None:
        answer = self._ask_handler(request)
        if isinstance(answer, DeferredReply):
            timer = asyncio.get_running_loop().call_later(
                answer.wait_s, self._settle_deferred, request_id, answer.otherwise
            )
            self._deferred[request_id] = request, timer
        else:
            self._finish(request_id, answer)

    def _answer_deferred(self) -> None:
        for request_id, (request, _) in list(self._deferred.items()):
            answer = self._ask_handler(request)
            if not isinstance(answer, DeferredReply):
                self._settle_deferred(request_id, answer)

    def _settle_deferred(self, request_id: RequestId, payload: ReplyPayload) -> None:
        """The one end of a deferred answer: it is kept like any other, and repeated if it is lost on its way."""
        self._deferred.pop(request_id)[1].cancel()
        self._finish(request_id, payload)

    def _ask_handler(self, request: NonBlockingRequest) -> ReplyPayload | DeferredReply:
        try:
            return self._non_blocking(request)
        except Exception as error:  # whatever it is, the master asked and must hear it; the I/O thread must live
            logger.exception("%s failed to answer %s", self.worker_id, type(request).__name__)
            return error_reply(error)

    def _finish(self, request_id: RequestId, payload: ReplyPayload) -> None:
        if request_id.epoch < self.max_epoch:
            return  # whoever asked is no longer our master
        self._replies.finish(str(request_id), self._send(request_id, payload))

    def _send(self, request_id: RequestId, payload: ReplyPayload) -> list[Buffer]:
        frames = self._codec.encode(payload, epoch=request_id.epoch, request_id=str(request_id))
        self._link.send(frames)  # if the link is down, the master asks again under the same id
        return frames


def _refused(error_type: str, message: str) -> ErrorReply:
    return ErrorReply(error_type=error_type, message=message, traceback="")
