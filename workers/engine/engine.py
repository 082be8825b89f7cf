"""The embedded generation engine: a model directory, a continuous batch over it, and weights that change under way.

    model directory --> module --> Decoder (same tensors, or their rounding) --> ContinuousBatch: add, step, pause, ...
                           ^
    weight directory --> stage_weights (any thread: read, check, build) --> apply_weights (between two steps)

Each token carries the version tag of the weights that made it.
"""

from __future__ import annotations

import copy
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from corral.experiments.config.rollout import UpdateMode
from corral.workers.engine.batch import ContinuousBatch
from corral.workers.engine.decoder import Decoder, Quantization, check_supported
from corral.workers.engine.requests import GenerationRequest, RequestOutput, text_decoder
from corral.workers.engine.weights import Checksums, model_with, stage_weights

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class StagedModel:
    """New weights of an engine, ready to compute with; beside the live ones they take the same memory once more."""

    directory: Path
    model: nn.Module
    decoder: Decoder
    checksums: Checksums


class GenerationEngine(ContinuousBatch):
    """Serves one model. Not thread-safe, but for `check`, `stage_weights` and the counters.

    Example:
        engine = GenerationEngine(Path("models/qwen2-tiny"), version="1.0")
        request = GenerationRequest(request_id="a", prompt=(5, 6, 7), sampling=SamplingParams(max_new_tokens=16))
        [output] = engine.generate([request])     # output.output_ids, .output_logprobs, .weight_versions
        engine.apply_weights(engine.stage_weights(Path("weights/v1")), version="1.1")
    """

    def __init__(
        self,
        model_directory: Path,
        *,
        device: str = "cpu",
        dtype: str = "float32",
        quantization: Quantization | None = None,
        max_running_requests: int = 64,
        max_total_tokens: int = 131_072,
        seed: int = 0,
        version: str = "default",
        read_lag: Literal[0, 1] | None = None,
    ) -> None:
        """Load a Hugging Face model directory; nothing is downloaded.

        Args:
            model_directory: with config.json and safetensors, and with a tokenizer.json for stop strings and
                texts of answers.
            device: "cpu", "cuda" or "cuda:N".
            dtype: float32, bfloat16 or float16; log-probabilities are float32 in any case.
            quantization: int8 multiplies by rounded weights (see linear.py), made from what is loaded here and
                from each update; None by the weights themselves.
            max_running_requests: rows of a decode step.
            max_total_tokens: cache positions in all, rows x longest; bounds the cache's memory.
            seed: of requests that bring no seed of their own.
            version: tag of the weights that are loaded here.
            read_lag: see `ContinuousBatch`.

        Raises:
            UnsupportedModelError: if the architecture cannot be run exactly.
            ValueError: if there is no such dtype, or none that can be quantised.
        """
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
        self.model_directory = Path(model_directory)
        self._model, eos_token_ids = load_model(self.model_directory, dtype=DTYPES[dtype], device=device)
        self.checksums = Checksums(self._model)
        """Of the live weights."""
        self._quantization = quantization
        decode, no_text_because = None, "the model has no tokenizer.json"
        if (self.model_directory / "tokenizer.json").is_file():
            try:
                decode = text_decoder(self.model_directory)
            except ValueError as error:
                no_text_because = str(error)
                logger.warning("answers come without their text: %s", error)
        super().__init__(
            Decoder(self._model, quantization=quantization),
            eos_token_ids=eos_token_ids,
            max_running_requests=max_running_requests,
            max_total_tokens=max_total_tokens,
            seed=seed,
            version=version,
            decode=decode,
            no_text_because=no_text_because,
            read_lag=read_lag,
        )
        self._decoder.pack_weights()

    @property
    def model_type(self) -> str:
        config: Any = self._model.config
        return str(config.model_type)

    def stage_weights(self, directory: Path) -> StagedModel:
        """Read, check and pack new weights without touching the live ones; any thread may call it.

        Raises:
            WeightsRejectedError: if they are unreadable, incomplete or of another model.
        """
        live = self._model
        model = model_with(stage_weights(directory, dict(live.named_parameters())), live)
        decoder = Decoder(model, quantization=self._quantization)
        decoder.pack_weights()
        return StagedModel(directory, model, decoder, Checksums(model))

    def apply_weights(self, staged: StagedModel, *, version: str) -> StagedModel:
        """Change over to staged weights, without a copy; the next token is made by them, whatever the cache holds.

        Returns:
            The weights of before: giving back their memory takes time, and is left to the caller that drops them.
        """
        before = StagedModel(self.model_directory, self._model, copy.copy(self._decoder), self.checksums)
        self._model, self.checksums = staged.model, staged.checksums
        self._decoder.adopt(staged.decoder)
        self.forget_prefixes()
        self.model_directory = staged.directory
        self.version = version
        return before


def load_model(directory: Path, *, dtype: torch.dtype, device: str) -> tuple[nn.Module, frozenset[int]]:
    """The model in evaluation mode, and its end-of-sequence ids."""
    from transformers import AutoConfig, AutoModelForCausalLM  # seconds to import: only who loads a model pays

    # A directory with code or pickled weights of its own is refused: loading it would run what somebody else wrote.
    config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    check_supported(config)
    model: Any = AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, local_files_only=True, trust_remote_code=False, use_safetensors=True
    )
    model = model.to(device).eval().requires_grad_(False)
    declared = [getattr(source, "eos_token_id", None) for source in (model.config, model.generation_config)]
    ids = [token_id for entry in declared for token_id in (entry if isinstance(entry, list) else [entry])]
    return model, frozenset(token_id for token_id in ids if token_id is not None)


# The thread that owns a GenerationEngine: commands and requests in, futures out.
#
#     any thread --submit/call/change_over-------> inbox --> [ commands | step | deliver ] --> futures
#                                                             ^------ one engine thread ------^
#
# Only this thread touches the engine, so a command takes effect between two decode steps, in the order in which it
# came. A change-over is a pause, an update, a look at what it did, and the end of the pause, as one command. An
# exception in a step ends the loop for good: every future gets it, and `failure` is the exception.

OutputListener = Callable[[RequestOutput], object]


class EngineStoppedError(RuntimeError):
    """The engine thread has stopped or failed; nothing more will be generated."""


class ChangedOver(NamedTuple):
    """The result of a change-over."""

    stopped_s: float
    """How long it kept the engine from its next step. One that was under way when it was ordered has made tokens."""
    replaced: StagedModel
    """The old weights, whose memory is given back when this is dropped."""


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
        """Answer all waiting requests, and accept no more."""
        reason = "has stopped" if failure is None else f"has failed: {failure!r}"
        stopped = EngineStoppedError(f"the generation engine {reason}")
        self._stopped = stopped  # from here on the thread that adds a request answers it
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
