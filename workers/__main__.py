"""The one entry point of every worker: argv -> plan.json -> WorkerContext -> Worker.run() -> exit code.

    python -m corral.workers --plan TRIAL/plan.json --kind rollout_worker --index 0 --attempt 0 --incarnation 5f2c...

This is the only place that configures logging and signals. Secrets come from the trial directory, never from arguments
or the environment.
"""

import argparse
import faulthandler
import importlib
import json
import logging
import os
import socket
import sys
import threading
import time
from pathlib import Path

from corral.experiments.exit_codes import WorkerExit
from corral.experiments.plan import RunPlan
from corral.experiments.trial.directory import TrialDirectory
from corral.experiments.trial.secrets import SecretFilter, TrialSecrets
from corral.experiments.trial.spans import Clock
from corral.experiments.trial.trust import Trust
from corral.experiments.trial.worker_record import LEASE_TTL_S, WorkerRecord
from corral.name_resolve.base import NameService
from corral.name_resolve.keys import TrialKeys
from corral.name_resolve.redis import RedisNameService
from corral.workers.lifecycle.presence import Presence
from corral.workers.lifecycle.timeline import Timeline
from corral.workers.lifecycle.worker import (
    StopRequested,
    Worker,
    WorkerContext,
    flush_output,
    install_signal_handlers,
    leave_word,
    notice_of,
    run_to_exit_code,
)
from corral.workers.modules import loading_modules
from corral.workers.streams.security import StreamSecurity
from corral.workers.user_code.loading import ChangedCodeError, use_kept_code

logger = logging.getLogger(__name__)

WORKER_CLASSES: dict[str, str] = {
    "master_worker": "corral.workers.master.master_worker:MasterWorker",
    "model_worker": "corral.workers.model.model_worker:ModelWorker",
    "generation_server": "corral.workers.generation.generation_server:GenerationServer",
    "gserver_manager": "corral.workers.manager.gserver_manager:GserverManager",
    "rollout_worker": "corral.workers.rollout.rollout_worker:RolloutWorker",
}
_RENDEZVOUS_TIMEOUT_S = 60.0
_ALLOCATOR_SETTINGS = frozenset({"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"})


def main(argv: list[str] | None = None) -> int:
    """Run one worker; returns its exit code."""
    arguments = _parse(sys.argv[1:] if argv is None else argv)
    worker_id = f"{arguments.kind}/{arguments.index}"
    faulthandler.enable()
    plan = RunPlan.from_json(arguments.plan.read_bytes())
    _let_segments_grow(arguments.kind)
    trial = TrialDirectory(plan.trial.directory)
    try:
        use_kept_code(trial.code_path, plan.code)
    except ChangedCodeError as error:
        print(f"{worker_id} cannot work with this code: {error}", file=sys.stderr)
        leave_word(trial, worker_id, str(error))
        return WorkerExit.BAD_CONFIGURATION
    secrets = TrialSecrets.load(trial.secrets_path)
    _configure_logging(worker_id, secrets)
    stopping = threading.Event()
    keys = TrialKeys(plan.trial.uuid)
    identity = _identity(arguments)
    # Ranks of a trainer group share their incarnation, so the process id keeps the owners of their records apart.
    owner, ttl_s = f"{arguments.incarnation}.{identity.pid}", LEASE_TTL_S
    key = keys.worker(arguments.kind, arguments.index)
    try:
        notice = notice_of(plan.mode, trial, arguments.kind, stop_grace_s=plan.supervision.stop_grace_s)
        install_signal_handlers(stopping, notice=notice)
        with (
            connect_names(trial, secrets, keys) as names,
            StreamSecurity(secrets, arguments.kind, trial_uuid=plan.trial.uuid) as security,
            Timeline(trial.timeline_path, _clock(arguments)) as timeline,
            Presence(names, key, owner=owner, ttl_s=ttl_s, identity=identity, timeline=timeline) as presence,
        ):
            presence.enter("setup", is_setting_up=True, deadline_s=plan.supervision.setup_timeout_s)
            context = WorkerContext(
                plan=plan,
                kind=arguments.kind,
                index=arguments.index,
                attempt=arguments.attempt,
                incarnation=arguments.incarnation,
                address=os.environ.get("CORRAL_BIND_ADDRESS", "127.0.0.1"),
                trial=trial,
                names=names,
                keys=keys,
                secrets=secrets,
                security=security,
                presence=presence,
                stopping=stopping,
            )
            module_name, _, class_name = WORKER_CLASSES[arguments.kind].partition(":")
            with loading_modules():
                worker_class: type[Worker] = getattr(importlib.import_module(module_name), class_name)
            exit_code = run_to_exit_code(worker_class, context)
            # The supervisor asks everyone to leave once the master has said Done, which may be while we clean up.
            stopping.set()
            return exit_code
    except StopRequested as reason:  # outside of the worker's own run: while it was being set up
        logger.info("%s leaves: asked to stop (%s)", worker_id, reason)
        return WorkerExit.DONE


