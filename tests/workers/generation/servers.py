"""A generation backend on an event loop of its own, as it runs in a worker process, and a client of both its keys.

make_backend(spec) ──start──► url ◄── Client (HTTP, blocking)       WeightUpdates, as the manager has it called
"""

import json
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import aiohttp

from corral.experiments.config.rollout import EngineConfig, FlagValue, SglangConfig, UpdateMode, WeightsConfig
from corral.experiments.inputs.other_pythons import sglang_python
from corral.experiments.trial.secrets import Secret
from corral.experiments.worker_specs import GenerationServerSpec
from corral.workers.generation.backend import GenerationBackend, ServerAccess
from corral.workers.generation.embedded import EmbeddedBackend
from corral.workers.generation.held_weights import HeldWeights
from corral.workers.generation.sglang import SglangBackend
from corral.workers.generation.weight_updates import UpdateOrder, WeightUpdates
from corral.workers.streams.https import open_session
from corral.workers.weight_transport.staging import WeightStaging, make_staging
from tests.workers.loop_thread import LoopThread, loop_thread
from tests.workers.trusted import connection_to, trust

API_KEY = "the key of those who generate"
ADMIN_KEY = "the key of the administrator"
LOOPBACK = "127.0.0.1"
DEADLINE_S = 240.0
START_S = 800.0  # SGLang's start is 20 s of computing on two idle cores, and the machine may do sixteen other things
T = TypeVar("T")
_OF_THE_REQUEST = ("logprob_start_len", "return_original_logprob")  # and not of its sampling_params


