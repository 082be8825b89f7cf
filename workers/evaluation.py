"""One evaluation, as a job of its own: a server of the trial's kind answers held-out problems by a version's weights.

    python -m corral.workers.evaluation {trial}/eval/step-00000012.request.json --gpus 1

request --read--> server <--HTTP-- agent, reward --batch by batch--> sums --write--> progress ... --> result, clean up

Greedy answers, and sampled ones of the embedded engine, depend on nothing but weights and problems, so an interrupted
evaluation goes on at the batch in which it was interrupted. SIGTERM and SIGUSR2 are left to the process that started
this one: it knows whether SLURM will start the job again. When that process dies, this one does.
"""

import argparse
import asyncio
import functools
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from corral.experiments.datasets.dataset import dataset_spec
from corral.experiments.datasets.formats import name_of
from corral.experiments.exit_codes import WorkerExit
from corral.experiments.prompts.row_prompts import PromptEncoder
from corral.experiments.prompts.tokens import eos_token_ids
from corral.experiments.trial.directory import TrialDirectory, atomic_write, remove_file
from corral.experiments.trial.evaluation import (
    EvaluationProgress,
    EvaluationRequest,
    EvaluationResult,
    progress_path,
    read_result,
)
from corral.experiments.trial.login_shell import leave_login_shell
from corral.experiments.trial.secrets import TrialSecrets
from corral.experiments.trial.tether import die_with_parent
from corral.experiments.trial.trust import Trust
from corral.experiments.worker_specs import TOKEN_TIMEOUT_S
from corral.workers.data.held_out import MAJORITY, added, means, pass_at_k
from corral.workers.data.prompts import open_problems
from corral.workers.generation.backend import ServerAccess
from corral.workers.generation.generation_server import make_backend
from corral.workers.lifecycle.worker import BadConfigurationError, UserCodeError, WrongDevicesError
from corral.workers.requests.manager_messages import HeldOutProblem
from corral.workers.rollout.episode_player import open_player
from corral.workers.rollout.generation_client import FailedTry, GenerationClient
from corral.workers.rollout.group_maker import GroupMaker
from corral.workers.rollout.held_out import HeldOutProblems
from corral.workers.rollout.judging import RewardJudge
from corral.workers.streams.https import open_session
from corral.workers.user_code.children import HostError
from corral.workers.user_code.loading import use_kept_code

logger = logging.getLogger(__name__)

_LOOPBACK = "127.0.0.1"
_START_TIMEOUT_S = 1800.0  # SGLang reads weights of any size from a shared file system
_MAX_CONNECTIONS = 1024


async def evaluate(request: EvaluationRequest, *, gpus: int) -> EvaluationResult:
    """Does what is asked for, from where an earlier start of the job got to.

    Guarantee: what was to be answered on a GPU is never answered on a CPU.

    Args:
        gpus: those that the job was given; where nobody counts GPUs, a node shows more.

    Raises:
        WrongDevicesError: if it sees fewer of them.
        ValueError: if the problems are not those that were asked for.
        BadConfigurationError, BackendLostError: if the server cannot be started, or has died.
    """
    if request.code is not None:
        use_kept_code(request.code, request.code_digests)
    progress = _read_progress(request)
    config, rollout = request.evaluation, request.rollout
    prompts = PromptEncoder(request.weights, config.dataset.chat_template_kwargs)
    rows = open_problems(config.dataset, prompts)

    def check_gpus(visible: int) -> int:
        if gpus > visible:
            raise WrongDevicesError.of("the evaluation", kind="model_worker", planned=gpus, visible=visible)
        return gpus

    async with AsyncExitStack() as stack:
        # A server of its own, with secrets of its own.
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

        async def route(uid: str, tokens: int, oldest_version: str, setback: FailedTry | None) -> str:
            return url

        headers = {"Authorization": f"Bearer {access.api_key.reveal()}"}
        session = open_session(trust.client(), headers=headers, max_connections=_MAX_CONNECTIONS)
        client = GenerationClient(
            await stack.enter_async_context(session),
            route,
            sampling=config.sampling,
            tokenizer=prompts.tokenizer,
            stop_token_ids=eos_token_ids(request.weights),
            token_timeout_s=TOKEN_TIMEOUT_S,
        )
        groups = GroupMaker(
            judge,
            client,
            prompts,
            await open_player(stack, rollout, judge, prompts),
            rows=rows,
            config=rollout,
            group_size=config.answers_per_problem,
            max_prompt_tokens=config.dataset.max_prompt_tokens,
        )
        problems = HeldOutProblems(config, {"": rows}, groups, client, seed=request.seed)
        logger.info("evaluating step %d, problem %d of %d", request.step, progress.num_done, len(rows))
        while progress.num_done < len(rows):
            started_at = time.monotonic()
            part = list(rows)[progress.num_done : progress.num_done + request.batch_size]
            asked = (HeldOutProblem(0, request.server.initial_version, "", row_id) for row_id in part)
            answering = asyncio.gather(*map(problems.answer, asked))
            either: list[asyncio.Future[Any]] = [answering, ended]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                answering.cancel()
                ended.result()
                raise BadConfigurationError("the server has ended by itself; its log says why")
            sums = functools.reduce(added, (answered.sums for answered in answering.result()), progress.sums)
            failures = (answered.failure for answered in answering.result() if answered.failure)
            progress = progress.model_copy(
                update={
                    "num_done": progress.num_done + len(part),
                    "sums": sums,
                    "failure": progress.failure or next(failures, ""),
                    "seconds": progress.seconds + time.monotonic() - started_at,
                }
            )
            atomic_write(progress_path(request.result), progress.model_dump_json().encode())
            logger.info("%d of %d problems: %s", progress.num_done, len(rows), means(sums))
    return _result(request, progress)


