"""SglangBackend: a supervised server of SGLang, in its own interpreter.

    start ──► sglang.launch_server ──/ready──► url
    swap ──► pause ──► it reads the weights ──► fingerprints ──► continue
                         │ could not, or has not: once more, else those from before ──► requests given up ──► continue
                         │ says nothing, or can read neither: it stays paused, BackendLostError
    wait_ended: every second, does the process live, does its scheduler answer?
                    │ died: BackendLostError      │ silent for SILENCE_TIMEOUT_S, and reads no weights: likewise
    restarted by the caller that runs the backend: stop, start

Stock SGLang: no file of it is changed. What a machine without a GPU lacks is put in its place, see `cpu_stand_ins`.
"""

import asyncio
import json
import logging
import os
import signal
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiohttp

from corral.experiments.config.rollout import FlagValue
from corral.experiments.trial.directory import write_new_file
from corral.experiments.trial.secrets import SecretFilter
from corral.experiments.worker_specs import GenerationServerSpec
from corral.workers.generation.backend import BackendLostError, NewWeights, Progress, ServerAccess
from corral.workers.generation.held_weights import StaleServerError
from corral.workers.generation.server_client import (
    Fingerprints,
    RefusedError,
    ServerError,
    SglangClient,
)
from corral.workers.generation.sglang_process import GPU_GRACE_S, STOP_GRACE_S, SglangProcess
from corral.workers.lifecycle.worker import BadConfigurationError

logger = logging.getLogger(__name__)

_LOOK_INTERVAL_S = 1.0
_READY_INTERVAL_S = 0.2
SILENCE_TIMEOUT_S = 60.0
"""A server that says nothing for so long, and is not taking over weights, is taken for hung, and started again."""
_GIVE_UP_TIMEOUT_S = 5.0  # one that hangs is not waited for longer: what it had is asked for elsewhere
_EXIT_USAGE = 2  # of argparse


# What an SGLang server is started with: command line, settings that hold secrets, environment. Pure.
#
# GenerationServerSpec ──► sglang_command ──► argv            anybody on the machine can read it
# keys of the server ────► secret_settings ──► a file of mode 0600, which `--config` names
# environment ───────────► sglang_environment ──► + the stand-ins for what a GPU would bring, where there is none
# CUDA_VISIBLE_DEVICES ──► has_gpu, check_gpus    as the launcher has set it: the server takes these GPUs and no others

STAND_INS = Path(__file__).parent / "cpu_stand_ins"
_ENTRY = Path(__file__).parent / "sglang_entry"


def sglang_command(
    spec: GenerationServerSpec,
    *,
    host: str,
    port: int,
    seed: int,
    descriptor: int,
    identity: Path,
    secrets_file: Path,
    has_gpu: bool,
) -> list[str]:
    """The command line; the user's own flags come last, so that they also replace what is only a default here.

    Args:
        descriptor: inherited; of a socket that is bound to `host` and `port`.
        identity: `Trust.path`, by which the server proves itself.
        secrets_file: what `secret_settings` gives, as a file that only its owner can read.
    """
    engine, sglang = spec.engine, spec.sglang
    assert sglang.python is not None  # the plan says which
    ours: dict[str, FlagValue] = {
        "config": str(secrets_file),
        "model-path": str(spec.initial_weights),
        "weight-version": spec.initial_version,
        "host": host,
        "port": port,
        "ssl-keyfile": str(identity),
        "ssl-certfile": str(identity),
        "dtype": engine.dtype,  # never `auto`, which makes float16 of float32
        "max-running-requests": engine.max_running_requests,
        "max-total-tokens": False if engine.max_total_tokens is None else engine.max_total_tokens,
        "random-seed": seed,
        "tp-size": spec.tensor_parallel_size,
        "skip-tokenizer-init": True,  # token ids in, token ids out
        "skip-server-warmup": True,  # it would ask without a key; the first request warms up as well
        "enable-metrics": True,
        "incremental-streaming-output": True,  # each token once, and not with all before it
        "log-level-http": "warning",  # else a line for every request
        "sleep-on-idle": True,  # an idle scheduler would otherwise keep a core busy
    }
    if spec.records_experts:
        ours["enable-return-routed-experts"] = True
    if not has_gpu:
        ours |= {"device": "cpu", "attention-backend": "torch_native"}
    flags = ours | sglang.flags
    return [str(sglang.python), str(_ENTRY), str(descriptor), *_arguments(flags)]


def _arguments(flags: Mapping[str, FlagValue]) -> Iterator[str]:
    for name, value in flags.items():
        if value is False:
            continue
        yield f"--{name}"
        if value is not True:
            yield from (str(item) for item in (value if isinstance(value, list) else [value]))


def secret_settings(*, api_key: str, admin_key: str) -> str:
    """YAML for `--config`: what no other user of the machine may read in the list of its processes.

    With an admin key SGLang takes pauses, updates and aborts from its holder only, and not from those who generate.
    """
    return json.dumps({"api-key": api_key, "admin-api-key": admin_key})


