"""SglangBackend: a supervised server of SGLang, in its own interpreter.

    start ──► sglang.launch_server ──/ready──► url
    swap ──► pause ──► it reads the weights ──► fingerprints ──► continue
                         │ could not, or has not: once more, else those from before ──► requests given up ──► continue
                         │ says nothing, or can read neither: it stays paused, BackendLostError
    wait_ended: every second, does the process live, does its scheduler answer?
                    │ died: BackendLostError      │ silent for probe_timeout_s, and reads no weights: likewise
    restarted by whoever runs the backend: stop, start

Stock SGLang: no file of it is changed. What a machine without a GPU lacks is put in its place, see `cpu_stand_ins`.
"""

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiohttp

from corral.experiments.trial.directory import write_new_file
from corral.experiments.trial.secrets import SecretFilter
from corral.experiments.worker_specs import GenerationServerSpec
from corral.workers.generation.backend import BackendLostError, NewWeights, Progress, ServerAccess
from corral.workers.generation.server_client import (
    Fingerprints,
    RefusedError,
    ServerError,
    SglangClient,
)
from corral.workers.generation.sglang_command import (
    check_gpus,
    has_gpu,
    secret_settings,
    sglang_command,
    sglang_environment,
)
from corral.workers.generation.sglang_process import GPU_GRACE_S, STOP_GRACE_S, SglangProcess
from corral.workers.generation.weight_proof import StaleServerError
from corral.workers.lifecycle.worker import BadConfigurationError

logger = logging.getLogger(__name__)

_LOOK_INTERVAL_S = 1.0
_READY_INTERVAL_S = 0.2
_GIVE_UP_TIMEOUT_S = 1.0  # one that hangs is not waited for: what it had is asked for elsewhere
_EXIT_USAGE = 2  # of argparse


