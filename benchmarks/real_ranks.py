"""Model workers in processes of their own, and what the master's side needs beside them, without a supervisor.

    worker_context(plan, ...)        what any worker is given; secrets are a trial's
    real_ranks(plan, folder)         every model worker of the plan, as the supervisor would start it

Ranks are forked from a server that has imported what they need, so that four of them start in a few seconds.
"""

import logging
import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from corral.experiments.plan import RunPlan
from corral.experiments.trial.directory import TrialDirectory
from corral.experiments.trial.secrets import TrialSecrets
from corral.experiments.trial.worker_record import WorkerRecord
from corral.name_resolve.base import NameService
from corral.name_resolve.keys import TrialKeys
from corral.workers.lifecycle.presence import Presence
from corral.workers.lifecycle.worker import WorkerContext, install_signal_handlers, run_to_exit_code
from corral.workers.streams.security import StreamSecurity
from tests.name_services import NamesAddress, running_names

LOOPBACK = "127.0.0.1"
_INCARNATION = "one"
_LEAVE_S = 60.0


@contextmanager
def worker_context(
    plan: RunPlan, kind: str, index: int, *, names: NameService, secrets: TrialSecrets
) -> Iterator[WorkerContext]:
    """What a worker of this plan is given."""
    keys = TrialKeys(plan.trial.uuid)
    owner = f"{kind}/{index} {os.getpid()}"
    with (
        Presence(names, keys.worker(kind, index), owner=owner, ttl_s=60.0, identity=WorkerRecord()) as presence,
        StreamSecurity(secrets, kind, trial_uuid=plan.trial.uuid) as security,
    ):
        yield WorkerContext(
            plan=plan,
            kind=kind,
            index=index,
            attempt=0,
            incarnation=_INCARNATION,
            address=LOOPBACK,
            trial=TrialDirectory(plan.trial.directory),
            names=names,
            keys=keys,
            secrets=secrets,
            security=security,
            presence=presence,
        )


@contextmanager
def real_ranks(plan: RunPlan, folder: Path, secrets: Path) -> Iterator[NameService]:
    """All model workers of a plan, with `folder` as their current directory; the service in which they meet the master.

    Raises:
        RuntimeError: at the end, if one of them has failed.
    """
    start = multiprocessing.get_context("forkserver")
    start.set_forkserver_preload(["corral.workers.model.model_worker"])
    with running_names() as names, names.connect() as service:
        ranks = [
            start.Process(
                target=_be_rank, args=(plan.to_json(), rank, folder, names, secrets), name=f"model_worker/{rank}"
            )
            for rank in range(plan.master.num_model_workers)
        ]
        for process in ranks:
            process.start()
        try:
            yield service
        finally:
            for process in ranks:
                process.terminate()
            deadline = time.monotonic() + _LEAVE_S
            for process in ranks:
                process.join(max(0.0, deadline - time.monotonic()))
                process.kill()
                process.join()
    if failed := [f"{process.name} ({process.exitcode})" for process in ranks if process.exitcode != 0]:
        raise RuntimeError(f"{', '.join(failed)} did not leave in order; see what they printed")


def _be_rank(plan_text: bytes, rank: int, folder: Path, names: NamesAddress, secrets: Path) -> None:
    # The process that starts the ranks needs neither.
    import torch
    from transformers.utils import logging as transformers_logging

    from corral.workers.model.model_worker import ModelWorker

    os.chdir(folder)
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.ERROR)
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    plan = RunPlan.from_json(plan_text)
    with (
        names.connect() as service,
        worker_context(plan, "model_worker", rank, names=service, secrets=TrialSecrets.load(secrets)) as context,
    ):
        install_signal_handlers(context.stopping)
        raise SystemExit(run_to_exit_code(ModelWorker, context))
