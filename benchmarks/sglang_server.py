"""A real SGLang server for benchmarks: started as a worker starts it, asked over HTTP, its CPU seconds read.

serving_sglang(model) ──► MeasuredSglang ──generate──► POST /generate ──► SGLang's processes ──cpu_seconds──► of the one
                                                                                             that computes
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from corral.experiments.config.rollout import EngineConfig, SglangConfig
from corral.experiments.inputs.other_pythons import sglang_python
from corral.experiments.trial.secrets import Secret
from corral.experiments.worker_specs import GenerationServerSpec
from corral.workers.generation.backend import ServerAccess
from corral.workers.generation.sglang import SglangBackend
from corral.workers.streams.https import open_session
from tests.workers.trusted import connection_to, trust

_ADDRESS = "127.0.0.1"
KEY = "the key of a benchmark"
_START_TIMEOUT_S = 300.0
_REQUEST_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class MeasuredSglang:
    """A server that runs."""

    url: str
    scheduler: psutil.Process
    """The process that computes; those that speak HTTP and pass tokens on are left out."""

    def generate(self, prompts: list[list[int]], *, max_new_tokens: int, temperature: float) -> list[list[int]]:
        """One batch in one request, all to the same length."""
        sampling = {"max_new_tokens": max_new_tokens, "temperature": temperature, "ignore_eos": True}
        body: dict[str, Any] = {"input_ids": prompts, "sampling_params": sampling, "return_logprob": True}
        connection = connection_to(self.url, timeout_s=_REQUEST_TIMEOUT_S)
        try:
            headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
            connection.request("POST", "/generate", json.dumps(body), headers)
            response = connection.getresponse()
            answers = json.loads(response.read())
        finally:
            connection.close()
        if response.status != 200:
            raise RuntimeError(f"SGLang answered {response.status}: {answers}")
        return [answer["output_ids"] for answer in answers]

    def cpu_seconds(self) -> float:
        """That its scheduler has used since it began, of all its threads."""
        times = self.scheduler.cpu_times()
        return float(times.user + times.system)


@contextmanager
def serving_sglang(
    model: Path, folder: Path, *, dtype: str, max_running_requests: int, keeps_prompts: bool = False
) -> Iterator[MeasuredSglang]:
    """A server of `model`; its log is `folder`/sglang.log.

    Args:
        keeps_prompts: else the prompts of a second round cost it as much as those of the first.
    """
    flags = {} if keeps_prompts else {"disable-radix-cache": True}
    spec = GenerationServerSpec(
        index=0,
        backend="sglang",
        initial_weights=model,
        engine=EngineConfig.model_validate(
            {"dtype": dtype, "max_running_requests": max_running_requests, "max_total_tokens": None}
        ),
        sglang=SglangConfig(python=sglang_python(SglangConfig()), flags=dict(flags)),
    )
    keys = {"api_key": Secret(KEY), "admin_key": Secret(KEY + ", as administrator")}
    access = ServerAccess(address=_ADDRESS, trust=trust(), **keys)
    with asyncio.Runner() as runner:
        session = runner.run(_session())
        backend = SglangBackend(
            spec=spec,
            access=access,
            session=session,
            log_path=folder / "sglang.log",
            seed=1,
            start_timeout_s=_START_TIMEOUT_S,
        )
        try:
            url = runner.run(backend.start())
            assert backend._process is not None
            processes = psutil.Process(backend._process.pid).children(recursive=True)
            [scheduler] = [process for process in processes if "scheduler" in process.name()]
            yield MeasuredSglang(url, scheduler)
        finally:
            runner.run(backend.stop())
            runner.run(session.close())


async def _session() -> aiohttp.ClientSession:
    return open_session(trust().client())