@dataclass(kw_only=True)
class SglangBackend:
    """Starts, watches and ends one SGLang server."""

    spec: GenerationServerSpec
    access: ServerAccess
    session: aiohttp.ClientSession
    """In which it is asked, and told to take over weights."""
    log_path: Path
    seed: int
    start_timeout_s: float
    """Longest time until it is ready."""
    _is_reading: bool = field(default=False, init=False)
    """Whether it reads weights at the moment: its scheduler answers nothing meanwhile, however long that takes.

    Not during the pause before and after, so that a server that hangs is noticed while it is asked for those.
    """
    _process: SglangProcess | None = field(default=None, init=False)
    _lost: str = field(default="", init=False)
    """Why nobody knows which weights it holds: it is paused then, and is to be started anew."""
    _client: SglangClient = field(init=False)
    """Of the server that was started last."""
    kv_tokens: int = field(default=0, init=False)
    """See `GenerationBackend.kv_tokens`."""
    _progress: Progress = field(
        default_factory=lambda: Progress(running=0, queued=0, tokens_generated=0, version=""), init=False
    )

    async def start(self) -> str:
        """Start the server and wait until it takes requests.

        Raises:
            BadConfigurationError: if SGLang does not know a flag, or the interpreter cannot be run.
            BackendLostError: if it ended, or was not ready in time.
        """
        self._lost = ""
        access = self.access
        api_key, admin_key = access.api_key.reveal(), access.admin_key.reveal()
        secrets_file = access.trust.secrets_directory / f"sglang-{self.spec.index}.yaml"
        secrets_file.unlink(missing_ok=True)
        write_new_file(secrets_file, secret_settings(api_key=api_key, admin_key=admin_key).encode())
        try:
            with _bound_socket(access.address) as bound:
                url = f"https://{access.address}:{bound.getsockname()[1]}"
                self._client = SglangClient(self.session, url, api_key=api_key, admin_key=admin_key)
                self._process = self._launch(bound, secrets_file)
            await self._until_ready(self._process)
        finally:
            secrets_file.unlink(missing_ok=True)
        return url

    def progress(self) -> Progress:
        """What the server last said."""
        return self._progress

    async def held(self) -> tuple[str, Path]:
        """See `WeightHolder.held`."""
        return await self._client.held()

    async def fingerprints(self, *, skipped: Sequence[str]) -> list[Fingerprints]:
        """See `WeightHolder.fingerprints`."""
        return await self._client.fingerprints(skipped=skipped)

    async def prepare(self, weights: Path) -> None:
        """Nothing: SGLang reads and changes its weights in one go."""

    async def swap(self, new: NewWeights) -> float:
        """See `GenerationBackend.swap`; the seconds are from the order to pause to the answer of that to go on."""
        if self._lost:
            raise ServerError(f"{self._client.url} is about to be started again: {self._lost}")
        version, directory = await self._client.held()
        before = replace(new, version=version, directory=directory)
        ordered = time.monotonic()
        async with self._client.paused(new.mode):
            try:
                failed = await self._take_over(new, before)
            except BaseException as error:
                self._lost = f"which weights it holds is unknown after an update: {error!r}"
                raise
        if failed is not None:
            raise failed
        return time.monotonic() - ordered

    async def _take_over(self, new: NewWeights, before: NewWeights) -> ServerError | None:
        """Read `new`, once more if that fails, or else `before` again; returns why it does not hold the new ones.

        A load that fails has written some tensors, and SGLang, which means to undo that, reads the new files once more:
        it may hold either, or a mixture, under the old version. A load that is acknowledged and was found not done says
        no more. So only one that succeeds, and that the proof finds done, says what it holds.

        Raises:
            ServerError: it holds nobody knows what.
        """
        if (failure := await self._try_load(new)) is None:
            return None
        logger.warning("reads version %s once more: %s", new.version, failure)
        if (again := await self._try_load(new)) is not None:
            logger.warning("reads version %s again, which it held: %s", before.version, again)
            await new.proof.expect(before.directory)
            await self._load(before)
        await self._client.give_up_requests()
        return failure if again is not None else None

    async def _try_load(self, weights: NewWeights) -> ServerError | None:
        """What it, or the proof, says against having loaded them; ServerError if it says nothing."""
        try:
            await self._load(weights)
        except (RefusedError, StaleServerError) as error:
            return error
        return None

    async def _load(self, weights: NewWeights) -> None:
        self._is_reading = True
        try:
            await self._client.load(
                version=weights.version,
                weights=weights.directory,
                flush_cache=weights.mode != "in_place",
                timeout_s=weights.timeout_s,
            )
        finally:
            self._is_reading = False
        await weights.proof.ask()

    async def wait_ended(self) -> None:
        """Watch the server; returns never.

        Raises:
            BackendLostError: if it died, or hangs.
        """
        assert self._process is not None
        heard_at = time.monotonic()
        while True:
            self._raise_if_ended(self._process)
            if self._lost:
                raise BackendLostError(f"SGLang at {self._client.url} cannot go on: {self._lost}")
            try:
                self._progress = await self._look()
                heard_at = time.monotonic()
            except ServerError as error:
                silent_s = time.monotonic() - heard_at
                if self._is_reading:
                    heard_at = time.monotonic()
                elif silent_s > self.spec.sglang.probe_timeout_s:
                    url = self._client.url
                    raise BackendLostError(f"SGLang at {url} hangs: {silent_s:.0f} s of {error}") from error
            await asyncio.sleep(_LOOK_INTERVAL_S)

    async def stop(self) -> None:
        """End the server and its children; if it still answers, requests under way get the tokens that they have."""
        if self._process is None:
            return
        if self._process.poll() is None and not self._lost:
            with suppress(ServerError):
                await self._client.give_up_requests(timeout_s=_GIVE_UP_TIMEOUT_S)
        await self._process.stop()

    def _launch(self, bound: socket.socket, secrets_file: Path) -> SglangProcess:
        gpu, num_ranks = has_gpu(os.environ), self.spec.tensor_parallel_size
        check_gpus(os.environ, num_ranks=num_ranks)
        command = sglang_command(
            self.spec,
            host=self.access.address,
            port=bound.getsockname()[1],
            descriptor=bound.fileno(),
            identity=self.access.trust.path,
            seed=self.seed,
            secrets_file=secrets_file,
            has_gpu=gpu,
        )
        logger.info("starts %s", " ".join(command))
        try:
            return SglangProcess(
                command,
                environment=sglang_environment(
                    os.environ, has_gpu=gpu, num_ranks=num_ranks, cpus=sorted(os.sched_getaffinity(0))
                ),
                log_path=self.log_path,
                descriptors=[bound.fileno()],
                grace_s=GPU_GRACE_S if gpu else STOP_GRACE_S,
                scrub=SecretFilter([self.access.api_key, self.access.admin_key]).scrub,
            )
        except OSError as error:
            raise BadConfigurationError(
                f"sglang.python {command[0]} cannot be run ({error}); `make sglang` installs SGLang"
            ) from error

    async def _until_ready(self, process: SglangProcess) -> None:
        deadline = time.monotonic() + self.start_timeout_s
        while True:
            if process.poll() == _EXIT_USAGE:
                raise BadConfigurationError(f"SGLang does not know its flags: {process.last_words()}")
            self._raise_if_ended(process)
            try:
                await self._client.get("/ready")
                self._progress = await self._look()
                return
            except ServerError as error:
                if time.monotonic() > deadline:
                    raise BackendLostError(
                        f"SGLang at {self._client.url} was not ready within {self.start_timeout_s:.0f} s "
                        f"({error}); its log is {self.log_path}"
                    ) from error
            await asyncio.sleep(_READY_INTERVAL_S)

    def _raise_if_ended(self, process: SglangProcess) -> None:
        code = process.poll()
        if code is None:
            return
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        because = f" after {process.first_error}" if process.first_error else ""  # SGLang ends itself by SIGKILL
        log = self.log_path
        raise BackendLostError(f"SGLang ended {how}{because}; its log is {log}, which ends\n{process.last_words()}")

    async def _look(self) -> Progress:
        """How it is; ServerError unless its scheduler answers, which neither /ready nor /metrics would need."""
        self.kv_tokens = await self._client.kv_tokens()
        metrics = await self._client.get("/metrics")
        version, _ = await self._client.held()
        return read_progress(metrics, version=version)


def read_progress(metrics: str, *, version: str) -> Progress:
    """The numbers of a heartbeat out of Prometheus' text; a counter is missing before its first event."""
    return Progress(
        running=_sum_of(metrics, "num_running_reqs"),
        queued=_sum_of(metrics, "num_queue_reqs"),
        tokens_generated=_sum_of(metrics, "generation_tokens_total"),
        version=version,
    )


def _sum_of(metrics: str, name: str) -> int:
    samples = (line.rpartition(" ") for line in metrics.splitlines())
    return int(sum(float(value) for label, _, value in samples if label.partition("{")[0] == f"sglang:{name}"))


def _bound_socket(address: str) -> socket.socket:
    """On a port that the system chooses, and that nobody else gets while the server or this process has the socket.

    It does not listen before the server does, so that who asks too early is refused at once.
    """
    bound = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    bound.bind((address, 0))
    return bound
