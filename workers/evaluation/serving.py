"""What answers in an evaluation job: a server of the trial's kind, for this process alone, and who asks it.

secrets of its own ──► backend: embedded engine, or SGLang ──url──► GenerationClient ──► agent, reward ──► Answered
"""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from corral.experiments.inputs.tokens import eos_token_ids, load_tokenizer
from corral.experiments.trial.evaluation import EvaluationRequest
from corral.experiments.trial.secrets import TrialSecrets
from corral.experiments.trial.trust import Trust
from corral.experiments.worker_specs import RewardSpec
from corral.workers.data.prompts import RowsById
from corral.workers.generation.backend import GenerationBackend, ServerAccess
from corral.workers.lifecycle.worker import WrongDevicesError
from corral.workers.rollout.generation_client import GenerationClient, Setback
from corral.workers.rollout.group_maker import GroupMaker
from corral.workers.rollout.held_out import HeldOutProblems
from corral.workers.rollout.judging import RewardJudge
from corral.workers.streams.https import open_session
from corral.workers.user_code.loading import load_callable

_LOOPBACK = "127.0.0.1"
_START_TIMEOUT_S = 1800.0  # SGLang reads weights of any size from a shared file system
_MAX_CONNECTIONS = 1024


@asynccontextmanager
async def served_problems(
    request: EvaluationRequest, rows: RowsById, *, gpus: int
) -> AsyncIterator[tuple[HeldOutProblems, asyncio.Future[None]]]:
    """Who answers, by a server that is ended afterwards; and the end of that server, should it come before.

    Raises:
        WrongDevicesError: if the server sees fewer GPUs than it was given.
        BadConfigurationError, BackendLostError: if it cannot be started.
    """
    rollout, tokenizer = request.rollout, load_tokenizer(request.weights)
    ends = eos_token_ids(request.weights)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="corral-evaluation-"))) / "secrets"
        secrets, trust = TrialSecrets.create(folder), Trust(folder)
        access = ServerAccess(
            address=_LOOPBACK, api_key=secrets.http_api_key, admin_key=secrets.http_admin_key, trust=trust
        )
        judge = RewardJudge(RewardSpec.of(rollout), tokenizer, stop_token_ids=ends)
        stack.callback(judge.close)
        judge.start()
        backend = await stack.enter_async_context(_serving(request, access, gpus=gpus))
        url = await backend.start()
        ended = asyncio.ensure_future(backend.wait_ended())
        stack.callback(ended.cancel)

        async def route(uid: str, tokens: int, oldest_version: str, setback: Setback | None) -> str:
            return url

        headers = {"Authorization": f"Bearer {access.api_key.reveal()}"}
        session = open_session(trust.client(), headers=headers, max_connections=_MAX_CONNECTIONS)
        client = GenerationClient(
            await stack.enter_async_context(session),
            route,
            sampling=request.evaluation.sampling,
            stop_token_ids=ends,
            new_tokens_per_chunk=rollout.new_tokens_per_chunk,
            request_timeout_s=rollout.request_timeout_s,
        )
        groups = GroupMaker(
            load_callable(rollout.agent),
            judge,
            client,
            tokenizer,
            config=rollout,
            trial_seed=request.seed,
            group_size=1,
            max_prompt_tokens=request.evaluation.dataset.max_prompt_tokens,
        )
        yield HeldOutProblems(request.evaluation, {"": rows}, groups), ended


@asynccontextmanager
async def _serving(request: EvaluationRequest, access: ServerAccess, *, gpus: int) -> AsyncIterator[GenerationBackend]:
    """The server that the plan describes, which is ended afterwards."""
    backend: GenerationBackend
    if request.server.backend == "sglang":
        from corral.workers.generation.sglang import SglangBackend

        async with open_session(access.trust.client()) as session:
            backend = SglangBackend(
                spec=request.server,
                access=access,
                session=session,
                log_path=request.result.with_suffix(".sglang.log"),
                seed=request.seed,
                start_timeout_s=_START_TIMEOUT_S,
            )
            try:
                yield backend
            finally:
                await backend.stop()
        return
    import torch  # which takes seconds

    from corral.workers.generation.embedded import EmbeddedBackend

    if gpus > torch.cuda.device_count():
        visible = torch.cuda.device_count()
        raise WrongDevicesError.of("the evaluation", kind="model_worker", planned=gpus, visible=visible)
    backend = EmbeddedBackend(spec=request.server, access=access, device="cuda" if gpus else "cpu", seed=request.seed)
    try:
        yield backend
    finally:
        await backend.stop()
