"""The thread that owns a GenerationEngine: commands and requests in, futures out.

    any thread --submit/call/change_over-------> inbox --> [ commands | step | deliver ] --> futures
                                                            ^------ one engine thread ------^

Only this thread touches the engine, so a command takes effect between two decode steps, in the order in which it came.
A change-over is a pause, an update, a look at what it did, and the end of the pause, as one command. An exception in a
step ends the loop for good: every future gets it, and `failure` says so to whoever asks.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, NamedTuple

from corral.experiments.config.rollout import UpdateMode
from corral.workers.engine.engine import GenerationEngine, StagedModel
from corral.workers.engine.requests import GenerationRequest, RequestOutput

logger = logging.getLogger(__name__)

OutputListener = Callable[[RequestOutput], object]


class EngineStoppedError(RuntimeError):
    """The engine thread has stopped or failed; nothing more will be generated."""


class ChangedOver(NamedTuple):
    """What a change-over did."""

    stopped_s: float
    """How long it kept the engine from its next step. One that was under way when it was ordered has made tokens."""
    replaced: StagedModel
    """The weights of before, whose memory is given back when this is dropped."""


class EngineLoop:
    """Runs an engine in its own thread. Every method may be called from any thread.

    Example:
        with EngineLoop(engine) as loop:
            output = loop.submit(request).result(timeout=60)
    """

    def __init__(self, engine: GenerationEngine) -> None:
        self.engine = engine
        """Read its counters and `check` freely; change it only through this loop."""
        self.ended: Future[None] = Future()
        """Done when the thread ends: with None after `stop`, with the exception of a failed step."""
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._futures: dict[str, Future[RequestOutput]] = {}
        self._listeners: dict[str, OutputListener] = {}
        self._is_stopping = False
        self._stopped: EngineStoppedError | None = None
        self._thread = threading.Thread(target=self._run, name="generation-engine", daemon=True)

    def __enter__(self) -> EngineLoop:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def start(self) -> None:
        self.ended.set_running_or_notify_cancel()  # from here on nobody who waits for it can cancel it
        self._thread.start()

    def stop(self, *, timeout_s: float = 30.0) -> None:
        """End every request as aborted and the thread with it.

        Raises:
            TimeoutError: if a decode step does not end in time.
        """
        if not self._thread.is_alive():
            return
        self.call(self._begin_stop)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"the engine thread did not end its decode step within {timeout_s:.0f} s")

    def submit(self, request: GenerationRequest, *, listener: OutputListener | None = None) -> Future[RequestOutput]:
        """Queue a request; the future carries its output, or ValueError if its id is in flight or it does not fit.

        Args:
            listener: gets every output of the request, if it is streamed, the last one before the future is done, which
                carries that one; called in the engine's thread, so it must neither wait nor raise.
        """
        future: Future[RequestOutput] = Future()
        self._post(lambda: self._accept(request, future, listener), future)
        return future

    def abort(self, request_ids: Iterable[str] | None) -> Future[None]:
        """End these requests (None: all); their own futures carry what they have."""
        wanted = None if request_ids is None else frozenset(request_ids)
        return self.call(lambda: self.engine.abort(wanted))

    def call(self, function: Callable[[], Iterable[RequestOutput]]) -> Future[None]:
        """Do something with the engine between two steps; futures of requests that it ends carry their outputs."""
        future: Future[None] = Future()

        def run() -> None:
            self._deliver(function())
            future.set_result(None)

        self._post(run, future)
        return future

    def change_over(
        self, staged: StagedModel, *, version: str, mode: UpdateMode, check: Callable[[], None]
    ) -> Future[ChangedOver]:
        """Apply staged weights between two decode steps; requests under way go on, or end, as the mode has it.

        Guarantee: no token is made by the new weights before `check` has returned. What it raises goes to the caller,
        ends all requests with the tokens that they have, and leaves the engine paused, since nobody knows what it
        would go on with, until other weights are taken over.

        Args:
            check: looks at the engine, in its thread, while it stands still; has to be quick.
        """
        future: Future[ChangedOver] = Future()

        def change() -> None:
            self._deliver(self.engine.pause("in_place"))  # reads the tokens of a step that a GPU is still at
            began = time.monotonic()
            self._deliver(self.engine.pause(mode))
            replaced = self.engine.apply_weights(staged, version=version)
            if mode != "in_place":
                self.engine.flush_cache()
            try:
                check()
            except Exception as refusal:  # whatever it is, it says that the weights are not those of the version
                self._deliver(self.engine.abort(None))
                future.set_exception(refusal)
                return
            self.engine.resume()
            future.set_result(ChangedOver(time.monotonic() - began, replaced))

        self._post(change, future)
        return future

    def _post(self, command: Callable[[], None], future: Future[Any]) -> None:
        def run() -> None:
            """ValueError is the caller's to answer; anything else ends the engine too."""
            if not future.set_running_or_notify_cancel():
                return
            try:
                if self._stopped is None:
                    command()
                else:
                    future.set_exception(self._stopped)
            except BaseException as error:
                future.set_exception(error)
                if not isinstance(error, ValueError):
                    raise

        self._inbox.put(run)
        if self._stopped is not None:  # the thread looks into the inbox no more, or not for this
            self._run_commands(wait=False)

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            while not self._is_stopping:
                self._run_commands(wait=not self.engine.has_work)
                if self.engine.has_work:
                    self._deliver(self.engine.step())
                    for news in self.engine.news() if self._listeners else ():
                        self._listeners[news.request_id](news)
            self._deliver(self.engine.abort(None))
        except BaseException as error:
            logger.exception("the generation engine failed; requests in flight are lost")
            failure = error
        self._close(failure)

    def _run_commands(self, *, wait: bool) -> None:
        """Everything in the inbox, and the first of it even if that is still to come."""
        with suppress(queue.Empty):
            self._inbox.get(block=wait)()
            while True:
                self._inbox.get_nowait()()

    def _close(self, failure: BaseException | None) -> None:
        """Answer everyone who still waits, and let nobody wait from now on."""
        reason = "has stopped" if failure is None else f"has failed: {failure!r}"
        stopped = EngineStoppedError(f"the generation engine {reason}")
        self._stopped = stopped  # from here on whoever puts something in answers it
        self._run_commands(wait=False)
        for future in self._futures.values():
            future.set_exception(stopped)
        self._futures.clear()
        self._listeners.clear()
        if failure is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(failure)

    def _begin_stop(self) -> Iterable[RequestOutput]:
        self._is_stopping = True
        return ()

    def _accept(
        self, request: GenerationRequest, future: Future[RequestOutput], listener: OutputListener | None
    ) -> None:
        if request.request_id in self._futures:
            raise ValueError(f"request id {request.request_id!r} is already in flight; ids must be unique")
        self.engine.add(request)
        self._futures[request.request_id] = future
        if listener is not None:
            self._listeners[request.request_id] = listener

    def _deliver(self, outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            if (listener := self._listeners.pop(output.request_id, None)) is not None:
                listener(output)
            self._futures.pop(output.request_id).set_result(output)
