"""What answers in an evaluation job: a server of the trial's kind, for this process alone, and who asks it.

secrets of its own ──► backend: embedded engine, or SGLang ──url──► GenerationClient ──► agent, reward ──► Answered
"""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from corral.experiments.datasets.row_parser import DatasetRow
from corral.experiments.prompts.row_prompts import PromptEncoder
from corral.experiments.prompts.tokens import eos_token_ids
from corral.experiments.trial.directory import TrialDirectory
from corral.experiments.trial.evaluation import EvaluationRequest
from corral.experiments.trial.secrets import TrialSecrets
from corral.experiments.trial.trust import Trust
from corral.workers.generation.backend import ServerAccess
from corral.workers.generation.generation_server import make_backend
from corral.workers.lifecycle.worker import WrongDevicesError
from corral.workers.rollout.episode_player import open_player
from corral.workers.rollout.generation_client import GenerationClient, Setback
from corral.workers.rollout.group_maker import GroupMaker
from corral.workers.rollout.held_out import HeldOutProblems
from corral.workers.rollout.judging import RewardJudge
from corral.workers.streams.https import open_session

_LOOPBACK = "127.0.0.1"
_START_TIMEOUT_S = 1800.0  # SGLang reads weights of any size from a shared file system
_MAX_CONNECTIONS = 1024


@asynccontextmanager
async def served_problems(
    request: EvaluationRequest, rows: Mapping[str, DatasetRow], *, gpus: int
) -> AsyncIterator[tuple[HeldOutProblems, asyncio.Future[None]]]:
    """Who answers, by a server that is ended afterwards; and the end of that server, should it come before.

    Raises:
        WrongDevicesError: if the server sees fewer GPUs than it was given.
        BadConfigurationError, BackendLostError: if it cannot be started.
    """

    def check_gpus(visible: int) -> int:
        if gpus > visible:
            raise WrongDevicesError.of("the evaluation", kind="model_worker", planned=gpus, visible=visible)
        return gpus

    rollout = request.rollout
    prompts = PromptEncoder(request.weights, request.evaluation.dataset.chat_template_kwargs)
    ends = eos_token_ids(request.weights)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="corral-evaluation-"))) / "secrets"
        secrets, trust = TrialSecrets.create(folder), Trust(folder)
        access = ServerAccess(
            address=_LOOPBACK, api_key=secrets.http_api_key, admin_key=secrets.http_admin_key, trust=trust
        )
        trials = (TrialDirectory(path).secrets_path for path in request.result.parents)  # the trial may run meanwhile
        hidden = [folder, *(path for path in trials if path.is_dir())]
        judge = RewardJudge(rollout, prompts.tokenizer, stop_token_ids=prompts.answer_ends, hidden=hidden)
        stack.callback(judge.close)
        judge.start()
        backend = make_backend(
            request.server,
            access,
            session=await stack.enter_async_context(open_session(trust.client())),
            seed=request.seed,
            log_path=request.result.with_suffix(".sglang.log"),
            start_timeout_s=_START_TIMEOUT_S,
            check_gpus=check_gpus,
        )
        stack.push_async_callback(backend.stop)
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
            tokenizer=prompts.tokenizer,
            stop_token_ids=ends,
            first_token_timeout_s=rollout.first_token_timeout_s,
            token_timeout_s=rollout.token_timeout_s,
        )
        groups = GroupMaker(
            judge,
            client,
            prompts,
            await open_player(stack, rollout, judge, prompts),
            config=rollout,
            group_size=1,
            max_prompt_tokens=request.evaluation.dataset.max_prompt_tokens,
        )
        yield HeldOutProblems(request.evaluation, {"": rows}, groups, seed=request.seed), ended