def sglang_environment(
    inherited: Mapping[str, str], *, has_gpu: bool, num_ranks: int, cpus: Sequence[int]
) -> dict[str, str]:
    """Without a network, and on a CPU with what SGLang imports of a GPU's packages and then does not use.

    Args:
        num_ranks: its tensor-parallel processes.
        cpus: those that this process may use.
    """
    # Its own processes begin with `python -c`, which would search the current folder first.
    environment = {**inherited, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1"}
    if not has_gpu:
        path = [str(STAND_INS), *filter(None, [inherited.get("PYTHONPATH")])]
        environment |= {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": ":".join(path)}
        if num_ranks > 1:  # else SGLang gives each rank a NUMA node, and ends where there are fewer
            environment["SGLANG_CPU_OMP_THREADS_BIND"] = cpus_by_rank(cpus, num_ranks)
    return environment


def cpus_by_rank(cpus: Sequence[int], num_ranks: int) -> str:
    """The CPUs of each rank, as SGLang reads them: "0,1|2,3". Equally many and none twice, but where there are fewer
    CPUs than ranks."""
    each = max(1, len(cpus) // num_ranks)
    by_rank = [[cpus[(rank * each + number) % len(cpus)] for number in range(each)] for rank in range(num_ranks)]
    return "|".join(",".join(map(str, of_rank)) for of_rank in by_rank)


def check_gpus(environment: Mapping[str, str], *, num_ranks: int) -> None:
    """BadConfigurationError if fewer GPUs are visible than there are ranks; where none is, they run on CPUs."""
    visible = [device for device in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if device.strip()]
    if visible and len(visible) < num_ranks:
        raise BadConfigurationError(
            f"the allocation gives this server {num_ranks} GPUs (t{num_ranks}), and its task has {len(visible)}: "
            f"CUDA_VISIBLE_DEVICES={','.join(visible)}; set groups.generation_server.scheduling.gpu to {num_ranks}, or "
            "leave it out"
        )


def has_gpu(environment: Mapping[str, str], *, driver: Path = Path("/proc/driver/nvidia/gpus")) -> bool:
    """Whether a process with this environment sees a GPU; asked without torch, which takes seconds to import."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    return bool(visible.strip()) if visible is not None else driver.is_dir() and any(driver.iterdir())


@dataclass(kw_only=True)
class SglangBackend:
    """Starts, watches and ends one SGLang server."""

    spec: GenerationServerSpec
    access: ServerAccess
    session: aiohttp.ClientSession
    """Of all requests to the server, updates of weights included."""
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
    _progress: Progress = field(default_factory=lambda: Progress(running=0, queued=0, tokens_generated=0), init=False)

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

    async def version(self) -> str:
        """See `GenerationBackend.version`."""
        return await self._client.version()

    async def fingerprints(self, *, skipped: Sequence[str]) -> list[Fingerprints]:
        """See `GenerationBackend.fingerprints`."""
        return await self._client.fingerprints(skipped=skipped)

    async def prepare(self, weights: Path) -> None:
        """Nothing: SGLang reads and changes its weights in one go."""

    async def swap(self, new: NewWeights) -> float:
        """See `GenerationBackend.swap`; the seconds are from the order to pause to the answer of that to go on."""
        if self._lost:
            raise ServerError(f"{self._client.url} is about to be started again: {self._lost}")
        before = replace(new, version=new.held.version, directory=new.held.directory)
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
            await new.held.expect(before.directory)
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
        await weights.held.ask()

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
                elif silent_s > SILENCE_TIMEOUT_S:
                    url = self._client.url
                    raise BackendLostError(f"SGLang at {url} hangs: {silent_s:.0f} s of {error}") from error
            await asyncio.sleep(_LOOK_INTERVAL_S)

    async def stop(self) -> None:
        """End the server and its children; if it still answers, requests under way get the tokens that they have."""
        if self._process is None:
            return
        if self._process.poll() is None and not self._lost:
            with suppress(ServerError, TimeoutError):
                async with asyncio.timeout(_GIVE_UP_TIMEOUT_S):
                    await self._give_up_requests()
        await self._process.stop()

    async def _give_up_requests(self) -> None:
        await self._client.give_up_requests()
        while (progress := await self._look())["running"] + progress["queued"]:
            await asyncio.sleep(_READY_INTERVAL_S)

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
        return read_progress(await self._client.get("/metrics"))


def read_progress(metrics: str) -> Progress:
    """The numbers of a heartbeat out of Prometheus' text; a counter is missing before its first event."""
    return Progress(
        running=_sum_of(metrics, "num_running_reqs"),
        queued=_sum_of(metrics, "num_queue_reqs"),
        tokens_generated=_sum_of(metrics, "generation_tokens_total"),
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