def _result(request: EvaluationRequest, progress: EvaluationProgress) -> EvaluationResult:
    values = means(progress.sums)
    if "accuracy" not in values:
        raise ValueError(f"the answers to all {progress.num_done} problems have no reward: {progress.failure}")
    return EvaluationResult(
        step=request.step,
        accuracy=values["accuracy"],
        mean_reward=values["reward/mean"],
        mean_response_tokens=values["response_length/mean"],
        pass_at=pass_at_k(values),
        majority=values.get(MAJORITY),
        num_prompts=progress.num_done,
        num_unjudged=int(values["unjudged"]),
        failure=progress.failure,
        seconds=round(progress.seconds, 3),
        num_starts=progress.num_starts,
        dataset=Path(name_of(request.evaluation.dataset)),
        dataset_sha256=request.dataset_sha256,
        sampling=request.evaluation.sampling,
        answers_per_problem=request.evaluation.answers_per_problem,
        source=request.source,
    )


def _read_progress(request: EvaluationRequest) -> EvaluationProgress:
    """The progress of earlier starts; a new request for an evaluation removes the files of an earlier one."""
    digest = dataset_spec(request.evaluation.dataset, kind="prompts").sha256
    if digest != request.dataset_sha256:
        raise ValueError(
            f"dataset {name_of(request.evaluation.dataset)} has changed since this evaluation was asked for (sha256 "
            f"{digest}, then {request.dataset_sha256}); run rl-eval again"
        )
    path = progress_path(request.result)
    progress = EvaluationProgress(num_done=0, sums={}, seconds=0.0, num_starts=0)
    if path.exists():
        progress = EvaluationProgress.model_validate_json(path.read_bytes())
    progress = progress.model_copy(update={"num_starts": progress.num_starts + 1})
    atomic_write(path, progress.model_dump_json().encode())
    return progress


def _clean_up(request: EvaluationRequest) -> None:
    """The result is there. The request stays: SLURM may start a job again that was about to end."""
    remove_file(progress_path(request.result))
    if request.are_weights_ours:
        shutil.rmtree(request.weights, ignore_errors=True)


def main(argv: list[str] | None = None) -> int:
    """Run one evaluation; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m corral.workers.evaluation", description="One evaluation of a trial."
    )
    parser.add_argument("request", type=Path, help="what to evaluate: step-*.request.json")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs that the job was given")
    arguments = parser.parse_args(argv)
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # left to the parent
    leave_login_shell()
    die_with_parent(parent=os.getppid())()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s: %(message)s")
    try:
        request = EvaluationRequest.model_validate_json(arguments.request.read_bytes())
        if read_result(request.result) is None:
            result = asyncio.run(evaluate(request, gpus=arguments.gpus))
            atomic_write(request.result, result.model_dump_json(indent=1).encode() + b"\n")
    except (HostError, UserCodeError) as error:
        logger.error("%s", error)
        return WorkerExit.USER_CODE
    except (ValueError, BadConfigurationError, WrongDevicesError) as error:
        logger.error("%s", error)
        return WorkerExit.WRONG_DEVICES if isinstance(error, WrongDevicesError) else WorkerExit.BAD_CONFIGURATION
    _clean_up(request)
    return WorkerExit.DONE


if __name__ == "__main__":
    sys.exit(main())