@dataclass
class Client:
    """Speaks SGLang's API to a server; `start` posts from a thread of its own."""

    url: str
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(16))

    def call(self, method: str, path: str, body: Any = None, *, key: str | None = API_KEY) -> tuple[int, Any]:
        connection = connection_to(self.url, timeout_s=DEADLINE_S)
        headers = {"Content-Type": "application/json"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
        try:
            connection.request(method, path, body if isinstance(body, bytes | None) else json.dumps(body), headers)
            response = connection.getresponse()
            answer = response.read()
        finally:
            connection.close()
        return response.status, json.loads(answer) if answer[:1] in (b"{", b"[") else answer.decode()

    def get(self, path: str) -> Any:
        status, answer = self.call("GET", path)
        assert status == 200, answer
        return answer

    def order(self, path: str, **body: Any) -> Any:
        """A call of the administrator."""
        status, answer = self.call("POST", path, body, key=ADMIN_KEY)
        assert status == 200, answer
        return answer

    def generate(self, input_ids: Any, **sampling: Any) -> Any:
        """The answer to a prompt, or those to several that are asked for at once."""
        if isinstance(input_ids[0], list):
            return [future.result() for future in [self.start(prompt, **sampling) for prompt in input_ids]]
        options = {name: sampling.pop(name) for name in _OF_THE_REQUEST if name in sampling}
        body = {"input_ids": input_ids, "sampling_params": sampling, "return_logprob": True, **options}
        status, answer = self.call("POST", "/generate", body)
        assert status == 200, answer
        return answer

    def stream(self, input_ids: Any, **sampling: Any) -> list[Any]:
        """The chunks of a streamed answer."""
        body = {"input_ids": input_ids, "sampling_params": sampling, "return_logprob": True, "stream": True}
        status, answer = self.call("POST", "/generate", body)
        assert status == 200, answer
        *chunks, done = [event.removeprefix("data: ") for event in answer.split("\n\n") if event]
        assert done == "[DONE]"
        return [json.loads(chunk) for chunk in chunks]

    def start(self, input_ids: Any, **sampling: Any) -> "Future[Any]":
        return self.pool.submit(lambda: self.generate(input_ids, **sampling))

    def metric(self, name: str) -> float:
        lines = [line.rpartition(" ") for line in str(self.get("/metrics")).splitlines()]
        return sum(float(value) for label, _, value in lines if label.partition("{")[0] == f"sglang:{name}")


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {DEADLINE_S:.0f} s for {what}"
        time.sleep(0.01)


@dataclass
class Served:
    """A backend that serves."""

    backend: GenerationBackend
    held: HeldWeights
    client: Client
    updates: WeightUpdates
    loop: LoopThread
    log_path: Path
    """Of a server of SGLang."""

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.loop.run(coroutine)

    def bring_to(self, version: str, weights: Path, *, digest: str | None = None, sources: Sequence[str] = ()) -> None:
        """As the manager asks for it."""
        order = UpdateOrder(
            version=version, weights=str(weights), digest=digest, timeout_s=DEADLINE_S, sources=list(sources)
        )
        self.run(self.updates.bring_to(order))

    @contextmanager
    def taking(self, transport: WeightStaging, *, mode: UpdateMode = "retract") -> Iterator["Served"]:
        """The same server, brought to new weights by another transport, or in another mode."""
        updates = WeightUpdates(transport, mode=mode)
        updates.serves(self.backend, self.held)
        with closing(transport):
            yield replace(self, updates=updates)

    def pause(self, mode: UpdateMode) -> None:
        """By the backend's own way: over HTTP, or in its process."""
        if isinstance(self.backend, EmbeddedBackend):
            engine = self.backend._server.loop.engine
            self.backend._server.loop.call(lambda: engine.pause(mode)).result(DEADLINE_S)
        else:
            self.client.order("/pause_generation", mode=mode)

    def go_on(self) -> None:
        """After a pause, or without one."""
        if isinstance(self.backend, EmbeddedBackend):
            engine = self.backend._server.loop.engine
            self.backend._server.loop.call(lambda: engine.resume() or ()).result(DEADLINE_S)
        else:
            self.client.order("/continue_generation")

    def abort_all(self) -> None:
        """End all requests with the tokens that they have."""
        self.pause("abort")
        self.go_on()

    def start_running(self, prompts: list[list[int]], **sampling: Any) -> "list[Future[Any]]":
        """Requests that are surely being decoded."""
        futures = [self.client.start(prompt, **sampling) for prompt in prompts]
        wait_until(lambda: self.client.metric("num_running_reqs") >= len(prompts), "the requests to run")
        return futures


def staging(config: WeightsConfig = WeightsConfig()) -> WeightStaging:  # noqa: B008 - it is frozen
    """What a server of a trial of its own gets new weights by."""
    uuid_of_trial = uuid.uuid4().hex
    return make_staging(config, trial_uuid=uuid_of_trial, worker="server", admin_key=ADMIN_KEY, tls=trust().client())


@contextmanager
def serving(
    kind: str,
    weights: Path,
    folder: Path,
    *,
    transport_config: WeightsConfig = WeightsConfig(),  # noqa: B008 - it is frozen
    flags: Mapping[str, FlagValue] | None = None,
    tensor_parallel_size: int = 1,
) -> Iterator[Served]:
    """A backend with version 0.0; what it prints is in `folder`, `flags` are SGLang's."""
    with loop_thread(deadline_s=START_S) as loop:

        async def connect() -> aiohttp.ClientSession:
            return open_session(trust().client())

        session = loop.run(connect())
        transport = staging(transport_config)
        updates = WeightUpdates(transport, mode=transport_config.update_mode)
        if kind == "hf":
            backend: GenerationBackend = embedded(weights)
        else:
            backend = sglang(
                weights,
                folder,
                session,
                flags=flags or {},
                tensor_parallel_size=tensor_parallel_size,
            )
        client = None
        try:
            url = loop.run(backend.start())
            held = HeldWeights(backend.fingerprints, url, version="0.0", directory=weights)
            updates.serves(backend, held)
            client = Client(url)
            yield Served(backend, held, client, updates, loop, folder / "sglang.log")
        finally:
            loop.run(backend.stop())
            loop.run(session.close())
            transport.close()
            if client is not None:
                client.pool.shutdown()


def access() -> ServerAccess:
    return ServerAccess(address=LOOPBACK, api_key=Secret(API_KEY), admin_key=Secret(ADMIN_KEY), trust=trust())


def embedded(weights: Path) -> EmbeddedBackend:
    return EmbeddedBackend(spec=server_spec("hf", weights), access=access(), device="cpu", seed=1)


def server_spec(
    backend: Literal["hf", "sglang"], weights: Path, *, tensor_parallel_size: int = 1, **sglang: Any
) -> GenerationServerSpec:
    """A small server; the settings of SGLang are of a server of SGLang."""
    python = sglang_python(SglangConfig()) if backend == "sglang" else None
    config = SglangConfig.model_validate({"python": python, **sglang})
    engine = EngineConfig(max_running_requests=16, max_total_tokens=16384)
    return GenerationServerSpec(
        index=0,
        backend=backend,
        tensor_parallel_size=tensor_parallel_size,
        initial_weights=weights,
        engine=engine,
        sglang=config,
    )


def sglang(
    weights: Path, folder: Path, session: aiohttp.ClientSession, *, flags: Mapping[str, FlagValue], **config: Any
) -> SglangBackend:
    spec = server_spec("sglang", weights, **config)
    # Else the server says only every 40 tokens how many requests it runs. Unchecked: a trial may not set all of them.
    unchecked = spec.sglang.model_copy(update={"flags": {"decode-log-interval": 1, **flags}})
    return SglangBackend(
        spec=spec.model_copy(update={"sglang": unchecked}),
        access=access(),
        session=session,
        log_path=folder / "sglang.log",
        seed=1,
        start_timeout_s=START_S,
    )