def _let_segments_grow(kind: str) -> None:
    """Have training ranks' memory of GPUs grow in place, unless the site says otherwise; torch reads it when it loads.

    Rows of every micro-batch have a length of their own. What one of them has taken suits no other, and torch would
    keep the pieces; generation servers, whose programs choose for themselves, are left alone.
    """
    if kind == "model_worker" and not _ALLOCATOR_SETTINGS & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def _identity(arguments: argparse.Namespace) -> WorkerRecord:
    host = socket.gethostname()
    return WorkerRecord(
        kind=arguments.kind,
        index=arguments.index,
        pid=os.getpid(),
        host=host,
        node=os.environ.get("SLURMD_NODENAME", host),
        attempt=arguments.attempt,
        incarnation=arguments.incarnation,
    )


def _clock(arguments: argparse.Namespace) -> Clock:
    """A guess, until the name service has been asked for the time."""
    return Clock(
        worker=f"{arguments.kind}/{arguments.index}",
        attempt=arguments.attempt,
        incarnation=arguments.incarnation,
        offset_s=time.time() - time.monotonic(),
        error_s=60.0,
    )


def connect_names(trial: TrialDirectory, secrets: TrialSecrets, keys: TrialKeys) -> NameService:
    """The trial's name service, at the address that the supervisor wrote to rdzv.json.

    Raises:
        TimeoutError: if the supervisor has not written it in time.
    """
    deadline = time.monotonic() + _RENDEZVOUS_TIMEOUT_S
    while True:
        try:
            rendezvous = json.loads(trial.rendezvous_path.read_text())
            break
        except (FileNotFoundError, json.JSONDecodeError) as error:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"the supervisor did not write {trial.rendezvous_path} within {_RENDEZVOUS_TIMEOUT_S:.0f} s; "
                    "see its log, supervisor.log, beside this worker's"
                ) from error
            time.sleep(0.05)
    return RedisNameService(
        host=rendezvous["host"],
        port=rendezvous["port"],
        username="trial",
        password=secrets.redis_password.reveal(),
        prefix=keys.prefix,
        tls=Trust(trial.secrets_path).client(),
    )


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m corral.workers", description="One worker of a trial.")
    parser.add_argument("--plan", type=Path, required=True, help="plan.json of the trial")
    parser.add_argument("--kind", choices=sorted(WORKER_CLASSES), required=True)
    parser.add_argument("--index", type=int, required=True)
    parser.add_argument("--attempt", type=int, default=0, help="which start of the trial this is, from 0")
    parser.add_argument("--incarnation", required=True, help="random name of this start of the worker")
    return parser.parse_args(argv)


def _configure_logging(worker_id: str, secrets: TrialSecrets) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s {worker_id} %(levelname)s %(name)s: %(message)s"))
    handler.addFilter(SecretFilter(secrets.values()))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)


if __name__ == "__main__":
    exit_code = main()
    flush_output()
    # Threads of libraries (ZeroMQ, OpenMP) must not keep a finished worker alive.
    os._exit(exit_code)
